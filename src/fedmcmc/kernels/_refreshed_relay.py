"""A relay with conducive gradients whose surrogates are refitted during the run.

The correction of El Mekkaoui et al. (2021), eq. 5, sums to zero over the clients whatever their
surrogates are, as long as its product is that of the surrogates in use. So a client may replace its
own, if it uses the new one no earlier than everyone's product holds it: from the next round on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._checks import positive_integer
from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    Disclosure,
    FederatedKernel,
    Federation,
    GradientEstimator,
    Number,
    Participation,
    PerClient,
    Posterior,
    StepInfo,
    as_functions,
    register_dataclass,
)
from fedmcmc.gaussian import Gaussian, symmetric
from fedmcmc.gradients import Target, as_gaussian, as_surrogates, zero_sum_correction
from fedmcmc.kernels._relay import ONE_CLIENT_PER_ROUND, Relay, relay_settings
from fedmcmc.kernels._shared import LocalDraws
from fedmcmc.pytrees import schedules, trees, where_any

NEVER = 2**31 - 1


class _Site(NamedTuple):
    """What a client keeps."""

    surrogate: Gaussian
    refresh: Array  # [] int32, the round of the last refresh that it has answered
    estimator: ArrayTree


class _Message(NamedTuple):
    """What a client sends."""

    shift: ArrayTree  # how far it moved the chain
    change: Gaussian  # of its surrogate's natural parameters


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class RefreshedRelay(Relay):
    """Clients move the one chain in turn and refit their surrogates; see `refreshed_relay`."""

    surrogates: Any = None  # PerClient of Gaussian, the first ones
    alpha: Any = 1.0
    refresh_until: Any = NEVER  # [] int32
    refresh_every: int = field(default=1, metadata={"static": True})

    # A late change of a surrogate would be missing from the product of all surrogates.
    traits = replace(Relay.traits, accepts_late_messages=False)
    disclosure = Disclosure(
        "how far the site moved the chain, in rounds in which the chain is at this site, and in "
        "some of these rounds the gradient and the curvature of the log likelihood. A site that "
        "has the chain just before and just after can compute how far this site moved it",
        reason=ONE_CLIENT_PER_ROUND,
    )

    @property
    def name(self) -> str:
        return "fsgld"

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, ArrayTree]:
        broadcast, server = super().server_init(rng_key, position, federation, totals)
        surrogates = self.surrogates.values
        surrogates.check_clients(broadcast.position, federation.num_clients)
        return broadcast._replace(extra=surrogates.sum()), server

    def client_init(self, broadcast: Broadcast, client: Client) -> _Site:
        own: Gaussian = self.surrogates.of(client)
        # Round zero counts as a refresh: the first surrogates are the user's.
        first = jnp.zeros((), jnp.int32)
        return _Site(own, first, super().client_init(broadcast, client))

    def message_like(self, like: Broadcast) -> ArrayTree:
        return _Message(super().message_like(like), trees.shapes_of(like.extra))

    def step(
        self, draws: LocalDraws, broadcast: Broadcast, client_state: _Site, client: Client
    ) -> tuple[_Message, _Site, StepInfo]:
        product: Gaussian = broadcast.extra
        own = client_state.surrogate
        alpha = schedules.value(self.alpha, broadcast.round)

        def correct(visited: Client) -> Gaussian:
            return zero_sum_correction(product, own, 1 / visited.weight, alpha)

        shift, estimator_state, info = self.visit(
            draws, broadcast, client_state.estimator, client, correct
        )
        latest = broadcast.round - broadcast.round % self.refresh_every
        due = (latest > client_state.refresh) & (broadcast.round < self.refresh_until)
        # The new surrogate is not used here: what the others have in their product is the old one.
        change = where_any(
            due,
            _change,
            trees.zeros_like(own),
            self.posterior,
            broadcast.position,
            own,
            client,
        )
        refresh = jnp.where(due, latest, client_state.refresh)
        info = info._replace(
            bits=info.bits + jnp.asarray(trees.num_bits(change), jnp.int32),
            bits_down=info.bits_down + jnp.asarray(trees.num_bits(product), jnp.int32),
        )
        return _Message(shift, change), _Site(own, refresh, estimator_state), info

    def commit(self, message: _Message, broadcast: Broadcast, client_state: _Site) -> _Site:
        # What the server reads, so that its product stays that of all surrogates.
        return client_state._replace(surrogate=client_state.surrogate * symmetric(message.change))

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: ArrayTree, total: _Message
    ) -> tuple[Broadcast, ArrayTree, ArrayTree]:
        moved, server, info = super().aggregate(rng_key, broadcast, server_state, total.shift)
        product = broadcast.extra * symmetric(total.change)
        return moved._replace(extra=product), server, info


def _change(posterior: Posterior, position: ArrayTree, own: Gaussian, client: Client) -> Gaussian:
    """Return by what a client's surrogate is multiplied to be its expansion at `position`."""
    flat, unravel = ravel_pytree(position)
    target = Target(posterior, None, unravel)
    gradient, precision = target.expand(client, flat, own.structure == "dense")
    change = as_gaussian(gradient, precision, flat, unravel) / own
    # Where the log likelihood has no curvature the old one stays.
    finite = trees.all_finite(change)
    kept: Gaussian = jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0), change)
    return kept


def refreshed_relay(
    posterior: Posterior,
    estimator: GradientEstimator,
    surrogates: Gaussian,
    *,
    participation: Participation,
    refresh_every: int,
    refresh_until: int | Array | None = None,
    alpha: Number = 1.0,
    step_size: Number,
    num_local_steps: int | Sequence[int] = 1,
    temperature: Number = 1.0,
    metric: ArrayTree | None = None,
) -> FederatedKernel:
    """Build a `relay` with conducive gradients whose surrogates are refitted during the run.

    Parameters
    ----------
    posterior, participation, step_size, num_local_steps, temperature, metric
        As in `relay`.
    estimator
        Of the gradient of a client's log likelihood, without the correction, such as `minibatch`.
    surrogates
        The first ones, dense or diagonal, as of `conducive`.
    refresh_every, refresh_until
        A client refits in its first visit after each round that is a multiple of `refresh_every`,
        if that visit is before round `refresh_until` (by default always): see `fedmcmc.fsgld`.
    alpha
        Strength of the corrections, a number or schedule of the round.

    Returns
    -------
    FederatedKernel
        Its ``state.clients.surrogate`` are the surrogates in use, ``state.broadcast.extra`` is
        their product.

    Raises
    ------
    ValueError
        On numbers out of range, if surrogates are scaled identities, if `estimator` broadcasts a
        reference of its own, and from `init` where the data does not fit.
    """
    surrogates = jax.tree.map(jnp.asarray, as_surrogates(surrogates))  # indexed outside of jit
    if surrogates.structure == "scaled_identity":
        raise ValueError(
            "Surrogates are refitted by expansions, which are dense or diagonal, got scaled "
            "identities: give the first ones in one of these structures."
        )
    settings = relay_settings(
        posterior, estimator, participation, step_size, num_local_steps, temperature, metric
    )
    if estimator.reference is not None:
        raise ValueError(
            "refreshed_relay broadcasts the product of the surrogates, and takes no estimator with "
            "a reference of its own (svrg)."
        )
    last = NEVER if refresh_until is None else refresh_until
    if not isinstance(last, jax.core.Tracer) and int(last) < 0:
        raise ValueError(f"refresh_until must be a round, at least 0, got {refresh_until}.")
    kind: Any = RefreshedRelay  # whose first fields are those of a relay
    return as_functions(
        kind(
            *settings,
            surrogates=PerClient(surrogates),
            alpha=schedules.number(alpha, "alpha"),
            refresh_until=jnp.asarray(last, jnp.int32),
            refresh_every=positive_integer(refresh_every, "refresh_every"),
        )
    )
