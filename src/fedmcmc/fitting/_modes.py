"""The posterior's modes and the curvature there, from sums over clients alone."""

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.optimize import minimize

from fedmcmc._types import ArrayTree, Posterior, as_functions
from fedmcmc.fitting._lockstep import Stopped, lockstep
from fedmcmc.gaussian import Mixture
from fedmcmc.gradients import minus_hessian
from fedmcmc.kernels import BELOW, Expanded, Points, evaluations, expansions
from fedmcmc.pytrees import trees
from fedmcmc.runs import Consortium

NUM_STARTS = 8
NUM_CANDIDATES = 32
"""Places of which the first that have a finite density are starts."""
NEWTON_DIMENSIONS = 256
"""Up to here steps are Newton's, with curvatures summed over clients; above L-BFGS's."""
DENSE_DIMENSIONS = 1000
"""Up to here the curvature at the mode is a matrix; above its diagonal."""
ARRIVED = 1e-3
"""A Newton step that promises to gain less, in nats, is the last."""
APART = 1.0
"""Mahalanobis distance from which on two maxima are two."""
FLAT = 1e-6
"""Eigenvalues below this share of the largest count as none."""
HIGH = 1e100
NEAR = 1e-5
"""Of a draw of `init_fn`: a start near the origin."""
Structure = Literal["dense", "diagonal", "none"]


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
    """

    flat: np.ndarray
    log_density: float
    covariance: np.ndarray
    gain: float
    clipped: int

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
    """

    modes: tuple[Mode, ...]
    num_starts: int
    centre: ArrayTree
    rounds: int
    bits_up: float
    bits_down: float

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


class _Ledger:
    """Adds up what exchanges cost."""

    def __init__(self, consortium: Consortium) -> None:
        self.consortium, self.rounds, self.up, self.down = consortium, 0, 0.0, 0.0

    def ask(self, question: Any, content: Any) -> Any:
        asked = self.consortium.ask(question, content)
        self.rounds += asked.rounds
        self.up, self.down = self.up + asked.bits_up, self.down + asked.bits_down
        return asked.value


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
    ledger = _Ledger(consortium)
    candidates = _candidates(rng_key, posterior, position)
    values = np.asarray(ledger.ask(evaluations(posterior), Points(candidates)).value, np.float64)
    prior = np.asarray(_log_priors(posterior, candidates), np.float64)
    good = np.flatnonzero((values > BELOW) & np.isfinite(values) & np.isfinite(prior))
    if len(good) == 0:
        raise ValueError(
            f"The log density is finite at none of {len(values)} starts: scale the covariates, or "
            "pass position=, a place where it is."
        )
    flat = np.asarray(jax.vmap(trees.ravel)(candidates), np.float64)
    starts = flat[good[:num_starts]]
    starts = np.concatenate([starts, np.repeat(starts[:1], num_starts - len(starts), axis=0)])
    size = flat.shape[1]
    newton = size <= NEWTON_DIMENSIONS
    # Differences to the best start are small where they matter.
    best = good[np.argmax((values + prior)[good])]
    centre = jax.tree.map(lambda leaf: leaf[best], candidates)
    evaluate = _Objective(posterior, ledger, centre, "dense" if newton else "none")
    results, _ = lockstep(evaluate, starts, _newton if newton else _lbfgs, max_evaluations)
    if not newton:  # curvature at the highest place alone: it takes d**2 / 2 numbers
        highest = min(results, key=lambda found: found.value)
        structure: Structure = "dense" if size <= DENSE_DIMENSIONS else "diagonal"
        at = _Objective(posterior, ledger, centre, structure)
        results = at(highest.point[None])
    modes = _distinct([_mode_of(result) for result in results], num_draws)
    middle = trees.cast_like(trees.unravel(jnp.asarray(modes[0].flat), centre), centre)
    found = min(num_starts, len(good))
    return Search(tuple(modes), found, middle, ledger.rounds, ledger.up, ledger.down)


def _candidates(rng_key: Array, posterior: Posterior, position: ArrayTree | None) -> ArrayTree:
    """Return places to start from, leaves ``[num, *event]``, the likeliest to be good first."""
    keys = jax.random.split(rng_key, NUM_CANDIDATES - 1)
    if position is not None:
        first = jax.tree.map(trees.as_float, position)
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


@jax.jit
def _log_priors(posterior: Posterior, positions: ArrayTree) -> Array:
    return jax.vmap(posterior.logprior_fn)(positions)


@partial(jax.jit, static_argnames=("structure",))
def _expanded_prior(
    posterior: Posterior, points: ArrayTree, centre: ArrayTree, structure: str
) -> tuple[Array, Array, ArrayTree]:
    """Return the log prior relative to the center, gradients and minus Hessians."""
    at_centre = posterior.logprior_fn(centre)

    def one(point: ArrayTree) -> tuple[Array, Array, ArrayTree]:
        def fn(flat: Array) -> Array:
            place = trees.cast_like(trees.unravel(flat, point), point)
            return posterior.logprior_fn(place) - at_centre

        flat = trees.ravel(point)
        value, gradient = jax.value_and_grad(fn)(flat)
        if structure == "none":
            return value, gradient, ()
        return value, gradient, minus_hessian(fn, flat, dense=structure == "dense")

    return jax.lax.map(one, points)


class _Expansion:
    """Minus the log posterior at a point, its gradient, its Hessian, and Newton's step.

    `hessian` is ``[d, d]``, a diagonal ``[d]`` or ``None``. Directions in which it is flat or falls
    are counted in `clipped`; `gain` is what the step promises, in nats.
    """

    def __init__(
        self, point: np.ndarray, value: float, gradient: np.ndarray, hessian: np.ndarray | None
    ) -> None:
        self.point, self.value, self.gradient, self.hessian = point, value, gradient, hessian
        self.step, self.gain, self.clipped = np.zeros_like(gradient), np.inf, 0
        self.covariance: np.ndarray | None = None
        if hessian is None:
            return
        diagonal = hessian if hessian.ndim == 1 else np.diagonal(hessian)
        scale = 1 / np.sqrt(np.maximum(np.abs(diagonal), np.finfo(float).tiny))
        if hessian.ndim == 1:
            self.clipped = int((hessian <= 0).sum())
            self.covariance = scale**2
            self.step = -self.covariance * gradient
        else:
            values, vectors = np.linalg.eigh(hessian * np.outer(scale, scale))
            least = FLAT * max(values[-1], np.finfo(float).tiny)
            self.clipped = int((values < least).sum())
            vectors = scale[:, None] * vectors
            self.covariance = (vectors / np.maximum(values, least)) @ vectors.T
            self.step = -self.covariance @ gradient
        self.gain = float(-gradient @ self.step / 2)


class _Objective:
    """Expansions of minus the log posterior at points, one exchange for all of them.

    Values are relative to the first center. The center of differences, in which float32 keeps
    digits, is the best place so far: near a mode, where they matter, differences are small.
    """

    def __init__(
        self, posterior: Posterior, ledger: _Ledger, centre: ArrayTree, structure: Structure
    ) -> None:
        self.posterior, self.ledger, self.centre = posterior, ledger, centre
        self.structure, self.at_centre = structure, 0.0
        self.question = expansions(posterior, curvature=structure)

    def __call__(self, points: np.ndarray) -> list[_Expansion]:
        at = jax.vmap(lambda x: trees.cast_like(trees.unravel(x, self.centre), self.centre))(
            jnp.asarray(points, trees.ravel(self.centre).dtype)
        )
        answer: Expanded = self.ledger.ask(self.question, Points(at, self.centre))
        prior = _expanded_prior(self.posterior, at, self.centre, self.structure)
        value = -(np.asarray(prior[0], np.float64) + np.asarray(answer.value, np.float64))
        value = value + self.at_centre
        gradient = -(np.asarray(prior[1], np.float64) + np.asarray(answer.gradient, np.float64))
        num, size = points.shape
        hessians: list[np.ndarray | None] = [None] * num
        if self.structure != "none":
            of_rows = np.asarray(answer.curvature, np.float64)
            if self.structure == "dense":
                of_rows = np.stack([_symmetric(upper, size) for upper in of_rows])
            hessians = list(of_rows + np.asarray(prior[2], np.float64))
        found = [
            _Expansion(*given) if _all_finite(given) else self._impossible(given)
            for given in zip(points, value, gradient, hessians, strict=True)
        ]
        best = int(np.argmin([x.value for x in found]))
        if found[best].value < self.at_centre:
            self.at_centre = found[best].value
            self.centre = jax.tree.map(lambda leaf: leaf[best], at)
        return found

    def _impossible(self, given: tuple[Any, ...]) -> _Expansion:
        """Return a place at which no step may end."""
        point, _, gradient, hessian = given
        unit: np.ndarray | None = None
        if hessian is not None:
            unit = np.eye(len(point)) if hessian.ndim == 2 else np.ones(len(point))
        return _Expansion(point, HIGH, np.zeros_like(gradient), unit)


def _symmetric(upper: np.ndarray, size: int) -> np.ndarray:
    whole = np.zeros((size, size))
    whole[np.triu_indices(size)] = upper
    symmetric: np.ndarray = whole + np.triu(whole, 1).T
    return symmetric


def _all_finite(given: tuple[Any, ...]) -> bool:
    return all(bool(np.isfinite(x).all()) for x in given if x is not None)


class _Arrived(Exception):
    """Ends an optimizer of SciPy whose next step would gain nothing."""


def _newton(objective: Any, start: np.ndarray) -> _Expansion:
    """Follow SciPy's trust-region Newton method and return the best place that it saw."""
    seen: dict[bytes, _Expansion] = {}
    best: list[_Expansion] = []

    def at(x: np.ndarray) -> _Expansion:
        key = x.tobytes()
        if key not in seen:
            seen[key] = found = objective(x)
            if not best or found.value < best[0].value:
                best[:] = [found]
            if found.value < HIGH and not found.clipped and found.gain < ARRIVED:
                best[:] = [found]
                raise _Arrived
        return seen[key]

    def follow(method: str, begin: np.ndarray) -> None:
        with contextlib.suppress(_Arrived, Stopped), np.errstate(all="ignore"):
            minimize(
                lambda x: at(x).value,
                begin,
                jac=lambda x: at(x).gradient,
                hess=lambda x: at(x).hessian,
                method=method,
                options={"gtol": 0.0, "maxiter": 200},
            )

    try:
        follow("trust-exact", start)
    except UnboundLocalError:  # of SciPy: at some saddles it finds no step
        follow("trust-krylov", best[0].point)
    return best[0]


def _lbfgs(objective: Any, start: np.ndarray) -> _Expansion:
    """Follow SciPy's L-BFGS and return the best place that it saw."""
    best: list[_Expansion] = []

    def at(x: np.ndarray) -> tuple[float, np.ndarray]:
        found: _Expansion = objective(x)
        if not best or found.value < best[0].value:
            best[:] = [found]
        return found.value, found.gradient

    with contextlib.suppress(Stopped):
        minimize(at, start, jac=True, method="L-BFGS-B", options={"ftol": 1e-7, "maxiter": 500})
    return best[0]


def _mode_of(found: _Expansion) -> Mode:
    assert found.covariance is not None
    # Inside of the quadratic region the last Newton step is free.
    arrived = found.gain < 0.1 and not found.clipped
    point = found.point + found.step if arrived else found.point
    value = -found.value + (found.gain if arrived else 0.0)
    return Mode(point, value, found.covariance, found.gain, found.clipped)


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
