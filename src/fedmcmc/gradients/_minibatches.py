"""Estimates of a client's gradient from some of its rows: minibatches, at random or in epochs."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import positive_integer
from fedmcmc._types import (
    ArrayTree,
    Client,
    Disclosure,
    GradientEstimator,
    LogDensity,
    register_dataclass,
)
from fedmcmc.data import gather
from fedmcmc.gradients._estimators import expect_prepared, full_gradient, sum_gradient
from fedmcmc.gradients._scaling import rows_over_batch
from fedmcmc.pytrees import trees
from fedmcmc.random import distinct_integers, integers_below, shuffle_words, shuffled

MAX_PREPARED_ROWS = 2**22
"""Above this many numbers per client and round, offsets of rows are prepared instead of rows."""
MAX_PREPARED_BATCH = 2**12
"""Above this many numbers per minibatch, likewise: gathering large batches early only copies."""
MAX_PREPARED_OFFSETS = 2**22
"""Above this many rows per client and round, keys of the permutations are prepared instead."""


class _Randomness(NamedTuple):
    """Which rows the calls of a round use: rows, or offsets if these are too many, or keys."""

    rows: ArrayTree = ()  # leaves [num_calls, batch_size, ...]
    offsets: ArrayTree = ()  # [num_calls, batch_size], in epochs negative where there is no row
    keys: ArrayTree = ()  # [num_calls]; in epochs those of the passes
    calls: ArrayTree = ()  # [num_calls], beside the keys of epochs


SIZE_WARNING = (
    "the server chooses the size of minibatches in its own questions, down to limits.min_batch "
    "rows."
)
"""Warning for the owner of a site."""


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Minibatch(GradientEstimator):
    """The sum over random rows, scaled to all; see `minibatch`."""

    disclosure = Disclosure(
        "no separate question: allows questions about random minibatches of the rows",
        warning=SIZE_WARNING,
    )

    batch_size: int | float = field(metadata={"static": True})  # a float is a fraction
    replace: bool = field(metadata={"static": True})

    def prepare(
        self, rng_key: Array, like: ArrayTree, client: Client, num_calls: int
    ) -> _Randomness:
        most = self._most_rows(client)
        if num_calls * most > MAX_PREPARED_ROWS:
            return _Randomness(keys=jax.random.split(rng_key, num_calls))
        offsets = self._offsets(rng_key, client, num_calls, most)
        size = most * row_size(client.rows)
        if size > MAX_PREPARED_BATCH or num_calls * size > MAX_PREPARED_ROWS:
            return _Randomness(offsets=offsets)
        return _Randomness(rows=gather(client, offsets))

    def estimate(
        self,
        loglikelihood_fn: LogDensity,
        draws: _Randomness,
        position: ArrayTree,
        context: ArrayTree,
        client: Client,
    ) -> ArrayTree:
        expect_prepared(isinstance(draws, _Randomness), "minibatch")
        rows, offsets, key, _ = draws
        if not trees.is_empty(key):
            offsets = self._offsets(key, client, 1, self._most_rows(client))[0]
        if trees.is_empty(rows):
            rows = gather(client, offsets)
        most = jax.tree.leaves(rows)[0].shape[0]
        if self.replace and self.batch_size == most:
            return rows_over_batch(client, most, sum_gradient(loglikelihood_fn, position, rows))
        used = self._rows_used(client.size)
        mask = jnp.arange(most, dtype=jnp.int32) < used
        return rows_over_batch(client, used, sum_gradient(loglikelihood_fn, position, rows, mask))

    def variance_factor(self, size: Any) -> Any:
        """Return the variance of estimates in units of that of a row's term over the rows.

        Where clients have `size` rows, ``[...]``: ``size**2 / n`` of batches of ``n``, times
        ``(size - n) / (size - 1)`` without replacement.
        """
        size = jnp.asarray(size, jnp.result_type(float))
        used = jnp.asarray(self._rows_used(size)).astype(size.dtype)
        left = 1.0 if self.replace else (size - used) / jnp.maximum(size - 1, 1)
        return size**2 / used * left

    def _rows_used(self, size: Any) -> Any:
        if isinstance(self.batch_size, int):
            return self.batch_size if self.replace else jnp.minimum(self.batch_size, size)
        # In float32 a tenth of 190 may be a little below 19.
        size = jnp.asarray(size, jnp.float32)
        rows = jnp.floor(size * jnp.float32(self.batch_size) * jnp.float32(1 + 2**-20))
        return jnp.maximum(rows, 1).astype(jnp.int32)

    def _most_rows(self, client: Client) -> int:
        if isinstance(self.batch_size, int):
            return self.batch_size
        with jax.ensure_compile_time_eval():
            return int(self._rows_used(client.max_size))

    def _offsets(self, rng_key: Array, client: Client, num_calls: int, most: int) -> Array:
        # The numbers of a client's rows in its minibatches, [num_calls, most].
        if not self.replace:
            take = self._rows_used(client.size)
            return distinct_integers(rng_key, client.size, (num_calls, most), take)
        if isinstance(self.batch_size, int):
            return integers_below(rng_key, client.size, (num_calls, most))
        # Transposed, so that what a client draws does not depend on the largest client.
        return integers_below(rng_key, client.size, (most, num_calls)).T


def minibatch(batch_size: int | float, *, replace: bool = True) -> GradientEstimator:
    """Use a random minibatch of the client's rows: their sum, times size over batch size.

    Parameters
    ----------
    batch_size
        Rows per call; or, between zero and one, the fraction of a client's rows, rounded down to
        at least one row.
    replace
        Draw rows with replacement (default), else without: then a client with fewer rows than
        `batch_size` uses each of its rows once.

    Raises
    ------
    ValueError
        If `batch_size` is neither a positive integer nor a fraction.
    """
    is_fraction = 0 < batch_size < 1
    if not is_fraction and (int(batch_size) != batch_size or batch_size < 1):
        raise ValueError(
            f"batch_size must be a positive integer, or a fraction between 0 and 1, got "
            f"{batch_size!r}."
        )
    return Minibatch(float(batch_size) if is_fraction else int(batch_size), bool(replace))


def row_size(rows: ArrayTree) -> int:
    """Return how many numbers a row holds."""
    return sum(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(rows))


def for_batch_size(batch_size: int | float | None, *, replace: bool = True) -> GradientEstimator:
    """Return `full_gradient` for ``None``, else `minibatch`."""
    return full_gradient() if batch_size is None else minibatch(batch_size, replace=replace)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Epochs(GradientEstimator):
    """Passes over the client's rows; see `epochs`."""

    disclosure = Disclosure(
        "no separate question: allows questions that pass over the rows in minibatches",
        warning=SIZE_WARNING,
    )

    batch_size: int = field(metadata={"static": True})

    def prepare(
        self, rng_key: Array, like: ArrayTree, client: Client, num_calls: int
    ) -> _Randomness:
        calls = jnp.arange(num_calls, dtype=jnp.int32)
        passes = calls // steps_per_epoch(client.size, self.batch_size)
        keys = jax.vmap(lambda i: jax.random.fold_in(rng_key, i))(passes)
        if num_calls * self.batch_size > MAX_PREPARED_OFFSETS:
            return _Randomness(keys=keys, calls=calls)
        offsets = jax.vmap(lambda key, i: offsets_of_call(self.batch_size, key, i, client))(
            keys, calls
        )
        return _Randomness(offsets=offsets)

    def estimate(
        self,
        loglikelihood_fn: LogDensity,
        draws: _Randomness,
        position: ArrayTree,
        context: ArrayTree,
        client: Client,
    ) -> ArrayTree:
        expect_prepared(isinstance(draws, _Randomness), "epochs")
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


def steps_per_epoch(size: Array | int, batch_size: int | None) -> Array:
    """Return how many minibatches a pass over `size` rows takes; one for a `batch_size` of None."""
    size = jnp.asarray(size, jnp.int32)
    return jnp.ones_like(size) if batch_size is None else (size + batch_size - 1) // batch_size


def offsets_of_call(batch_size: int, key: Array, call: Array, client: Client) -> Array:
    """Return the numbers of the client's rows in minibatch `call`, ``[batch_size]``.

    They are negative where there is no row; `key` is that of the pass which the call belongs to.
    """
    first = call % steps_per_epoch(client.size, batch_size) * batch_size
    places = first + jnp.arange(batch_size, dtype=jnp.int32)
    words = shuffle_words(key)
    entries = shuffled(words, jnp.minimum(places, client.size - 1), client.size)
    return jnp.where(places < client.size, entries, -1)
