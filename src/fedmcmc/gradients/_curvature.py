"""Second derivatives, computed for a block of directions at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.types import ArrayTree

BLOCK = 64
"""Number of directions per block, for Hessian-vector products and for checks of a maximum."""


def minus_hessian(fn: Callable[[Array], Array], flat: Array, *, dense: bool = True) -> Array:
    """Return minus the Hessian of `fn` at `flat` ``[d]``: ``[d, d]``, or its diagonal ``[d]``."""
    size = flat.shape[0]

    def column(i: Array) -> Array:
        tangent = jnp.zeros_like(flat).at[i].set(1)
        product = -jax.jvp(jax.grad(fn), (flat,), (tangent,))[1]
        return product if dense else product[i]

    # Compute one block of products at a time: a diagonal then needs no [d, d] array.
    columns = blockwise(column, size, BLOCK)
    return (columns + columns.T) / 2 if dense else columns


def blockwise(fn: Callable[[Array], ArrayTree], num: int, block: int) -> ArrayTree:
    """Return ``fn(i)`` for ``i`` in ``[0, num)``, stacked, computing `block` values at a time."""
    if num <= block:
        return jax.vmap(fn)(jnp.arange(num))
    num_blocks = -(-num // block)
    # Fill the last block with copies, so that one program computes all blocks.
    index = jnp.minimum(jnp.arange(num_blocks * block), num - 1).reshape(num_blocks, block)
    stacked = jax.lax.map(jax.vmap(fn), index)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num], stacked)
