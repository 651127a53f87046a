"""Gaussian sites: the state of a client, and the sites of the first round."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import ClientDensity, as_gaussian
from fedmcmc.kernels._shared import report
from fedmcmc.pytrees import trees
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Client,
    Posterior,
    SetupPhase,
    StepInfo,
    compiled,
    register_dataclass,
)


class Site(NamedTuple):
    """State of a client with a site.

    Attributes
    ----------
    site
        The client's factor of the approximation.
    optimizer
        State of its optimizer.
    locals
        Latents of its groups, or ``()``.
    next_round
        ``[]`` int32, first round whose step is not yet in `site`; ``()`` if the optimizer has no
        state.
    lost
        ``[]`` bool, true if the client's last fit was not proper.
    """

    site: Gaussian
    optimizer: ArrayTree
    locals: ArrayTree
    next_round: ArrayTree
    lost: Array


def first_site(site: Gaussian, optimizer: ArrayTree, locals_: ArrayTree, round_: Array) -> Site:
    """Return a client's state before its first round."""
    state = () if optimizer == () else optimizer.init(site)
    next_round = jnp.asarray(round_, jnp.int32) if jax.tree.leaves(state) else ()
    return Site(site, state, locals_, next_round, jnp.zeros((), bool))


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class FirstSites(SetupPhase):
    """Phase that sums the clients' expansions at the start, their first sites."""

    posterior: Posterior
    structure: str = field(metadata={"static": True})

    def site(self, position: ArrayTree, client: Client) -> Gaussian:
        """Return the second-order expansion of the client's log likelihood at `position`."""
        return _expansion(self.posterior, position, client, dense=self.structure == "dense")

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        message = self.site(jax.tree.map(trees.as_float, broadcast.position), client)
        return message, client_state, report(message, jnp.zeros(()))

    def message_like(self, like: Broadcast) -> ArrayTree:
        position = jax.eval_shape(lambda x: jax.tree.map(trees.as_float, x), like.position)
        return jax.eval_shape(lambda x: Gaussian.uniform(x, self.structure), position)


@compiled(static_argnames=("dense",))  # compiled, because a run calls it before its first round
def _expansion(
    posterior: Posterior, position: ArrayTree, client: Client, *, dense: bool
) -> Gaussian:
    flat, unravel = ravel_pytree(position)
    gradient, precision = ClientDensity(posterior, None, unravel).expand(client, flat, dense)
    return as_gaussian(gradient, precision, flat, unravel)
