"""Tempering from an approximation to the posterior, for several modes and for the evidence.

Source: Dau and Chopin (2022), Waste-free sequential Monte Carlo.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import logsumexp

from fedmcmc._checks import expect, positive_integer
from fedmcmc.data import FederatedData
from fedmcmc.diagnostics import SamplingWarning
from fedmcmc.exact._correct import CorrectionTarget, make_proposal
from fedmcmc.gaussian import Gaussian, Mixture
from fedmcmc.kernels import LOG_ZERO_THRESHOLD, Evaluated, Points
from fedmcmc.pytrees import in_single_precision, trees
from fedmcmc.random import as_key
from fedmcmc.records import Samples
from fedmcmc.runs import Consortium, as_consortium
from fedmcmc.types import (
    ArrayTree,
    MissingFunction,
    Posterior,
    WithFunctions,
    as_functions,
    compiled,
    vmap_axes,
)

EFFECTIVE_SHARE = 0.5
"""Share of states that stay effective after a step of the temperature."""
MAX_TEMPERATURES = 200
SCALES = (1.0, 0.25)
"""Alternating scales of random-walk proposals, relative to the best scale for a Gaussian."""
MIN_ACCEPTANCE = 0.02
MAX_INVALID_SHARE = 0.01


@dataclass(frozen=True, repr=False)
class Tempered(WithFunctions):
    """Draws of the posterior and its evidence from sequential Monte Carlo.

    Attributes
    ----------
    draws
        Draws of equal weight in the user's unconstrained coordinates, a pytree of NumPy arrays with
        leaves ``[num_islands * num_seeds * length, *event]``: islands, chains and states, in this
        order.
    log_evidence, log_evidence_sd
        Log of ``p(data)`` and its standard error, estimated from differences between islands, or
        between chains if there is one island; NaN if the prior is improper. The value is correct
        only if log prior and log likelihood are normalized, as with `fedmcmc.from_numpyro`; no
        check can establish this.
    temperatures
        Powers of the posterior, from zero to one.
    acceptance
        Share of accepted moves per temperature above zero.
    totals
        ``rounds`` of communication, ``bits_up`` and ``bits_down`` of all clients.
    constrain_fn
        Function from an unconstrained position to the user's parameters; ``None`` for the identity.
    num_islands
        Number of groups of chains that exchange no states.
    """

    draws: ArrayTree
    log_evidence: float
    log_evidence_sd: float
    temperatures: tuple[float, ...]
    acceptance: tuple[float, ...]
    totals: dict[str, float]
    constrain_fn: Callable[[ArrayTree], ArrayTree] | None = field(default=None)
    num_islands: int = 1

    FUNCTIONS: ClassVar[dict[str, str]] = {"constrain_fn": "constrained"}

    def __repr__(self) -> str:
        """Return the number of draws, the cost and the evidence."""
        num = len(jax.tree.leaves(self.draws)[0])
        return (
            f"Tempered: {num:,} draws, {len(self.acceptance)} temperatures, acceptance at least "
            f"{min(self.acceptance):.2g}, {self.totals['rounds']:,} rounds\n"
            f"log evidence {self.log_evidence:.4g} (sd {self.log_evidence_sd:.2g}, if prior and "
            f"likelihood are normalized)"
        )

    @property
    def islands(self) -> ArrayTree:
        """Draws per island, leaves ``[num_islands, num_seeds * length, *event]``."""
        return jax.tree.map(
            lambda leaf: leaf.reshape(self.num_islands, -1, *leaf.shape[1:]), self.draws
        )

    @property
    def constrained(self) -> ArrayTree:
        """Draws in the user's parameters, in the order of `draws`."""
        if self.constrain_fn is None:
            return self.draws
        if isinstance(self.constrain_fn, MissingFunction):
            return self.computed("constrained", self.constrain_fn)
        draws = jax.tree.map(jnp.asarray, self.draws)
        return jax.tree.map(
            np.asarray, vmap_axes(as_functions(self.constrain_fn), draws, num_axes=1)
        )


@in_single_precision
def tempered(
    rng_key: Array,
    posterior: Posterior,
    data: FederatedData | Consortium,
    approximation: Gaussian | Mixture | Samples,
    *,
    num_seeds: int = 100,
    length: int = 20,
    num_islands: int = 1,
    centre: ArrayTree | None = None,
) -> Tempered:
    """Sample ``approximation**(1 - b) * posterior**b`` while ``b`` rises from 0 to 1.

    Each step raises ``b`` until half of the states stay effective, resamples `num_seeds` states by
    weight, and starts a chain of `length` states from each; all states are kept (Dau and Chopin
    2022, Waste-free sequential Monte Carlo). It samples modes between which no chain moves, if the
    approximation covers them, and estimates the evidence. A `SamplingWarning` follows if chains
    hardly move.

    Parameters
    ----------
    rng_key, posterior, data, approximation, centre
        See `fedmcmc.correct`.
    num_seeds, length
        Number of chains per island at each temperature, and number of states per chain; a
        temperature takes ``length - 1`` exchanges, in which clients send only log likelihoods.
    num_islands
        Number of groups of chains that share exchanges, temperatures and proposals, but no states.
        Differences between groups estimate the Monte Carlo error.

    Raises
    ------
    ValueError, RuntimeError
        If the approximation does not fit, or 200 temperatures do not reach the posterior.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> wide = fedmcmc.Gaussian.from_moments(jnp.array(-2.0), variance=jnp.array(9.0))
    >>> round(float(tempered(jax.random.key(0), posterior, data, wide).draws.mean()), 1)
    0.3
    """
    expect(posterior, Posterior, "posterior")
    num_seeds = positive_integer(num_seeds, "num_seeds")
    length = positive_integer(length, "length")
    if num_seeds < 2 or length < 2:
        raise ValueError(f"num_seeds and length must be at least 2, got {num_seeds} and {length}.")
    proposal, centre = make_proposal(approximation, centre)
    num_islands = positive_integer(num_islands, "num_islands")
    path = _Path(CorrectionTarget(as_functions(posterior), as_consortium(data), centre), proposal)
    words = np.asarray(jax.random.bits(as_key(rng_key), (4,), jnp.uint32))
    rng = np.random.default_rng(words.tolist())
    num = num_seeds * length
    key = jax.random.key(int(rng.integers(2**32)))
    points = proposal.placed(proposal.standard_draws(key, num_islands * num))
    states = path.evaluate(np.asarray(points, np.float64))
    if not np.isfinite(states.log_ratio).any():
        raise ValueError(
            f"The posterior's density is zero or not a number at all {num_islands * num} draws of "
            f"the approximation. Pass an approximation of the same model that overlaps the "
            f"posterior."
        )
    powers, acceptance = [0.0], []
    log_evidence = np.zeros(num_islands)
    variance = 0.0  # of the log evidence, estimated from the chains of all islands
    chain_length = 1  # the initial states are independent
    while powers[-1] < 1:
        if len(powers) > MAX_TEMPERATURES:
            raise RuntimeError(
                f"After {MAX_TEMPERATURES} temperatures the power of the posterior is only "
                f"{powers[-1]:.3g}: pass an approximation that is closer to the posterior."
            )
        power = _choose_power(powers[-1], states.log_ratio)
        log_weights = ((power - powers[-1]) * states.log_ratio).reshape(num_islands, num)
        total = logsumexp(log_weights)
        log_evidence += logsumexp(log_weights, axis=1) - np.log(num)
        chain_weights = np.exp(log_weights - total).reshape(-1, chain_length).mean(1)
        chain_weights /= chain_weights.mean()
        variance += chain_weights.var(ddof=1) / len(chain_weights)
        root = _factorize_covariance(states.points, np.exp(log_weights - total).ravel())
        seeds = [
            start + _resample(np.exp(island - logsumexp(island)), num_seeds, rng)
            for start, island in zip(range(0, num_islands * num, num), log_weights, strict=True)
            if np.isfinite(island).any()  # an island without weight copies the others' seeds
        ]
        index = np.resize(np.concatenate(seeds), num_islands * num_seeds)
        states, acceptance_rate = path.move(states.take(index), power, root, length, rng)
        powers.append(power)
        acceptance.append(acceptance_rate)
        chain_length = length
    path.warn_of_problems(acceptance)
    log_mean = float(logsumexp(log_evidence) - np.log(num_islands))
    if num_islands > 1:
        variance = float(np.var(np.exp(log_evidence - log_mean), ddof=1)) / num_islands
    has_evidence = not posterior.improper
    return Tempered(
        draws=path.target.in_users_coordinates(states.points),
        log_evidence=log_mean + path.log_density_at_centre if has_evidence else np.nan,
        log_evidence_sd=float(np.sqrt(variance)) if has_evidence else np.nan,
        temperatures=tuple(powers),
        acceptance=tuple(acceptance),
        totals={"rounds": path.rounds, "bits_up": path.bits_up, "bits_down": path.bits_down},
        constrain_fn=posterior.constrain_fn,
        num_islands=num_islands,
    )


@dataclass(frozen=True)
class _States:
    """Points ``[num, d]`` with log densities ``[num]`` of the posterior and the approximation."""

    points: np.ndarray
    log_target: np.ndarray
    log_start: np.ndarray

    @property
    def log_ratio(self) -> np.ndarray:
        return self.log_target - self.log_start

    def log_density(self, power: float) -> np.ndarray:
        return power * self.log_target + (1 - power) * self.log_start

    def take(self, index: np.ndarray) -> "_States":
        return _States(self.points[index], self.log_target[index], self.log_start[index])

    def where(self, mask: np.ndarray, alternative: "_States") -> "_States":
        """Return these states where `mask` is true, else `alternative`."""
        return _States(
            np.where(mask[:, None], self.points, alternative.points),
            np.where(mask, self.log_target, alternative.log_target),
            np.where(mask, self.log_start, alternative.log_start),
        )


class _Path:
    """Path of densities from an approximation to the posterior, with the cost so far."""

    def __init__(self, target: CorrectionTarget, start: Mixture) -> None:
        self.target, self.start = target, start
        self.rounds, self.bits_up, self.bits_down = 0, 0.0, 0.0
        self.num_points = self.num_invalid = 0
        self.log_density_at_centre = np.nan

    def evaluate(self, points: np.ndarray) -> _States:
        """Evaluate points ``[num, d]`` in one exchange with all clients."""
        centre = self.target.centre
        flat = jnp.asarray(points, trees.ravel(centre).dtype)
        positions = trees.cast_like(jax.vmap(lambda x: trees.unravel(x, centre))(flat), centre)
        reply = self.target.consortium.ask(self.target.question, Points(positions, centre))
        answer: Evaluated = reply.value
        prior, prior_at_centre = _evaluate_priors(self.target.posterior, positions, centre)
        value = np.asarray(answer.value, np.float64)
        log_target = np.where(
            value < LOG_ZERO_THRESHOLD, -np.inf, value + np.asarray(prior, np.float64)
        )
        log_target[~(log_target < np.inf)] = -np.inf  # also replaces NaN
        points = np.asarray(flat, np.float64)  # rounded as the clients received them
        self.rounds += reply.rounds
        self.bits_up += reply.bits_up
        self.bits_down += reply.bits_down
        self.num_points += len(points)
        self.num_invalid += int(answer.invalid.value)
        self.log_density_at_centre = self.target.log_density_at_centre(answer, prior_at_centre)
        return _States(points, log_target, self.start.log_density(points))

    def move(
        self, seeds: _States, power: float, root: np.ndarray, length: int, rng: np.random.Generator
    ) -> tuple[_States, float]:
        """Run chains from `seeds` that leave a tempered density invariant; return all states."""
        current, chains, acceptance = seeds, [seeds], []
        num, size = seeds.points.shape
        for step in range(length - 1):
            scale = SCALES[step % len(SCALES)] * 2.38 / np.sqrt(size)
            points = current.points + scale * rng.normal(size=(num, size)) @ root.T
            proposed = self.evaluate(points)
            with np.errstate(invalid="ignore"):  # minus infinity minus itself is NaN
                log_ratio = proposed.log_density(power) - current.log_density(power)
            accept = np.log(rng.random(num)) < log_ratio
            current = proposed.where(accept, current)
            chains.append(current)
            acceptance.append(accept.mean())
        states = _States(
            np.stack([x.points for x in chains], axis=1).reshape(-1, size),
            np.stack([x.log_target for x in chains], axis=1).ravel(),
            np.stack([x.log_start for x in chains], axis=1).ravel(),
        )
        return states, float(np.mean(acceptance))

    def warn_of_problems(self, acceptance: list[float]) -> None:
        """Warn if chains hardly moved or many log densities were NaN or infinite."""
        if min(acceptance) < MIN_ACCEPTANCE:
            warnings.warn(
                f"tempered: chains hardly moved at a temperature, where only a share of "
                f"{min(acceptance):.2g} of the moves was accepted: increase length.",
                SamplingWarning,
                stacklevel=4,
            )
        if self.num_invalid > MAX_INVALID_SHARE * self.num_points:
            warnings.warn(
                f"tempered: the log density is NaN or infinite at {self.num_invalid} of "
                f"{self.num_points} points, which get no weight.",
                SamplingWarning,
                stacklevel=4,
            )


@compiled
def _evaluate_priors(
    posterior: Posterior, points: ArrayTree, centre: ArrayTree
) -> tuple[Array, Array]:
    at_centre = posterior.logprior_fn(centre)
    return jax.vmap(lambda point: posterior.logprior_fn(point) - at_centre)(points), at_centre


def _choose_power(power: float, log_ratio: np.ndarray) -> float:
    """Return the largest power at which half of the states of positive weight stay effective."""
    min_ess = EFFECTIVE_SHARE * np.isfinite(log_ratio).sum()

    def ess(next_power: float) -> float:
        log_weights = (next_power - power) * log_ratio
        return float(np.exp(2 * logsumexp(log_weights) - logsumexp(2 * log_weights)))

    if ess(1.0) >= min_ess:
        return 1.0
    low, high = power, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if ess(middle) >= min_ess else (low, middle)
    return high


def _factorize_covariance(points: np.ndarray, weights: np.ndarray) -> np.ndarray:
    gaps = points - weights @ points
    covariance = (gaps.T * weights) @ gaps
    ridge = 1e-10 * np.trace(covariance) / len(covariance)
    root: np.ndarray = np.linalg.cholesky(covariance + ridge * np.eye(len(covariance)))
    return root


def _resample(weights: np.ndarray, num: int, rng: np.random.Generator) -> np.ndarray:
    """Return `num` indices by systematic resampling: counts are weights, rounded up or down."""
    cumulative = np.cumsum(weights)
    index = np.searchsorted(cumulative, (np.arange(num) + rng.random()) / num * cumulative[-1])
    return np.minimum(index, len(weights) - 1)
