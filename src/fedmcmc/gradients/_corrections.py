"""Corrections by which each client feels what the others would say, and their sum does not.

Both are ``estimate + share * grad log q - grad log q_client`` (`fedmcmc.zero_sum`), with Gaussian
``q_client`` that are known from the start, or log-linear ones that are renewed every round.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial

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
from fedmcmc.gradients._estimators import client_gradient
from fedmcmc.gradients._zero_sum import Correction, zero_sum
from fedmcmc.pytrees import schedules, trees

__all__ = ["as_surrogates", "conducive", "scaffold"]


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
        None if shares is None else PerClient(_as_shares(shares)),
    )
    return zero_sum(
        estimator,
        Partial(_conducive, parameters),
        check=Partial(_check, surrogates, parameters.shares),
    )


def scaffold(estimator: GradientEstimator, *, shares: Array | None = None) -> GradientEstimator:
    """Estimate gradients relative to those at the position that the round starts from.

    ``H(theta) - H(theta_0) + share * sum_c grad log p(rows_c | theta_0)``, with the same draws at
    both places. Before the clients move, each sends its gradient at ``theta_0``, by a full pass
    over its rows; the kernel's round then holds one more exchange of messages. At ``theta_0`` all
    clients have the same gradient, whatever their data.

    Parameters
    ----------
    estimator
        Gives ``H``.
    shares
        ``[num_clients]``, summing to one; by default each client's share of rows. In a weighted
        average of clients these are the weights.

    References
    ----------
    Karimireddy et al. (2020), SCAFFOLD, option I; Liang et al. (2024), Algorithm B.2.

    Examples
    --------
    >>> import fedmcmc
    >>> estimator = scaffold(fedmcmc.minibatch(10))
    """
    parameters = None if shares is None else PerClient(_as_shares(shares))
    return zero_sum(
        estimator,
        Partial(_scaffold, parameters),
        check=Partial(_check_shares, parameters),
        summed=Partial(_gradient_at_start),
    )


def _as_shares(shares: Any) -> Array:
    return jnp.asarray(shares, jnp.result_type(float))


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


def _share(shares: PerClient | None, client: Client) -> Array:
    return client.share if shares is None else shares.of(client)


def _conducive(
    parameters: _Conducive,
    loglikelihood_fn: Any,
    broadcast: Broadcast,
    own: ArrayTree,
    client: Client,
) -> tuple[Correction, ArrayTree]:
    del loglikelihood_fn
    # One Gaussian in place of two: alpha * (share * log q - log q_client), natural parameters.
    share = _share(parameters.shares, client)
    log_q = parameters.product**share / parameters.own.of(client)
    return Correction(log_q=log_q ** schedules.value(parameters.alpha, broadcast.round)), own


def _gradient_at_start(loglikelihood_fn: Any, broadcast: Broadcast, client: Client) -> ArrayTree:
    return client_gradient(loglikelihood_fn, broadcast.position, client)


def _scaffold(
    shares: PerClient | None,
    loglikelihood_fn: Any,
    broadcast: Broadcast,
    own: ArrayTree,
    client: Client,
) -> tuple[Correction, ArrayTree]:
    del loglikelihood_fn
    slope = trees.scale(_share(shares, client), broadcast.summed)
    return Correction(slope=slope, anchor=broadcast.position), own


def _check(
    surrogates: Gaussian, shares: PerClient | None, position: ArrayTree, data: FederatedData
) -> None:
    surrogates.check_clients(position, data.num_clients)
    _check_shares(shares, position, data)


def _check_shares(shares: PerClient | None, position: ArrayTree, data: FederatedData) -> None:
    del position
    if shares is not None and shares.values.shape != (data.num_clients,):
        raise ValueError(
            f"shares must have shape ({data.num_clients},), one a client, got "
            f"{shares.values.shape}."
        )
