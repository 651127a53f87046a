"""Minibatches: estimates of a client's gradient from some of its rows."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._types import ArrayTree, Client, GradientEstimator, LogDensity
from fedmcmc.data import gather
from fedmcmc.gradients._estimators import full_gradient, sum_gradient
from fedmcmc.gradients._scaling import rows_over_batch
from fedmcmc.pytrees import trees
from fedmcmc.random import distinct_integers, integers_below

__all__ = ["for_batch_size", "minibatch"]

MAX_PREPARED_ROWS = 2**22
"""Above this many numbers per client and round, offsets of rows are prepared instead of rows."""
MAX_PREPARED_BATCH = 2**12
"""Above this many numbers per minibatch, likewise: gathering large batches early only copies."""


class _Draws(NamedTuple):
    rows: ArrayTree  # leaves [num_calls, batch_size, ...], or () where only offsets are prepared
    offsets: ArrayTree  # [num_calls, batch_size], or () where rows or keys are prepared
    keys: ArrayTree  # [num_calls] where even the offsets would be too many, else ()


@register_dataclass
@dataclass(frozen=True, eq=False)
class Minibatch(GradientEstimator):
    """The sum over random rows, scaled to all; see `minibatch`."""

    batch_size: int | float = field(metadata={"static": True})  # a float is a fraction
    replace: bool = field(metadata={"static": True})

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client, num_calls: int) -> _Draws:
        """Draw rows, or what makes them where they are many."""
        most = self._most_rows(client)
        if num_calls * most > MAX_PREPARED_ROWS:
            return _Draws((), (), jax.random.split(rng_key, num_calls))
        offsets = self._offsets(rng_key, client, num_calls, most)
        row_size = sum(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(client.rows))
        size = most * row_size
        if size > MAX_PREPARED_BATCH or num_calls * size > MAX_PREPARED_ROWS:
            return _Draws((), offsets, ())
        return _Draws(gather(client, offsets), (), ())

    def estimate(
        self,
        loglikelihood_fn: LogDensity,
        draws: _Draws,
        position: ArrayTree,
        context: ArrayTree,
        client: Client,
    ) -> ArrayTree:
        """Return the scaled sum."""
        rows, offsets, key = draws
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

    def _rows_used(self, size: Any) -> Any:
        """Return how many rows of a client of this size a minibatch uses."""
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
        """Return the numbers of a client's rows in its minibatches, ``[num_calls, most]``."""
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


def for_batch_size(batch_size: int | float | None, *, replace: bool = True) -> GradientEstimator:
    """Return `full_gradient` for ``None``, else `minibatch`."""
    return full_gradient() if batch_size is None else minibatch(batch_size, replace=replace)
