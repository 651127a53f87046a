"""What several questions ask of a client's rows: some rows at a time, sums that lose no digit."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree, Client, Federation, Posterior
from fedmcmc.data import gather
from fedmcmc.gradients import row_size
from fedmcmc.kernels import compensated_sum, in_parts
from fedmcmc.pytrees import trees

BUDGET = 2**19
"""Numbers of rows and draws that one client takes at a time."""


def over_rows(
    fn: Callable[[ArrayTree, Array, Array], ArrayTree], client: Client, num_draws: int
) -> ArrayTree:
    """Return the sum of ``fn(rows, mask, number)`` over blocks of the client's rows.

    Blocks are so small that `num_draws` numbers per number of a row fit `BUDGET`. Rows behind the
    client's last are copies of its first, where the mask ``[block]`` does not hold; `number` is
    ``[]`` int32, that of the block.
    """
    size = max(1, min(client.max_size, BUDGET // (num_draws * max(row_size(client.rows), 1))))

    def block(number: Array) -> ArrayTree:
        offsets = number * size + jnp.arange(size, dtype=jnp.int32)
        mask = offsets < client.size
        return fn(gather(client, jnp.where(mask, offsets, 0)), mask, number)

    first = jnp.zeros((), jnp.int32)
    if size == client.max_size:
        return block(first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(block, first))
    return jax.lax.fori_loop(
        0, (client.size + size - 1) // size, lambda i, sums: trees.add(sums, block(i)), zeros
    )


def exact_sum(terms: Array, mask: Array) -> Array:
    """Return the sum of ``[..., num]`` terms where `mask` ``[num]`` holds, in parts ``[..., 3]``.

    Adding parts loses no digit; add the three in float64.
    """
    flat = jnp.where(mask, terms, 0).reshape(-1, terms.shape[-1])
    sums = jax.vmap(lambda x: in_parts(*compensated_sum(x)))(flat)
    return sums.reshape(*terms.shape[:-1], 3)


def check_resample(posterior: Posterior, position: ArrayTree, federation: Federation) -> None:
    """Raise `ValueError` unless the model can draw outcomes for rows like the federation's."""
    if posterior.resample_fn is None:
        why = posterior.why_no_resample
        raise ValueError(
            "Replicated outcomes are drawn from the model: the posterior needs a resample_fn, "
            "(rng_key, position, batch) -> batch."
            + (
                f" from_numpyro made none, as {why}."
                if why
                else " from_numpyro and from_flax make one where they can."
            )
            + " If you can draw outcomes yourself, use posterior._replace(resample_fn=...)."
        )
    few = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((3, *leaf.shape[1:]), leaf.dtype), federation.rows
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    drawn = jax.eval_shape(posterior.resample_fn, key, trees.shapes_of(position), few)
    if not trees.same_shapes(drawn, few):
        raise ValueError(
            "resample_fn must return rows of the shapes it is given: "
            f"{jax.tree.map(lambda x: x.shape, few)}, got "
            f"{jax.tree.map(lambda x: jnp.shape(x), drawn)}."
        )
