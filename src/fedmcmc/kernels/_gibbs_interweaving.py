"""Interweaving: parameters of the population are proposed with all latents going along.

A latent then stays as far from the population's mean, in units of its spread, as it was (Yu and
Meng 2011). All clients are asked for the log likelihood of their rows there; latents that are to go
along do so in the round's last exchange, so that no client may be lost in between.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._types import ArrayTree, Broadcast, Client, Exact, StepInfo
from fedmcmc.hierarchy import Locals, groups_of
from fedmcmc.kernels._gibbs_judging import Judged, Judgement
from fedmcmc.kernels._gibbs_rows import RowMoves, judge, propose
from fedmcmc.kernels._questions import BELOW, IMPOSSIBLE
from fedmcmc.kernels._shared import report
from fedmcmc.pytrees import trees


@register_dataclass
@dataclass(frozen=True, eq=False)
class Rescaling(Judgement):
    """Asks for log likelihoods where the population's parameters take the latents along."""

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: Locals, client: Client
    ) -> tuple[Exact, ArrayTree, StepInfo]:
        kernel, position = self.kernel, broadcast.position
        groups, latents = groups_of(kernel.local, client), client_state.latents
        other = kernel.with_others(position, broadcast.extra.rescaled)
        there = groups.as_flat(transported(kernel, latents, position, other))
        value = groups.rows_difference(other, position, there, groups.as_flat(latents))
        dtype = jnp.result_type(float)
        value = jnp.where(jnp.isfinite(value), value, IMPOSSIBLE).astype(dtype)
        message = Judged(value, jnp.zeros(0, dtype), jnp.ones((), dtype))
        down = trees.num_bits(position) + trees.num_bits(broadcast.extra.rescaled)
        info = report(message, jnp.zeros(()), bits_down=jnp.asarray(down, jnp.int32))
        return Exact(message), client_state, info

    def message_like(self, like: Broadcast) -> Exact:
        one = jax.ShapeDtypeStruct((), jnp.result_type(float))
        return Exact(Judged(one, jax.ShapeDtypeStruct((0,), one.dtype), one))

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: Any, total: Exact
    ) -> tuple[Broadcast, Any, ArrayTree]:
        kernel, position, said = self.kernel, broadcast.position, total.value
        uniform = self.prepare_server(rng_key, broadcast) if trees.is_key(rng_key) else rng_key
        other = kernel.with_others(position, broadcast.extra.rescaled)
        # In units of their spread latents have one density wherever the population's parameters
        # are: these are known by their prior and the rows alone.
        here, there = (kernel.posterior.logprior_fn(at) for at in (position, other))
        possible = (said.difference > BELOW) & jnp.isfinite(there)
        accepted, rescales = judge(
            server_state.rescales,
            jnp.where(possible, said.difference + there - here, -jnp.inf),
            jnp.zeros_like(broadcast.extra.rescaled),
            said.one == server_state.num_clients,
            uniform,
            broadcast.round < kernel.num_adapt,
        )
        moved = broadcast._replace(
            position=trees.select(accepted, other, position),
            extra=broadcast.extra._replace(came_from=position),
        )
        return moved, server_state._replace(rescales=rescales), ()


def transported(
    kernel: Any, latents: ArrayTree, position: ArrayTree, other: ArrayTree
) -> ArrayTree:
    """Return latents, leaves ``[num, *event]``, that went along to another position."""
    transport_fn = kernel.population.transport_fn
    assert transport_fn is not None
    return jax.vmap(lambda latent: transport_fn(latent, position, other))(latents)


def gone_along(kernel: Any, latents: ArrayTree, broadcast: Broadcast) -> ArrayTree:
    """Return latents that went along if the population's parameters were rescaled."""
    old, new = broadcast.extra.came_from, broadcast.position
    went = jnp.any(trees.ravel(old) != trees.ravel(new))
    return trees.select(went, transported(kernel, latents, old, new), latents)


def proposed(
    kernel: Any, rng_key: Array, position: ArrayTree, rescales: RowMoves, extra: Any
) -> tuple[RowMoves, Any]:
    """Return them with another proposal of the population's parameters: a random walk."""
    place = trees.ravel(position)[kernel.other_places(position)].astype(extra.rescaled.dtype)
    normal_key, step_key = jax.random.split(rng_key)
    normals = jax.random.normal(normal_key, place.shape, place.dtype)
    uniform = jax.random.uniform(step_key, (), place.dtype)
    none, always = jnp.zeros_like(place), jnp.array(True)
    moves = propose(rescales, none, always, normals, uniform)
    proposal = place + moves.factor @ moves.shift
    return moves, extra._replace(rescaled=proposal, came_from=position)
