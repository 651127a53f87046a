"""Tempering: from an approximation to the posterior in steps, for several modes and the evidence.

Source: Dau and Chopin (2022), Waste-free sequential Monte Carlo.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import logsumexp

from fedmcmc._checks import expect, positive_integer
from fedmcmc._types import (
    Absent,
    ArrayTree,
    Posterior,
    WithFunctions,
    as_functions,
    compiled,
    mapped,
)
from fedmcmc.diagnostics import SamplingWarning
from fedmcmc.exact._correct import Target, first_proposal
from fedmcmc.gaussian import Gaussian, Mixture
from fedmcmc.kernels import BELOW, Evaluated, Points
from fedmcmc.pytrees import in_single_precision, trees
from fedmcmc.random import as_key
from fedmcmc.records import Samples
from fedmcmc.runs import as_consortium

SHARE = 0.5
"""Of the states: how many effective ones a step of the temperature leaves."""
MOST_TEMPERATURES = 200
SCALES = (1.0, 0.25)
"""Of random-walk proposals in turns, relative to what is best for a Gaussian: far and near."""
LEAST_ACCEPTED = 0.02
MOST_INVALID = 0.01


@dataclass(frozen=True, repr=False)
class Tempered(WithFunctions):
    """Draws of the posterior and its evidence, by sequential Monte Carlo.

    Attributes
    ----------
    draws
        Pytree of NumPy arrays, leaves ``[num_islands * num_seeds * length, *event]``, of equal
        weight, in the user's coordinates, unconstrained: one island after another, each with
        `num_seeds` chains of `length` states, one after another.
    log_evidence, log_evidence_sd
        Log of ``p(data)`` with an estimate of its standard error, from how islands differ, or the
        chains of a temperature if there is one island. Right only if log prior and log likelihood
        are normalized, as those of `fedmcmc.from_numpyro` are; nothing can check it. NaN if the
        model's prior is improper.
    temperatures
        Powers of the posterior, from zero to one.
    acceptance
        Share of accepted moves, one per temperature above zero.
    totals
        ``rounds`` of communication, ``bits_up`` and ``bits_down`` of all clients.
    constrain_fn
        Unconstrained position to the user's parameters, ``None`` for the identity.
    num_islands
        Number of groups of chains between which no state moves.
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
        """Return figures and cost."""
        num = len(jax.tree.leaves(self.draws)[0])
        return (
            f"Tempered: {num:,} draws, {len(self.acceptance)} temperatures, moves accepted with "
            f"{min(self.acceptance):.2g} at least, {self.totals['rounds']:,} rounds\n"
            f"log evidence {self.log_evidence:.4g} (sd {self.log_evidence_sd:.2g}, if prior and "
            f"likelihood are normalized)"
        )

    @property
    def islands(self) -> ArrayTree:
        """The draws by island, leaves ``[num_islands, num_seeds * length, *event]``."""
        return jax.tree.map(
            lambda leaf: leaf.reshape(self.num_islands, -1, *leaf.shape[1:]), self.draws
        )

    @property
    def constrained(self) -> ArrayTree:
        """The draws in the user's parameters, in the order of `draws`."""
        if self.constrain_fn is None:
            return self.draws
        if isinstance(self.constrain_fn, Absent):
            return self.computed("constrained", self.constrain_fn)
        given = jax.tree.map(jnp.asarray, self.draws)
        return jax.tree.map(np.asarray, mapped(as_functions(self.constrain_fn), given, num_axes=1))


@in_single_precision
def tempered(
    rng_key: Array,
    posterior: Posterior,
    data: Any,
    approximation: Gaussian | Mixture | Samples,
    *,
    num_seeds: int = 100,
    length: int = 20,
    num_islands: int = 1,
    centre: ArrayTree | None = None,
) -> Tempered:
    """Sample the posterior by way of ``approximation**(1 - b) * posterior**b``, b from 0 to 1.

    At each ``b``, chosen so that half of the states stay effective, `num_seeds` states are drawn by
    weight and each begins a chain of `length` states, all of which are kept. A step of all chains
    is one exchange with all clients, who send log likelihoods alone. Slower than
    `fedmcmc.hmc`, and for what that cannot do: modes that no chain comes across between, as long as
    the approximation covers them, and the evidence.

    Parameters
    ----------
    rng_key
        Of all draws.
    posterior, data, approximation, centre
        As those of `fedmcmc.correct`. A wider approximation finds more modes, for more
        temperatures.
    num_seeds, length
        Number of chains of an island at each temperature, and of states in a chain: ``num_seeds *
        length`` draws per island, and ``length - 1`` exchanges per temperature.
    num_islands
        Number of groups of chains that share temperatures and proposals but no states, so that
        their differences show the Monte Carlo error. They share all exchanges.

    Returns
    -------
    Tempered
        The evidence is unbiased for fixed temperatures, consistent for these.

    Raises
    ------
    ValueError
        As `fedmcmc.correct`; if the posterior's density is zero at all draws of the approximation.
    RuntimeError
        If 200 temperatures do not reach the posterior.

    Warns
    -----
    SamplingWarning
        If chains hardly move at some temperature, or log densities are NaN or infinite at more than
        one point in a hundred.

    References
    ----------
    Dau and Chopin (2022), Waste-free sequential Monte Carlo.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> wide = fedmcmc.Gaussian.from_moments(jnp.array(-2.0), variance=jnp.array(9.0))
    >>> found = tempered(jax.random.key(0), posterior, data, wide)
    >>> print(round(float(found.draws.mean()), 1), round(float(found.draws.std()), 1))
    0.3 0.3
    """
    expect(posterior, Posterior, "posterior")
    num_seeds = positive_integer(num_seeds, "num_seeds")
    length = positive_integer(length, "length")
    if num_seeds < 2 or length < 2:
        raise ValueError(f"num_seeds and length must be 2 at least, got {num_seeds} and {length}.")
    proposal, middle = first_proposal(approximation, 0.2, 5.0)
    centre = middle if centre is None else trees.as_floats(centre, "centre")
    if trees.num_elements(centre) != proposal.means.shape[1]:
        raise ValueError(
            f"The approximation has {proposal.means.shape[1]} dimensions, and centre "
            f"{trees.num_elements(centre)}."
        )
    num_islands = positive_integer(num_islands, "num_islands")
    path = _Path(Target(as_functions(posterior), as_consortium(data), centre), proposal)
    words = np.asarray(jax.random.bits(as_key(rng_key), (4,), jnp.uint32))
    rng = np.random.default_rng(words.tolist())
    num = num_seeds * length
    states = path.at(_drawn(proposal, rng, num_islands * num))
    if not np.isfinite(states.log_ratio).any():
        raise ValueError(
            f"The posterior's density is zero or not a number at all {num_islands * num} draws of "
            "the approximation: it is that of another model, or far off."
        )
    powers, acceptance = [0.0], []
    log_evidence = np.zeros(num_islands)  # one estimate per island
    variance = 0.0  # of the log evidence, by the chains of all islands
    chain_length = 1  # the first states are independent
    while powers[-1] < 1:
        if len(powers) > MOST_TEMPERATURES:
            raise RuntimeError(
                f"{MOST_TEMPERATURES} temperatures came to a power of {powers[-1]:.3g} of the "
                "posterior: the approximation is too far from it."
            )
        power = _next_power(powers[-1], states.log_ratio)
        log_weights = ((power - powers[-1]) * states.log_ratio).reshape(num_islands, num)
        total = logsumexp(log_weights)
        log_evidence += logsumexp(log_weights, axis=1) - np.log(num)
        of_chains = np.exp(log_weights - total).reshape(-1, chain_length).mean(1)
        of_chains /= of_chains.mean()
        variance += of_chains.var(ddof=1) / len(of_chains)
        root = _root_of_covariance(states.points, np.exp(log_weights - total).ravel())
        places = [
            first + _systematic(np.exp(own - logsumexp(own)), num_seeds, rng)
            for first, own in zip(range(0, num_islands * num, num), log_weights, strict=True)
            if np.isfinite(own).any()  # an island without weight gets the seeds of the others
        ]
        chosen = np.concatenate(places)
        chosen = np.resize(chosen, num_islands * num_seeds)
        states, accepted = path.move(states.take(chosen), power, root, length, rng)
        powers.append(power)
        acceptance.append(accepted)
        chain_length = length
    path.warn(acceptance)
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
    """Points ``[num, d]`` with log densities, ``[num]``, of posterior and approximation."""

    points: np.ndarray
    log_target: np.ndarray
    log_start: np.ndarray

    @property
    def log_ratio(self) -> np.ndarray:
        return self.log_target - self.log_start

    def log_density(self, power: float) -> np.ndarray:
        return power * self.log_target + (1 - power) * self.log_start

    def take(self, places: np.ndarray) -> "_States":
        return _States(self.points[places], self.log_target[places], self.log_start[places])

    def where(self, chosen: np.ndarray, other: "_States") -> "_States":
        """Return these states where `chosen`, and others elsewhere."""
        return _States(
            np.where(chosen[:, None], self.points, other.points),
            np.where(chosen, self.log_target, other.log_target),
            np.where(chosen, self.log_start, other.log_start),
        )


class _Path:
    """The way from an approximation to the posterior, and what was asked on it."""

    def __init__(self, target: Target, start: Mixture) -> None:
        self.target, self.start = target, start
        self.rounds, self.bits_up, self.bits_down = 0, 0.0, 0.0
        self.num_points = self.num_invalid = 0
        self.log_density_at_centre = np.nan

    def at(self, points: np.ndarray) -> _States:
        """Ask all clients for their log likelihoods at points, ``[num, d]``."""
        centre = self.target.centre
        flat = jnp.asarray(points, trees.ravel(centre).dtype)
        positions = trees.cast_like(jax.vmap(lambda x: trees.unravel(x, centre))(flat), centre)
        asked = self.target.consortium.ask(self.target.question, Points(positions, centre))
        answer: Evaluated = asked.value
        prior, prior_at_centre = _priors(self.target.posterior, positions, centre)
        value = np.asarray(answer.value, np.float64)
        log_target = np.where(value < BELOW, -np.inf, value + np.asarray(prior, np.float64))
        log_target[~(log_target < np.inf)] = -np.inf  # NaN too
        points = np.asarray(flat, np.float64)  # as the clients had them
        self.rounds += asked.rounds
        self.bits_up += asked.bits_up
        self.bits_down += asked.bits_down
        self.num_points += len(points)
        self.num_invalid += int(answer.invalid.value)
        at_centre = np.asarray(answer.at_centre.value, np.float64).sum() + float(prior_at_centre)
        if not np.isfinite(at_centre):
            raise ValueError(
                "The log density at the center of the approximation is not finite. Pass centre=, a "
                "position where it is."
            )
        self.log_density_at_centre = at_centre
        return _States(points, log_target, self.start.log_density(points))

    def move(
        self, seeds: _States, power: float, root: np.ndarray, length: int, rng: np.random.Generator
    ) -> tuple[_States, float]:
        """Return the states of chains from `seeds` that leave a power of the target invariant."""
        now, chains, accepted = seeds, [seeds], []
        num, size = seeds.points.shape
        for step in range(length - 1):
            scale = SCALES[step % len(SCALES)] * 2.38 / np.sqrt(size)
            tried = self.at(now.points + scale * rng.normal(size=(num, size)) @ root.T)
            with np.errstate(invalid="ignore"):  # minus infinity less itself
                log_ratio = tried.log_density(power) - now.log_density(power)
            taken = np.log(rng.random(num)) < log_ratio
            now = tried.where(taken, now)
            chains.append(now)
            accepted.append(taken.mean())
        # One chain after another.
        states = _States(
            np.stack([x.points for x in chains], axis=1).reshape(-1, size),
            np.stack([x.log_target for x in chains], axis=1).ravel(),
            np.stack([x.log_start for x in chains], axis=1).ravel(),
        )
        return states, float(np.mean(accepted))

    def warn(self, acceptance: list[float]) -> None:
        """Warn where chains hardly moved, or log densities were no numbers."""
        if min(acceptance) < LEAST_ACCEPTED:
            warnings.warn(
                f"tempered: at a temperature moves were accepted with a share of "
                f"{min(acceptance):.2g}, so that chains hardly moved: take a larger length.",
                SamplingWarning,
                stacklevel=4,
            )
        if self.num_invalid > MOST_INVALID * self.num_points:
            warnings.warn(
                f"tempered: the log density is NaN or infinite at {self.num_invalid} of "
                f"{self.num_points} points, which get no weight.",
                SamplingWarning,
                stacklevel=4,
            )


@compiled
def _priors(posterior: Posterior, points: ArrayTree, centre: ArrayTree) -> tuple[Array, Array]:
    at_centre = posterior.logprior_fn(centre)
    return jax.vmap(lambda point: posterior.logprior_fn(point) - at_centre)(points), at_centre


def _drawn(mixture: Mixture, rng: np.random.Generator, num: int) -> np.ndarray:
    """Draw points ``[num, d]`` of a mixture, independently."""
    key = jax.random.key(int(rng.integers(2**32)))
    return np.asarray(mixture.placed(mixture.standard_draws(key, num)), np.float64)


def _next_power(power: float, log_ratio: np.ndarray) -> float:
    """Return the power to which half of the states that have any weight stay effective."""
    wanted = SHARE * np.isfinite(log_ratio).sum()

    def effective(to: float) -> float:
        log_weights = (to - power) * log_ratio
        return float(np.exp(2 * logsumexp(log_weights) - logsumexp(2 * log_weights)))

    if effective(1.0) >= wanted:
        return 1.0
    low, high = power, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if effective(middle) >= wanted else (low, middle)
    return high


def _root_of_covariance(points: np.ndarray, weights: np.ndarray) -> np.ndarray:
    gaps = points - weights @ points
    covariance = (gaps.T * weights) @ gaps
    ridge = 1e-10 * np.trace(covariance) / len(covariance)
    root: np.ndarray = np.linalg.cholesky(covariance + ridge * np.eye(len(covariance)))
    return root


def _systematic(weights: np.ndarray, num: int, rng: np.random.Generator) -> np.ndarray:
    """Return `num` places, each as often as its weight, rounded up or down."""
    ends = np.cumsum(weights)
    places = np.searchsorted(ends, (np.arange(num) + rng.random()) / num * ends[-1])
    return np.minimum(places, len(weights) - 1)
