"""Chains of Hamiltonian Monte Carlo until they agree."""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, FederatedState, Posterior, compiled
from fedmcmc.diagnostics import (
    DiagnosisWarning,
    MonteCarloErrors,
    errors_of_chains,
    judged_values,
    mixing,
)
from fedmcmc.dynamics import hmc_step_size
from fedmcmc.exact import Corrected
from fedmcmc.fitting._modes import Search
from fedmcmc.gaussian import Mixture, defensive
from fedmcmc.kernels import hmc
from fedmcmc.pytrees import trees
from fedmcmc.records import Samples
from fedmcmc.runs import Consortium

NUM_CHAINS, NUM_PLACES = 64, 8
"""Chains, eight from each of eight places: nested R-hat compares the places."""
ADAPTING = (10, 10, 10, 20, 20, 40)
"""Rounds of segments after each of which steps, and every other the metric, are adapted."""
SEGMENT, FEWEST_ROUNDS = 50, 4
"""Rounds of a segment, and of one that was interrupted (Ctrl-C) so that it is judged."""
RHAT, ESS = 1.01, 400.0
HOPELESS_ROUNDS, HOPELESS_RHAT = 600, 1.1
"""Chains that after so many rounds are so far apart will not agree soon."""
PER_DIMENSION = 10
METRIC_PRIOR = 5.0
"""Draws that a diagonal metric counts as when moments of chains replace it."""
LEAST_EIGENVALUE, SHRINKAGE = 1e-5, 1e-4
"""Smallest eigenvalue of a metric's correlations that is left as it is, and their shrinkage."""
ROUNDS_PER_DRAW = 10
"""Rounds of a chain that adapts which count as one independent draw."""


@dataclass(frozen=True)
class Chains:
    """What chains found.

    `samples` are of sampled positions, `num_rounds` counts those of adaptation, too.
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
        """Whether R-hat, effective draws and Monte Carlo errors are as wanted."""
        return self.rhat < RHAT and self.ess >= ESS and self.errors.are_small

    @property
    def wanted(self) -> str:
        """What R-hat and effective draws are to be, in words."""
        return f"wanted: R-hat below {RHAT:g}, {ESS:g} effective draws"

    @property
    def figures(self) -> dict[str, Any]:
        """The figures of a `Verdict`."""
        return dict(r_hat=self.rhat, ess=self.ess, error=self.errors.mean, sd_error=self.errors.sd)

    @property
    def covariance(self) -> np.ndarray:
        """Covariance of the draws, ``[d, d]``."""
        return np.atleast_2d(np.cov(_flat(self.samples.draws).T))

    def proposal(self) -> Mixture:
        """Return a Gaussian of the draws' moments, with heavier tails."""
        return defensive(_flat(self.samples.draws).mean(0), self.covariance)


def run_chains(
    rng_key: Array,
    posterior: Posterior,
    consortium: Consortium,
    search: Search,
    corrected: Corrected | None,
    *,
    max_rounds: int,
) -> Chains:
    """Run 64 chains from eight places until nested R-hat and effective sizes are as wanted.

    Steps are those that are accepted as often as wanted on a Gaussian, then adapted to the
    acceptance of all chains; the metric is the covariance of the weighted draws, or that at the
    mode, then that of the chains' own draws. What is kept was drawn after both were fixed.
    """
    place_key, init_key, run_key = jax.random.split(rng_key, 3)
    like, size = search.centre, trees.num_elements(search.centre)
    places, metric = _places(place_key, search, corrected)
    metric = _well_conditioned(metric)
    most = 1 if size <= 30 else 3 if size <= 300 else 5
    target = 0.57 if most == 1 else 0.8
    step = float(hmc_step_size(size, target, most))
    kernel = _kernel(posterior, search.centre, step, most, metric, like)
    keys = jax.random.split(init_key, NUM_CHAINS)
    positions = jax.vmap(lambda x: trees.cast_like(trees.unravel(x, like), like))(
        jnp.asarray(np.repeat(places, NUM_CHAINS // NUM_PLACES, axis=0), trees.ravel(like).dtype)
    )
    federation = consortium.federation

    @compiled
    def started(kernel: Any, positions: ArrayTree, round_: Array) -> FederatedState:
        """Return chains before their first trajectories, with the random numbers of a round."""

        def begin(key: Array, position: ArrayTree) -> FederatedState:
            broadcast, server = kernel.server_init(key, position, federation, ())
            return FederatedState(broadcast._replace(round=round_), server, ())

        return jax.vmap(begin)(keys, positions)

    state = started(kernel, positions, jnp.int32(0))

    def ran(state: Any, num_rounds: int) -> Samples:
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

    done, parts = 0, []
    for number, length in enumerate(ADAPTING):
        samples = ran(state, length)
        if samples.num_draws < length:
            raise KeyboardInterrupt  # nothing was kept yet
        done = done + length
        parts.append(samples)
        # Before its first trajectory ends, a chain reports an acceptance of one.
        gap = float(np.mean(samples.info["acceptance"][:, length // 2 :])) - target
        step = step * float(np.exp(np.clip(2 * gap / np.sqrt(number + 1), -1, 1)))
        if number % 2:
            metric = _moved_metric(metric, [part.draws for part in parts[-2:]])
        kernel = _kernel(posterior, search.centre, step, most, metric, like)
        # A trajectory is reversible only if step and metric are those that it began with.
        state = started(kernel, samples.state.broadcast.position, jnp.int32(done))
    adapted: list[Samples] = parts
    kept: list[Samples] = []
    rhat, ess, errors = np.inf, 0.0, MonteCarloErrors(np.inf, np.inf)
    while done < max(max_rounds, sum(ADAPTING) + SEGMENT):
        samples = ran(state, SEGMENT)
        interrupted = samples.num_draws < SEGMENT
        if interrupted and samples.num_draws < FEWEST_ROUNDS:
            if kept:
                break
            raise KeyboardInterrupt
        done, state = done + samples.num_draws, samples.state
        kept.append(samples)
        rhat, ess, errors = judge_chains(_joined([part.draws for part in kept]))
        hopeless = done >= HOPELESS_ROUNDS and rhat > HOPELESS_RHAT
        if interrupted or hopeless or (rhat < RHAT and ess >= ESS and errors.are_small):
            break
    whole = replace(
        kept[-1],
        draws=_joined([part.draws for part in kept]),
        info={
            name: np.concatenate([part.info[name] for part in kept], 1) for name in kept[-1].info
        },
        totals={
            name: np.sum([part.totals[name] for part in (*adapted, *kept)], axis=0)
            for name in kept[-1].totals
        },
    )
    accepted = float(np.mean(whole.info["acceptance"]))
    method = (
        f"HMC, {NUM_CHAINS} chains, 1 to {most} steps" if most > 1 else f"MALA, {NUM_CHAINS} chains"
    )
    why = (
        f"{sum(ADAPTING)} rounds of adaptation left out; step {step:.3g}, {accepted:.0%} of "
        f"trajectories accepted (wanted {target:.0%})"
    )
    return Chains(whole, done, rhat, ess, errors, method, why)


def judge_chains(draws: ArrayTree) -> tuple[float, float, MonteCarloErrors]:
    """Return the largest R-hat, the fewest effective draws and the largest Monte Carlo errors."""
    found = mixing(draws)
    rhat = float(np.nanmax(found.rhat))
    ess = float(min(np.nanmin(found.ess_bulk), np.nanmin(found.ess_tail)))
    return rhat, ess, errors_of_chains(judged_values(draws)[0])


def _kernel(
    posterior: Posterior,
    centre: ArrayTree,
    step: float,
    most: int,
    metric: np.ndarray,
    like: ArrayTree,
) -> Any:
    given: ArrayTree = jnp.asarray(metric, jnp.result_type(float))
    if metric.ndim == 1:
        given = trees.unravel(given, like)
    return hmc(posterior, centre, step_size=step, max_integration_steps=most, metric=given)


def _places(
    rng_key: Array, search: Search, corrected: Corrected | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return where chains start, ``[8, d]``, and a covariance to step by.

    Of weighted draws, chosen by the roots of their weights, so that they lie wider apart than the
    posterior; else around the mode.
    """
    mode = search.modes[0]
    if corrected is None:
        mixture = search.mixture(tail=0.5) if search.found else None
        if mixture is not None:
            draws = np.asarray(mixture.draw(rng_key, NUM_PLACES), np.float64)
            return np.asarray(jax.random.permutation(rng_key, draws)), mode.covariance
        root = np.sqrt(np.diag(mode.covariance) if mode.covariance.ndim == 2 else mode.covariance)
        noise = np.asarray(jax.random.normal(rng_key, (NUM_PLACES, len(root))), np.float64)
        return mode.flat + 0.3 * root * noise, mode.covariance
    flat = np.asarray(_flat(jax.tree.map(lambda leaf: leaf[None], corrected.draws)))
    weights = np.exp((corrected.log_weights - corrected.log_weights.max()) / 2)
    index = jax.random.choice(
        rng_key, len(flat), (NUM_PLACES,), replace=False, p=jnp.asarray(weights / weights.sum())
    )
    metric = mode.covariance
    if corrected.ess > PER_DIMENSION * flat.shape[1] and metric.ndim == 2:
        own = corrected.weights
        gaps = flat - own @ flat
        metric = (gaps.T * own) @ gaps
    return flat[np.asarray(index)], metric


def _well_conditioned(metric: np.ndarray) -> np.ndarray:
    """Return a matrix whose correlations are shrunk so far that float32 can factorize it."""
    if metric.ndim == 1:
        return metric
    scale = np.sqrt(np.diag(metric))
    correlation = metric / np.outer(scale, scale)
    if np.linalg.eigvalsh(correlation)[0] > LEAST_EIGENVALUE:
        return metric
    shrunk = (1 - SHRINKAGE) * correlation + SHRINKAGE * np.eye(len(scale))
    return np.asarray(shrunk * np.outer(scale, scale))


def _moved_metric(metric: np.ndarray, draws: list[ArrayTree]) -> np.ndarray:
    """Return a mean of the covariance of draws and of the metric so far.

    A matrix moves all the way only with ten independent draws per dimension: with fewer, the
    covariance of draws is narrow in directions that they hardly span.
    """
    flat = np.concatenate([_flat(each) for each in draws])
    gaps, num = flat - flat.mean(0), len(flat)
    if metric.ndim == 1:
        trust = num / (num + METRIC_PRIOR)
        found = (gaps**2).mean(0)
    else:
        trust = min(1.0, num / ROUNDS_PER_DRAW / (PER_DIMENSION * flat.shape[1]))
        found = gaps.T @ gaps / num
    moved: np.ndarray = trust * found + (1 - trust) * metric
    return moved


def _flat(draws: ArrayTree) -> np.ndarray:
    """Return draws ``[num_chains, num_draws, *event]`` as ``[num, d]`` float64."""
    return np.concatenate(
        [
            np.asarray(leaf, np.float64).reshape(leaf.shape[0] * leaf.shape[1], -1)
            for leaf in jax.tree.leaves(draws)
        ],
        axis=1,
    )


def _joined(parts: list[ArrayTree]) -> ArrayTree:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *parts)
