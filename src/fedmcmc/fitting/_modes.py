"""Modes and curvature of the posterior, computed from sums over clients."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from fedmcmc.fitting._symmetries import MAX_IMAGES, Images, list_symmetries
from fedmcmc.gaussian import Mixture
from fedmcmc.kernels import LOG_ZERO_THRESHOLD, Points, evaluations
from fedmcmc.pytrees import trees
from fedmcmc.runs import Consortium
from fedmcmc.surrogates import (
    NEWTON_DIMENSIONS,
    SITE_LOGS,
    Expansion,
    Ledger,
    Objective,
    explain_failures,
    explain_nonfinite,
    lbfgs,
    newton,
    run_ascents,
)
from fedmcmc.types import ArrayTree, Posterior, as_functions, bound, compiled

NUM_STARTS = 8
NUM_CANDIDATES = 32
"""Number of candidates for a start; candidates of finite density are used in order."""
DENSE_DIMENSIONS = 1000
"""Number of dimensions up to which the curvature at the mode is a matrix, else its diagonal."""
MAX_HESSIANS = 10
"""Largest number of dense Hessians above 256 dimensions; one if L-BFGS has reached the mode."""
MIN_GAIN = 1e-3
"""Smallest predicted gain, in nats, for another Newton step."""
MIN_DISTANCE = 1.0
"""Smallest Mahalanobis distance of two distinct modes."""
MAX_SYMMETRIC_GAP, MAX_START_GAP = 0.05, 10.0
"""Largest difference, in nats, from the highest mode to a symmetric mode; and to an image that is
used as a start if the posterior has several modes."""
ORIGIN_SCALE = 1e-5
"""Factor that turns a draw of `init_fn` into a start near the origin."""


@dataclass(frozen=True)
class PosteriorMode:
    """Local maximum of the posterior with its curvature.

    Attributes
    ----------
    flat
        Raveled position after the final Newton step, ``[d]`` float64.
    log_density
        Log density of the posterior relative to the search's center, in nats.
    covariance
        Inverse of the negative Hessian, ``[d, d]``, or of its diagonal, ``[d]``, in many
        dimensions.
    gain
        Predicted gain of the final Newton step, in nats; below 1e-3 at a mode.
    clipped
        Number of directions along which the log posterior does not fall; their curvature is
        replaced by a small positive number.
    flat_along
        These directions, ``[d, clipped]``; empty for diagonal curvatures.
    """

    flat: np.ndarray
    log_density: float
    covariance: np.ndarray
    gain: float
    clipped: int
    flat_along: np.ndarray

    @property
    def is_maximum(self) -> bool:
        """True for a stationary point with positive curvature in all directions."""
        return self.gain < MIN_GAIN and not self.clipped and bool(np.isfinite(self.flat).all())

    @property
    def log_mass(self) -> float:
        """Log of the mode's mass by Laplace's method, up to a constant that all modes share."""
        if self.covariance.ndim == 1:
            return self.log_density + 0.5 * float(np.log(self.covariance).sum())
        return self.log_density + 0.5 * float(np.linalg.slogdet(self.covariance)[1])


@dataclass(frozen=True)
class ModeSearch:
    """Result of a search for modes.

    Attributes
    ----------
    modes
        Modes in descending order of density, without modes of negligible mass. If the search
        reached no mode, its highest point.
    num_starts
        Number of starts.
    centre
        Position of the highest mode.
    rounds, bits_up, bits_down
        Cost of the search.
    unidentified
        Names of parameters on which no row depends; their posterior is the prior.
    num_symmetric
        Number of modes as high as the highest one.
    caveats
        Reasons why draws around these modes may miss a part of the posterior.
    """

    modes: tuple[PosteriorMode, ...]
    num_starts: int
    centre: ArrayTree
    rounds: int
    bits_up: float
    bits_down: float
    unidentified: tuple[str, ...] = ()
    num_symmetric: int = 1
    caveats: tuple[str, ...] = ()

    @property
    def has_mode(self) -> bool:
        """True if the search reached a mode."""
        return self.modes[0].is_maximum

    def mixture(self, *, tail: float = 0.2, degrees: float = 5.0, widen: float = 1.0) -> Mixture:
        """Return the mixture of Laplace approximations at all modes, with heavier tails.

        The tails are as in `fedmcmc.gaussian.defensive`; `widen` multiplies the covariances.
        """
        masses = np.array([mode.log_mass for mode in self.modes])
        weights = np.exp(masses - masses.max())
        # Laplace's method may underestimate the mass of a mode.
        weights = np.maximum(weights / weights.sum(), 0.05)
        parts: list[tuple[float, float, Any, Any]] = []
        for weight, mode in zip(weights, self.modes, strict=True):
            scale = widen * mode.covariance
            parts.append(((1 - tail) * weight, np.inf, mode.flat, scale))
            if tail:
                parts.append((tail * weight, degrees, mode.flat, 1.2 * scale))
        return Mixture.of(parts)


def find_modes(
    rng_key: Array,
    posterior: Posterior,
    consortium: Consortium,
    *,
    position: ArrayTree | None = None,
    num_starts: int = NUM_STARTS,
    max_evaluations: int = 60,
    num_draws: int = 4000,
) -> ModeSearch:
    """Search for modes of the posterior from several starts that share each message.

    Candidates for a start are a point near the origin and draws of ``posterior.init_fn``, or
    `position` and normal draws with sd 2 around it; the search uses candidates of finite density.
    Newton's method with a trust region climbs from each start; above 256 dimensions L-BFGS, and
    Newton's method from its highest point.

    Raises
    ------
    ValueError
        If there is no start, or if the density is finite at none of 32 candidates.
    """
    posterior = as_functions(posterior)
    ledger = Ledger(consortium)
    candidates = draw_candidates(rng_key, posterior, position)
    values = np.asarray(ledger.ask(evaluations(posterior), Points(candidates)).value, np.float64)
    prior = np.asarray(log_priors(posterior, candidates), np.float64)
    valid = np.flatnonzero((values > LOG_ZERO_THRESHOLD) & np.isfinite(values) & np.isfinite(prior))
    if not np.isfinite(prior).any():
        raise ValueError(
            f"The log density of the prior is finite at none of {len(prior)} starts: check its "
            f"scales and bounds, or pass position=, a position where it is finite."
        )
    if len(valid) == 0:
        explain_nonfinite(posterior, consortium, candidates)
        raise ValueError(
            f"The log density is finite at none of {len(values)} starts: scale the covariates, or "
            f"pass position=, a position where it is finite. {SITE_LOGS}"
        )
    flat = _ravel_each(candidates)
    starts = _pad(flat[valid[:num_starts]], num_starts)
    size = flat.shape[1]
    by_newton = size <= NEWTON_DIMENSIONS
    ascend = partial(newton if by_newton else lbfgs, min_gain=MIN_GAIN)
    # Relative to the best start, log densities near a mode are small and keep their digits.
    best = valid[np.argmax((values + prior)[valid])]
    centre = jax.tree.map(lambda leaf: leaf[best], candidates)
    evaluate = Objective(posterior, ledger, centre, "dense" if by_newton else "none")
    evaluate_first = explain_failures(evaluate, consortium, candidates)
    results = run_ascents(evaluate_first, [*map(ascend, starts)], max_evaluations)
    num_used = num_starts
    while by_newton and num_used < len(valid) and _may_miss_modes(results, num_draws):
        starts = flat[valid[num_used : num_used + num_starts]]
        num_used += len(starts)
        ascents = [*map(ascend, _pad(starts, num_starts))]
        results += run_ascents(evaluate, ascents, max_evaluations)
    if not by_newton:  # one point only, because each Hessian takes d**2 / 2 numbers
        point = min(results, key=lambda result: result.value).point
        if size <= DENSE_DIMENSIONS:
            evaluate_dense = Objective(posterior, ledger, centre, "dense")
            results = run_ascents(evaluate_dense, [newton(point, min_gain=MIN_GAIN)], MAX_HESSIANS)
        else:
            results = Objective(posterior, ledger, centre, "diagonal")(point[None])
    modes = _select_distinct([_as_mode(result) for result in results], num_draws)
    num_symmetric = 1
    caveats: tuple[str, ...] = ()
    if by_newton and modes[0].is_maximum and posterior.position_fn is None:
        images, complete = _find_images(modes[0], posterior, ledger, centre, len(modes) > 1)
        if len(images):
            starts = _pad(images, num_starts)
            for batch in starts.reshape(-1, num_starts, size):
                results += run_ascents(evaluate, [*map(ascend, batch)], max_evaluations)
            modes = _select_distinct([_as_mode(result) for result in results], num_draws)
            gaps = [modes[0].log_density - mode.log_density for mode in modes]
            num_symmetric = sum(gap < MAX_SYMMETRIC_GAP for gap in gaps)
        if not complete:
            caveats = (
                f"the posterior has more than {MAX_IMAGES} symmetric modes, of which the draws "
                f"represent {num_symmetric}: order the exchangeable parameters",
            )
    unidentified: tuple[str, ...] = ()
    if evaluate.unidentified is not None and evaluate.unidentified.any():
        names = trees.element_names(centre)
        unidentified = tuple(names[i] for i in np.flatnonzero(evaluate.unidentified))
    centre, cost = trees.restore(modes[0].flat, centre), (ledger.rounds, ledger.up, ledger.down)
    num_used = min(num_used, len(valid))
    return ModeSearch(tuple(modes), num_used, centre, *cost, unidentified, num_symmetric, caveats)


def _pad(starts: np.ndarray, multiple: int) -> np.ndarray:
    """Return starts ``[num, d]`` padded with copies of one start to a multiple of a number."""
    return np.concatenate([starts, np.repeat(starts[:1], -len(starts) % multiple, axis=0)])


def _may_miss_modes(results: list[Expansion], num_draws: int) -> bool:
    """Return true if more than a tenth of the starts reached a mode that no other start reached.

    This share estimates the probability that another start reaches a new mode (Good and Turing).
    """
    maxima = [mode for mode in map(_as_mode, results) if mode.is_maximum]
    modes = _select_distinct(maxima, num_draws) if maxima else []
    if len(modes) < 2:
        return False
    counts = [sum(_mahalanobis_distance(mode, x) < MIN_DISTANCE for x in maxima) for mode in modes]
    return counts.count(1) > 0.1 * len(maxima)


def _find_images(
    mode: PosteriorMode, posterior: Posterior, ledger: Ledger, centre: ArrayTree, multimodal: bool
) -> tuple[np.ndarray, bool]:
    """Return candidates for symmetric modes, ``[num, d]``, and true if no candidate is missing.

    If the posterior is `multimodal`, a few images of a slightly lower density are included.
    """
    no_images = np.zeros((0, len(mode.flat)))
    images = Images(posterior, trees.restore(mode.flat, centre))
    symmetries = list_symmetries(images.values)
    if not symmetries:
        return no_images, True
    flat = images.flat([images.values, *(x.example(images.values) for x in symmetries)])
    max_gap = MAX_START_GAP if multimodal else MAX_SYMMETRIC_GAP
    distant = np.array(
        [_mahalanobis_distance(replace(mode, flat=x), mode) >= MIN_DISTANCE for x in flat[1:]]
    )
    # Padded to the number of candidates, whose compiled program is used again.
    padded = trees.restore(_pad(flat, NUM_CANDIDATES), centre)
    prior = np.asarray(log_priors(posterior, padded), np.float64)[: len(flat)]
    plausible = distant & np.isfinite(flat[1:]).all(1) & (prior[1:] > prior[0] - max_gap)
    chosen = np.flatnonzero(plausible)[: NUM_CANDIDATES - 1]
    if not len(chosen):
        return no_images, True
    # The number of points of the initial exchange, whose compiled program is used again.
    index = np.concatenate([[0], chosen + 1])
    index = np.concatenate([index, np.zeros(NUM_CANDIDATES - len(index), int)])
    points = trees.restore(flat[index], centre)
    value = np.asarray(ledger.ask(evaluations(posterior), Points(points)).value, np.float64)
    change = (value + prior[index])[1 : len(chosen) + 1] - (value[0] + prior[0])
    changes = list(zip([symmetries[i] for i in chosen], change, strict=True))
    exact = [symmetry for symmetry, gap in changes if gap > -MAX_SYMMETRIC_GAP]
    starts, complete = images.closure(exact)
    starts += [
        symmetry.example(images.values)
        for symmetry, gap in changes
        if -max_gap < gap <= -MAX_SYMMETRIC_GAP
    ][:NUM_STARTS]
    return (images.flat(starts) if starts else no_images), complete


def draw_candidates(rng_key: Array, posterior: Posterior, position: ArrayTree | None) -> ArrayTree:
    """Return candidates for a start, NumPy leaves ``[num, *event]``, the most promising in front.

    They are on the host, where the search computes.
    """
    num = NUM_CANDIDATES - 1
    if position is not None:
        centre = jax.tree.map(np.asarray, trees.as_floats(position, "position"))
        flat = trees.ravel(centre)
        steps = np.asarray(_draw_steps(rng_key, flat, num=num))
        draws = trees.restore(flat + 2 * steps, centre)
    elif posterior.init_fn is not None:
        draws = jax.tree.map(np.asarray, draw_starts(bound(posterior.init_fn), rng_key, num=num))
        # At the origin itself NumPyro's Bernoulli(logits=0) has a gradient of 0 or 1 instead of
        # a half.
        centre = jax.tree.map(lambda leaf: ORIGIN_SCALE * leaf[0], draws)
    else:
        raise ValueError(
            "This posterior has no init_fn to draw starts from: pass position=, a start."
        )
    return jax.tree.map(lambda x, more: np.concatenate([x[None], more]), centre, draws)


@compiled(static_argnames=("num",), optimize=False)
def _draw_steps(rng_key: Array, like: Array, *, num: int) -> Array:
    """Return standard normal draws with the shape of `like`, ``[num, *like.shape]``."""
    keys = jax.random.split(rng_key, num)
    return jax.vmap(lambda key: jax.random.normal(key, like.shape, like.dtype))(keys)


@compiled(static_argnames=("num",), optimize=False)
def draw_starts(init_fn: Callable[[Array], ArrayTree], rng_key: Array, *, num: int) -> ArrayTree:
    """Return draws of `init_fn`, leaves ``[num, *event]``."""
    return jax.vmap(init_fn)(jax.random.split(rng_key, num))


def _ravel_each(positions: ArrayTree) -> np.ndarray:
    """Return positions with leaves ``[num, *event]`` as ``[num, d]`` float64."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(positions)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


@compiled(optimize=False)
def log_priors(posterior: Posterior, positions: ArrayTree) -> Array:
    return jax.vmap(posterior.logprior_fn)(positions)


def _as_mode(result: Expansion) -> PosteriorMode:
    assert result.covariance is not None
    # In the quadratic region the final Newton step needs no further exchange.
    is_quadratic = result.gain < 0.1 and not result.clipped
    point = result.point + result.step if is_quadratic else result.point
    value = -result.value + (result.gain if is_quadratic else 0.0)
    return PosteriorMode(
        point, value, result.covariance, result.gain, result.clipped, result.flat_along
    )


def _select_distinct(candidates: list[PosteriorMode], num_draws: int) -> list[PosteriorMode]:
    """Return maxima of non-negligible mass that are distant from each other, the highest in front.

    The highest candidate is always included.
    """
    candidates = sorted(candidates, key=lambda mode: -mode.log_density)
    modes = candidates[:1]
    lowest = modes[0].log_density - 2 * np.log(NUM_STARTS * num_draws)
    for mode in candidates[1:]:
        is_near = any(_mahalanobis_distance(mode, x) < MIN_DISTANCE for x in modes)
        if mode.is_maximum and mode.log_density > lowest and not is_near:
            modes.append(mode)
    return modes


def _mahalanobis_distance(mode: PosteriorMode, reference: PosteriorMode) -> float:
    """Return the Mahalanobis distance by the covariance of the reference."""
    gap = mode.flat - reference.flat
    if reference.covariance.ndim == 1:
        return float(np.sqrt(gap**2 @ (1 / reference.covariance)))
    return float(np.sqrt(gap @ np.linalg.solve(reference.covariance, gap)))
