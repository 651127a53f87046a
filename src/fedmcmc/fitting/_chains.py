"""Chains of Hamiltonian Monte Carlo that run until they agree."""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.diagnostics import (
    MAX_RHAT,
    MIN_ESS,
    DiagnosisWarning,
    MonteCarloErrors,
    chain_errors,
    judged_values,
    mixing,
)
from fedmcmc.dynamics import hmc_step_size
from fedmcmc.exact import Corrected, ravel_draws
from fedmcmc.fitting._modes import ModeSearch
from fedmcmc.gaussian import Mixture, defensive
from fedmcmc.kernels import hmc
from fedmcmc.pytrees import trees
from fedmcmc.records import Samples
from fedmcmc.runs import Consortium
from fedmcmc.types import (
    ArrayTree,
    FederatedKernel,
    FederatedState,
    FederationArgument,
    Posterior,
    compiled,
)

NUM_CHAINS, NUM_STARTS = 64, 8
"""Number of chains and of starts: eight chains share a start, and nested R-hat compares starts."""
ADAPTATION_ROUNDS = (10, 10, 10, 20, 20, 40)
"""Rounds of the adaptation segments: the step size adapts after each, the metric after every second
one."""
SEGMENT_ROUNDS, MIN_SEGMENT_ROUNDS = 50, 4
"""Number of rounds of a segment, and smallest number that is kept after an interrupt (Ctrl-C)."""
EARLY_ABORT_ROUNDS, EARLY_ABORT_RHAT = 600, 1.1
"""Number of rounds after which chains with a larger R-hat stop."""
ESS_PER_DIMENSION = 10
METRIC_PRIOR = 5.0
"""Number of draws that the previous diagonal metric counts as in an update."""
MIN_EIGENVALUE, SHRINKAGE = 1e-5, 1e-4
"""Smallest eigenvalue of a metric's correlations that needs no shrinkage, and the shrinkage."""
REQUIREMENTS = f"required: R-hat below {MAX_RHAT:g}, {MIN_ESS:g} effective draws"
ROUNDS_PER_DRAW = 10
"""Number of rounds of an adapting chain that count as one independent draw."""


@dataclass(frozen=True)
class Chains:
    """Draws of sampled positions after adaptation, with the diagnostics of the chains.

    `num_rounds` includes adaptation.
    """

    samples: Samples
    num_rounds: int
    rhat: float
    ess: float
    errors: MonteCarloErrors
    method: str
    why: str

    @property
    def agree(self) -> bool:
        """True if R-hat, effective draws and Monte Carlo errors meet the requirements."""
        return is_converged(self.rhat, self.ess, self.errors)

    @property
    def figures(self) -> dict[str, Any]:
        """Figures for a `Verdict`."""
        return dict(r_hat=self.rhat, ess=self.ess, error=self.errors.mean, sd_error=self.errors.sd)

    @property
    def covariance(self) -> np.ndarray:
        """Covariance of the draws, ``[d, d]``."""
        return np.atleast_2d(np.cov(ravel_draws(self.samples.draws).T))

    def proposal(self) -> Mixture:
        """Return the Gaussian with the moments of the draws and heavier tails."""
        return defensive(ravel_draws(self.samples.draws).mean(0), self.covariance)


def run_chains(
    rng_key: Array,
    posterior: Posterior,
    consortium: Consortium,
    search: ModeSearch,
    corrected: Corrected | None,
    *,
    max_rounds: int,
) -> Chains:
    """Run 64 chains from eight starts until nested R-hat and effective draws are sufficient.

    The initial step size has the target acceptance on a Gaussian; then it adapts to the acceptance
    of all chains. The initial metric is the covariance of the weighted draws or at the mode; then
    it adapts to the draws of the chains. Only draws after adaptation are kept.
    """
    start_key, init_key, run_key = jax.random.split(rng_key, 3)
    centre, size = search.centre, trees.num_elements(search.centre)
    starts, metric = _draw_starts(start_key, search, corrected)
    metric = _shrink_correlations(metric)
    max_steps = 1 if size <= 30 else 3 if size <= 300 else 5
    target = 0.57 if max_steps == 1 else 0.8
    step_size = float(hmc_step_size(size, target, max_steps))
    kernel = _build_kernel(posterior, centre, step_size, max_steps, metric)
    keys = jax.random.split(init_key, NUM_CHAINS)
    positions = jax.vmap(lambda x: trees.cast_like(trees.unravel(x, centre), centre))(
        jnp.asarray(np.repeat(starts, NUM_CHAINS // NUM_STARTS, axis=0), trees.ravel(centre).dtype)
    )
    federation = FederationArgument.of(consortium.federation)
    state = _start_chains(kernel, federation, keys, positions, jnp.int32(0))

    def sample(state: FederatedState, num_rounds: int) -> Samples:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DiagnosisWarning)
            return consortium.sample(
                run_key,
                kernel,
                state=state,
                num_rounds=num_rounds,
                num_chains=NUM_CHAINS,
                progress=False,
            )

    num_rounds = 0
    adaptation: list[Samples] = []
    for number, length in enumerate(ADAPTATION_ROUNDS):
        samples = sample(state, length)
        if samples.num_draws < length:
            raise KeyboardInterrupt  # there are no draws to return
        num_rounds += length
        adaptation.append(samples)
        # A chain reports an acceptance of 1 until its initial trajectory ends.
        gap = float(np.mean(samples.info["acceptance"][:, length // 2 :])) - target
        step_size = step_size * float(np.exp(np.clip(2 * gap / np.sqrt(number + 1), -1, 1)))
        if number % 2:
            metric = _update_metric(metric, [x.draws for x in adaptation[-2:]])
        kernel = _build_kernel(posterior, centre, step_size, max_steps, metric)
        # New trajectories: a change within a trajectory would make it irreversible.
        positions = samples.state.broadcast.position
        state = _start_chains(kernel, federation, keys, positions, jnp.int32(num_rounds))
    segments: list[Samples] = []
    rhat, ess, errors = np.inf, 0.0, MonteCarloErrors(np.inf, np.inf)
    while num_rounds < max(max_rounds, sum(ADAPTATION_ROUNDS) + SEGMENT_ROUNDS):
        samples = sample(state, SEGMENT_ROUNDS)
        interrupted = samples.num_draws < SEGMENT_ROUNDS
        if interrupted and samples.num_draws < MIN_SEGMENT_ROUNDS:
            if segments:
                break
            raise KeyboardInterrupt
        num_rounds, state = num_rounds + samples.num_draws, samples.state
        segments.append(samples)
        rhat, ess, errors = judge_chains(_join([x.draws for x in segments]))
        aborted = num_rounds >= EARLY_ABORT_ROUNDS and rhat > EARLY_ABORT_RHAT
        if interrupted or aborted or is_converged(rhat, ess, errors):
            break
    samples = replace(
        segments[-1],
        draws=_join([x.draws for x in segments]),
        info={
            name: np.concatenate([x.info[name] for x in segments], 1) for name in segments[-1].info
        },
        totals={
            name: np.sum([x.totals[name] for x in (*adaptation, *segments)], axis=0)
            for name in segments[-1].totals
        },
    )
    acceptance = float(np.mean(samples.info["acceptance"]))
    method = f"MALA, {NUM_CHAINS} chains"
    if max_steps > 1:
        method = f"HMC, {NUM_CHAINS} chains, 1 to {max_steps} steps"
    why = (
        f"{sum(ADAPTATION_ROUNDS)} rounds of adaptation excluded; step size {step_size:.3g}, "
        f"{acceptance:.0%} of trajectories accepted (target {target:.0%})"
    )
    return Chains(samples, num_rounds, rhat, ess, errors, method, why)


@compiled
def _start_chains(
    kernel: FederatedKernel,
    federation: FederationArgument,
    keys: Array,
    positions: ArrayTree,
    round_: Array,
) -> FederatedState:
    def start(key: Array, position: ArrayTree) -> FederatedState:
        broadcast, server = kernel.server_init(key, position, federation.federation, ())
        return FederatedState(broadcast._replace(round=round_), server, ())

    return jax.vmap(start)(keys, positions)


def judge_chains(draws: ArrayTree) -> tuple[float, float, MonteCarloErrors]:
    """Return the largest R-hat, the fewest effective draws and the largest Monte Carlo errors."""
    figures = mixing(draws)
    rhat = float(np.nanmax(figures.rhat))
    ess = float(min(np.nanmin(figures.ess_bulk), np.nanmin(figures.ess_tail)))
    return rhat, ess, chain_errors(judged_values(draws)[0])


def is_converged(rhat: float, ess: float, errors: MonteCarloErrors) -> bool:
    return rhat < MAX_RHAT and ess >= MIN_ESS and errors.are_small


def _build_kernel(
    posterior: Posterior, centre: ArrayTree, step_size: float, max_steps: int, metric: np.ndarray
) -> Any:
    covariance: ArrayTree = jnp.asarray(metric, jnp.result_type(float))
    if metric.ndim == 1:
        covariance = trees.unravel(covariance, centre)
    return hmc(
        posterior,
        centre,
        step_size=step_size,
        max_integration_steps=max_steps,
        metric=covariance,
    )


def _draw_starts(
    rng_key: Array, search: ModeSearch, corrected: Corrected | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return starts of chains, ``[8, d]``, and a covariance for the initial metric.

    Starts are weighted draws, selected by the roots of their weights so that they are more
    dispersed than the posterior; without weighted draws, they are drawn around the mode.
    """
    mode = search.modes[0]
    if corrected is None:
        if search.has_mode:
            draws = np.asarray(search.mixture(tail=0.5).draw(rng_key, NUM_STARTS), np.float64)
            return np.asarray(jax.random.permutation(rng_key, draws)), mode.covariance
        sds = np.sqrt(np.diag(mode.covariance) if mode.covariance.ndim == 2 else mode.covariance)
        noise = np.asarray(jax.random.normal(rng_key, (NUM_STARTS, len(sds))), np.float64)
        return mode.flat + 0.3 * sds * noise, mode.covariance
    flat = ravel_draws(jax.tree.map(lambda leaf: leaf[None], corrected.draws))
    root_weights = np.exp((corrected.log_weights - corrected.log_weights.max()) / 2)
    probabilities = jnp.asarray(root_weights / root_weights.sum())
    index = jax.random.choice(rng_key, len(flat), (NUM_STARTS,), replace=False, p=probabilities)
    metric = mode.covariance
    if corrected.ess > ESS_PER_DIMENSION * flat.shape[1] and metric.ndim == 2:
        weights = corrected.weights
        gaps = flat - weights @ flat
        metric = (gaps.T * weights) @ gaps
    return flat[np.asarray(index)], metric


def _shrink_correlations(metric: np.ndarray) -> np.ndarray:
    """Return the metric with correlations shrunk until float32 can factorize it."""
    if metric.ndim == 1:
        return metric
    scale = np.sqrt(np.diag(metric))
    correlation = metric / np.outer(scale, scale)
    if np.linalg.eigvalsh(correlation)[0] > MIN_EIGENVALUE:
        return metric
    shrunk = (1 - SHRINKAGE) * correlation + SHRINKAGE * np.eye(len(scale))
    return np.asarray(shrunk * np.outer(scale, scale))


def _update_metric(metric: np.ndarray, draws: list[ArrayTree]) -> np.ndarray:
    """Return a weighted mean of the covariance of draws and the previous metric.

    A matrix is replaced completely only with ten independent draws per dimension: with fewer, the
    covariance of draws is too narrow in directions that the draws hardly span.
    """
    flat = np.concatenate([ravel_draws(x) for x in draws])
    gaps, num = flat - flat.mean(0), len(flat)
    if metric.ndim == 1:
        trust = num / (num + METRIC_PRIOR)
        covariance = (gaps**2).mean(0)
    else:
        trust = min(1.0, num / ROUNDS_PER_DRAW / (ESS_PER_DIMENSION * flat.shape[1]))
        covariance = gaps.T @ gaps / num
    updated: np.ndarray = trust * covariance + (1 - trust) * metric
    return updated


def _join(parts: list[ArrayTree]) -> ArrayTree:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *parts)
