"""Conditions and loops that stay one under `jax.vmap`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap

from fedmcmc._types import ArrayTree, as_functions


def where_any(
    condition: Array,
    compute: Callable[..., ArrayTree],
    otherwise: ArrayTree,
    *operands: ArrayTree,
) -> ArrayTree:
    """Return ``compute(*operands)`` where `condition` holds, else `otherwise`.

    Under `jax.vmap`, `jax.lax.cond` computes both sides for every entry. This computes `compute`
    only if any entry needs it: a full pass over a client's rows that is due every hundredth round
    costs nothing in the others, whatever is mapped over (clients, chains, or both).

    Parameters
    ----------
    condition
        ``[]`` bool.
    compute
        Must be a function of its operands alone: it may not close over traced values.
    otherwise
        Shaped as what `compute` returns.
    operands
        Pytrees of arrays (and of `jax.tree_util.Partial`).

    Examples
    --------
    >>> x = jnp.array([1.0, 4.0])
    >>> jax.vmap(lambda x: where_any(x > 2, jnp.sqrt, x, x))(x).tolist()
    [1.0, 2.0]
    """

    @custom_vmap
    def run(condition: Array, otherwise: ArrayTree, operands: tuple[ArrayTree, ...]) -> ArrayTree:
        def chosen() -> ArrayTree:
            new = compute(*operands)
            return jax.tree.map(lambda a, b: jnp.where(_column(condition, a), a, b), new, otherwise)

        return jax.lax.cond(jnp.any(condition), chosen, lambda: otherwise)

    @run.def_vmap
    def run_batched(axis_size: int, in_batched: Any, *arguments: Any) -> tuple[ArrayTree, Any]:
        def repeated(leaf: Array, is_batched: bool) -> Array:
            return leaf if is_batched else jnp.broadcast_to(leaf, (axis_size, *jnp.shape(leaf)))

        # What is not mapped over is repeated, except the operands: rows and positions that all
        # share stay shared.
        condition, otherwise = jax.tree.map(repeated, arguments[:2], tuple(in_batched[:2]))
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, in_batched[2])
        mapped = jax.vmap(compute, in_axes=axes, axis_size=axis_size)
        result = where_any(condition, mapped, otherwise, *arguments[2])
        return result, jax.tree.map(lambda leaf: True, result)

    return run(jnp.asarray(condition), otherwise, as_functions(operands))


@custom_vmap
def largest_of_batch(number: Array) -> Array:
    """Return the largest of the numbers that a batch has: a loop of that length stays one loop.

    Examples
    --------
    >>> def count(num):
    ...     return jax.lax.fori_loop(0, largest_of_batch(num), lambda i, total: total + 1, 0)
    >>> jax.vmap(count)(jnp.array([2, 3])).tolist()
    [3, 3]
    """
    return number


@largest_of_batch.def_vmap
def _largest_of_batch(axis_size: int, in_batched: list[bool], number: Array) -> tuple[Array, bool]:
    del axis_size
    # Asked again: another map around this one may hold a batch of these batches.
    return (largest_of_batch(jnp.max(number, axis=0)) if in_batched[0] else number), False


def _column(condition: Array, leaf: Array) -> Array:
    return condition.reshape(condition.shape + (1,) * (leaf.ndim - condition.ndim))
