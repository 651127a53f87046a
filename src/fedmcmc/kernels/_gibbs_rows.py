"""Metropolis-adjusted Langevin moves of the row parameters within Gibbs sampling.

The row parameters are the shared parameters on which rows depend given their latents, such as a
slope or a residual sd. The server proposes from the sum of all clients' gradients, and a separate
exchange accepts or rejects by the sum of differences of log likelihoods.

The step size of each proposal is drawn: the largest, a fourth of it, a sixteenth, and so on,
whatever the chain's position. Chains therefore move even where the metric, which comes from the
start, is far off.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.dynamics import hmc_step_size
from fedmcmc.hierarchy import LatentState, groups_of
from fedmcmc.kernels._adjusted import probability
from fedmcmc.kernels._questions import (
    IMPOSSIBLE,
    LOG_ZERO_THRESHOLD,
    below_range,
    impossible_in_sum,
)
from fedmcmc.kernels._shared import report
from fedmcmc.pytrees import in_single_precision, trees
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Client,
    Phase,
    StepInfo,
    Uncompressed,
    register_dataclass,
)

TARGET_ACCEPTANCE = 0.57
"""Acceptance for which the default step size is computed, and to which it adapts."""
NUM_STEP_SIZES = 4
"""Number of step sizes from which one is drawn, each a fourth of the one before."""
ADAPTATION_EXPONENT = 0.6
"""The ``n``-th adaptation of a step size has the rate ``n ** -0.6``."""


class RowMoves(NamedTuple):
    """State of the moves of ``l`` row parameters at the server."""

    factor: Array  # [l, l], `C` of the metric `C C'`
    max_step_size: Array
    step_size: Array  # of the proposal
    gradient: Array  # [l], of the conditional log density at the position, times the factor
    shift: Array  # [l], from the position to the proposal, in units of the factor
    is_ready: Array  # true if there is a proposal: the sum held every client's gradient
    num_judged: Array  # int32, judged proposals with the largest step size
    acceptance: Array  # probability of the last judged proposal
    is_judged: Array  # true if the last proposal was judged: every client answered


def init_moves(information: Array, step_size: ArrayTree) -> RowMoves:
    """Return the initial state; `step_size` is ``()`` for the one of `TARGET_ACCEPTANCE`.

    The metric is the inverse of the rows' information ``[l, l]`` plus one for each parameter.
    """
    size, dtype = information.shape[0], information.dtype
    precision = information + jnp.eye(size, dtype=dtype)
    root = jnp.linalg.cholesky(precision)
    # The transposed inverse is a factor of the covariance; any factor will do.
    factor = jnp.linalg.inv(root).T
    zeros = jnp.zeros(size, dtype)
    step: ArrayTree = step_size
    if trees.is_empty(step_size):
        step = hmc_step_size(size, TARGET_ACCEPTANCE) ** 2 / 2
    return RowMoves(
        factor,
        jnp.asarray(step, dtype),
        jnp.asarray(step, dtype),
        zeros,
        zeros,
        jnp.array(False),
        jnp.zeros((), jnp.int32),
        jnp.ones((), dtype),
        jnp.array(True),
    )


def propose(
    moves: RowMoves, gradient: Array, is_complete: Array, normals: Array, uniform: Array
) -> RowMoves:
    """Return the state with a new proposal, from the gradient at the chain's position."""
    # Half of the proposals have the largest step size, a fourth have a fourth of it, and so on.
    power = sum((uniform > 1 - 0.5**k).astype(gradient.dtype) for k in range(1, NUM_STEP_SIZES))
    scaled, step = moves.factor.T @ gradient, moves.max_step_size * 4.0**-power
    shift = step * scaled + jnp.sqrt(2 * step) * normals
    is_ready = is_complete & jnp.all(jnp.isfinite(shift))
    shift = jnp.where(is_ready, shift, 0)
    return moves._replace(gradient=scaled, shift=shift, step_size=step, is_ready=is_ready)


def judge(
    moves: RowMoves,
    difference: Array,
    gradient: Array,
    is_complete: Array,
    uniform: Array,
    adapts: Array,
) -> tuple[Array, RowMoves]:
    """Return a flag for acceptance, and the state with its step size adapted.

    `difference` is the difference of conditional log densities, `gradient` the gradient at the
    proposal.
    """
    step, scaled = moves.step_size, moves.factor.T @ gradient
    forward = jnp.sum((moves.shift - step * moves.gradient) ** 2)
    backward = jnp.sum((moves.shift + step * scaled) ** 2)
    chance = probability(difference + (forward - backward) / (4 * step))
    is_judged = is_complete & moves.is_ready
    is_largest = is_judged & (step > 0.5 * moves.max_step_size)
    num = moves.num_judged + is_largest
    rate = jnp.maximum(num, 1).astype(step.dtype) ** -ADAPTATION_EXPONENT
    adapted = moves.max_step_size * jnp.exp(rate * (chance - TARGET_ACCEPTANCE))
    return is_judged & (uniform < chance), moves._replace(
        max_step_size=jnp.where(is_largest & adapts, adapted, moves.max_step_size),
        num_judged=num,
        acceptance=jnp.where(is_judged, chance, moves.acceptance),
        is_judged=is_judged,
    )


class ProposalEvaluation(NamedTuple):
    """Message of a client about proposals."""

    difference: ArrayTree  # [] or [num], of log densities at the proposal and the position
    gradient: ArrayTree  # [l], at the proposal, or ()
    num_answers: ArrayTree  # one

    def to_range(self, limit: float) -> "ProposalEvaluation":
        """Return the message for a secure sum of numbers up to `limit`; see `Ranged`."""
        impossible, gradient = below_range(self.difference, limit), self.gradient
        if not trees.is_empty(gradient):
            is_steep = jnp.any(jnp.abs(gradient) > trees.cast(limit, gradient))
            impossible = impossible | is_steep
            gradient = jnp.where(impossible, 0, gradient)
        lowest = -trees.cast(limit, self.difference)
        difference = jnp.where(impossible, lowest, self.difference)
        return self._replace(difference=difference, gradient=gradient)

    def from_range(self, limit: float) -> "ProposalEvaluation":
        """Return a sum of such messages as the server uses it."""
        impossible = impossible_in_sum(self.difference, limit)
        lowest = trees.cast(IMPOSSIBLE, self.difference)
        return self._replace(difference=jnp.where(impossible, lowest, self.difference))


@register_dataclass
@dataclass(frozen=True, eq=False)
class RowPhase(Phase):
    """Exchange that evaluates a proposal of the row parameters, and accepts or rejects it."""

    kernel: Any  # the `FederatedGibbs` of the phase

    @in_single_precision
    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: LatentState, client: Client
    ) -> tuple[Uncompressed, ArrayTree, StepInfo]:
        kernel, position = self.kernel, broadcast.position
        groups = groups_of(kernel.local, client)
        flat = groups.as_flat(client_state.latents)

        def difference(values: Array) -> Array:
            new_position = kernel.with_row_parameters(position, values)
            return groups.log_likelihood_change(new_position, position, flat)

        value, gradient = jax.value_and_grad(difference)(broadcast.extra.proposal)
        possible = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient))
        dtype = jnp.result_type(float)
        message = ProposalEvaluation(
            jnp.where(possible, value, IMPOSSIBLE).astype(dtype),
            jnp.where(possible, gradient, 0).astype(dtype),
            jnp.ones((), dtype),
        )
        down = trees.num_bits(position) + trees.num_bits(broadcast.extra.proposal)
        square = trees.squared_norm(message.gradient)
        info = report(message, square, bits_down=jnp.asarray(down, jnp.int32))
        return Uncompressed(message), client_state, info

    def message_like(self, like: Broadcast) -> Uncompressed:
        scalar = jax.ShapeDtypeStruct((), jnp.result_type(float))
        gradient = jax.ShapeDtypeStruct(like.extra.proposal.shape, scalar.dtype)
        return Uncompressed(ProposalEvaluation(scalar, gradient, scalar))

    def prepare_server(self, rng_key: Array, like: Broadcast) -> Array:
        return jax.random.uniform(rng_key, (), jnp.result_type(float))

    @in_single_precision
    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: Any, total: Uncompressed
    ) -> tuple[Broadcast, Any, ArrayTree]:
        kernel, position, answer = self.kernel, broadcast.position, total.value
        uniform = self.prepare_server(rng_key, broadcast) if trees.is_key(rng_key) else rng_key
        proposal = kernel.with_row_parameters(position, broadcast.extra.proposal)
        sums = server_state.sums.latent_sums(broadcast.extra.origins.now)
        current = kernel.server_density(position, sums)
        new, gradient = jax.value_and_grad(kernel.server_density)(proposal, sums)
        row_gradient = trees.ravel(gradient)[kernel.row_indices(position)]
        possible = (
            (answer.difference > LOG_ZERO_THRESHOLD)
            & jnp.isfinite(new)
            & trees.all_finite(gradient)
        )
        accepted, moves = judge(
            server_state.moves,
            jnp.where(possible, answer.difference + new - current, -jnp.inf),
            answer.gradient + jnp.where(possible, row_gradient, 0),
            answer.num_answers == server_state.num_clients,
            uniform,
            broadcast.round < kernel.num_adapt,
        )
        position = trees.select(accepted, proposal, position)
        return broadcast._replace(position=position), server_state._replace(moves=moves), ()
