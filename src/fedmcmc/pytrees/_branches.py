"""Conditions and loops that remain single conditions and loops under `jax.vmap`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap

from fedmcmc.types import ArrayTree, as_functions


def where_any(
    condition: Array,
    compute: Callable[..., ArrayTree],
    otherwise: ArrayTree,
    *operands: ArrayTree,
) -> ArrayTree:
    """Return ``compute(*operands)`` if `condition` is true, else `otherwise`.

    Under `jax.vmap`, `jax.lax.cond` computes both branches for each entry. This function runs
    `compute` only if at least one entry needs it. A full pass over a client's rows in every
    hundredth round thus costs nothing in the other rounds, under any `jax.vmap` over clients or
    chains.

    `condition` is a scalar. `compute` must not close over traced values. `otherwise` has the shapes
    and types that `compute` returns. `operands` are pytrees of arrays (and of
    `jax.tree_util.Partial`).

    Examples
    --------
    >>> x = jnp.array([1.0, 4.0])
    >>> jax.vmap(lambda x: where_any(x > 2, jnp.sqrt, x, x))(x).tolist()
    [1.0, 2.0]
    """

    @custom_vmap
    def run(condition: Array, otherwise: ArrayTree, operands: tuple[ArrayTree, ...]) -> ArrayTree:
        def compute_and_select() -> ArrayTree:
            def select(a: Array, b: Array) -> Array:
                column = condition.reshape(condition.shape + (1,) * (a.ndim - condition.ndim))
                return jnp.where(column, a, b)

            return jax.tree.map(select, compute(*operands), otherwise)

        return jax.lax.cond(jnp.any(condition), compute_and_select, lambda: otherwise)

    @run.def_vmap
    def run_batched(
        axis_size: int, in_batched: Sequence[Any], *arguments: ArrayTree
    ) -> tuple[ArrayTree, ArrayTree]:
        def repeat(leaf: Array, is_batched: bool) -> Array:
            return leaf if is_batched else jnp.broadcast_to(leaf, (axis_size, *jnp.shape(leaf)))

        # Operands are not repeated: rows and positions that all entries share stay shared.
        condition, otherwise = jax.tree.map(repeat, arguments[:2], tuple(in_batched[:2]))
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, in_batched[2])
        mapped = jax.vmap(compute, in_axes=axes, axis_size=axis_size)
        result = where_any(condition, mapped, otherwise, *arguments[2])
        return result, jax.tree.map(lambda leaf: True, result)

    return run(jnp.asarray(condition), otherwise, as_functions(operands))


@custom_vmap
def largest_of_batch(number: Array) -> Array:
    """Return the largest number in a batch under `jax.vmap`; without a batch, return `number`.

    A loop of that length stays a single loop.

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
    # Call again, because an outer `jax.vmap` may map over several of these batches.
    return (largest_of_batch(jnp.max(number, axis=0)) if in_batched[0] else number), False
