"""Recentering: joint moves of shared parameters in which latents compensate for slopes.

When the row parameters move, each latent moves in the opposite direction, so that predictions do
not change. This helps slopes of covariates that vary between groups, which the latents otherwise
hold back (Gelfand et al. 1995). The clients evaluate the candidates in a separate
exchange, and move their latents in the round's last exchange, so no client may be lost in between.

One exchange is as expensive for many candidates as for one. The server therefore proposes many,
around a center that is as far from the chain's position as the candidates are from the center: each
candidate, and the position, could have led to all the others. It then chooses among all of them in
proportion to their densities (Tjelmeland 2004). With sixteen candidates a chain mixes about three
times as fast per exchange as with one.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.hierarchy import Groups, LatentState, groups_of
from fedmcmc.kernels._gibbs_rows import ADAPTATION_EXPONENT, NUM_STEP_SIZES, ProposalEvaluation
from fedmcmc.kernels._questions import (
    IMPOSSIBLE,
    LOG_ZERO_THRESHOLD,
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

NUM_CANDIDATES = 16
SCALE = 2.4
"""Step size of a walk in one dimension, in posterior sds; divided by ``sqrt(d)`` in ``d``."""
TARGET_MOVES = 0.6
"""Share of rounds that choose a candidate, to which the step size adapts (2 to 8 dimensions)."""
RIDGE = 1e-3
"""Ridge of the regression, relative to the rows' information about a latent."""


class Walk(NamedTuple):
    """State of the walk over ``d`` shared parameters at the server."""

    factor: Array  # [d, d], `C` of the metric `C C'`; rows of zeros for parameters that stay
    max_step_size: Array
    step_size: Array  # of the candidates
    num_judged: Array  # int32, choices among candidates with the largest step size


class Candidates(NamedTuple):
    """Candidates of a walk, part of a broadcast."""

    shifts: Array  # [num, d], from the chain's position to the candidates
    previous_position: ArrayTree  # before the choice of a candidate


def init_walk(information: Array, position: ArrayTree) -> tuple[Walk, Candidates]:
    """Return the initial state from information ``[d, d]``, and candidates that do not move.

    The metric is the inverse of the information plus one for each parameter. Parameters without
    information stay.
    """
    dtype = information.dtype
    moves = jnp.diagonal(information) > 0
    values, vectors = jnp.linalg.eigh((information + information.T) / 2)
    factor = vectors * (1 + jnp.maximum(values, 0)) ** -0.5
    max_step_size = SCALE * jnp.maximum(jnp.sum(moves), 1).astype(dtype) ** -0.5
    walk = Walk(
        jnp.where(moves[:, None], factor, 0),
        max_step_size,
        jnp.zeros((), dtype),
        jnp.zeros((), jnp.int32),
    )
    shifts = jnp.zeros((NUM_CANDIDATES, factor.shape[0]), jnp.result_type(float))
    return walk, Candidates(shifts, position)


def draw_candidates(walk: Walk, rng_key: Array, position: ArrayTree) -> tuple[Walk, Candidates]:
    """Return the walk with a drawn step size, and candidates around `position`."""
    normal_key, step_key = jax.random.split(rng_key)
    dtype, size = walk.factor.dtype, walk.factor.shape[0]
    normals = jax.random.normal(normal_key, (1 + NUM_CANDIDATES, size), dtype)
    uniform = jax.random.uniform(step_key, (), dtype)
    # Three quarters of the rounds have the largest step size, 3/16 have a fourth of it, and so on.
    power = sum((uniform < 0.25**k).astype(dtype) for k in range(1, NUM_STEP_SIZES))
    step = walk.max_step_size * 4.0**-power
    shifts = step * (normals[0] + normals[1:]) @ walk.factor.T
    return walk._replace(step_size=step), Candidates(shifts, position)


def choose(
    walk: Walk, differences: Array, is_complete: Array, uniform: Array, adapts: Array
) -> tuple[Array, Array, Walk]:
    """Return the index of the chosen candidate, a flag for a move, and the adapted walk.

    `differences` are the candidates' log densities minus the position's, ``[num]``.
    """
    relative = jnp.concatenate([jnp.zeros(1, differences.dtype), differences])
    shares = jax.nn.softmax(relative)
    choice = jnp.sum(uniform > jnp.cumsum(shares)[:-1])
    is_largest = is_complete & (walk.step_size > 0.5 * walk.max_step_size)
    num = walk.num_judged + is_largest
    rate = jnp.maximum(num, 1).astype(shares.dtype) ** -ADAPTATION_EXPONENT
    adapted = walk.max_step_size * jnp.exp(rate * (1 - shares[0] - TARGET_MOVES))
    max_step_size = jnp.where(is_largest & adapts, adapted, walk.max_step_size)
    moved = is_complete & (choice > 0)
    walk = walk._replace(max_step_size=max_step_size, num_judged=num)
    return jnp.maximum(choice - 1, 0), moved, walk


@register_dataclass
@dataclass(frozen=True, eq=False)
class RecenteringPhase(Phase):
    """Exchange that evaluates candidates, with latents that compensate, and chooses one."""

    kernel: Any  # the `FederatedGibbs` of the phase

    @in_single_precision
    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: LatentState, client: Client
    ) -> tuple[Uncompressed, ArrayTree, StepInfo]:
        kernel, position = self.kernel, broadcast.position
        groups, latents = groups_of(kernel.local, client), client_state.latents
        flat, shifts = groups.as_flat(latents), broadcast.extra.candidates.shifts

        @jax.vmap
        def difference(shift: Array) -> Array:
            candidate = _shifted(position, shift)
            moved = _compensated(kernel, client_state, position, candidate)
            rows = groups.log_likelihood_change(candidate, position, groups.as_flat(moved), flat)
            density = jax.vmap(kernel.local.logprior_fn, (None, 0))
            change = density(candidate, moved) - density(position, latents)
            return rows + jnp.sum(jnp.where(groups.present, change, 0))

        dtype, values = jnp.result_type(float), difference(shifts)
        values = jnp.where(jnp.isfinite(values), values, IMPOSSIBLE).astype(dtype)
        message = ProposalEvaluation(values, (), jnp.ones((), dtype))
        down = trees.num_bits(position) + trees.num_bits(shifts)
        info = report(message, jnp.zeros(()), bits_down=jnp.asarray(down, jnp.int32))
        return Uncompressed(message), client_state, info

    def message_like(self, like: Broadcast) -> Uncompressed:
        dtype = jnp.result_type(float)
        values = jax.ShapeDtypeStruct((NUM_CANDIDATES,), dtype)
        return Uncompressed(ProposalEvaluation(values, (), jax.ShapeDtypeStruct((), dtype)))

    def prepare_server(self, rng_key: Array, like: Broadcast) -> Array:
        return jax.random.uniform(rng_key, (), jnp.result_type(float))

    @in_single_precision
    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: Any, total: Uncompressed
    ) -> tuple[Broadcast, Any, ArrayTree]:
        kernel, position, answer = self.kernel, broadcast.position, total.value
        uniform = self.prepare_server(rng_key, broadcast) if trees.is_key(rng_key) else rng_key
        candidates = broadcast.extra.candidates
        prior_fn = kernel.posterior.logprior_fn

        @jax.vmap
        def prior_difference(shift: Array) -> Array:
            return prior_fn(_shifted(position, shift)) - prior_fn(position)

        priors = prior_difference(candidates.shifts)
        possible = (answer.difference > LOG_ZERO_THRESHOLD) & jnp.isfinite(priors)
        index, moved, walk = choose(
            server_state.walk,
            jnp.where(possible, answer.difference + priors, -jnp.inf),
            answer.num_answers == server_state.num_clients,
            uniform,
            broadcast.round < kernel.num_adapt,
        )
        candidate = _shifted(position, candidates.shifts[index])
        extra = broadcast.extra._replace(candidates=candidates._replace(previous_position=position))
        position = trees.select(moved, candidate, position)
        broadcast = broadcast._replace(position=position, extra=extra)
        return broadcast, server_state._replace(walk=walk), ()


def _shifted(position: ArrayTree, shift: Array) -> ArrayTree:
    flat = trees.ravel(position)
    return trees.cast_like(trees.unravel(flat + shift.astype(flat.dtype), position), position)


def _compensated(
    kernel: Any, client_state: LatentState, position: ArrayTree, new_position: ArrayTree
) -> ArrayTree:
    """Return latents ``[G, *event]`` that compensate for the change of the row parameters."""
    rows = kernel.row_indices(position)
    change = (trees.ravel(new_position) - trees.ravel(position))[rows]
    flat = jax.vmap(trees.ravel)(client_state.latents)
    moved = flat - client_state.kernel.slopes @ change.astype(flat.dtype)
    return jax.vmap(lambda latent: trees.unravel(latent, kernel.local.like.tree))(moved)


def transport_latents(kernel: object, client_state: LatentState, broadcast: Broadcast) -> ArrayTree:
    """Return a client's latents after the choice of a candidate."""
    old, new = broadcast.extra.candidates.previous_position, broadcast.position
    moved = jnp.any(trees.ravel(old) != trees.ravel(new))
    latents = _compensated(kernel, client_state, old, new)
    return trees.select(moved, latents, client_state.latents)


def compute_slopes(
    kernel: object, groups: Groups, position: ArrayTree, latents: ArrayTree
) -> Array:
    """Return the weighted regression of row covariates on latent covariates, ``[G, k, l]``.

    If the row parameters change, the latents change by minus this matrix times the change. For an
    intercept the matrix holds the group's means of the covariates.
    """
    curvature, mixed = _row_curvatures(kernel, groups, position, groups.as_flat(latents))
    diagonal = jnp.diagonal(curvature, axis1=-2, axis2=-1)
    ridge = jnp.where(diagonal > 0, RIDGE * diagonal, 1)
    slopes = jnp.linalg.solve(curvature + jax.vmap(jnp.diag)(ridge), mixed)
    usable = groups.present[:, None, None] & jnp.isfinite(slopes)
    return jnp.where(usable, slopes, 0)


def compute_information(
    kernel: Any, groups: Groups, position: ArrayTree, latents: ArrayTree
) -> Array:
    """Return the information of rows and compensating latents about the parameters, ``[d, d]``.

    Parameters that influence neither the rows nor the population's mean have none.
    """
    flat, rows = groups.as_flat(latents), kernel.row_indices(position)
    place, like = trees.ravel(position), groups.local.like.tree
    slopes = compute_slopes(kernel, groups, position, latents)
    to_all = jnp.zeros((rows.size, place.size), place.dtype).at[jnp.arange(rows.size), rows].set(1)

    def of_rows(shift: Array) -> Array:
        new_position = kernel.with_row_parameters(position, place[rows] + shift)
        return groups.log_likelihood_change(new_position, position, flat - slopes @ shift, flat)

    row_information = -jax.hessian(of_rows)(jnp.zeros(rows.size, place.dtype))

    def mean(values: Array) -> Array:
        new_position = trees.cast_like(trees.unravel(values, position), position)
        return trees.ravel(kernel.population.origin_fn(new_position))

    def density(latent: Array) -> Array:
        return kernel.local.logprior_fn(position, trees.unravel(latent, like))

    # Derivative of a latent's distance from the mean, and precision of this distance.
    distance = slopes @ to_all + jax.jacfwd(mean)(place)
    precision = -jax.vmap(jax.hessian(density))(flat)
    present = groups.present[:, None, None]
    terms = jnp.where(present, jnp.einsum("gki,gkl,glj->gij", distance, precision, distance), 0)
    total = to_all.T @ row_information @ to_all + jnp.sum(terms, 0)
    return jnp.where(jnp.isfinite(total), total, 0).astype(jnp.result_type(float))


def _row_curvatures(
    kernel: Any, groups: Groups, position: ArrayTree, flat: Array
) -> tuple[Array, Array]:
    """Return minus second derivatives of the rows by latents, and by latents and parameters."""
    values = trees.ravel(position)[kernel.row_indices(position)]

    def gradient(values: Array, latents: Array) -> Array:
        new_position = kernel.with_row_parameters(position, values)
        return jax.grad(lambda x: groups.log_likelihood_change(new_position, position, x, flat))(
            latents
        )

    def column(axis: Array) -> Array:
        direction = jnp.broadcast_to(axis, flat.shape)
        return -jax.jvp(lambda latents: gradient(values, latents), (flat,), (direction,))[1]

    axes = jnp.eye(groups.size, dtype=flat.dtype)
    curvature = jnp.stack([column(axis) for axis in axes], -1)
    curvature = (curvature + jnp.swapaxes(curvature, -1, -2)) / 2
    return curvature, -jax.jacfwd(gradient)(values, flat)
