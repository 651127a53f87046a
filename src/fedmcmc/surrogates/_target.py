"""One client's log density over raveled positions, and maps over all clients.

Everything works on raveled positions ``[d]``, for one client; `over_clients` maps it over all.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree, Client, Posterior
from fedmcmc.data import CHUNK_ROWS, FederatedData, fold
from fedmcmc.pytrees import trees

__all__ = [
    "DENSE_LIMIT",
    "Target",
    "blockwise",
    "change",
    "client_cost",
    "over_clients",
    "row_size",
    "value_and_gradient",
]

DENSE_LIMIT = 256
"""Up to this many dimensions a matrix ``[d, d]`` a client may be built to check a fit."""

_BLOCK = 64  # Hessian-vector products taken at a time
_BUDGET = 2**26  # numbers that all clients treated at a time may take


class Target(NamedTuple):
    """``log p(rows | position) + prior_fraction * log prior`` over raveled positions.

    A `prior_fraction` of ``None`` leaves the prior out, so that an infinite or undefined prior
    cannot enter as zero times infinity.
    """

    posterior: Posterior
    prior_fraction: Array | None
    unravel: Callable[[Array], ArrayTree]

    def rows(self, flat: Array, rows: ArrayTree, mask: Array) -> Array:
        """Return the log likelihood of the rows where `mask` holds, ``[]``."""
        return jnp.sum(jnp.where(mask, self.terms(flat, rows), 0))

    def terms(self, flat: Array, rows: ArrayTree) -> Array:
        """Return the log likelihood of each row, ``[num]``."""
        terms = self.posterior.loglikelihood_fn(self.unravel(flat), rows)
        num = jax.tree.leaves(rows)[0].shape[0]
        if terms.shape != (num,):
            raise ValueError(
                f"loglikelihood_fn must return one term per row, shape ({num},), got {terms.shape}."
            )
        return terms

    def prior(self, flat: Array) -> Array:
        """Return the prior's part, ``[]``."""
        log_prior = self.posterior.logprior_fn(self.unravel(flat))
        return trees.cast(self.prior_fraction, log_prior) * log_prior


def value_and_gradient(target: Target, client: Client, flat: Array) -> tuple[Array, Array]:
    """Return the target at `flat` ``[]`` and its gradient ``[d]``."""
    total = fold(
        lambda rows, mask: jax.value_and_grad(lambda x: target.rows(x, rows, mask))(flat), client
    )
    if target.prior_fraction is None:
        return total
    value, gradient = jax.value_and_grad(target.prior)(flat)
    return total[0] + value.astype(total[0].dtype), total[1] + gradient


def blockwise(fn: Callable[[Array], ArrayTree], num: int, block: int) -> ArrayTree:
    """Return ``fn(i)`` for ``i`` in ``[0, num)``, stacked, computing `block` of them at a time."""
    if num <= block:
        return jax.vmap(fn)(jnp.arange(num))
    count = -(-num // block)
    # The last block is filled up with copies, so that one program serves all blocks.
    index = jnp.minimum(jnp.arange(count * block), num - 1).reshape(count, block)
    stacked = jax.lax.map(jax.vmap(fn), index)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num], stacked)


def over_clients(fn: Callable[[Array], ArrayTree], num_clients: int, cost: int) -> ArrayTree:
    """Return ``fn(index)`` of every client, leaves ``[num_clients, ...]``.

    As many clients at a time as fit, where one takes about `cost` numbers.
    """
    return blockwise(fn, num_clients, max(1, _BUDGET // max(cost, 1)))


def client_cost(data: FederatedData, size: int) -> int:
    """Return about how many numbers second derivatives of one client take."""
    chunk = min(data.max_size, CHUNK_ROWS)
    return chunk * (row_size(data) + min(size, _BLOCK)) + size * min(size, _BLOCK)


def change(target: Target, client: Client, flat: Array, shift: Array) -> Array:
    """Return the target at ``flat + shift`` minus that at `flat`, summed row by row."""

    def rows_change(rows: ArrayTree, mask: Array) -> Array:
        terms = target.terms(flat + shift, rows) - target.terms(flat, rows)
        return jnp.sum(jnp.where(mask, terms, 0))

    total = fold(rows_change, client)
    if target.prior_fraction is None:
        return total
    return total + (target.prior(flat + shift) - target.prior(flat)).astype(total.dtype)


def row_size(data: FederatedData) -> int:
    """Return how many numbers a row holds."""
    return sum(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(data.rows))
