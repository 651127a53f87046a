"""Functions that are traced once, with factors and solves of small matrices written out.

Up to version 0.11.0, jaxlib's triangular solve of a batch of matrices waits for the thread pool
that it runs on. Several of them in one program can occupy every thread, and the program then never
ends. Arithmetic needs no such operation, and is faster for thousands of matrices of a few rows.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

MAX_ROWS = 32
"""Rows of the largest matrices that are written out."""
BLOCK_ROWS = 4
"""Rows of matrices that are written out entry by entry; larger ones are split into halves."""
_OPERATIONS = ("cholesky", "triangular_solve")
MAX_TRACES = 64
"""Traces that a function keeps, one per combination of shapes."""
_OWN_DERIVATIVES = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
_CHECKPOINTS = ("checkpoint", "remat", "remat2")
_CALLS = ("jit", "pjit", "closed_call", "core_call")


def traced_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` so that it is traced once for arguments of the same shapes.

    Later calls, within other transformations, evaluate the operations of the first, which takes a
    fraction of the time: a model is a program of its own that builds distributions. Cholesky
    factors and triangular solves of small matrices are written out, except in functions with a
    derivative of their own (`jax.custom_jvp`, `jax.custom_vjp`).
    """
    traces: dict[Any, tuple[Callable[..., Any], Any]] = {}

    @wraps(fn)
    def called(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        leaves = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves]
        settings: Any = jax.config
        config = settings.jax_enable_x64, settings.jax_default_matmul_precision
        key = (treedef, tuple(map(jax.typeof, leaves)), *config)
        if key not in traces:
            given = jax.tree.unflatten(treedef, leaves)
            closed, result = jax.make_jaxpr(fn, return_shape=True)(*given)
            if _has_operations(closed):
                inner = closed
                closed = jax.make_jaxpr(lambda *x: _evaluate(inner, x))(*leaves)
            found = jaxpr_as_fun(closed), jax.tree.structure(result)
            if any(isinstance(const, jax.core.Tracer) for const in closed.consts):
                return jax.tree.unflatten(found[1], found[0](*leaves))
            if len(traces) >= MAX_TRACES:
                traces.clear()
            traces[key] = found
        evaluate, structure = traces[key]
        return jax.tree.unflatten(structure, evaluate(*leaves))

    return called


def _has_operations(closed: ClosedJaxpr) -> bool:
    return any(
        _is_small(eqn) or any(map(_has_operations, _inner(eqn.params))) for eqn in closed.jaxpr.eqns
    )


def _is_small(eqn: Any) -> bool:
    if eqn.primitive.name not in _OPERATIONS:
        return False
    matrix = eqn.invars[0].aval
    return matrix.shape[-1] <= MAX_ROWS and jnp.issubdtype(matrix.dtype, jnp.floating)


def _is_closed(value: Any) -> bool:
    return isinstance(value, ClosedJaxpr)


def _inner(params: dict[str, Any]) -> list[ClosedJaxpr]:
    """Return the functions that an operation calls (branches, bodies of loops)."""
    found = []
    for value in params.values():
        parts = value if isinstance(value, tuple) else (value,)
        found += [ClosedJaxpr(x, ()) if isinstance(x, Jaxpr) else x for x in parts]
    return [x for x in found if _is_closed(x)]


def _evaluate(closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values |= zip(closed.jaxpr.invars, inputs, strict=True)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in closed.jaxpr.eqns:
        outputs = _apply(eqn, [read(atom) for atom in eqn.invars])
        values |= zip(eqn.outvars, outputs, strict=True)
    return [read(atom) for atom in closed.jaxpr.outvars]


def _apply(eqn: Any, inputs: list[Any]) -> Sequence[Any]:
    name, params = eqn.primitive.name, eqn.params
    if _is_small(eqn):
        if name == "cholesky":
            return [cholesky(*inputs)]
        return [triangular_solve(*inputs, **params)]
    if name not in _OWN_DERIVATIVES and any(map(_has_operations, _inner(params))):
        if name in _CALLS:
            return _evaluate(_inner(params)[0], inputs)
        if name in _CHECKPOINTS:
            kept = {key: params[key] for key in ("prevent_cse", "policy")}
            inner = _inner(params)[0]
            return jax.checkpoint(lambda *x: _evaluate(inner, x), **kept)(*inputs)
        params = {key: _written_out(value) for key, value in params.items()}
    bound = eqn.primitive.get_bind_params(params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # by version of JAX
    outputs = eqn.primitive.bind(*functions, *inputs, **params)
    return outputs if eqn.primitive.multiple_results else [outputs]


def _written_out(value: Any) -> Any:
    """Return a parameter of an operation with the functions in it written out."""
    if _is_closed(value):
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in value.in_avals
        ]
        return jax.make_jaxpr(lambda *inputs: _evaluate(value, inputs))(*shapes)
    if isinstance(value, tuple) and any(map(_is_closed, value)):
        parts = [_written_out(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def cholesky(matrix: Array, **_: Any) -> Array:
    """Return the lower factor of symmetric matrices, ``[..., n, n]``; NaN of indefinite ones."""
    size = matrix.shape[-1]
    if size > BLOCK_ROWS:
        half = size // 2
        first = cholesky(matrix[..., :half, :half])
        below = _swapped(solve_lower(first, _swapped(matrix[..., half:, :half])))
        second = cholesky(matrix[..., half:, half:] - _product(below, _swapped(below)))
        above = jnp.zeros_like(matrix[..., :half, half:])
        return jnp.concatenate(
            [jnp.concatenate([first, above], -1), jnp.concatenate([below, second], -1)], -2
        )
    rows: list[list[Array]] = []
    for i in range(size):
        row: list[Array] = []
        for j in range(i + 1):
            entry = matrix[..., i, j]
            for x, y in zip(row, rows[j] if j < i else row, strict=False):
                entry = entry - x * y
            row.append(jnp.sqrt(entry) if j == i else entry / rows[j][j])
        rows.append(row)
    zero = jnp.zeros_like(matrix[..., 0, 0])
    padded = [jnp.stack([*row, *[zero] * (size - len(row))], -1) for row in rows]
    factor = jnp.stack(padded, -2)
    # As LAPACK's: no part of the factor of a matrix that is not positive definite is a number.
    broken = jnp.isnan(factor).any((-2, -1), keepdims=True)
    return jnp.where(broken, jnp.nan, factor)


def triangular_solve(
    matrix: Array,
    right: Array,
    *,
    left_side: bool,
    lower: bool,
    transpose_a: bool,
    unit_diagonal: bool,
    **_: Any,
) -> Array:
    """Return ``x`` with ``op(matrix) x = right``, or ``x op(matrix) = right`` if not `left_side`.

    Arguments are those of `jax.lax.linalg.triangular_solve`, of real numbers.
    """
    if transpose_a == left_side:
        matrix, lower = _swapped(matrix), not lower
    right = right if left_side else _swapped(right)
    if not lower:  # the same with rows and columns in reverse order
        matrix, right = matrix[..., ::-1, ::-1], right[..., ::-1, :]
    found = solve_lower(matrix, right, unit_diagonal=unit_diagonal)
    found = found if lower else found[..., ::-1, :]
    return found if left_side else _swapped(found)


def solve_lower(matrix: Array, right: Array, *, unit_diagonal: bool = False) -> Array:
    """Return ``x`` with ``matrix x = right``, ``[..., n, m]``, of lower triangular matrices."""
    size = matrix.shape[-1]
    if size > BLOCK_ROWS:
        half = size // 2
        first = solve_lower(
            matrix[..., :half, :half], right[..., :half, :], unit_diagonal=unit_diagonal
        )
        rest = right[..., half:, :] - _product(matrix[..., half:, :half], first)
        second = solve_lower(matrix[..., half:, half:], rest, unit_diagonal=unit_diagonal)
        return jnp.concatenate([first, second], -2)
    found: list[Array] = []
    for i in range(size):
        row = right[..., i, :]
        for j, x in enumerate(found):
            row = row - matrix[..., i, j, None] * x
        found.append(row if unit_diagonal else row / matrix[..., i, i, None])
    return jnp.stack(found, -2)


def _swapped(matrix: Array) -> Array:
    return jnp.swapaxes(matrix, -1, -2)


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision="highest")
