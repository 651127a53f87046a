"""The exchange of a Gibbs sampler in which clients say how likely their rows are at a proposal."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    Phase,
    StepInfo,
    Uncompressed,
    register_dataclass,
)
from fedmcmc.hierarchy import Locals, groups_of
from fedmcmc.kernels._gibbs_rows import judge
from fedmcmc.kernels._questions import (
    IMPOSSIBLE,
    LOG_ZERO_THRESHOLD,
    below_range,
    impossible_in_sum,
)
from fedmcmc.kernels._shared import report
from fedmcmc.pytrees import in_single_precision, trees


class Judged(NamedTuple):
    """A client's answer: a difference of log likelihoods, its gradient, and a one to count."""

    difference: Any
    gradient: Any
    one: Any

    def to_range(self, limit: float) -> "Judged":
        """Return the message for a secure sum of numbers up to `limit`; see `Ranged`."""
        outside = jnp.any(jnp.abs(self.gradient) > trees.cast(limit, self.gradient))
        impossible = below_range(self.difference, limit) | outside
        lowest = -trees.cast(limit, self.difference)
        return self._replace(
            difference=jnp.where(impossible, lowest, self.difference),
            gradient=jnp.where(impossible, 0, self.gradient),
        )

    def from_range(self, limit: float) -> "Judged":
        """Return a sum of such messages as the server reads it."""
        impossible = impossible_in_sum(self.difference, limit)
        lowest = trees.cast(IMPOSSIBLE, self.difference)
        return self._replace(difference=jnp.where(impossible, lowest, self.difference))


@register_dataclass
@dataclass(frozen=True, eq=False)
class Judgement(Phase):
    """Asks for log likelihoods at a proposal of the parameters of rows, which the server judges."""

    kernel: Any  # the `FederatedGibbs` that asks

    @in_single_precision
    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: Locals, client: Client
    ) -> tuple[Uncompressed, ArrayTree, StepInfo]:
        kernel, position = self.kernel, broadcast.position
        groups = groups_of(kernel.local, client)
        flat = groups.as_flat(client_state.latents)

        def difference(place: Array) -> Array:
            return groups.rows_difference(kernel.placed(position, place), position, flat)

        value, slope = jax.value_and_grad(difference)(broadcast.extra.proposal)
        possible = jnp.isfinite(value) & jnp.all(jnp.isfinite(slope))
        dtype = jnp.result_type(float)
        message = Judged(
            jnp.where(possible, value, IMPOSSIBLE).astype(dtype),
            jnp.where(possible, slope, 0).astype(dtype),
            jnp.ones((), dtype),
        )
        down = trees.num_bits(position) + trees.num_bits(broadcast.extra.proposal)
        square = trees.squared_norm(message.gradient)
        info = report(message, square, bits_down=jnp.asarray(down, jnp.int32))
        return Uncompressed(message), client_state, info

    def message_like(self, like: Broadcast) -> Uncompressed:
        dtype = jnp.result_type(float)
        one = jax.ShapeDtypeStruct((), dtype)
        slope = jax.ShapeDtypeStruct(like.extra.proposal.shape, dtype)
        return Uncompressed(Judged(one, slope, one))

    def prepare_server(self, rng_key: Array, like: Broadcast) -> Array:
        return jax.random.uniform(rng_key, (), jnp.result_type(float))

    @in_single_precision
    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: Any, total: Uncompressed
    ) -> tuple[Broadcast, Any, ArrayTree]:
        kernel, position, said = self.kernel, broadcast.position, total.value
        uniform = self.prepare_server(rng_key, broadcast) if trees.is_key(rng_key) else rng_key
        proposal = kernel.placed(position, broadcast.extra.proposal)
        known = server_state.sums.known(broadcast.extra.origins.now)
        here = kernel.server_density(position, known)
        there, gradient = jax.value_and_grad(kernel.server_density)(proposal, known)
        of_rows = trees.ravel(gradient)[kernel.row_places(position)]
        possible = (
            (said.difference > LOG_ZERO_THRESHOLD)
            & jnp.isfinite(there)
            & trees.all_finite(gradient)
        )
        accepted, moves = judge(
            server_state.moves,
            jnp.where(possible, said.difference + there - here, -jnp.inf),
            said.gradient + jnp.where(possible, of_rows, 0),
            said.one == server_state.num_clients,
            uniform,
            broadcast.round < kernel.num_adapt,
        )
        position = trees.select(accepted, proposal, position)
        return broadcast._replace(position=position), server_state._replace(moves=moves), ()
