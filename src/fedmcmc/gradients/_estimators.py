"""Estimates of the gradient of a client's log likelihood, and the gradient of the prior."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    GradientEstimator,
    Number,
    PerClient,
    Reference,
    Static,
)
from fedmcmc.data import FederatedData, fold, own_rows, single_chunk
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import normals, realise_normals

__all__ = [
    "client_gradient",
    "first_reference",
    "full_gradient",
    "next_broadcast",
    "no_check",
    "no_context",
    "no_state",
    "noisy",
    "sum_gradient",
]


def client_gradient(
    loglikelihood_fn: Callable[..., Array], position: ArrayTree, client: Client
) -> ArrayTree:
    """Gradient of the sum of the client's log likelihood over all its rows."""
    return fold(lambda rows, mask: sum_gradient(loglikelihood_fn, position, rows, mask), client)


def sum_gradient(
    loglikelihood_fn: Callable[..., Array],
    position: ArrayTree,
    rows: ArrayTree,
    mask: Array | None = None,
) -> ArrayTree:
    """Gradient of the sum of the log likelihood over `rows`, those under `mask` alone.

    Raises
    ------
    ValueError
        If the log likelihood does not return one term a row.
    """

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


def noisy(
    estimator: GradientEstimator,
    scale: Number,
    *,
    weighted: bool = False,
    weights: Array | None = None,
) -> GradientEstimator:
    """Add Gaussian noise of standard deviation `scale` to each coordinate of an estimate.

    Models an oracle with state-independent noise; its laws on Gaussian targets are exact.

    Parameters
    ----------
    estimator
        What the noise is added to.
    scale
        Number or schedule of the round.
    weighted
        Whether the noise is that of the gradient of a client's weighted loss, minus its log
        likelihood over its weight: then it is `scale` times the weight.
    weights
        ``[num_clients]``, where `weighted`; by default a client's weight is its share of rows.

    Raises
    ------
    ValueError
        If a number is out of range, or weights are given for noise that is not weighted.
    """
    if weights is not None and not weighted:
        raise ValueError("noisy takes weights only with weighted=True.")
    sd = schedules.number(scale, "scale", minimum=0.0)
    table: Any = ()
    if weights is not None:
        table = PerClient(jnp.asarray(weights, jnp.result_type(float)))
    return estimator._replace(
        prepare=Partial(_prepare_noisy, estimator.prepare),
        start=Partial(_start_noisy, estimator.start, sd, Static(bool(weighted)), table),
        estimate=Partial(_estimate_noisy, estimator.estimate),
        check=Partial(_check_noisy, estimator.check, table),
    )


def _check_noisy(
    inner: Callable[..., None],
    weights: PerClient | tuple[()],
    position: ArrayTree,
    data: FederatedData,
) -> None:
    inner(position, data)
    if isinstance(weights, PerClient) and weights.values.shape != (data.num_clients,):
        raise ValueError(
            f"weights must have shape ({data.num_clients},), one a client, got "
            f"{weights.values.shape}."
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
    return sum_gradient(loglikelihood_fn, position, *context)


def _prepare_noisy(
    inner: Callable[..., ArrayTree], rng_key: Array, like: ArrayTree, client: Client, num_calls: int
) -> tuple[ArrayTree, ArrayTree]:
    inner_key, noise_key = jax.random.split(rng_key)
    return inner(inner_key, like, client, num_calls), normals(noise_key, like, num_calls)


def _start_noisy(
    inner: Callable[..., tuple[ArrayTree, ArrayTree]],
    scale: Any,
    weighted: Static[bool],
    weights: PerClient | tuple[()],
    loglikelihood_fn: Any,
    broadcast: Broadcast,
    state: ArrayTree,
    client: Client,
) -> tuple[ArrayTree, ArrayTree]:
    context, state = inner(loglikelihood_fn, broadcast, state, client)
    sd = schedules.value(scale, broadcast.round)
    if weighted.value:
        sd = sd * (weights.of(client) if isinstance(weights, PerClient) else client.share)
    return (context, sd), state


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
