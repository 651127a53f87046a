"""Corrections of a client's gradient that sum to zero over clients.

All are ``estimate + share * grad log q - grad log q_client`` with ``q`` the product of the
clients' ``q_client`` and shares that sum to one, so the sum over clients is left alone while each
client feels what the others would say.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial

from fedmcmc import schedules, trees
from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    GradientEstimator,
    Number,
    PerClient,
)
from fedmcmc.data import FederatedData
from fedmcmc.gaussian import Gaussian

__all__ = ["as_surrogates", "conducive"]


def conducive(
    estimator: GradientEstimator,
    surrogates: Gaussian,
    alpha: Number = 1.0,
    *,
    shares: Array | None = None,
) -> GradientEstimator:
    """Add conducive gradients, built from surrogates of the clients' likelihoods.

    Parameters
    ----------
    estimator
        What is corrected.
    surrogates
        One `Gaussian` a client, leaves ``[num_clients, ...]``: the client's likelihood (without
        prior), proper or not.
    alpha
        Strength, a number or schedule of the round; zero switches the correction off.
    shares
        ``[num_clients]``, summing to one; by default each client's share of rows. In a relay
        these are the client probabilities.

    Notes
    -----
    In El Mekkaoui et al. (2021), eq. 5, the term is divided by the client's probability ``f_s``:
    ``g_s = grad log q - grad log q_s / f_s``. Here the kernel divides the whole gradient by
    ``f_s``, hence ``f_s * grad log q - grad log q_s``.
    """
    surrogates = as_surrogates(surrogates)
    parameters = _Conducive(
        PerClient(surrogates),
        surrogates.sum(),
        schedules.number(alpha, "alpha"),
        None if shares is None else PerClient(jnp.asarray(shares, jnp.result_type(float))),
    )
    return GradientEstimator(
        init=estimator.init,
        prepare=estimator.prepare,
        start=Partial(_start, estimator.start, parameters),
        estimate=Partial(_estimate, estimator.estimate),
        check=Partial(_check, estimator.check, surrogates, parameters.shares),
        reference=estimator.reference,
    )


def as_surrogates(surrogates: Gaussian) -> Gaussian:
    """Return `surrogates` with a client axis on every leaf.

    Raises
    ------
    TypeError, ValueError
        If it is not one `Gaussian` with a leading client axis and finite natural parameters.
    """
    if not isinstance(surrogates, Gaussian):
        raise TypeError(
            f"surrogates must be one fedmcmc.Gaussian with a leading client axis, got "
            f"{type(surrogates).__name__}."
        )
    for leaf in jax.tree.leaves(surrogates):
        if not isinstance(leaf, jax.core.Tracer) and not np.isfinite(leaf).all():
            raise ValueError("The surrogates hold NaN or infinite natural parameters.")
    return surrogates.one_a_client()


class _Conducive(NamedTuple):
    own: PerClient  # of Gaussian
    product: Gaussian
    alpha: Any
    shares: PerClient | None


def _start(
    inner: Callable[..., tuple[ArrayTree, ArrayTree]],
    parameters: _Conducive,
    loglikelihood_fn: Any,
    broadcast: Broadcast,
    state: ArrayTree,
    client: Client,
) -> tuple[ArrayTree, ArrayTree]:
    context, state = inner(loglikelihood_fn, broadcast, state, client)
    share = client.share if parameters.shares is None else parameters.shares.of(client)
    # One Gaussian in place of two: alpha * (share * log q - log q_client), natural parameters.
    correction = parameters.product**share / parameters.own.of(client)
    return (context, correction ** schedules.value(parameters.alpha, broadcast.round)), state


def _estimate(
    inner: Callable[..., ArrayTree],
    loglikelihood_fn: Any,
    draws: ArrayTree,
    position: ArrayTree,
    context: tuple[ArrayTree, Gaussian],
    client: Client,
) -> ArrayTree:
    gradient = inner(loglikelihood_fn, draws, position, context[0], client)
    return trees.add(gradient, context[1].grad_log(position))


def _check(
    inner: Callable[..., None],
    surrogates: Gaussian,
    shares: PerClient | None,
    position: ArrayTree,
    data: FederatedData,
) -> None:
    inner(position, data)
    surrogates.check_clients(position, data.num_clients)
    if shares is not None and shares.values.shape != (data.num_clients,):
        raise ValueError(
            f"shares must have shape ({data.num_clients},), one a client, got "
            f"{shares.values.shape}."
        )
