"""Epochs: minibatches that pass over a client's rows, each row once per pass, in a new order."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._checks import positive_integer
from fedmcmc._types import ArrayTree, Client, GradientEstimator, LogDensity
from fedmcmc.data import gather
from fedmcmc.gradients._estimators import sum_gradient
from fedmcmc.gradients._scaling import rows_over_batch
from fedmcmc.pytrees import trees
from fedmcmc.random import shuffle_words, shuffled

__all__ = ["epochs", "offsets_of_call", "steps_an_epoch"]

MAX_PREPARED_OFFSETS = 2**22
"""Above this many rows per client and round, keys of the permutations are prepared instead."""


class _Draws(NamedTuple):
    offsets: ArrayTree  # [num_calls, batch_size], negative where there is no row, or ()
    keys: ArrayTree  # [num_calls], of the pass, where the offsets would be too many, else ()
    calls: ArrayTree  # [num_calls], likewise


@register_dataclass
@dataclass(frozen=True, eq=False)
class Epochs(GradientEstimator):
    """Passes over the client's rows; see `epochs`."""

    batch_size: int = field(metadata={"static": True})

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client, num_calls: int) -> _Draws:
        """Draw the orders of rows, or keys of them where they are many."""
        calls = jnp.arange(num_calls, dtype=jnp.int32)
        passes = calls // steps_an_epoch(client.size, self.batch_size)
        keys = jax.vmap(lambda i: jax.random.fold_in(rng_key, i))(passes)
        if num_calls * self.batch_size > MAX_PREPARED_OFFSETS:
            return _Draws((), keys, calls)
        offsets = jax.vmap(lambda key, i: offsets_of_call(self.batch_size, key, i, client))(
            keys, calls
        )
        return _Draws(offsets, (), ())

    def estimate(
        self,
        loglikelihood_fn: LogDensity,
        draws: _Draws,
        position: ArrayTree,
        context: ArrayTree,
        client: Client,
    ) -> ArrayTree:
        """Return the sum over the minibatch, scaled to all rows."""
        offsets = draws.offsets
        if trees.is_empty(offsets):
            offsets = offsets_of_call(self.batch_size, draws.keys, draws.calls, client)
        mask = offsets >= 0
        # In place of a row that is missing, the client's first: none of another client.
        rows = gather(client, jnp.maximum(offsets, 0))
        gradient = sum_gradient(loglikelihood_fn, position, rows, mask)
        return rows_over_batch(client, jnp.sum(mask, dtype=jnp.int32), gradient)


def epochs(batch_size: int) -> GradientEstimator:
    """Use minibatches that together are all rows of the client, then again in another order.

    The calls of a round pass over the client's rows: each row is in one minibatch of a pass. The
    last minibatch of a pass holds the rows that are left. An estimate is the sum over the
    minibatch times size over the number of its rows.

    Parameters
    ----------
    batch_size
        Rows per call.

    Raises
    ------
    ValueError
        If it is not a positive integer.

    Notes
    -----
    Each call's estimate is unbiased up to the last minibatch of a pass, which counts as much as the
    others with fewer rows. Calls of one round are not independent; a kernel that takes one call
    per round uses a minibatch without replacement.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> data = fedmcmc.FederatedData.from_clients([jnp.arange(5.0)])
    >>> estimator, client = epochs(2), data.client(0)
    >>> draws = estimator.prepare(jax.random.key(0), jnp.array(0.0), client, 3)
    >>> def total(position, rows):
    ...     return position * rows
    >>> fits = [
    ...     estimator.estimate(total, jax.tree.map(lambda x: x[i], draws), 1.0, (), client)
    ...     for i in range(3)
    ... ]
    >>> sum(float(fit) * rows / 5 for fit, rows in zip(fits, (2, 2, 1)))
    10.0
    """
    return Epochs(positive_integer(batch_size, "batch_size"))


def steps_an_epoch(size: Array | int, batch_size: int | None) -> Array:
    """Return how many minibatches a pass over `size` rows takes; one for a `batch_size` of None."""
    size = jnp.asarray(size, jnp.int32)
    return jnp.ones_like(size) if batch_size is None else (size + batch_size - 1) // batch_size


def offsets_of_call(batch_size: int, key: Array, call: Array, client: Client) -> Array:
    """Return the numbers of the client's rows in minibatch `call`, ``[batch_size]``.

    They are negative where there is no row; `key` is that of the pass which the call belongs to.
    """
    first = call % steps_an_epoch(client.size, batch_size) * batch_size
    places = first + jnp.arange(batch_size, dtype=jnp.int32)
    words = shuffle_words(key)
    entries = shuffled(words, jnp.minimum(places, client.size - 1), client.size)
    return jnp.where(places < client.size, entries, -1)
