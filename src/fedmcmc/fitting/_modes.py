"""The posterior's modes and the curvature there, from sums over clients alone."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, Posterior, as_functions, compiled
from fedmcmc.fitting._lockstep import lockstep
from fedmcmc.fitting._symmetries import MOST_IMAGES, Images, candidate_symmetries
from fedmcmc.gaussian import Mixture
from fedmcmc.kernels import BELOW, Points, evaluations
from fedmcmc.pytrees import trees
from fedmcmc.runs import Consortium
from fedmcmc.surrogates import (
    NEWTON_DIMENSIONS,
    SITE_LOGS,
    Expansion,
    Ledger,
    Objective,
    Structure,
    explain_nonfinite,
    explained,
    lbfgs,
    newton,
)

NUM_STARTS = 8
NUM_CANDIDATES = 32
"""Places of which the first that have a finite density are starts."""
DENSE_DIMENSIONS = 1000
"""Up to here the curvature at the mode is a matrix; above its diagonal."""
ARRIVED = 1e-3
"""A Newton step that promises to gain less, in nats, is the last."""
APART = 1.0
"""Mahalanobis distance from which on two maxima are two."""
LEVEL, LOWER = 0.05, 10.0
"""Nats by which a symmetric mode may be lower than the highest; by which an image of one of several
modes may be lower and still be a start."""
NEAR = 1e-5
"""Of a draw of `init_fn`: a start near the origin."""


@dataclass(frozen=True)
class Mode:
    """A local maximum of the posterior and its curvature.

    Attributes
    ----------
    flat
        ``[d]`` float64, the raveled position, after a last Newton step.
    log_density
        Of the posterior there, relative to that at the search's center, in nats.
    covariance
        ``[d, d]``, the inverse of minus the Hessian; or ``[d]`` above 256 dimensions.
    gain
        What the last step promised, in nats: of a mode that was found less than 1e-3.
    clipped
        Directions in which the log posterior does not fall, of which the curvature was made up.
    flat_along
        ``[d, clipped]``, these directions; none where curvatures are diagonal.
    """

    flat: np.ndarray
    log_density: float
    covariance: np.ndarray
    gain: float
    clipped: int
    flat_along: np.ndarray

    @property
    def found(self) -> bool:
        """Whether it is a maximum, with curvature in all directions."""
        return self.gain < ARRIVED and not self.clipped and bool(np.isfinite(self.flat).all())

    @property
    def log_mass(self) -> float:
        """Log of what the Laplace approximation says the mode holds, up to what all share."""
        if self.covariance.ndim == 1:
            return self.log_density + 0.5 * float(np.log(self.covariance).sum())
        return self.log_density + 0.5 * float(np.linalg.slogdet(self.covariance)[1])


@dataclass(frozen=True)
class Search:
    """What a search for modes found.

    Attributes
    ----------
    modes
        From the highest down; those that hold next to nothing are left out. If none was found, the
        best place where the search ended.
    num_starts
        From how many starts.
    centre
        The highest mode as a position.
    rounds, bits_up, bits_down
        What it cost.
    untold
        Names of parameters of which no row said anything, so that their posterior is their prior.
    num_symmetric
        How many of the modes are as high as the highest one.
    caveats
        Why draws around these modes may not be the whole posterior.
    """

    modes: tuple[Mode, ...]
    num_starts: int
    centre: ArrayTree
    rounds: int
    bits_up: float
    bits_down: float
    untold: tuple[str, ...] = ()
    num_symmetric: int = 1
    caveats: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """Whether the highest place is a mode."""
        return self.modes[0].found

    def mixture(self, *, tail: float = 0.2, degrees: float = 5.0, widen: float = 1.0) -> Mixture:
        """Return Laplace approximations of all modes, with heavier tails (`defensive`).

        Covariances are multiplied by `widen`.
        """
        masses = np.array([mode.log_mass for mode in self.modes])
        weights = np.exp(masses - masses.max())
        # A mode that Laplace's method thinks little of is still looked at.
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
) -> Search:
    """Search for maxima of the posterior from several starts, whose points share each message.

    Starts are a place near the origin and draws of ``posterior.init_fn``, or `position` and normals
    of sd 2 around it: the first of them with a finite density. Each is followed by SciPy's
    trust-region Newton method on summed curvatures, above 256 dimensions by its L-BFGS.

    Raises
    ------
    ValueError
        Without a start, or if the density is finite at none of 32.
    """
    posterior = as_functions(posterior)
    ledger = Ledger(consortium)
    candidates = _candidates(rng_key, posterior, position)
    values = np.asarray(ledger.ask(evaluations(posterior), Points(candidates)).value, np.float64)
    prior = np.asarray(log_priors(posterior, candidates), np.float64)
    good = np.flatnonzero((values > BELOW) & np.isfinite(values) & np.isfinite(prior))
    if not np.isfinite(prior).any():
        raise ValueError(
            f"The log density of the prior is finite at none of {len(prior)} starts: check its "
            f"scales and bounds, or pass position=, a place where it is finite."
        )
    if len(good) == 0:
        explain_nonfinite(posterior, consortium, candidates)
        raise ValueError(
            f"The log density is finite at none of {len(values)} starts: scale the covariates, or "
            f"pass position=, a place where it is. {SITE_LOGS}"
        )
    flat = np.asarray(jax.vmap(trees.ravel)(candidates), np.float64)
    starts = flat[good[:num_starts]]
    starts = np.concatenate([starts, np.repeat(starts[:1], num_starts - len(starts), axis=0)])
    size = flat.shape[1]
    by_newton = size <= NEWTON_DIMENSIONS
    follow = partial(newton, least_gain=ARRIVED) if by_newton else lbfgs
    # Differences to the best start are small where they matter.
    best = good[np.argmax((values + prior)[good])]
    centre = jax.tree.map(lambda leaf: leaf[best], candidates)
    evaluate = Objective(posterior, ledger, centre, "dense" if by_newton else "none")
    results, _ = lockstep(
        explained(evaluate, consortium, candidates), starts, follow, max_evaluations
    )
    num_used = num_starts
    while by_newton and num_used < len(good) and _some_may_be_missing(results, num_draws):
        more = flat[good[num_used : num_used + num_starts]]
        num_used += len(more)
        more = np.concatenate([more, np.repeat(more[:1], num_starts - len(more), axis=0)])
        results += lockstep(evaluate, more, follow, max_evaluations)[0]
    if not by_newton:  # curvature at the highest place alone: it takes d**2 / 2 numbers
        highest = min(results, key=lambda found: found.value)
        structure: Structure = "dense" if size <= DENSE_DIMENSIONS else "diagonal"
        at = Objective(posterior, ledger, centre, structure)
        results = at(highest.point[None])
    modes = _distinct([_mode_of(result) for result in results], num_draws)
    num_symmetric = 1
    caveats: tuple[str, ...] = ()
    if by_newton and modes[0].found and posterior.position_fn is None:
        images, complete = _images_of(modes[0], posterior, ledger, centre, len(modes) > 1)
        if len(images):
            starts = np.concatenate([images, np.repeat(images[:1], -len(images) % num_starts, 0)])
            for batch in starts.reshape(-1, num_starts, size):
                results += lockstep(evaluate, batch, follow, max_evaluations)[0]
            modes = _distinct([_mode_of(result) for result in results], num_draws)
            num_symmetric = sum(_as_high(mode, modes[0]) for mode in modes)
        if not complete:
            caveats = (
                f"the posterior has more than {MOST_IMAGES} symmetric modes, of which the draws "
                f"hold {num_symmetric}: order the exchangeable parameters",
            )
    middle = trees.cast_like(trees.unravel(jnp.asarray(modes[0].flat), centre), centre)
    found = min(num_used, len(good))
    cost = ledger.rounds, ledger.up, ledger.down
    untold: tuple[str, ...] = ()
    if evaluate.untold is not None and evaluate.untold.any():
        names = trees.element_names(centre)
        untold = tuple(names[i] for i in np.flatnonzero(evaluate.untold))
    return Search(tuple(modes), found, middle, *cost, untold, num_symmetric, caveats)


def _some_may_be_missing(results: list[Expansion], num_draws: int) -> bool:
    """Return whether starts led to several modes, to more than a tenth of which only one did.

    The share of starts that alone led to their mode estimates how likely another start is to lead
    to a new one (Good and Turing).
    """
    found = [mode for mode in map(_mode_of, results) if mode.found]
    modes = _distinct(found, num_draws) if found else []
    if len(modes) < 2:
        return False
    counts = [sum(_distance(mode, other) < APART for other in found) for mode in modes]
    return counts.count(1) > 0.1 * len(found)


def _as_high(mode: Mode, highest: Mode) -> bool:
    return highest.log_density - mode.log_density < LEVEL


def _images_of(
    mode: Mode, posterior: Posterior, ledger: Ledger, centre: ArrayTree, several: bool
) -> tuple[np.ndarray, bool]:
    """Return where symmetric modes may lie, ``[num, d]``, and whether these are all.

    `several` says whether the search found more than one mode: then a few images of a somewhat
    lower density are kept, too.
    """
    position = trees.cast_like(trees.unravel(jnp.asarray(mode.flat), centre), centre)
    images = Images(posterior, position)
    symmetries = candidate_symmetries(images.values)
    if not symmetries:
        return np.zeros((0, len(mode.flat))), True
    flat = images.flat([images.values, *(each.example(images.values) for each in symmetries)])
    drop = LOWER if several else LEVEL
    apart = np.array([_distance(replace(mode, flat=x), mode) >= APART for x in flat[1:]])
    prior = np.asarray(log_priors(posterior, as_positions(flat, centre)), np.float64)
    kept = np.flatnonzero(apart & np.isfinite(flat[1:]).all(1) & (prior[1:] > prior[0] - drop))
    kept = kept[: NUM_CANDIDATES - 1]
    if not len(kept):
        return np.zeros((0, len(mode.flat))), True
    # As many points as the first exchange, whose compiled program is used again.
    places = np.concatenate([[0], kept + 1])
    places = np.concatenate([places, np.zeros(NUM_CANDIDATES - len(places), int)])
    points = as_positions(flat[places], centre)
    value = np.asarray(ledger.ask(evaluations(posterior), Points(points)).value, np.float64)
    change = (value + prior[places])[1 : len(kept) + 1] - (value[0] + prior[0])
    level = [symmetries[i] for i, gap in zip(kept, change, strict=True) if gap > -LEVEL]
    found, complete = images.closure(level)
    found += [
        symmetries[i].example(images.values)
        for i, gap in zip(kept, change, strict=True)
        if -drop < gap <= -LEVEL
    ][:NUM_STARTS]
    if not found:
        return np.zeros((0, len(mode.flat))), complete
    return images.flat(found), complete


def as_positions(flat: np.ndarray, centre: ArrayTree) -> ArrayTree:
    """Return raveled positions ``[num, d]`` as positions, leaves ``[num, *event]``."""
    leaves, treedef = jax.tree.flatten(centre)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    parts = [
        jnp.asarray(part.reshape(-1, *leaf.shape).astype(leaf.dtype))
        for part, leaf in zip(np.split(flat, ends, axis=1), leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, parts)


def _candidates(rng_key: Array, posterior: Posterior, position: ArrayTree | None) -> ArrayTree:
    """Return places to start from, leaves ``[num, *event]``, the likeliest to be good first."""
    keys = jax.random.split(rng_key, NUM_CANDIDATES - 1)
    if position is not None:
        first = trees.as_floats(position, "position")
        flat = trees.ravel(first)
        moved = jax.vmap(lambda key: flat + 2 * jax.random.normal(key, flat.shape, flat.dtype))
        others = jax.vmap(lambda x: trees.cast_like(trees.unravel(x, first), first))(moved(keys))
    elif posterior.init_fn is not None:
        others = jax.vmap(posterior.init_fn)(keys)
        # Near the origin and not at it: there NumPyro's Bernoulli(logits=0) has a gradient of 0 or
        # 1 in place of a half.
        first = jax.tree.map(lambda leaf: NEAR * leaf[0], others)
    else:
        raise ValueError(
            "This posterior has no init_fn to draw starts from: pass position=, a place to start."
        )
    return jax.tree.map(lambda one, more: jnp.concatenate([one[None], more]), first, others)


@compiled
def log_priors(posterior: Posterior, positions: ArrayTree) -> Array:
    return jax.vmap(posterior.logprior_fn)(positions)


def _mode_of(found: Expansion) -> Mode:
    assert found.covariance is not None
    # Inside of the quadratic region the last Newton step is free.
    arrived = found.gain < 0.1 and not found.clipped
    point = found.point + found.step if arrived else found.point
    value = -found.value + (found.gain if arrived else 0.0)
    return Mode(point, value, found.covariance, found.gain, found.clipped, found.flat_along)


def _distinct(modes: list[Mode], num_draws: int) -> list[Mode]:
    """Return maxima that are apart from one another and hold something, the highest first."""
    modes = sorted(modes, key=lambda mode: -mode.log_density)
    kept: list[Mode] = []
    least = modes[0].log_density - 2 * np.log(NUM_STARTS * num_draws)
    for mode in modes:
        near = any(_distance(mode, other) < APART for other in kept)
        if not kept or (mode.found and mode.log_density > least and not near):
            kept.append(mode)
    return kept


def _distance(mode: Mode, other: Mode) -> float:
    gap = mode.flat - other.flat
    if other.covariance.ndim == 1:
        return float(np.sqrt(gap**2 @ (1 / other.covariance)))
    return float(np.sqrt(gap @ np.linalg.solve(other.covariance, gap)))
