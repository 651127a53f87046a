"""Gradient estimators that use minibatches of a client's rows, at random or in epochs."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from numpy.typing import ArrayLike

from fedmcmc._checks import positive_integer
from fedmcmc.data import gather
from fedmcmc.gradients._estimators import check_prepared, full_gradient, sum_gradient
from fedmcmc.gradients._scaling import rows_over_batch
from fedmcmc.pytrees import trees
from fedmcmc.random import distinct_integers, integers_below, shuffle_words, shuffled
from fedmcmc.types import (
    ArrayTree,
    Client,
    Disclosure,
    GradientEstimator,
    LogDensity,
    register_dataclass,
)

MAX_PREPARED_ROWS = 2**22
"""Largest count of prepared numbers per client and round; above it, prepare offsets of rows."""
MAX_PREPARED_BATCH = 2**12
"""Largest count of prepared numbers per minibatch; copying larger minibatches early is slower."""
MAX_PREPARED_OFFSETS = 2**22
"""Largest count of prepared offsets per client and round; above it, prepare permutation keys."""


class _MinibatchDraws(NamedTuple):
    """Rows for the calls of a round, or their offsets, or keys, depending on their number."""

    rows: ArrayTree = ()  # leaves [num_calls, batch_size, ...]
    offsets: ArrayTree = ()  # [num_calls, batch_size]; in epochs negative if there is no row
    keys: ArrayTree = ()  # [num_calls]; in epochs the keys of the passes
    calls: ArrayTree = ()  # [num_calls], only with the keys of epochs


SIZE_WARNING = (
    "the server chooses the size of minibatches in its own questions, down to limits.min_batch "
    "rows."
)
"""Warning to the owner of a site."""


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Minibatch(GradientEstimator):
    """Estimator from random rows; see `minibatch`."""

    disclosure = Disclosure(
        "no separate question: allows questions about random minibatches of the rows",
        warning=SIZE_WARNING,
    )

    batch_size: int | float = field(metadata={"static": True})  # a float is a fraction
    replace: bool = field(metadata={"static": True})

    def prepare(
        self, rng_key: Array, like: ArrayTree, client: Client, num_calls: int
    ) -> _MinibatchDraws:
        max_rows = self._max_rows(client)
        if num_calls * max_rows > MAX_PREPARED_ROWS:
            return _MinibatchDraws(keys=jax.random.split(rng_key, num_calls))
        offsets = self._offsets(rng_key, client, num_calls, max_rows)
        size = max_rows * row_size(client.rows)
        if size > MAX_PREPARED_BATCH or num_calls * size > MAX_PREPARED_ROWS:
            return _MinibatchDraws(offsets=offsets)
        return _MinibatchDraws(rows=gather(client, offsets))

    def estimate(
        self,
        loglikelihood_fn: LogDensity,
        draws: _MinibatchDraws,
        position: ArrayTree,
        context: ArrayTree,
        client: Client,
    ) -> ArrayTree:
        check_prepared(isinstance(draws, _MinibatchDraws), "minibatch")
        rows, offsets, key, _ = draws
        if not trees.is_empty(key):
            offsets = self._offsets(key, client, 1, self._max_rows(client))[0]
        if trees.is_empty(rows):
            rows = gather(client, offsets)
        max_rows = jax.tree.leaves(rows)[0].shape[0]
        if self.replace and self.batch_size == max_rows:
            gradient = sum_gradient(loglikelihood_fn, position, rows)
            return rows_over_batch(client, max_rows, gradient)
        num_rows = self._num_rows(client.size)
        mask = jnp.arange(max_rows, dtype=jnp.int32) < num_rows
        gradient = sum_gradient(loglikelihood_fn, position, rows, mask)
        return rows_over_batch(client, num_rows, gradient)

    def variance_factor(self, size: ArrayLike) -> Array:
        """Return the variance of estimates divided by the variance of row gradients, ``[...]``.

        For clients with `size` rows ``[...]`` and minibatches of ``n`` rows, the factor is
        ``size**2 / n``, times ``(size - n) / (size - 1)`` without replacement.
        """
        size = jnp.asarray(size, jnp.result_type(float))
        num_rows = jnp.asarray(self._num_rows(size)).astype(size.dtype)
        correction = 1.0 if self.replace else (size - num_rows) / jnp.maximum(size - 1, 1)
        return size**2 / num_rows * correction

    def _num_rows(self, size: Array | int) -> Array | int:
        """Return the rows per minibatch of a client with `size` rows."""
        if isinstance(self.batch_size, int):
            return self.batch_size if self.replace else jnp.minimum(self.batch_size, size)
        # In float32 a tenth of 190 may be slightly below 19.
        size = jnp.asarray(size, jnp.float32)
        rows = jnp.floor(size * jnp.float32(self.batch_size) * jnp.float32(1 + 2**-20))
        return jnp.maximum(rows, 1).astype(jnp.int32)

    def _max_rows(self, client: Client) -> int:
        """Return the rows per minibatch of the largest client."""
        if isinstance(self.batch_size, int):
            return self.batch_size
        with jax.ensure_compile_time_eval():
            return int(self._num_rows(client.max_size))

    def _offsets(self, rng_key: Array, client: Client, num_calls: int, max_rows: int) -> Array:
        """Return indices of the client's rows in its minibatches, ``[num_calls, max_rows]``."""
        if not self.replace:
            num_rows = self._num_rows(client.size)
            return distinct_integers(rng_key, client.size, (num_calls, max_rows), num_rows)
        if isinstance(self.batch_size, int):
            return integers_below(rng_key, client.size, (num_calls, max_rows))
        # Transpose, so that a client's draws do not depend on the largest client.
        return integers_below(rng_key, client.size, (max_rows, num_calls)).T


def minibatch(batch_size: int | float, *, replace: bool = True) -> GradientEstimator:
    """Estimate the gradient from a random minibatch of the client's rows.

    The estimate is the sum over the minibatch, times the client's number of rows over the number
    of rows in the minibatch.

    Parameters
    ----------
    batch_size
        Number of rows per call, or a fraction between zero and one of the client's rows, rounded
        down to at least one row.
    replace
        If true (default), draw rows with replacement. If false, a client with fewer rows than
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
    """Return the size of a row, the count of its numbers."""
    return sum(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(rows))


def for_batch_size(batch_size: int | float | None, *, replace: bool = True) -> GradientEstimator:
    """Return `full_gradient` for ``None``, otherwise `minibatch`."""
    return full_gradient() if batch_size is None else minibatch(batch_size, replace=replace)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Epochs(GradientEstimator):
    """Estimator from passes over the client's rows; see `epochs`."""

    disclosure = Disclosure(
        "no separate question: allows questions that pass over the rows in minibatches",
        warning=SIZE_WARNING,
    )

    batch_size: int = field(metadata={"static": True})

    def prepare(
        self, rng_key: Array, like: ArrayTree, client: Client, num_calls: int
    ) -> _MinibatchDraws:
        calls = jnp.arange(num_calls, dtype=jnp.int32)
        passes = calls // steps_per_epoch(client.size, self.batch_size)
        keys = jax.vmap(lambda i: jax.random.fold_in(rng_key, i))(passes)
        if num_calls * self.batch_size > MAX_PREPARED_OFFSETS:
            return _MinibatchDraws(keys=keys, calls=calls)
        offsets = jax.vmap(lambda key, i: offsets_of_call(self.batch_size, key, i, client))(
            keys, calls
        )
        return _MinibatchDraws(offsets=offsets)

    def estimate(
        self,
        loglikelihood_fn: LogDensity,
        draws: _MinibatchDraws,
        position: ArrayTree,
        context: ArrayTree,
        client: Client,
    ) -> ArrayTree:
        check_prepared(isinstance(draws, _MinibatchDraws), "epochs")
        offsets = draws.offsets
        if trees.is_empty(offsets):
            offsets = offsets_of_call(self.batch_size, draws.keys, draws.calls, client)
        mask = offsets >= 0
        # Replace missing rows by the client's row 0, so that no other client's row is read.
        rows = gather(client, jnp.maximum(offsets, 0))
        gradient = sum_gradient(loglikelihood_fn, position, rows, mask)
        return rows_over_batch(client, jnp.sum(mask, dtype=jnp.int32), gradient)


def epochs(batch_size: int) -> GradientEstimator:
    """Estimate gradients from minibatches that pass over all rows of the client.

    Each row is in one minibatch of a pass, and each pass has a new random order. An estimate is the
    sum over the minibatch, times the client's number of rows over the number of rows in the
    minibatch.

    Parameters
    ----------
    batch_size
        Number of rows per call.

    Raises
    ------
    ValueError
        If `batch_size` is not a positive integer.

    Notes
    -----
    The last minibatch of a pass may have fewer rows and the same weight, which is the only bias.
    Calls of one round are dependent. With one call per round, the minibatch is drawn without
    replacement.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> data = fedmcmc.FederatedData.from_clients([jnp.arange(5.0)])
    >>> estimator, client = epochs(2), data.client(0)
    >>> draws = estimator.prepare(jax.random.key(0), jnp.array(0.0), client, 3)
    >>> gradients = [
    ...     estimator.estimate(jnp.multiply, jax.tree.map(lambda x: x[i], draws), 1.0, (), client)
    ...     for i in range(3)
    ... ]
    >>> sum(float(gradient) * num / 5 for gradient, num in zip(gradients, (2, 2, 1)))
    10.0
    """
    return Epochs(positive_integer(batch_size, "batch_size"))


def steps_per_epoch(size: Array | int, batch_size: int | None) -> Array:
    """Return the number of minibatches per pass; one if `batch_size` is ``None``."""
    size = jnp.asarray(size, jnp.int32)
    return jnp.ones_like(size) if batch_size is None else (size + batch_size - 1) // batch_size


def offsets_of_call(batch_size: int, key: Array, call: Array, client: Client) -> Array:
    """Return indices of the client's rows in minibatch `call`, ``[batch_size]``, -1 for none.

    `key` is the key of the pass that contains the call.
    """
    start = call % steps_per_epoch(client.size, batch_size) * batch_size
    places = start + jnp.arange(batch_size, dtype=jnp.int32)
    words = shuffle_words(key)
    entries = shuffled(words, jnp.minimum(places, client.size - 1), client.size)
    return jnp.where(places < client.size, entries, -1)
