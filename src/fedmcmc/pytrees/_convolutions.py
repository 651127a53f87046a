"""Convolutions at full speed inside loops and conditions on CPU.

XLA's CPU backend has fast kernels only for convolutions whose axes are in one order: batch, space,
features. It transposes other convolutions into this order, but only in the entry computation of a
program. In the body of a loop or the branch of a condition they fall back to a naive loop, which is
4 to 60 times slower (jax-ml/jax#12868). Gradients of convolutions always have another order, and a
run is a loop over rounds. `canonical` therefore traces a function and reorders its convolutions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive

from fedmcmc.pytrees._operations import inner_jaxprs
from fedmcmc.types import ArrayTree

_CONVOLUTION = "conv_general_dilated"


def holds_convolution(jaxpr: ClosedJaxpr | Jaxpr) -> bool:
    """Return whether a jaxpr, or a jaxpr inside its equations, contains a convolution."""
    return any(
        eqn.primitive.name == _CONVOLUTION or any(map(holds_convolution, inner_jaxprs(eqn)))
        for eqn in _open(jaxpr).eqns
    )


def canonical(fn: Callable[..., ArrayTree]) -> Callable[..., ArrayTree]:
    """Return `fn` with all convolutions in the order of axes that XLA's CPU kernels need.

    The result is the same up to rounding. A function without convolutions is called unchanged.
    Convolutions inside loops, conditions and calls are reordered, too. Apply `canonical` after
    `jax.grad`, which adds convolutions in other orders.

    Examples
    --------
    >>> def loss(w):
    ...     return jnp.sum(jax.lax.conv(jnp.ones((1, 1, 4, 4)), w, (1, 1), "VALID") ** 2)
    >>> w = jnp.ones((1, 1, 2, 2))
    >>> canonical(jax.grad(loss))(w)[0, 0]
    Array([[72., 72.],
           [72., 72.]], dtype=float32)
    """

    def canonical_fn(*arguments: ArrayTree) -> ArrayTree:
        leaves, treedef = jax.tree.flatten(arguments)

        def fn_of_leaves(*leaves_: Array) -> ArrayTree:
            return fn(*jax.tree.unflatten(treedef, leaves_))

        closed, shapes = jax.make_jaxpr(fn_of_leaves, return_shape=True)(*leaves)
        if not holds_convolution(closed):
            return fn(*arguments)
        return jax.tree.unflatten(jax.tree.structure(shapes), _evaluate(closed, leaves))

    return canonical_fn


def _open(jaxpr: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _evaluate(jaxpr: ClosedJaxpr | Jaxpr, arguments: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr with reordered convolutions."""
    opened = _open(jaxpr)
    values: dict[Any, Any] = dict(zip(opened.constvars, getattr(jaxpr, "consts", ()), strict=True))
    values.update(zip(opened.invars, arguments, strict=True))

    def read(atom: object) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in opened.eqns:
        if eqn.primitive.name == _CONVOLUTION:
            results = [_convolution(eqn.primitive, *map(read, eqn.invars), **eqn.params)]
        else:
            if any(map(holds_convolution, inner_jaxprs(eqn))):
                eqn = eqn.replace(params={name: _rewrite(v) for name, v in eqn.params.items()})
            # Primitives are bound in different ways, which `eval_jaxpr` handles.
            inputs = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
            single = opened.replace(constvars=[], invars=inputs, outvars=eqn.outvars, eqns=[eqn])
            results = jax.core.eval_jaxpr(single, (), *map(read, inputs))
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in opened.outvars]


def _rewrite(param: object) -> Any:
    """Return a parameter of a loop, a condition or a call with rewritten jaxprs."""
    if isinstance(param, (tuple, list)):
        return type(param)(map(_rewrite, param))
    if not (isinstance(param, ClosedJaxpr | Jaxpr) and holds_convolution(param)):
        return param
    avals = [var.aval for var in _open(param).invars]
    shapes = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        for aval in avals
        if isinstance(aval, jax.core.ShapedArray)
    ]
    if len(shapes) < len(avals):
        return param  # mutable arrays have no shape to trace with
    rewritten = jax.make_jaxpr(lambda *arguments: _evaluate(param, arguments))(*shapes)
    if isinstance(param, ClosedJaxpr):
        return rewritten
    # An open jaxpr cannot hold constants.
    return param if rewritten.consts else rewritten.jaxpr


def _convolution(
    primitive: Primitive,
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
        # Groups of the batch are equivalent to groups of features.
        lhs = lhs.reshape(batch_group_count, -1, *lhs.shape[1:])
        lhs = jnp.moveaxis(lhs, 0, -2).reshape(*lhs.shape[1:-1], -1)
        feature_group_count, batch_group_count = batch_group_count, 1
    rank = lhs.ndim
    # Positions of batch, features and space.
    lhs_axes = (0, rank - 1, *range(1, rank - 1))
    rhs_axes = (rank - 1, rank - 2, *range(rank - 2))
    result = primitive.bind(
        lhs,
        rhs,
        dimension_numbers=type(dimension_numbers)(lhs_axes, rhs_axes, lhs_axes),
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        **params,
    )
    # `out` lists the positions of batch, features and space in the result of the caller.
    return jnp.transpose(result, [lhs_axes[out.index(axis)] for axis in range(rank)])
