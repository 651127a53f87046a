"""Estimates of the gradient of a client's log likelihood, and the gradient of the prior."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from fedmcmc import schedules, trees
from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    GradientEstimator,
    Number,
    Reference,
    Static,
)
from fedmcmc.data import FederatedData, fold, gather, own_rows, single_chunk
from fedmcmc.scaling import rows_over_batch
from fedmcmc.streams import distinct_integers, integers_below, normals, realise_normals

__all__ = [
    "client_gradient",
    "first_reference",
    "for_batch_size",
    "full_gradient",
    "minibatch",
    "next_broadcast",
    "noisy",
]

MAX_PREPARED_ROWS = 2**22
"""Above this many numbers a client and round, offsets of rows are prepared instead of rows."""
MAX_PREPARED_BATCH = 2**12
"""Above this many numbers a minibatch, likewise: gathering large batches ahead only copies them."""


def client_gradient(
    loglikelihood_fn: Callable[..., Array], position: ArrayTree, client: Client
) -> ArrayTree:
    """Gradient of the sum of the client's log likelihood over all its rows."""
    return fold(lambda rows, mask: _sum_gradient(loglikelihood_fn, position, rows, mask), client)


def _sum_gradient(
    loglikelihood_fn: Callable[..., Array],
    position: ArrayTree,
    rows: ArrayTree,
    mask: Array | None = None,
) -> ArrayTree:
    def total(position_: ArrayTree) -> Array:
        terms = loglikelihood_fn(position_, rows)
        num = jax.tree.leaves(rows)[0].shape[0]
        if terms.shape != (num,):
            raise ValueError(
                f"loglikelihood_fn must return one term a row, shape ({num},), got {terms.shape}."
            )
        return jnp.sum(terms if mask is None else jnp.where(mask, terms, 0))

    return jax.grad(total)(position)


def first_reference(estimator: GradientEstimator, position: ArrayTree) -> ArrayTree:
    """Return what the first round broadcasts besides the position."""
    if estimator.reference is None:
        return ()
    return estimator.reference.update(jnp.zeros((), jnp.int32), position, None)


def next_broadcast(
    reference: Reference | None, broadcast: Broadcast, position: ArrayTree
) -> Broadcast:
    """Return the next round's broadcast, with the position the server moved to."""
    round_ = broadcast.round + 1
    if reference is None:
        return broadcast._replace(round=round_, position=position)
    return Broadcast(round_, position, reference.update(round_, position, broadcast.extra))


def full_gradient() -> GradientEstimator:
    """Use all of the client's rows, exactly."""
    return GradientEstimator(
        init=Partial(no_state),
        prepare=Partial(_prepare_nothing),
        start=Partial(_gather_once),
        estimate=Partial(_estimate_full),
        check=Partial(no_check),
    )


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


def noisy(estimator: GradientEstimator, scale: Number) -> GradientEstimator:
    """Add Gaussian noise of standard deviation `scale` to each coordinate of an estimate.

    Models an oracle with state-independent noise; its laws on Gaussian targets are exact.
    """
    sd = schedules.number(scale, "scale", minimum=0.0)
    return GradientEstimator(
        init=estimator.init,
        prepare=Partial(_prepare_noisy, estimator.prepare),
        start=Partial(_start_noisy, estimator.start, sd),
        estimate=Partial(_estimate_noisy, estimator.estimate),
        check=estimator.check,
        reference=estimator.reference,
    )


def no_state(loglikelihood_fn: Any, position: ArrayTree, client: Client) -> ArrayTree:
    """Keep nothing between rounds."""
    del loglikelihood_fn, position, client
    return ()


def no_context(
    loglikelihood_fn: Any, broadcast: Broadcast, state: ArrayTree, client: Client
) -> tuple[ArrayTree, ArrayTree]:
    """Nothing is computed once a round."""
    del loglikelihood_fn, broadcast, client
    return (), state


def no_check(position: ArrayTree, data: FederatedData) -> None:
    """Any position and data fit."""
    del position, data


def _prepare_nothing(rng_key: Array, like: ArrayTree, client: Client, num_calls: int) -> ArrayTree:
    del rng_key, like, client, num_calls
    return ()


def _gather_once(
    loglikelihood_fn: Any, broadcast: Broadcast, state: ArrayTree, client: Client
) -> tuple[ArrayTree, ArrayTree]:
    del loglikelihood_fn, broadcast
    return (own_rows(client) if single_chunk(client) else ()), state


def _estimate_full(
    loglikelihood_fn: Callable[..., Array],
    draws: ArrayTree,
    position: ArrayTree,
    context: ArrayTree,
    client: Client,
) -> ArrayTree:
    del draws
    if trees.is_empty(context):
        return client_gradient(loglikelihood_fn, position, client)
    return _sum_gradient(loglikelihood_fn, position, *context)


class _Config(NamedTuple):
    batch_size: int | float  # a float is a fraction
    replace: bool


class _Minibatch(NamedTuple):
    rows: ArrayTree  # leaves [num_calls, batch_size, ...], or () where only offsets are prepared
    offsets: ArrayTree  # [num_calls, batch_size], or () where rows are prepared


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
    given, replace = config.value
    if isinstance(given, int):
        most = given
    else:
        with jax.ensure_compile_time_eval():
            most = int(_rows_used(config.value, client.max_size))
    if not replace:
        take = _rows_used(config.value, client.size)
        offsets = distinct_integers(rng_key, client.size, (num_calls, most), take)
    elif isinstance(given, int):
        offsets = integers_below(rng_key, client.size, (num_calls, most))
    else:
        # Transposed, so that what a client draws does not depend on the largest client.
        offsets = integers_below(rng_key, client.size, (most, num_calls)).T
    row_size = sum(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(client.rows))
    size = most * row_size
    if size > MAX_PREPARED_BATCH or num_calls * size > MAX_PREPARED_ROWS:
        return _Minibatch((), offsets)
    return _Minibatch(gather(client, offsets), ())


def _estimate_minibatch(
    config: Static[_Config],
    loglikelihood_fn: Callable[..., Array],
    draws: _Minibatch,
    position: ArrayTree,
    context: ArrayTree,
    client: Client,
) -> ArrayTree:
    del context
    rows = gather(client, draws.offsets) if trees.is_empty(draws.rows) else draws.rows
    most = jax.tree.leaves(rows)[0].shape[0]
    if config.value == (most, True):
        return rows_over_batch(client, most, _sum_gradient(loglikelihood_fn, position, rows))
    used = _rows_used(config.value, client.size)
    mask = jnp.arange(most, dtype=jnp.int32) < used
    return rows_over_batch(client, used, _sum_gradient(loglikelihood_fn, position, rows, mask))


def _prepare_noisy(
    inner: Callable[..., ArrayTree], rng_key: Array, like: ArrayTree, client: Client, num_calls: int
) -> tuple[ArrayTree, ArrayTree]:
    inner_key, noise_key = jax.random.split(rng_key)
    return inner(inner_key, like, client, num_calls), normals(noise_key, like, num_calls)


def _start_noisy(
    inner: Callable[..., tuple[ArrayTree, ArrayTree]],
    scale: Any,
    loglikelihood_fn: Any,
    broadcast: Broadcast,
    state: ArrayTree,
    client: Client,
) -> tuple[ArrayTree, ArrayTree]:
    context, state = inner(loglikelihood_fn, broadcast, state, client)
    return (context, schedules.value(scale, broadcast.round)), state


def _estimate_noisy(
    inner: Callable[..., ArrayTree],
    loglikelihood_fn: Any,
    draws: tuple[ArrayTree, ArrayTree],
    position: ArrayTree,
    context: tuple[ArrayTree, Array],
    client: Client,
) -> ArrayTree:
    gradient = inner(loglikelihood_fn, draws[0], position, context[0], client)
    return trees.add_scaled(gradient, context[1], realise_normals(draws[1], position))
