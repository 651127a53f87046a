"""Hamiltonian Monte Carlo at the server, one leapfrog step per round; exact.

A round asks all clients for their log likelihoods and gradients at one point per chain: where its
trajectory stands. Momenta are standard normal; with the metric ``B = C C'`` a position moves by
``step_size * C momentum`` and a momentum by ``step_size * C' gradient``.

Two things keep the law of every round's draw exact, and not only that of the ends of trajectories.
How many rounds a trajectory takes does not depend on where it goes: one that meets an impossible
point is rejected, but when its time has come. And a trajectory keeps the step size it began with.

With noise in the values that decide, clients send differences to the log likelihood where the
trajectory began, so that the noise of a comparison is fresh, and half of its variance is taken off
the log ratio: ``E min(1, exp(d + e - v / 2))`` with ``e ~ N(0, v)`` obeys detailed balance.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect, positive_integer
from fedmcmc._types import (
    Adjusted,
    ArrayTree,
    Broadcast,
    Client,
    Disclosure,
    Exact,
    FederatedKernel,
    Federation,
    Posterior,
    StepInfo,
    as_functions,
    register_dataclass,
)
from fedmcmc.dynamics import Metric, hmc_step_size
from fedmcmc.kernels._adjusted import (
    AdjustedKernel,
    Proposed,
    as_centre,
    probability,
    repeated,
)
from fedmcmc.kernels._evaluations import Points
from fedmcmc.kernels._questions import BELOW
from fedmcmc.pytrees import in_single_precision, schedules, trees
from fedmcmc.random import integers_below, realize_normals

# Dual averaging as in Hoffman and Gelman (2014), section 3.2.
SHRINKAGE, FIRST_ROUNDS, FORGETTING = 0.05, 10.0, 0.75


class _Draws(NamedTuple):
    momentum: ArrayTree  # standard normals, of the next trajectory
    length: Array  # its steps
    uniform: Array  # accepts or rejects the last one


class _Adaptation(NamedTuple):
    num_rounds: Array  # [] int32, all rounds since the kernel's first
    num: Array  # [], trajectories that came to their ends
    deficit: Array  # mean of target minus acceptance
    log_step: Array  # tried next
    log_mean: Array  # kept once nothing is adapted any more


class _Server(NamedTuple):
    log_density: Array  # at the chain's position
    gradient: ArrayTree
    momentum: ArrayTree  # where the trajectory stands, half a kick behind
    energy: Array  # at its start
    step_size: Array  # of this trajectory
    done: Array  # [] int32, points judged of it; -1 before the start itself was
    length: Array  # [] int32
    impossible: Array  # [] bool, whether one of them was impossible
    acceptance: Array  # of the last trajectory that came to its end
    num_clients: Array
    adaptation: ArrayTree  # or ()


def _check_deterministic(kernel: Any, compressor: Any) -> None:
    """Raise `ValueError` unless what is sent is a function of the gradient alone."""
    like = jax.ShapeDtypeStruct((8,), jnp.result_type(float))
    zero, one = jnp.zeros((), jnp.int32), jnp.ones(())
    client = Client((), zero, zero, zero, one, one, 1)
    random = jax.eval_shape(lambda: compressor.prepare(jax.random.key(0), like, client))
    if not (trees.is_empty(random) and trees.is_empty(compressor.init(like))):
        raise ValueError(
            "A trajectory is reversible only if what clients send is a function of the point "
            "alone: compress by top_k(..., error_feedback=False), clip, or a chain of these, "
            "which leave draws exact. Random codes, error feedback and memories do not; for "
            "them take a kernel that is not adjusted, as fedmcmc.qlsd."
        )


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class HamiltonianMonteCarlo(AdjustedKernel):
    """Leapfrog trajectories that are accepted or rejected; see `hmc`."""

    centre: ArrayTree
    step_size: Any  # [], or () for the one of the wanted acceptance
    metric: Metric
    num_adapt: Any  # [] int32, or () where nothing is adapted
    value_noise: Any  # [], or () without noise
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
    def asks_for_gradients(self) -> bool:
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
            # Shares add up to one, so that the sum's noise has the whole variance.
            value, share = message.value.value, client.share
            noise = draws * trees.cast(jnp.sqrt(self.value_noise * share), draws)
            message = message._replace(value=Exact(jnp.where(value < BELOW, value, value + noise)))
        return message, client_state, info

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, _Server]:
        position, centre = self.checked_start(position, self.centre, federation)
        self.metric.check(position)
        dtype = jnp.result_type(float)
        zero, none = jnp.zeros((), dtype), jnp.zeros((), jnp.int32)
        step = self._given_step(position)
        adaptation: ArrayTree = ()
        if not trees.is_empty(self.num_adapt):
            adaptation = _Adaptation(none, zero, zero, jnp.log(step), jnp.log(step))
        zeros = trees.zeros_like(position)
        server = _Server(
            log_density=zero,
            gradient=zeros,
            momentum=zeros,
            energy=zero,
            step_size=step,
            done=none - 1,
            length=none + 1,
            impossible=jnp.zeros((), bool),
            acceptance=zero + 1,
            num_clients=jnp.asarray(federation.num_clients, dtype),
            adaptation=adaptation,
        )
        if self._is_noisy:
            centre = position
        return Broadcast(none, position, Points(repeated(position, 1), centre)), server

    @in_single_precision
    def prepare_server(self, rng_key: Array, like: Broadcast) -> _Draws:
        momentum_key, length_key, uniform_key = jax.random.split(rng_key, 3)
        most = self._most_steps(like.position)
        return _Draws(
            realize_normals(momentum_key, like.position),
            1 + integers_below(length_key, jnp.int32(most), ()),
            jax.random.uniform(uniform_key, (), jnp.result_type(float)),
        )

    @in_single_precision
    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: _Server, total: Proposed
    ) -> tuple[Broadcast, _Server, Adjusted]:
        draws = rng_key
        if trees.is_key(draws):
            draws = self.prepare_server(draws, trees.shapes_of(broadcast))
        judged = self.judge(broadcast.extra.points, total, server_state.num_clients)
        here = jax.tree.map(lambda leaf: leaf[0], broadcast.extra.points)
        log_density = judged.log_density[0]
        gradient = jax.tree.map(lambda leaf: leaf[0], judged.gradient)

        # The end of a trajectory, or of the start's own judgement.
        old = server_state
        momentum = half_kick(old.momentum, gradient, old.step_size, self.metric)
        is_start, done = old.done < 0, old.done + 1
        ends = is_start | (done >= old.length)
        impossible = (old.impossible | jnp.isneginf(log_density)) & ~is_start
        log_ratio = old.energy - (_kinetic(momentum) - log_density)
        kept = log_density
        if self._is_noisy:
            log_ratio = log_ratio - self.value_noise / 2
            # Relative to the likelihood at the chain's position, which has no noise itself.
            kept = self.posterior.logprior_fn(here).astype(log_density.dtype)
        accepted = jnp.where(impossible, 0, probability(log_ratio))
        taken = ends & (is_start | (draws.uniform < accepted))
        position, at_position = trees.select(
            taken,
            (here, (kept, gradient)),
            (broadcast.position, (old.log_density, old.gradient)),
        )

        # The next step, of a new trajectory or of this one.
        adaptation, new_step, adapting = self._adapted(old, accepted, ends & ~is_start, position)
        stands, momentum, step = trees.select(
            ends, (position, draws.momentum, new_step), (here, momentum, old.step_size)
        )
        at_stand = trees.select(ends, at_position[1], gradient)
        momentum_after = half_kick(momentum, at_stand, step, self.metric)
        moved = drift(stands, momentum_after, step, self.metric)
        # An impossible trajectory waits where it is for its time.
        waits = (impossible & ~ends) | ~trees.all_finite(moved)
        server = _Server(
            log_density=at_position[0],
            gradient=at_position[1],
            momentum=momentum_after,
            energy=jnp.where(ends, _kinetic(draws.momentum) - at_position[0], old.energy),
            step_size=step,
            done=jnp.where(ends, 0, done),
            length=jnp.where(ends, draws.length, old.length),
            impossible=waits,
            acceptance=jnp.where(ends & ~is_start, accepted, old.acceptance),
            num_clients=old.num_clients,
            adaptation=adaptation,
        )
        asked = repeated(trees.select(waits, stands, moved), 1)
        # A sum without a client would be that of another posterior: nothing happens.
        server, position, asked = trees.select(
            judged.whole,
            (server, position, asked),
            (old, broadcast.position, broadcast.extra.points),
        )
        if not trees.is_empty(adaptation):
            num_rounds = old.adaptation.num_rounds + 1
            server = server._replace(adaptation=server.adaptation._replace(num_rounds=num_rounds))
        moved_broadcast = broadcast._replace(
            round=broadcast.round + 1,
            position=position,
            extra=Points(asked, position if self._is_noisy else broadcast.extra.centre),
        )
        return moved_broadcast, server, Adjusted(server.acceptance, judged.whole, adapting)

    def _most_steps(self, position: ArrayTree) -> int:
        if self.max_integration_steps is not None:
            return self.max_integration_steps
        size = trees.num_elements(position)
        return 1 if size <= 30 else 3 if size <= 300 else 5

    def _target(self, position: ArrayTree) -> float:
        if self.target_accept is not None:
            return self.target_accept
        return 0.57 if self._most_steps(position) == 1 else 0.8

    def _given_step(self, position: ArrayTree) -> Array:
        if not trees.is_empty(self.step_size):
            step: Array = self.step_size
            return step
        size, target = trees.num_elements(position), self._target(position)
        found = hmc_step_size(size, target, self._most_steps(position))
        return jnp.asarray(found, jnp.result_type(float))

    def _adapted(
        self, old: _Server, accepted: Array, ends: Array, position: ArrayTree
    ) -> tuple[ArrayTree, Array, Array]:
        """Return what adaptation knows now, a new trajectory's step size, whether it goes on."""
        given = self._given_step(position)
        before: _Adaptation | tuple[()] = old.adaptation
        if not isinstance(before, _Adaptation):
            return (), given, jnp.zeros((), bool)
        adapting = before.num_rounds < self.num_adapt
        num = before.num + 1
        share = 1 / (num + FIRST_ROUNDS)
        missing = self._target(position) - accepted
        deficit = (1 - share) * before.deficit + share * missing
        log_step = jnp.log(given) - jnp.sqrt(num) / SHRINKAGE * deficit
        weight = num**-FORGETTING
        log_mean = weight * log_step + (1 - weight) * before.log_mean
        after = _Adaptation(before.num_rounds, num, deficit, log_step, log_mean)
        now: _Adaptation = trees.select(ends & adapting, after, before)
        # The round after this one: nothing is tried that no later round learns from.
        tries = before.num_rounds + 1 < self.num_adapt
        return now, jnp.exp(jnp.where(tries, now.log_step, now.log_mean)), adapting


def half_kick(momentum: ArrayTree, gradient: ArrayTree, step_size: Array, metric: Metric) -> Any:
    """Return a momentum after half a leapfrog step along a gradient."""
    return trees.add_scaled(momentum, step_size / 2, metric.transposed_root_times(gradient))


def drift(position: ArrayTree, momentum: ArrayTree, step_size: Array, metric: Metric) -> Any:
    """Return a position after a leapfrog step."""
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
    """Build Hamiltonian Monte Carlo with a Metropolis test: exact at any step size.

    All of it happens at the server, which asks all clients for their log likelihoods and gradients
    at one point per chain and round, one leapfrog step. Chains share a round's messages: many
    chains (``num_chains=64``) cost no round more than one.

    Parameters
    ----------
    posterior
        The model.
    centre
        A position near the mode, best the mode itself (``white.position`` of `fedmcmc.whiten`):
        log likelihoods are sent as differences to those there, row by row, so that no digit is
        lost. Any center at which they are finite gives the same law.
    step_size
        Of the leapfrog integrator. By default, that of `target_accept` on a Gaussian target whose
        covariance is the metric, in closed form (`fedmcmc.tuning.hmc_step_size`): right in whitened
        coordinates.
    max_integration_steps
        A trajectory has 1 to so many steps, all equally likely. By default 1 up to 30 dimensions, 3
        up to 300, and 5 above: rounds are dear, gradients are cheap.
    metric
        ``B = C C'``, best the posterior's covariance (``white.metric``): shaped as the position for
        a diagonal, or ``[d, d]`` over the raveled position; the identity by default, as is right in
        whitened coordinates. With another metric go on by `fedmcmc.switch`.
    num_adapt
        In the first rounds of the kernel, so many, each chain adapts its step size to
        `target_accept` (dual averaging); then it stays. Draws are exact from then on: give
        `sample` a ``num_burnin`` that is as large at least. Few rounds end short of the target (100
        rounds of 3 dimensions: 0.72 where 0.6 was wanted, from any first step): where the metric is
        about the covariance, the default step size needs none.
    target_accept
        By default 0.57 where trajectories have one step, and 0.8 elsewhere.
    value_noise
        A variance: clients add normal noise to their log likelihoods, of this variance in the sum
        that decides, each a part by its share of the rows. Draws stay exact (the penalty method),
        fewer proposals are accepted: of those that were certain ``2 Phi(-sqrt(value_noise) / 2)``.
        By itself this is no differential privacy, as log likelihoods have no bound and gradients
        are sent as they are.

    Returns
    -------
    FederatedKernel
        ``samples.info["acceptance"]`` holds acceptance probabilities. A round in which a client's
        message is missing changes nothing, and the next one asks the same again.

    Raises
    ------
    TypeError, ValueError
        On settings out of range; from `init` where center, metric, model and data do not fit; from
        `fedmcmc.compress` on a compressor that would make draws wrong.

    Notes
    -----
    Draws of a chain are the same while a trajectory runs. Gradients may be compressed by whatever
    is a function of them alone (``top_k(..., error_feedback=False)``, `clip`): leapfrog steps along
    any field are reversible and keep volume, and the values that decide are never compressed.

    References
    ----------
    Neal (2011), MCMC using Hamiltonian dynamics. Hoffman and Gelman (2014), section 3.2, for the
    adaptation. Ceperley and Dewing (1999), The penalty method for random walks with uncertain
    energies.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> kernel = hmc(posterior, 0.3, metric=jnp.array(1 / 9))
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, 0.3, num_rounds=100, num_chains=64, progress=False
    ... )
    >>> round(float(samples.draws.mean()), 1), round(float(samples.draws.var()) * 9, 1)
    (0.3, 1.0)
    >>> round(float(samples.info["acceptance"].mean()), 1)
    0.6
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
            as_centre(centre, "centre"),
            () if step_size is None else _number(step_size),
            Metric.of(metric),
            jnp.asarray(num_adapt, jnp.int32) if num_adapt else (),
            () if value_noise is None else _number(value_noise, "value_noise"),
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

    Every round is a proposal ``position + step_size * B gradient + sqrt(2 * step_size) * C normal``
    that is accepted or rejected: `fedmcmc.lsd` without its error.

    Parameters
    ----------
    step_size
        Multiplies the gradient, as in `fedmcmc.lsd`. By default, that of `target_accept` where the
        metric is the covariance.
    posterior, centre, metric, num_adapt, target_accept, value_noise
        As those of `hmc`.

    References
    ----------
    Roberts and Rosenthal (1998), Optimal scaling of discrete approximations to Langevin diffusions.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> kernel = mala(posterior, 0.3, step_size=0.1)
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, 0.3, num_rounds=100, num_chains=64, progress=False
    ... )
    >>> round(float(samples.draws.mean()), 1), round(float(samples.draws.var()) * 9, 1)
    (0.3, 1.0)
    """
    return hmc(
        posterior,
        centre,
        step_size=None if step_size is None else jnp.sqrt(2 * _number(step_size)),
        max_integration_steps=1,
        metric=metric,
        num_adapt=num_adapt,
        target_accept=target_accept,
        value_noise=value_noise,
    )


def _number(given: Any, name: str = "step_size") -> Array:
    number: Array = schedules.number(given, name, minimum=0.0, strict=True)
    if isinstance(number, schedules.Scheduled):
        raise TypeError(
            f"{name} must be a number: draws are exact at any, so that none has to fall."
        )
    return number
