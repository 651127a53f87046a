"""Relay with conducive gradients whose surrogates are refitted during the run.

The correction of El Mekkaoui et al. (2021), eq. 5, sums to zero over the clients if it uses the
product of their present surrogates. So a client uses its new surrogate from the next round on, when
the broadcast product contains it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._checks import positive_integer
from fedmcmc.gaussian import Gaussian, symmetric
from fedmcmc.gradients import ClientDensity, as_gaussian, as_surrogates, zero_sum_correction
from fedmcmc.kernels._relay import ONE_CLIENT_PER_ROUND, Relay, relay_settings
from fedmcmc.kernels._shared import ClientDraws
from fedmcmc.pytrees import schedules, trees, where_any
from fedmcmc.types import (
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

NEVER = 2**31 - 1


class _RefreshedRelayState(NamedTuple):
    surrogate: Gaussian
    refresh: Array  # [] int32, round of its last refresh
    estimator: ArrayTree


class _RefreshedRelayMessage(NamedTuple):
    shift: ArrayTree  # displacement of the chain
    change: Gaussian  # change of the surrogate's natural parameters


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class RefreshedRelay(Relay):
    """Relay whose clients refit their surrogates; see `refreshed_relay`."""

    surrogates: ArrayTree = None  # PerClient of Gaussian, the initial surrogates
    alpha: Number = 1.0
    refresh_until: ArrayTree = NEVER  # [] int32
    refresh_every: int = field(default=1, metadata={"static": True})

    # A late change of a surrogate would be missing from the product of all surrogates.
    traits = replace(Relay.traits, accepts_late_messages=False, refits_surrogates=True)
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

    def client_init(self, broadcast: Broadcast, client: Client) -> _RefreshedRelayState:
        surrogate: Gaussian = self.surrogates.of(client)
        # Round zero counts as a refresh, with the surrogates of the user.
        refresh = jnp.zeros((), jnp.int32)
        return _RefreshedRelayState(surrogate, refresh, super().client_init(broadcast, client))

    def message_like(self, like: Broadcast) -> ArrayTree:
        return _RefreshedRelayMessage(super().message_like(like), trees.shapes_of(like.extra))

    def step(
        self,
        draws: ClientDraws,
        broadcast: Broadcast,
        client_state: _RefreshedRelayState,
        client: Client,
    ) -> tuple[_RefreshedRelayMessage, _RefreshedRelayState, StepInfo]:
        product: Gaussian = broadcast.extra
        surrogate = client_state.surrogate
        alpha = schedules.value(self.alpha, broadcast.round)

        def correct(visited: Client) -> Gaussian:
            return zero_sum_correction(product, surrogate, 1 / visited.weight, alpha)

        shift, estimator_state, info = self.visit(
            draws, broadcast, client_state.estimator, client, correct
        )
        latest = broadcast.round - broadcast.round % self.refresh_every
        due = (latest > client_state.refresh) & (broadcast.round < self.refresh_until)
        # This round uses the old surrogate, which is still in the product of all clients.
        change = where_any(
            due,
            _change,
            trees.zeros_like(surrogate),
            self.posterior,
            broadcast.position,
            surrogate,
            client,
        )
        refresh = jnp.where(due, latest, client_state.refresh)
        info = info._replace(
            bits=info.bits + jnp.asarray(trees.num_bits(change), jnp.int32),
            bits_down=info.bits_down + jnp.asarray(trees.num_bits(product), jnp.int32),
        )
        return (
            _RefreshedRelayMessage(shift, change),
            _RefreshedRelayState(surrogate, refresh, estimator_state),
            info,
        )

    def commit(
        self,
        message: _RefreshedRelayMessage,
        broadcast: Broadcast,
        client_state: _RefreshedRelayState,
    ) -> _RefreshedRelayState:
        # The server also makes the sum symmetric, so its product matches the clients' surrogates.
        return client_state._replace(surrogate=client_state.surrogate * symmetric(message.change))

    def aggregate(
        self,
        rng_key: ArrayTree,
        broadcast: Broadcast,
        server_state: ArrayTree,
        total: _RefreshedRelayMessage,
    ) -> tuple[Broadcast, ArrayTree, ArrayTree]:
        moved, server, info = super().aggregate(rng_key, broadcast, server_state, total.shift)
        product = broadcast.extra * symmetric(total.change)
        return moved._replace(extra=product), server, info


def _change(
    posterior: Posterior, position: ArrayTree, surrogate: Gaussian, client: Client
) -> Gaussian:
    """Return the client's expansion at `position` divided by its surrogate."""
    flat, unravel = ravel_pytree(position)
    target = ClientDensity(posterior, None, unravel)
    gradient, precision = target.expand(client, flat, surrogate.structure == "dense")
    change = as_gaussian(gradient, precision, flat, unravel) / surrogate
    # If the log likelihood has no curvature, the surrogate does not change.
    return trees.select(trees.all_finite(change), change, trees.zeros_like(change))


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
        The same as in `relay`.
    estimator
        Gradient estimator for a client's log likelihood without correction, such as `minibatch`.
    surrogates
        Initial surrogates, dense or diagonal, as in `conducive`.
    refresh_every, refresh_until
        Rounds of a refit: a client refits in its first visit after each round that is a multiple of
        `refresh_every`, before round `refresh_until` (by default always); see `fedmcmc.fsgld`.
    alpha
        Strength of the corrections, a number or a schedule of the round.

    Returns
    -------
    FederatedKernel
        ``state.clients.surrogate`` holds the present surrogates, ``state.broadcast.extra`` their
        product.

    Raises
    ------
    ValueError
        If a number is out of range, if surrogates are scaled identities, or if `estimator`
        broadcasts a reference; from `init` if the data does not fit.
    """
    surrogates = jax.tree.map(jnp.asarray, as_surrogates(surrogates))  # indexed outside of jit
    if surrogates.structure == "scaled_identity":
        raise ValueError(
            "Surrogates are refitted by expansions, which are dense or diagonal, got scaled "
            "identities: use initial surrogates with one of these structures."
        )
    settings = relay_settings(
        posterior, estimator, participation, step_size, num_local_steps, temperature, metric
    )
    if estimator.reference is not None:
        raise ValueError(
            "refreshed_relay broadcasts the product of the surrogates, so it supports no estimator "
            "that broadcasts a reference (svrg)."
        )
    end = NEVER if refresh_until is None else refresh_until
    if not isinstance(end, jax.core.Tracer) and int(end) < 0:
        raise ValueError(f"refresh_until must be a round, at least 0, got {refresh_until}.")
    kind: Any = RefreshedRelay  # it starts with the fields of `Relay`
    return as_functions(
        kind(
            *settings,
            surrogates=PerClient(surrogates),
            alpha=schedules.number(alpha, "alpha"),
            refresh_until=jnp.asarray(end, jnp.int32),
            refresh_every=positive_integer(refresh_every, "refresh_every"),
        )
    )
