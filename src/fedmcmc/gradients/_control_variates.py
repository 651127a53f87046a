"""Gradient estimates relative to a point where the gradient is known: fixed, or refreshed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial

from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Cached,
    Client,
    GradientEstimator,
    Reference,
    Static,
)
from fedmcmc.data import FederatedData
from fedmcmc.gradients._estimators import client_gradient
from fedmcmc.gradients._zero_sum import Correction, zero_sum
from fedmcmc.pytrees import trees, where_any

__all__ = ["fixed_point", "svrg"]


def fixed_point(
    estimator: GradientEstimator, centre: ArrayTree, *, centred: bool = False
) -> GradientEstimator:
    """Estimate the difference to the gradient at `centre`, with the same rows at both.

    ``H(theta) - H(centre) + grad log p(rows | centre)``, the last term by a full pass over the
    client's rows before the first round.

    Parameters
    ----------
    estimator
        Gives ``H``.
    centre
        Shaped as the position; best near the mode, where estimates are needed most.
    centred
        Leave the last term out. Each client is then off by its own gradient at the centre, all
        together by the sum of them, which whoever sums the clients must add; it is zero where the
        centre maximises the likelihood.

    References
    ----------
    Baker et al. (2019), Control variates for SGMCMC, eq. 5; centred, Vono et al. (2022),
    Algorithm S1.

    Examples
    --------
    >>> import fedmcmc
    >>> estimator = fixed_point(fedmcmc.minibatch(10), jnp.zeros(3))
    """
    if estimator.reference is not None:
        raise ValueError("fixed_point goes around an estimator that needs no reference of its own.")
    centre = jax.tree.map(trees.as_float, centre)
    return zero_sum(
        estimator,
        Partial(_correct_fixed, centre),
        init=Partial(_init_fixed, centre, Static(bool(centred))),
        check=Partial(_check_fixed, centre),
    )


def svrg(estimator: GradientEstimator, refresh_every: int) -> GradientEstimator:
    """Estimate the difference to the gradient at a snapshot, which is renewed every so often.

    ``H(theta) - H(zeta) + grad log p(rows | zeta)`` with ``zeta`` the position at the last round
    that is a multiple of `refresh_every`. The last term is a full pass over the client's rows, in
    the first round after a refresh in which the client takes part, and in no other. (In a
    simulation that computes everyone, as of `bernoulli`, all clients do it in the round of
    refresh: the numbers are the same.)

    Parameters
    ----------
    estimator
        Gives ``H``, with the same rows at both places.
    refresh_every
        Rounds between snapshots.

    Raises
    ------
    ValueError
        If `refresh_every` is not a positive integer.

    References
    ----------
    Johnson and Zhang (2013); Dubey et al. (2016); Algorithm 2 of Vono et al. (2022), where
    `refresh_every` is ``l``.

    Examples
    --------
    >>> import fedmcmc
    >>> estimator = svrg(fedmcmc.minibatch(10), refresh_every=100)
    """
    if int(refresh_every) != refresh_every or refresh_every < 1:
        raise ValueError(f"refresh_every must be a positive integer, got {refresh_every!r}.")
    if estimator.reference is not None:
        raise ValueError("svrg goes around an estimator that needs no reference of its own.")
    period = Static(int(refresh_every))
    return zero_sum(
        estimator,
        Partial(_correct_svrg, period),
        init=Partial(_init_svrg),
        reference=Reference(Partial(_update, period), Partial(_missing, period)),
    )


# A fixed point


def _init_fixed(
    centre: ArrayTree,
    centred: Static[bool],
    loglikelihood_fn: Any,
    position: ArrayTree,
    client: Client,
) -> ArrayTree:
    del position
    return () if centred.value else client_gradient(loglikelihood_fn, centre, client)


def _correct_fixed(
    centre: ArrayTree, loglikelihood_fn: Any, broadcast: Broadcast, own: ArrayTree, client: Client
) -> tuple[Correction, ArrayTree]:
    del loglikelihood_fn, broadcast, client
    return Correction(slope=own, anchor=centre), own


def _check_fixed(centre: ArrayTree, position: ArrayTree, data: FederatedData) -> None:
    del data
    leaves = jax.tree.leaves(centre)
    given, expected = trees.shapes_of(centre), trees.shapes_of(position)
    same = trees.same_structure(given, expected) and all(
        a.shape == b.shape
        for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True)
    )
    if not same:
        raise ValueError(
            f"centre must be shaped as the position, {jax.tree.map(lambda x: x.shape, expected)}, "
            f"got {jax.tree.map(lambda x: x.shape, given)}."
        )
    if not all(isinstance(x, jax.core.Tracer) or np.isfinite(x).all() for x in leaves):
        raise ValueError("centre holds NaN or infinite numbers.")


# A snapshot


class _Known(NamedTuple):
    round: Array  # [] int32, of the snapshot, -1 for none
    gradient: ArrayTree


class _Snapshot(NamedTuple):
    sent: Array  # [] int32, the round of the last snapshot that the client was sent, -1 for none
    known: Cached  # of _Known


def _init_svrg(loglikelihood_fn: Any, position: ArrayTree, client: Client) -> _Snapshot:
    del loglikelihood_fn, client
    never = jnp.full((), -1, jnp.int32)
    return _Snapshot(never, Cached(_Known(never, trees.zeros_like(position))))


def _snapshot_round(period: Static[int], round_: Array) -> Array:
    return round_ - round_ % period.value


def _update(
    period: Static[int], round_: Array, position: ArrayTree, previous: ArrayTree
) -> ArrayTree:
    if previous is None:
        return position
    return trees.select(round_ % period.value == 0, position, previous)


def _missing(period: Static[int], broadcast: Broadcast, state: tuple[_Snapshot, Any]) -> Array:
    # In a round of refresh the snapshot is the position itself.
    latest = _snapshot_round(period, broadcast.round)
    return (state[0].sent != latest) & (broadcast.round != latest)


def _correct_svrg(
    period: Static[int],
    loglikelihood_fn: Any,
    broadcast: Broadcast,
    own: _Snapshot,
    client: Client,
) -> tuple[Correction, _Snapshot]:
    known = own.known.value
    latest = _snapshot_round(period, broadcast.round)
    gradient = where_any(
        known.round != latest,
        client_gradient,
        known.gradient,
        loglikelihood_fn,
        broadcast.extra,
        client,
    )
    snapshot = _Snapshot(latest, Cached(_Known(latest, gradient)))
    return Correction(slope=gradient, anchor=broadcast.extra), snapshot
