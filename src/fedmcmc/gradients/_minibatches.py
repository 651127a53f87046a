"""Minibatches: estimates of a client's gradient from some of its rows."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from fedmcmc._types import ArrayTree, Client, GradientEstimator, Static
from fedmcmc.data import gather
from fedmcmc.gradients._estimators import (
    full_gradient,
    no_check,
    no_context,
    no_state,
    sum_gradient,
)
from fedmcmc.gradients._scaling import rows_over_batch
from fedmcmc.pytrees import trees
from fedmcmc.random import distinct_integers, integers_below

__all__ = ["for_batch_size", "minibatch"]

MAX_PREPARED_ROWS = 2**22
"""Above this many numbers a client and round, offsets of rows are prepared instead of rows."""
MAX_PREPARED_BATCH = 2**12
"""Above this many numbers a minibatch, likewise: gathering large batches ahead only copies them."""


def minibatch(batch_size: int | float, *, replace: bool = True) -> GradientEstimator:
    """Use a random minibatch of the client's rows: their sum, times size over batch size.

    Parameters
    ----------
    batch_size
        Rows a call; or, between zero and one, the fraction of a client's rows, rounded down to
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
    config = _Config(float(batch_size) if is_fraction else int(batch_size), bool(replace))
    return GradientEstimator(
        init=Partial(no_state),
        prepare=Partial(_prepare_minibatch, Static(config)),
        start=Partial(no_context),
        estimate=Partial(_estimate_minibatch, Static(config)),
        check=Partial(no_check),
    )


def for_batch_size(batch_size: int | float | None, *, replace: bool = True) -> GradientEstimator:
    """Return `full_gradient` for ``None``, else `minibatch`."""
    return full_gradient() if batch_size is None else minibatch(batch_size, replace=replace)


class _Config(NamedTuple):
    batch_size: int | float  # a float is a fraction
    replace: bool


class _Minibatch(NamedTuple):
    rows: ArrayTree  # leaves [num_calls, batch_size, ...], or () where only offsets are prepared
    offsets: ArrayTree  # [num_calls, batch_size], or () where rows or keys are prepared
    keys: ArrayTree  # [num_calls] where even the offsets would be too many, else ()


def _rows_used(config: _Config, size: Any) -> Any:
    """Return how many rows of a client of this size a minibatch uses."""
    if isinstance(config.batch_size, int):
        return config.batch_size if config.replace else jnp.minimum(config.batch_size, size)
    # In float32 a tenth of 190 may be a little below 19.
    size = jnp.asarray(size, jnp.float32)
    rows = jnp.floor(size * jnp.float32(config.batch_size) * jnp.float32(1 + 2**-20))
    return jnp.maximum(rows, 1).astype(jnp.int32)


def _prepare_minibatch(
    config: Static[_Config],
    rng_key: Array,
    like: ArrayTree,
    client: Client,
    num_calls: int,
) -> _Minibatch:
    del like
    most = _most_rows(config.value, client)
    if num_calls * most > MAX_PREPARED_ROWS:
        return _Minibatch((), (), jax.random.split(rng_key, num_calls))
    offsets = _offsets(config.value, rng_key, client, num_calls, most)
    row_size = sum(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(client.rows))
    size = most * row_size
    if size > MAX_PREPARED_BATCH or num_calls * size > MAX_PREPARED_ROWS:
        return _Minibatch((), offsets, ())
    return _Minibatch(gather(client, offsets), (), ())


def _most_rows(config: _Config, client: Client) -> int:
    if isinstance(config.batch_size, int):
        return config.batch_size
    with jax.ensure_compile_time_eval():
        return int(_rows_used(config, client.max_size))


def _offsets(config: _Config, rng_key: Array, client: Client, num_calls: int, most: int) -> Array:
    """Return the numbers of a client's rows in its minibatches, ``[num_calls, most]``."""
    if not config.replace:
        take = _rows_used(config, client.size)
        return distinct_integers(rng_key, client.size, (num_calls, most), take)
    if isinstance(config.batch_size, int):
        return integers_below(rng_key, client.size, (num_calls, most))
    # Transposed, so that what a client draws does not depend on the largest client.
    return integers_below(rng_key, client.size, (most, num_calls)).T


def _estimate_minibatch(
    config: Static[_Config],
    loglikelihood_fn: Callable[..., Array],
    draws: _Minibatch,
    position: ArrayTree,
    context: ArrayTree,
    client: Client,
) -> ArrayTree:
    del context
    rows, offsets, key = draws
    if not trees.is_empty(key):
        offsets = _offsets(config.value, key, client, 1, _most_rows(config.value, client))[0]
    if trees.is_empty(rows):
        rows = gather(client, offsets)
    most = jax.tree.leaves(rows)[0].shape[0]
    if config.value == (most, True):
        return rows_over_batch(client, most, sum_gradient(loglikelihood_fn, position, rows))
    used = _rows_used(config.value, client.size)
    mask = jnp.arange(most, dtype=jnp.int32) < used
    return rows_over_batch(client, used, sum_gradient(loglikelihood_fn, position, rows, mask))
