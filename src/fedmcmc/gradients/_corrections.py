"""Corrections that pull each client towards the other clients and sum to zero over all of them.

Both are ``estimate + share * grad log q - grad log q_client`` (`ZeroSum`). The ``q_client`` are
Gaussians that are known from the start, or log-linear densities that are renewed every round.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._checks import expect
from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    Federation,
    GradientEstimator,
    LogDensity,
    Number,
    PerClient,
)
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients._estimators import client_gradient
from fedmcmc.gradients._zero_sum import Correction, ZeroSum
from fedmcmc.pytrees import schedules, trees

__all__ = ["as_surrogates", "conducive", "scaffold"]


class _ByShares(ZeroSum):
    """A correction whose total is split by shares, those of rows where none are given."""

    shares: PerClient | None

    def _share(self, client: Client) -> Array:
        return client.share if self.shares is None else self.shares.of(client)

    def check(self, position: ArrayTree, federation: Federation) -> None:
        super().check(position, federation)
        if self.shares is not None and self.shares.values.shape != (federation.num_clients,):
            raise ValueError(
                f"shares must have shape ({federation.num_clients},), one per client, got "
                f"{self.shares.values.shape}."
            )


def _as_shares(shares: Any) -> PerClient | None:
    return None if shares is None else PerClient(jnp.asarray(shares, jnp.result_type(float)))


@register_dataclass
@dataclass(frozen=True, eq=False)
class Conducive(_ByShares):
    """Corrections from surrogates of the clients' likelihoods; see `conducive`."""

    estimator: GradientEstimator
    surrogates: PerClient  # of Gaussian
    product: Gaussian
    alpha: Any
    shares: PerClient | None

    def correction(
        self, loglikelihood_fn: LogDensity, broadcast: Broadcast, memory: ArrayTree, client: Client
    ) -> tuple[Correction, ArrayTree]:
        """Return one Gaussian: ``alpha * (share * log q - log q_client)``."""
        share = self._share(client)
        log_q = self.product**share / self.surrogates.of(client)
        return Correction(log_q=log_q ** schedules.value(self.alpha, broadcast.round)), memory

    def check(self, position: ArrayTree, federation: Federation) -> None:
        """Check that surrogates and shares are one per client."""
        self.surrogates.values.check_clients(position, federation.num_clients)
        super().check(position, federation)


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
        One `Gaussian` per client, leaves ``[num_clients, ...]``: the client's likelihood (without
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
    expect(estimator, GradientEstimator, "estimator")
    surrogates = as_surrogates(surrogates)
    return Conducive(
        estimator,
        PerClient(surrogates),
        surrogates.sum(),
        schedules.number(alpha, "alpha"),
        _as_shares(shares),
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


@register_dataclass
@dataclass(frozen=True, eq=False)
class Scaffold(_ByShares):
    """Corrections from all clients' gradients at the round's start; see `scaffold`."""

    estimator: GradientEstimator
    shares: PerClient | None

    @property
    def needs_sum(self) -> bool:
        """The clients' gradients."""
        return True

    def summed(
        self, loglikelihood_fn: LogDensity, broadcast: Broadcast, client: Client
    ) -> ArrayTree:
        """Return the client's gradient at the broadcast position."""
        return client_gradient(loglikelihood_fn, broadcast.position, client)

    def correction(
        self, loglikelihood_fn: LogDensity, broadcast: Broadcast, memory: ArrayTree, client: Client
    ) -> tuple[Correction, ArrayTree]:
        """Return the client's share of the sum, with its own gradient subtracted."""
        slope = trees.scale(self._share(client), broadcast.summed)
        return Correction(slope=slope, anchor=broadcast.position), memory


def scaffold(estimator: GradientEstimator, *, shares: Array | None = None) -> GradientEstimator:
    """Estimate gradients relative to those at the position that the round starts from.

    ``H(theta) - H(theta_0) + share * sum_c grad log p(rows_c | theta_0)``, with the same draws at
    both places. Before the clients move, each sends its gradient at ``theta_0``, by a full pass
    over its rows; the kernel's round then has one more phase. At ``theta_0`` all clients have the
    same gradient, whatever their data.

    Parameters
    ----------
    estimator
        Gives ``H``.
    shares
        ``[num_clients]``, summing to one; by default each client's share of rows. In a weighted
        average of clients these are the weights.

    Raises
    ------
    ValueError
        If `estimator` is itself relative to the position that the round starts from.

    References
    ----------
    Karimireddy et al. (2020), SCAFFOLD, option I; Liang et al. (2024), Algorithm B.2.

    Examples
    --------
    >>> import fedmcmc
    >>> estimator = scaffold(fedmcmc.minibatch(10))
    """
    expect(estimator, GradientEstimator, "estimator")
    if estimator.needs_sum:
        raise ValueError(
            "This correction goes around an estimator that is not itself relative to a snapshot or "
            "to the broadcast position."
        )
    return Scaffold(estimator, _as_shares(shares))
