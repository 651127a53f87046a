"""Functions that are traced once, with the linear algebra of small matrices as plain arithmetic.

Up to version 0.11.0, jaxlib's batched triangular solve waits for the thread pool that it runs on.
Several solves in one program can occupy all threads, and the program then never ends. Plain
arithmetic avoids the solve, and is faster for thousands of matrices of a few rows.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

MAX_ROWS = 32
"""Maximal number of rows of matrices that are replaced by arithmetic."""
BLOCK_ROWS = 4
"""Maximal number of rows of matrices that are computed by entries; larger ones are halved."""
MAX_TRACES = 64
"""Maximal number of cached traces per function, one for each combination of shapes."""
_OPERATIONS = ("cholesky", "triangular_solve")
_CUSTOM_DERIVATIVES = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
_CHECKPOINTS = ("checkpoint", "remat", "remat2")
_CALLS = ("jit", "pjit", "closed_call", "core_call")


def traced_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that traces `fn` only once for arguments of the same shapes.

    Later calls evaluate the operations of the first trace, which takes a fraction of the time, as
    a NumPyro model builds distributions in Python. Cholesky factors and triangular solves of small
    matrices become arithmetic, except in functions with a custom derivative (`jax.custom_jvp`,
    `jax.custom_vjp`).
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
            arguments = jax.tree.unflatten(treedef, leaves)
            closed, result = jax.make_jaxpr(fn, return_shape=True)(*arguments)
            if _has_operations(closed):
                original = closed
                closed = jax.make_jaxpr(lambda *x: _evaluate(original, x))(*leaves)
            evaluate, structure = jaxpr_as_fun(closed), jax.tree.structure(result)
            if any(isinstance(const, jax.core.Tracer) for const in closed.consts):
                return jax.tree.unflatten(structure, evaluate(*leaves))
            if len(traces) >= MAX_TRACES:
                traces.clear()
            traces[key] = evaluate, structure
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


def _inner(params: dict[str, Any]) -> list[ClosedJaxpr]:
    """Return the functions that an operation calls (branches, bodies of loops)."""
    values: list[Any] = []
    for value in params.values():
        values += value if isinstance(value, tuple) else (value,)
    closed = [ClosedJaxpr(x, ()) if isinstance(x, Jaxpr) else x for x in values]
    return [x for x in closed if isinstance(x, ClosedJaxpr)]


def _evaluate(closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values |= zip(closed.jaxpr.invars, inputs, strict=True)

    def read(atom: object) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in closed.jaxpr.eqns:
        outputs = _apply(eqn, [read(atom) for atom in eqn.invars])
        values |= zip(eqn.outvars, outputs, strict=True)
    return [read(atom) for atom in closed.jaxpr.outvars]


def _apply(eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    name, params = eqn.primitive.name, eqn.params
    if _is_small(eqn):
        if name == "cholesky":
            return [cholesky(*inputs)]
        return [triangular_solve(*inputs, **params)]
    if name not in _CUSTOM_DERIVATIVES and any(map(_has_operations, _inner(params))):
        if name in _CALLS:
            return _evaluate(_inner(params)[0], inputs)
        if name in _CHECKPOINTS:
            settings = {key: params[key] for key in ("prevent_cse", "policy")}
            inner = _inner(params)[0]
            return jax.checkpoint(lambda *x: _evaluate(inner, x), **settings)(*inputs)
        params = {key: _with_arithmetic(value) for key, value in params.items()}
    bound = eqn.primitive.get_bind_params(params)
    # The return type depends on the version of JAX.
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    outputs = eqn.primitive.bind(*functions, *inputs, **params)
    return outputs if eqn.primitive.multiple_results else [outputs]


def _with_arithmetic(value: object) -> Any:
    """Return a parameter of an operation with arithmetic in the functions that it contains."""
    if isinstance(value, ClosedJaxpr):
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in value.in_avals
        ]
        return jax.make_jaxpr(lambda *inputs: _evaluate(value, inputs))(*shapes)
    if isinstance(value, tuple) and any(isinstance(part, ClosedJaxpr) for part in value):
        parts = [_with_arithmetic(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def cholesky(matrix: Array, **_: object) -> Array:
    """Return the lower factor of symmetric matrices, ``[..., n, n]``, NaN if indefinite."""
    size = matrix.shape[-1]
    if size > BLOCK_ROWS:
        half = size // 2
        upper_left = cholesky(matrix[..., :half, :half])
        lower_left = _swapped(solve_lower(upper_left, _swapped(matrix[..., half:, :half])))
        lower_right = cholesky(
            matrix[..., half:, half:] - _product(lower_left, _swapped(lower_left))
        )
        upper_right = jnp.zeros_like(matrix[..., :half, half:])
        upper = jnp.concatenate([upper_left, upper_right], -1)
        return jnp.concatenate([upper, jnp.concatenate([lower_left, lower_right], -1)], -2)
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
    # LAPACK also returns NaN everywhere if the matrix is not positive definite.
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
    **_: object,
) -> Array:
    """Return ``x`` with ``op(matrix) x = right``, or ``x op(matrix) = right`` if not `left_side`.

    The arguments have the same meaning as in `jax.lax.linalg.triangular_solve`, and are real.
    """
    if transpose_a == left_side:
        matrix, lower = _swapped(matrix), not lower
    right = right if left_side else _swapped(right)
    if not lower:  # the same with rows and columns in reverse order
        matrix, right = matrix[..., ::-1, ::-1], right[..., ::-1, :]
    solution = solve_lower(matrix, right, unit_diagonal=unit_diagonal)
    solution = solution if lower else solution[..., ::-1, :]
    return solution if left_side else _swapped(solution)


def solve_lower(matrix: Array, right: Array, *, unit_diagonal: bool = False) -> Array:
    """Return ``x`` with ``matrix x = right``, ``[..., n, m]``, for lower triangular matrices."""
    size = matrix.shape[-1]
    if size > BLOCK_ROWS:
        half = size // 2
        upper = solve_lower(
            matrix[..., :half, :half], right[..., :half, :], unit_diagonal=unit_diagonal
        )
        remainder = right[..., half:, :] - _product(matrix[..., half:, :half], upper)
        lower = solve_lower(matrix[..., half:, half:], remainder, unit_diagonal=unit_diagonal)
        return jnp.concatenate([upper, lower], -2)
    rows: list[Array] = []
    for i in range(size):
        row = right[..., i, :]
        for j, x in enumerate(rows):
            row = row - matrix[..., i, j, None] * x
        rows.append(row if unit_diagonal else row / matrix[..., i, i, None])
    return jnp.stack(rows, -2)


def _swapped(matrix: Array) -> Array:
    return jnp.swapaxes(matrix, -1, -2)


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision="highest")
