"""Hamiltonian Monte Carlo at the server with one leapfrog step per round; exact.

In a round all clients send their log likelihoods and gradients at one point per chain, the current
point of its trajectory. Momenta are standard normal. With the metric ``B = C C'`` a position moves
by ``step_size * C momentum``, and a momentum by ``step_size * C' gradient``.

The draw of every round follows the posterior exactly, not only the ends of trajectories. Two rules
ensure this. First, the length of a trajectory does not depend on its path: a trajectory that meets
an impossible point is rejected at its planned end. Second, its step size is constant.

If `value_noise` is set, clients send differences to the log likelihood at the start of the
trajectory, so that each comparison has new noise. Half of the noise's variance is subtracted from
the log ratio: ``E min(1, exp(d + e - v / 2))`` with ``e ~ N(0, v)`` obeys detailed balance.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect, positive_integer
from fedmcmc.dynamics import Metric, hmc_step_size
from fedmcmc.kernels._adjusted import (
    AdjustedKernel,
    Proposed,
    as_centre,
    probability,
    repeat,
)
from fedmcmc.kernels._evaluations import Points
from fedmcmc.kernels._questions import LOG_ZERO_THRESHOLD
from fedmcmc.kernels._shared import as_constant
from fedmcmc.pytrees import in_single_precision, trees
from fedmcmc.random import integers_below, realize_normals
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Client,
    Disclosure,
    FederatedKernel,
    Federation,
    MetropolisReport,
    Posterior,
    StepInfo,
    Uncompressed,
    as_functions,
    register_dataclass,
)

# Dual averaging as in Hoffman and Gelman (2014), section 3.2.
SHRINKAGE, FIRST_ROUNDS, FORGETTING = 0.05, 10.0, 0.75


class _HamiltonianDraws(NamedTuple):
    momentum: ArrayTree  # standard normals for the next trajectory
    length: Array  # number of steps of the next trajectory
    uniform: Array  # accepts or rejects the end of the current trajectory


class _Adaptation(NamedTuple):
    num_rounds: Array  # [] int32, number of rounds so far
    num: Array  # [], number of completed trajectories
    deficit: Array  # weighted mean of the target minus the acceptance probability
    log_step: Array  # log step size of the next trajectory during adaptation
    log_mean: Array  # log step size after adaptation


class _HamiltonianServer(NamedTuple):
    log_density: Array  # at the chain's position
    gradient: ArrayTree
    momentum: ArrayTree  # of the trajectory, before the half kick at its current point
    energy: Array  # at the trajectory's start
    step_size: Array  # of this trajectory
    num_points: Array  # [] int32, evaluated points of this trajectory; -1 before the first round
    length: Array  # [] int32, planned number of points
    impossible: Array  # [] bool, true if the trajectory met an impossible point
    acceptance: Array  # acceptance probability of the last completed trajectory
    num_clients: Array
    adaptation: ArrayTree  # or ()


def _check_deterministic(kernel: object, compressor: Any) -> None:
    """Raise `ValueError` unless the compressed message depends on the gradient only."""
    like = jax.ShapeDtypeStruct((8,), jnp.result_type(float))
    zero, unit = jnp.zeros((), jnp.int32), jnp.ones(())
    client = Client((), zero, zero, zero, unit, unit, 1)
    random = jax.eval_shape(lambda: compressor.prepare(jax.random.key(0), like, client))
    if not (trees.is_empty(random) and trees.is_empty(compressor.init(like))):
        raise ValueError(
            "A trajectory is reversible only if the messages depend on the point alone. Compress "
            "by top_k(..., error_feedback=False), clip, or a chain of these. For random codes, "
            "error feedback and memories use a kernel without an accept step, such as "
            "fedmcmc.qlsd."
        )


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class HamiltonianMonteCarlo(AdjustedKernel):
    """Metropolis-adjusted leapfrog trajectories; see `hmc`."""

    centre: ArrayTree
    step_size: ArrayTree  # [], or () for the step size with the target acceptance
    metric: Metric
    num_adapt: ArrayTree  # [] int32, or () without adaptation
    value_noise: ArrayTree  # [], or () without noise
    max_integration_steps: int | None = field(metadata={"static": True})
    target_accept: float | None = field(metadata={"static": True})

    traits = replace(AdjustedKernel.traits, check_compressor=_check_deterministic)
    disclosure = Disclosure(
        "the log likelihood and its gradient at positions of the chain", hidden_in_sums=True
    )

    @property
    def name(self) -> str:
        return "mala" if self.max_integration_steps == 1 else "hmc"

    @property
    def uses_gradients(self) -> bool:
        return True

    @property
    def _is_noisy(self) -> bool:
        return not trees.is_empty(self.value_noise)

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> ArrayTree:
        if not self._is_noisy:
            return ()
        return jax.random.normal(rng_key, (1,), jnp.result_type(float))

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[Proposed, ArrayTree, StepInfo]:
        message, client_state, info = super().step(draws, broadcast, client_state, client)
        if self._is_noisy:
            # Shares sum to one, so the noise of the sum has the full variance.
            value, share = message.value.value, client.share
            noise = draws * trees.cast(jnp.sqrt(self.value_noise * share), draws)
            message = message._replace(
                value=Uncompressed(jnp.where(value < LOG_ZERO_THRESHOLD, value, value + noise))
            )
        return message, client_state, info

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, _HamiltonianServer]:
        position, centre = self.check_start(position, self.centre, federation)
        self.metric.check(position)
        dtype = jnp.result_type(float)
        zero, first_round = jnp.zeros((), dtype), jnp.zeros((), jnp.int32)
        step = self._initial_step_size(position)
        adaptation: ArrayTree = ()
        if not trees.is_empty(self.num_adapt):
            adaptation = _Adaptation(first_round, zero, zero, jnp.log(step), jnp.log(step))
        zeros = trees.zeros_like(position)
        server = _HamiltonianServer(
            log_density=zero,
            gradient=zeros,
            momentum=zeros,
            energy=zero,
            step_size=step,
            num_points=first_round - 1,
            length=first_round + 1,
            impossible=jnp.zeros((), bool),
            acceptance=zero + 1,
            num_clients=jnp.asarray(federation.num_clients, dtype),
            adaptation=adaptation,
        )
        if self._is_noisy:
            centre = position
        return Broadcast(first_round, position, Points(repeat(position, 1), centre)), server

    @in_single_precision
    def prepare_server(self, rng_key: Array, like: Broadcast) -> _HamiltonianDraws:
        momentum_key, length_key, uniform_key = jax.random.split(rng_key, 3)
        max_steps = self._max_num_steps(like.position)
        return _HamiltonianDraws(
            realize_normals(momentum_key, like.position),
            1 + integers_below(length_key, jnp.int32(max_steps), ()),
            jax.random.uniform(uniform_key, (), jnp.result_type(float)),
        )

    @in_single_precision
    def aggregate(
        self,
        rng_key: ArrayTree,
        broadcast: Broadcast,
        server_state: _HamiltonianServer,
        total: Proposed,
    ) -> tuple[Broadcast, _HamiltonianServer, MetropolisReport]:
        draws = rng_key
        if trees.is_key(draws):
            draws = self.prepare_server(draws, trees.shapes_of(broadcast))
        densities = self.read_sum(broadcast.extra.points, total, server_state.num_clients)
        point = jax.tree.map(lambda leaf: leaf[0], broadcast.extra.points)
        log_density = densities.log_density[0]
        gradient = jax.tree.map(lambda leaf: leaf[0], densities.gradient)

        # Accept or reject the point if the trajectory ends. The first round evaluates the start.
        old = server_state
        momentum = half_kick(old.momentum, gradient, old.step_size, self.metric)
        is_start, num_points = old.num_points < 0, old.num_points + 1
        ends = is_start | (num_points >= old.length)
        impossible = (old.impossible | jnp.isneginf(log_density)) & ~is_start
        log_ratio = old.energy - (_kinetic(momentum) - log_density)
        point_density = log_density
        if self._is_noisy:
            log_ratio = log_ratio - self.value_noise / 2
            # The accepted point becomes the center: its log likelihood is zero without noise.
            point_density = self.posterior.logprior_fn(point).astype(log_density.dtype)
        acceptance = jnp.where(impossible, 0, probability(log_ratio))
        moves = ends & (is_start | (draws.uniform < acceptance))
        position, at_position = trees.select(
            moves,
            (point, (point_density, gradient)),
            (broadcast.position, (old.log_density, old.gradient)),
        )

        # The next leapfrog step, in a new trajectory or in this one.
        adaptation, new_step, adapting = self._adapt(old, acceptance, ends & ~is_start, position)
        origin, momentum, step = trees.select(
            ends, (position, draws.momentum, new_step), (point, momentum, old.step_size)
        )
        origin_gradient = trees.select(ends, at_position[1], gradient)
        momentum_after = half_kick(momentum, origin_gradient, step, self.metric)
        moved = drift(origin, momentum_after, step, self.metric)
        # A trajectory that met an impossible point stays there until its planned end.
        waits = (impossible & ~ends) | ~trees.all_finite(moved)
        server = _HamiltonianServer(
            log_density=at_position[0],
            gradient=at_position[1],
            momentum=momentum_after,
            energy=jnp.where(ends, _kinetic(draws.momentum) - at_position[0], old.energy),
            step_size=step,
            num_points=jnp.where(ends, 0, num_points),
            length=jnp.where(ends, draws.length, old.length),
            impossible=waits,
            acceptance=jnp.where(ends & ~is_start, acceptance, old.acceptance),
            num_clients=old.num_clients,
            adaptation=adaptation,
        )
        next_points = repeat(trees.select(waits, origin, moved), 1)
        # Without all clients the sum belongs to another posterior: the round changes nothing.
        server, position, next_points = trees.select(
            densities.is_complete,
            (server, position, next_points),
            (old, broadcast.position, broadcast.extra.points),
        )
        if not trees.is_empty(adaptation):
            num_rounds = old.adaptation.num_rounds + 1
            server = server._replace(adaptation=server.adaptation._replace(num_rounds=num_rounds))
        moved_broadcast = broadcast._replace(
            round=broadcast.round + 1,
            position=position,
            extra=Points(next_points, position if self._is_noisy else broadcast.extra.centre),
        )
        return (
            moved_broadcast,
            server,
            MetropolisReport(server.acceptance, densities.is_complete, adapting),
        )

    def _max_num_steps(self, position: ArrayTree) -> int:
        if self.max_integration_steps is not None:
            return self.max_integration_steps
        size = trees.num_elements(position)
        return 1 if size <= 30 else 3 if size <= 300 else 5

    def _target(self, position: ArrayTree) -> float:
        if self.target_accept is not None:
            return self.target_accept
        return 0.57 if self._max_num_steps(position) == 1 else 0.8

    def _initial_step_size(self, position: ArrayTree) -> Array:
        if not trees.is_empty(self.step_size):
            step: Array = self.step_size
            return step
        size, target = trees.num_elements(position), self._target(position)
        step_size = hmc_step_size(size, target, self._max_num_steps(position))
        return jnp.asarray(step_size, jnp.result_type(float))

    def _adapt(
        self, old: _HamiltonianServer, acceptance: Array, ends: Array, position: ArrayTree
    ) -> tuple[ArrayTree, Array, Array]:
        """Return the new adaptation state, the next step size, and if rounds still adapt it."""
        initial = self._initial_step_size(position)
        before: _Adaptation | tuple[()] = old.adaptation
        if not isinstance(before, _Adaptation):
            return (), initial, jnp.zeros((), bool)
        adapting = before.num_rounds < self.num_adapt
        num = before.num + 1
        share = 1 / (num + FIRST_ROUNDS)
        missing = self._target(position) - acceptance
        deficit = (1 - share) * before.deficit + share * missing
        log_step = jnp.log(initial) - jnp.sqrt(num) / SHRINKAGE * deficit
        weight = num**-FORGETTING
        log_mean = weight * log_step + (1 - weight) * before.log_mean
        after = _Adaptation(before.num_rounds, num, deficit, log_step, log_mean)
        now: _Adaptation = trees.select(ends & adapting, after, before)
        # The last trajectories use the mean, because no later round would learn from a new step.
        tries = before.num_rounds + 1 < self.num_adapt
        return now, jnp.exp(jnp.where(tries, now.log_step, now.log_mean)), adapting


def half_kick(momentum: ArrayTree, gradient: ArrayTree, step_size: Array, metric: Metric) -> Any:
    """Return the momentum after half a leapfrog step along a gradient."""
    return trees.add_scaled(momentum, step_size / 2, metric.transposed_root_times(gradient))


def drift(position: ArrayTree, momentum: ArrayTree, step_size: Array, metric: Metric) -> Any:
    """Return the position after a leapfrog step."""
    return trees.add_scaled(position, step_size, metric.root_times(momentum))


def _kinetic(momentum: ArrayTree) -> Array:
    dtype = jnp.result_type(float)
    terms = [jnp.sum(jnp.square(leaf.astype(dtype))) for leaf in jax.tree.leaves(momentum)]
    return sum(terms, jnp.zeros((), dtype)) / 2


def hmc(
    posterior: Posterior,
    centre: ArrayTree,
    *,
    step_size: float | Array | None = None,
    max_integration_steps: int | None = None,
    metric: ArrayTree | None = None,
    num_adapt: int = 0,
    target_accept: float | None = None,
    value_noise: float | Array | None = None,
) -> FederatedKernel:
    """Build Hamiltonian Monte Carlo with a Metropolis test: exact at any step size (Neal 2011).

    In a round all clients send their log likelihoods and gradients at one point per chain, which is
    one leapfrog step. Chains share messages: 64 chains need no more rounds than one.
    ``samples.info["acceptance"]`` holds acceptance probabilities.

    Parameters
    ----------
    posterior, centre
        Model, and position near the mode, such as ``white.position`` of `fedmcmc.whiten`. Clients
        send differences to the log likelihoods there, row by row, to lose no digits.
    step_size
        Leapfrog step size, by default `fedmcmc.tuning.hmc_step_size` for a Gaussian target.
    max_integration_steps
        Largest number of steps per trajectory, uniform from 1; by default 1 to 5 by dimension.
    metric
        Matrix ``B`` of `fedmcmc.langevin`, best the posterior's covariance (``white.metric``).
    num_adapt, target_accept
        Number of initial rounds that adapt each chain's step size by dual averaging (Hoffman and
        Gelman 2014, section 3.2), and target acceptance probability, by default 0.57 for
        trajectories of one step, else 0.8. Draws are exact after these rounds.
    value_noise
        Variance of the normal noise that clients add to the log likelihoods in total. Draws stay
        exact (penalty method, Ceperley and Dewing 1999) but fewer proposals are accepted.

    Raises
    ------
    TypeError, ValueError
        If a setting is out of range; from `init` if center, metric, model and data do not fit.

    Examples
    --------
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> hmc(posterior, 0.3, step_size=0.5).name
    'hmc'
    """
    expect(posterior, Posterior, "posterior")
    if max_integration_steps is not None:
        max_integration_steps = positive_integer(max_integration_steps, "max_integration_steps")
    if target_accept is not None and not 0 < target_accept < 1:
        raise ValueError(f"target_accept must be in (0, 1), got {target_accept!r}.")
    if num_adapt != 0:
        num_adapt = positive_integer(num_adapt, "num_adapt")
    return as_functions(
        HamiltonianMonteCarlo(
            posterior,
            as_centre(centre),
            () if step_size is None else as_constant(step_size, "step_size"),
            Metric.of(metric),
            jnp.asarray(num_adapt, jnp.int32) if num_adapt else (),
            () if value_noise is None else as_constant(value_noise, "value_noise"),
            max_integration_steps,
            None if target_accept is None else float(target_accept),
        )
    )


def mala(
    posterior: Posterior,
    centre: ArrayTree,
    *,
    step_size: float | Array | None = None,
    metric: ArrayTree | None = None,
    num_adapt: int = 0,
    target_accept: float | None = None,
    value_noise: float | Array | None = None,
) -> FederatedKernel:
    """Build the Metropolis-adjusted Langevin algorithm: `hmc` with trajectories of one step.

    Every round accepts or rejects a proposal
    ``position + step_size * B gradient + sqrt(2 * step_size) * C normal``: `fedmcmc.lsd` without
    its discretization error.

    Parameters
    ----------
    step_size
        Factor of the gradient, as in `fedmcmc.lsd`. By default the step size with acceptance
        probability `target_accept` if the metric is the covariance.
    posterior, centre, metric, num_adapt, target_accept, value_noise
        The same as in `hmc`.

    References
    ----------
    Roberts and Rosenthal (1998), Optimal scaling of discrete approximations to Langevin diffusions.

    Examples
    --------
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> mala(posterior, 0.3, step_size=0.1).name
    'mala'
    """
    return hmc(
        posterior,
        centre,
        step_size=None if step_size is None else jnp.sqrt(2 * as_constant(step_size, "step_size")),
        max_integration_steps=1,
        metric=metric,
        num_adapt=num_adapt,
        target_accept=target_accept,
        value_noise=value_noise,
    )
