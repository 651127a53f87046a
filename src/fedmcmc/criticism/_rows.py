"""Accurate sums over blocks of a client's rows, and checks of outcome simulators."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.data import gather
from fedmcmc.gradients import row_size
from fedmcmc.kernels import compensated_sum, split_sum
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Client, Federation, Posterior

BUDGET = 2**19
"""Numbers of rows times draws in one block."""


def sum_over_rows(
    fn: Callable[[ArrayTree, Array, Array], ArrayTree], client: Client, num_draws: int
) -> ArrayTree:
    """Return the sum of ``fn(rows, mask, number)`` over blocks of the client's rows.

    The size of a block times `num_draws` is limited by `BUDGET`. The mask ``[block]`` is false for
    padding rows, which are copies of row 0; `number` is the index of the block, ``[]`` int32.
    """
    size = max(1, min(client.max_size, BUDGET // (num_draws * max(row_size(client.rows), 1))))

    def block(number: Array) -> ArrayTree:
        offsets = number * size + jnp.arange(size, dtype=jnp.int32)
        mask = offsets < client.size
        return fn(gather(client, jnp.where(mask, offsets, 0)), mask, number)

    start = jnp.zeros((), jnp.int32)
    if size == client.max_size:
        return block(start)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(block, start))
    return jax.lax.fori_loop(
        0, (client.size + size - 1) // size, lambda i, sums: trees.add(sums, block(i)), zeros
    )


def exact_sum(terms: Array, mask: Array) -> Array:
    """Return the sum of ``[..., num]`` terms where `mask` ``[num]`` is true, as parts ``[..., 3]``.

    Parts can be added without rounding error; the final sum of the three needs float64.
    """
    flat = jnp.where(mask, terms, 0).reshape(-1, terms.shape[-1])
    sums = jax.vmap(lambda x: split_sum(*compensated_sum(x)))(flat)
    return sums.reshape(*terms.shape[:-1], 3)


def check_resample(posterior: Posterior, position: ArrayTree, federation: Federation) -> None:
    """Raise `ValueError` if the model cannot draw outcomes for the federation's rows."""
    if posterior.resample_fn is None:
        reason = posterior.no_resample_reason
        raise ValueError(
            "Replicated outcomes are drawn from the model: the posterior needs a resample_fn, "
            "(rng_key, position, batch) -> batch."
            + (
                f" from_numpyro could not create one, because {reason}."
                if reason
                else " from_numpyro and from_flax create one if possible."
            )
            + " If you can draw outcomes yourself, use posterior._replace(resample_fn=...)."
        )
    rows = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((3, *leaf.shape[1:]), leaf.dtype), federation.rows
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    outcomes = jax.eval_shape(posterior.resample_fn, key, trees.shapes_of(position), rows)
    if not trees.same_shapes(outcomes, rows):
        raise ValueError(
            "resample_fn must return rows with the shapes of its argument: "
            f"{jax.tree.map(jnp.shape, rows)}, got {jax.tree.map(jnp.shape, outcomes)}."
        )
