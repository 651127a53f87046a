"""Convolutions at full speed inside loops and conditions on CPU.

XLA's CPU backend computes a convolution by its fast kernels only if batch, space and features lie
in one order of axes. It brings the others into that order (with transpositions), but only in a
program's entry computation: in the body of a loop or the branch of a condition they fall to a
naive loop, 4 to 60 times slower (jax-ml/jax#12868). The gradients of a convolution always lie in
another order, and a run is one loop over rounds. `canonical` therefore traces a function, writes
its convolutions in that order itself, and the compiler has nothing left to miss.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree

_CONVOLUTION = "conv_general_dilated"


def holds_convolution(jaxpr: Any) -> bool:
    """Return whether a jaxpr, or one within its equations, holds a convolution."""
    return any(
        eqn.primitive.name == _CONVOLUTION or any(map(holds_convolution, _inner(eqn)))
        for eqn in _open(jaxpr).eqns
    )


def canonical(fn: Callable[..., ArrayTree]) -> Callable[..., ArrayTree]:
    """Return `fn` with every convolution in the order of axes that XLA's CPU kernels take.

    The result is the same up to rounding. A function without convolutions is called as it is.
    Apply it after `jax.grad`, which adds convolutions in other orders. Loops, conditions and calls
    are rewritten inside too.

    Examples
    --------
    >>> def loss(w):
    ...     return jnp.sum(jax.lax.conv(jnp.ones((1, 1, 4, 4)), w, (1, 1), "VALID") ** 2)
    >>> w = jnp.ones((1, 1, 2, 2))
    >>> canonical(jax.grad(loss))(w)[0, 0]
    Array([[72., 72.],
           [72., 72.]], dtype=float32)
    """

    def rewritten(*arguments: ArrayTree) -> ArrayTree:
        leaves, treedef = jax.tree.flatten(arguments)

        def flat(*leaves_: Array) -> ArrayTree:
            return fn(*jax.tree.unflatten(treedef, leaves_))

        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        if not holds_convolution(closed):
            return fn(*arguments)
        return jax.tree.unflatten(jax.tree.structure(shapes), _evaluate(closed, leaves))

    return rewritten


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(_open(value), "eqns")


def _inner(eqn: Any) -> list[Any]:
    found = []
    for value in eqn.params.values():
        values = value if isinstance(value, (tuple, list)) else (value,)
        found += [item for item in values if _is_jaxpr(item)]
    return found


def _evaluate(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    inner = _open(jaxpr)
    values: dict[Any, Any] = dict(zip(inner.constvars, getattr(jaxpr, "consts", ()), strict=True))
    values.update(zip(inner.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else values[atom]

    for eqn in inner.eqns:
        if eqn.primitive.name == _CONVOLUTION:
            results = [_convolution(eqn.primitive, *map(read, eqn.invars), **eqn.params)]
        else:
            if any(map(holds_convolution, _inner(eqn))):
                eqn = eqn.replace(params={name: _rewrite(v) for name, v in eqn.params.items()})
            # Primitives differ in how they are bound; the evaluation of a jaxpr knows how.
            wanted = [atom for atom in eqn.invars if not hasattr(atom, "val")]
            alone = inner.replace(constvars=[], invars=wanted, outvars=eqn.outvars, eqns=[eqn])
            results = jax.core.eval_jaxpr(alone, (), *map(read, wanted))
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in inner.outvars]


def _rewrite(param: Any) -> Any:
    """Return a parameter of a loop, a condition or a call with its jaxprs rewritten."""
    if isinstance(param, (tuple, list)):
        return type(param)(map(_rewrite, param))
    if not (_is_jaxpr(param) and holds_convolution(param)):
        return param
    avals = [var.aval for var in _open(param).invars]
    if not all(isinstance(aval, jax.core.ShapedArray) for aval in avals):
        return param  # with mutable arrays, which no shape stands for
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    new = jax.make_jaxpr(lambda *arguments: _evaluate(param, arguments))(*shapes)
    if hasattr(param, "consts"):
        return new
    # An open jaxpr has no place for constants; without any it is the same thing.
    return param if new.consts else new.jaxpr


def _convolution(
    primitive: Any,
    lhs: Array,
    rhs: Array,
    *,
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    **params: Any,
) -> Array:
    """Convolve with axes in the order batch, space, features; space, inputs, outputs for `rhs`."""
    (batch, feature, *space), (outputs, inputs, *window), out = dimension_numbers
    lhs = jnp.transpose(lhs, (batch, *space, feature))
    rhs = jnp.transpose(rhs, (*window, inputs, outputs))
    if batch_group_count > 1:
        # Groups of the batch are groups of features that lie elsewhere.
        lhs = lhs.reshape(batch_group_count, -1, *lhs.shape[1:])
        lhs = jnp.moveaxis(lhs, 0, -2).reshape(*lhs.shape[1:-1], -1)
        feature_group_count, batch_group_count = batch_group_count, 1
    rank = lhs.ndim
    between = tuple(range(1, rank - 1))
    result = primitive.bind(
        lhs,
        rhs,
        dimension_numbers=type(dimension_numbers)(
            (0, rank - 1, *between), (rank - 1, rank - 2, *range(rank - 2)), (0, rank - 1, *between)
        ),
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        **params,
    )
    # Axis `a` of the result asked for is where `out` has `a`, in its order batch, features, space.
    ours = (0, rank - 1, *between)
    return jnp.transpose(result, [ours[out.index(axis)] for axis in range(rank)])
