"""Gradient estimates relative to a point where the gradient is known: fixed, or refreshed."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._checks import expect
from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Cached,
    Client,
    Federation,
    GradientEstimator,
    LogDensity,
    Reference,
)
from fedmcmc.gradients._estimators import client_gradient
from fedmcmc.gradients._zero_sum import Correction, ZeroSum
from fedmcmc.pytrees import trees, where_any

__all__ = ["fixed_point", "svrg"]


@register_dataclass
@dataclass(frozen=True, eq=False)
class FixedPoint(ZeroSum):
    """Differences to the gradient at a fixed point; see `fixed_point`."""

    estimator: GradientEstimator
    centre: ArrayTree
    centred: bool = field(metadata={"static": True})

    remembers = True

    def first_memory(
        self, loglikelihood_fn: LogDensity, position: ArrayTree, client: Client
    ) -> ArrayTree:
        """Return the client's gradient at the center, which stays, where it is added."""
        return () if self.centred else client_gradient(loglikelihood_fn, self.centre, client)

    def correction(
        self, loglikelihood_fn: LogDensity, broadcast: Broadcast, memory: ArrayTree, client: Client
    ) -> tuple[Correction, ArrayTree]:
        """Return the gradient at the center in place of its estimate."""
        return Correction(slope=memory, anchor=self.centre), memory

    def check(self, position: ArrayTree, federation: Federation) -> None:
        """Check that the center is a position."""
        super().check(position, federation)
        leaves = jax.tree.leaves(self.centre)
        shapes, expected = trees.shapes_of(self.centre), trees.shapes_of(position)
        same = trees.same_structure(shapes, expected) and all(
            a.shape == b.shape
            for a, b in zip(jax.tree.leaves(shapes), jax.tree.leaves(expected), strict=True)
        )
        if not same:
            raise ValueError(
                f"centre must be shaped as the position, "
                f"{jax.tree.map(lambda x: x.shape, expected)}, got "
                f"{jax.tree.map(lambda x: x.shape, shapes)}."
            )
        if not all(isinstance(x, jax.core.Tracer) or np.isfinite(x).all() for x in leaves):
            raise ValueError("centre holds NaN or infinite numbers.")


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
        Leave the last term out. Each client is then off by its own gradient at the center, all
        together by the sum of them, which whoever sums the clients must add; it is zero where the
        center maximizes the likelihood.

    References
    ----------
    Baker et al. (2019), Control variates for SGMCMC, eq. 5; centred, Vono et al. (2022),
    Algorithm S1.

    Examples
    --------
    >>> import fedmcmc
    >>> estimator = fixed_point(fedmcmc.minibatch(10), jnp.zeros(3))
    """
    expect(estimator, GradientEstimator, "estimator")
    if estimator.reference is not None:
        raise ValueError("fixed_point goes around an estimator that needs no reference of its own.")
    return FixedPoint(estimator, jax.tree.map(trees.as_float, centre), bool(centred))


@register_dataclass
@dataclass(frozen=True, eq=False)
class Snapshot(Reference):
    """The position at the last round that is a multiple of `period`."""

    period: int = field(metadata={"static": True})

    def round_of(self, round_: Array) -> Array:
        """Return the round of the snapshot that is used in `round_`."""
        return round_ - round_ % self.period

    def update(self, round_: Array, position: ArrayTree, previous: ArrayTree) -> ArrayTree:
        """Return the position in a round of refresh, else the snapshot before."""
        if previous is None:
            return position
        return trees.select(round_ % self.period == 0, position, previous)

    def missing(self, broadcast: Broadcast, state: "tuple[_Memory, Any]") -> Array:
        """Return whether the client was not sent the snapshot, which is not the position itself."""
        latest = self.round_of(broadcast.round)
        return (state[0].sent != latest) & (broadcast.round != latest)


class _Known(NamedTuple):
    round: Array  # [] int32, of the snapshot, -1 for none
    gradient: ArrayTree


class _Memory(NamedTuple):
    sent: Array  # [] int32, the round of the last snapshot that the client was sent, -1 for none
    known: Cached  # of _Known


@register_dataclass
@dataclass(frozen=True, eq=False)
class Svrg(ZeroSum):
    """Differences to the gradient at a snapshot; see `svrg`."""

    estimator: GradientEstimator
    refresh_every: int = field(metadata={"static": True})

    remembers = True

    @property
    def reference(self) -> Snapshot:
        """The snapshot."""
        return Snapshot(self.refresh_every)

    def first_memory(
        self, loglikelihood_fn: LogDensity, position: ArrayTree, client: Client
    ) -> _Memory:
        """Know no snapshot."""
        never = jnp.full((), -1, jnp.int32)
        return _Memory(never, Cached(_Known(never, trees.zeros_like(position))))

    def correction(
        self, loglikelihood_fn: LogDensity, broadcast: Broadcast, memory: _Memory, client: Client
    ) -> tuple[Correction, _Memory]:
        """Return the gradient at the snapshot, computed where it is new, for its estimate."""
        known = memory.known.value
        latest = self.reference.round_of(broadcast.round)
        gradient = where_any(
            known.round != latest,
            client_gradient,
            known.gradient,
            loglikelihood_fn,
            broadcast.extra,
            client,
        )
        memory = _Memory(latest, Cached(_Known(latest, gradient)))
        return Correction(slope=gradient, anchor=broadcast.extra), memory


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
    expect(estimator, GradientEstimator, "estimator")
    if estimator.reference is not None:
        raise ValueError("svrg goes around an estimator that needs no reference of its own.")
    return Svrg(estimator, int(refresh_every))
