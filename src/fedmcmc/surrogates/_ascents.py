"""Searches for a mode of the posterior that need only sums over clients.

Each evaluation is an exchange with the clients, who may be elsewhere, so that no search can run
within one compiled program. Several searches share each exchange.
"""

import itertools
from collections.abc import Callable, Generator
from typing import Any, Literal

import jax
import numpy as np
from jax import Array
from scipy.optimize import LbfgsInvHessProduct

from fedmcmc.gradients import minus_hessian
from fedmcmc.kernels import Expanded, Points, Question, expansions
from fedmcmc.pytrees import trees
from fedmcmc.runs import Consortium
from fedmcmc.surrogates._clients import symmetric
from fedmcmc.types import ArrayTree, Posterior, compiled

NEWTON_DIMENSIONS = 256
"""Number of dimensions up to which the search uses Newton's method, and above it L-BFGS."""
MIN_EIGENVALUE_RATIO = 1e-6
"""Smallest ratio of an eigenvalue to the largest one in a direction that is not flat."""
MAX_ROUNDING_RATIO = 1e-3
"""Largest ratio of a negative eigenvalue to the largest one that can be due to rounding."""
IMPOSSIBLE = 1e100
"""Value of a point at which the density or a derivative is not finite."""
MEMORY = 10
"""Number of previous steps that L-BFGS uses."""
ROUNDING = 1e-6
"""Relative rounding error of values."""
MAX_SLOPE_RATIO, MAX_TRIES = 0.9, 20
"""Largest ratio of the slopes at the end and the start of a step; largest number of trials."""
INITIAL_RADIUS, MAX_RADIUS, RADIUS_SLACK = 1.0, 1e9, 1.1
"""Initial and largest radius of the trust region; factor by which a Newton step may exceed it."""
Structure = Literal["dense", "diagonal", "none"]
"""Part of the Hessian that is evaluated."""


class Ledger:
    """Total cost of exchanges with a consortium.

    Attributes
    ----------
    rounds, up, down
        Number of exchanges, and bits that all clients sent and received.
    """

    def __init__(self, consortium: Consortium) -> None:
        self.consortium, self.rounds, self.up, self.down = consortium, 0, 0.0, 0.0

    def ask(self, question: Question, content: object) -> Any:
        """Return the sum of the clients' answers, and add its cost."""
        answer = self.consortium.ask(question, content)
        self.add(answer.rounds, answer.bits_up, answer.bits_down)
        return answer.value

    def add(self, rounds: int, bits_up: float, bits_down: float) -> None:
        """Add the cost of other exchanges."""
        self.rounds += rounds
        self.up, self.down = self.up + bits_up, self.down + bits_down


@compiled(static_argnames=("structure",))
def expanded_prior(
    posterior: Posterior, points: ArrayTree, centre: ArrayTree, *, structure: str
) -> tuple[Array, Array, ArrayTree]:
    """Return the log prior relative to the center, gradients and minus Hessians."""
    at_centre = posterior.logprior_fn(centre)

    def expand(point: ArrayTree) -> tuple[Array, Array, ArrayTree]:
        def fn(flat: Array) -> Array:
            position = trees.cast_like(trees.unravel(flat, point), point)
            return posterior.logprior_fn(position) - at_centre

        flat = trees.ravel(point)
        value, gradient = jax.value_and_grad(fn)(flat)
        if structure == "none":
            return value, gradient, ()
        return value, gradient, minus_hessian(fn, flat, dense=structure == "dense")

    return jax.lax.map(expand, points)


class Expansion:
    """Quadratic expansion of the negative log posterior at a point.

    Attributes
    ----------
    point, value, gradient
        Raveled position ``[d]``, negative log posterior and its gradient ``[d]``.
    hessian
        ``[d, d]``, a diagonal ``[d]``, or ``None``.
    step, gain
        Newton step and the gain that the expansion predicts for it, in nats.
    covariance
        Inverse of the Hessian after flat and negative directions get a small curvature.
    clipped, flat_along
        Number of these directions; for a dense Hessian the directions, ``[d, clipped]``.
    falls
        True if the Hessian is negative in a direction by more than rounding.
    """

    def __init__(
        self, point: np.ndarray, value: float, gradient: np.ndarray, hessian: np.ndarray | None
    ) -> None:
        self.point, self.value, self.gradient, self.hessian = point, value, gradient, hessian
        self.step, self.gain, self.clipped = np.zeros_like(gradient), np.inf, 0
        self.falls = False
        self.covariance: np.ndarray | None = None
        self.flat_along = np.zeros((len(point), 0))
        if hessian is None:
            return
        diagonal = hessian if hessian.ndim == 1 else np.diagonal(hessian)
        scale = 1 / np.sqrt(np.where(diagonal == 0, 1, np.abs(diagonal)))
        if hessian.ndim == 1:
            self.clipped = int((hessian <= 0).sum())
            self.falls = bool((hessian < 0).any())
            self.covariance = scale**2
            self.step = -self.covariance * gradient
        else:
            values, vectors = np.linalg.eigh(hessian * np.outer(scale, scale))
            smallest = MIN_EIGENVALUE_RATIO * max(values[-1], np.finfo(float).tiny)
            self.clipped = int((values < smallest).sum())
            self.falls = bool(values[0] < -MAX_ROUNDING_RATIO * values[-1])
            vectors = scale[:, None] * vectors
            self.flat_along = vectors[:, values < smallest]
            with np.errstate(over="ignore"):
                self.covariance = (vectors / np.maximum(values, smallest)) @ vectors.T
            self.step = -self.covariance @ gradient
        self.gain = float(-gradient @ self.step / 2)

    def step_within(self, radius: float) -> tuple[np.ndarray, float]:
        """Return the best step within a trust region and its predicted gain, for a dense Hessian.

        The step is Newton's unless that one is too long or the expansion has no minimum.
        """
        assert self.hessian is not None
        step = self.step
        if self.clipped or not np.linalg.norm(step) <= RADIUS_SLACK * radius:
            step = _minimize_within(self.gradient, self.hessian, radius)
        return step, float(-self.gradient @ step - step @ self.hessian @ step / 2)


def _minimize_within(gradient: np.ndarray, hessian: np.ndarray, radius: float) -> np.ndarray:
    """Minimize a quadratic function in a ball (Nocedal and Wright 2006, section 4.3)."""
    values, vectors = np.linalg.eigh(hessian)
    slopes = vectors.T @ gradient

    def shifted(shift: float) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.where(slopes == 0, 0, -slopes / (values + shift))

    low = max(0.0, -values[0])
    rounding = np.finfo(float).eps * np.abs(values).max() + np.finfo(float).tiny
    high = low + max(float(np.linalg.norm(slopes)) / radius, rounding)
    for _ in range(60):
        middle = (low + high) / 2
        if np.linalg.norm(shifted(middle)) > radius:
            low = middle
        else:
            high = middle
    step = shifted(high)
    if values[0] < 0:
        # A gradient without a component along the lowest eigenvector does not reach the boundary.
        length = np.sqrt(max(0.0, step[0] ** 2 + radius**2 - step @ step))
        step[0] = -np.copysign(length, slopes[0])
    return np.asarray(vectors @ step)


class Objective:
    """Function that expands the negative log posterior at points, in one exchange for all.

    Values are relative to the first center. Differences of log densities keep most digits in
    float32 if they are small, so the center moves to the best point so far.

    Attributes
    ----------
    unidentified
        Flags of coordinates ``[d]`` on which no row depends at any point, neither directly nor
        through another coordinate by the prior; ``None`` without dense Hessians.
    any_finite
        True if value and derivatives were finite at any point.
    """

    def __init__(
        self, posterior: Posterior, ledger: Ledger, centre: ArrayTree, structure: Structure
    ) -> None:
        self.posterior, self.ledger, self.centre = posterior, ledger, centre
        self.structure, self.at_centre = structure, 0.0
        self.question = expansions(posterior, curvature=structure)
        self.unidentified: np.ndarray | None = None
        self.any_finite = False

    def __call__(self, points: np.ndarray) -> list[Expansion]:
        """Return one expansion per point ``[num, d]``, rounded to the precision of the center."""
        # NumPy arrays, because operations on the host compile nothing.
        self.centre = jax.tree.map(np.asarray, self.centre)
        flat = points.astype(trees.ravel(self.centre).dtype)
        positions = trees.restore(flat, self.centre)
        answer: Expanded = self.ledger.ask(self.question, Points(positions, self.centre))
        prior = expanded_prior(self.posterior, positions, self.centre, structure=self.structure)
        value = -(np.asarray(prior[0], np.float64) + np.asarray(answer.value, np.float64))
        value = value + self.at_centre
        gradient = -(np.asarray(prior[1], np.float64) + np.asarray(answer.gradient, np.float64))
        points = np.asarray(flat, np.float64)
        finite = np.isfinite(points).all(1) & np.isfinite(value) & np.isfinite(gradient).all(1)
        num, size = points.shape
        hessians: Any = [None] * num
        if self.structure != "none":
            curvature = np.asarray(answer.curvature, np.float64)
            if self.structure == "dense":
                curvature = symmetric(curvature, size)
                self._find_unidentified(np.asarray(answer.gradient), np.asarray(prior[2]))
            hessians = curvature + np.asarray(prior[2], np.float64)
            finite &= np.isfinite(hessians).reshape(num, -1).all(1)
            hessians[~finite] = np.eye(size) if self.structure == "dense" else 1.0
        value[~finite], gradient[~finite] = IMPOSSIBLE, 0.0
        self.any_finite |= bool(finite.any())
        parts = zip(points, value, gradient, hessians, strict=True)
        results = [Expansion(*part) for part in parts]
        best = int(np.argmin([x.value for x in results]))
        if results[best].value < self.at_centre:
            self.at_centre = results[best].value
            self.centre = jax.tree.map(lambda leaf: leaf[best], positions)
        return results

    def _find_unidentified(self, gradient: np.ndarray, prior_hessian: np.ndarray) -> None:
        coupled = prior_hessian * (1 - np.eye(prior_hessian.shape[-1])) != 0
        unidentified = ~((gradient != 0) | coupled.any(axis=-1)).any(axis=0)
        if self.unidentified is not None:
            unidentified &= self.unidentified
        self.unidentified = unidentified


Ascent = Generator[np.ndarray, Expansion | None, Expansion]
"""Search that yields a point, receives its expansion and so on, and returns the best expansion.

A search that receives ``None`` instead returns the best expansion so far.
"""


def run_ascents(
    evaluate: Callable[[np.ndarray], list[Expansion]], ascents: list[Ascent], max_evaluations: int
) -> list[Expansion]:
    """Run searches in parallel, with one evaluation for the points of all, and return the results.

    Each evaluation has one point per search, so that one compiled program serves all: a search that
    has ended repeats its last point.
    """
    points = np.stack([next(ascent) for ascent in ascents])
    running = dict(enumerate(ascents))
    results: dict[int, Expansion] = {}
    for count in range(max_evaluations + 1):
        answers: list[Any] = [None] * len(ascents)
        if count < max_evaluations:
            answers = evaluate(points.copy())
        for index, ascent in list(running.items()):
            try:
                points[index] = ascent.send(answers[index])
            except StopIteration as end:
                results[index] = end.value
                del running[index]
        if not running:
            break
    return [results[index] for index in range(len(ascents))]


def newton(start: np.ndarray, *, min_gain: float, accept_flat: bool = False) -> Ascent:
    """Search by Newton's method with a trust region, of dense expansions.

    The search ends where a step gains less than `min_gain` nats and the Hessian is positive in all
    directions, or with `accept_flat` negative in none.
    """

    def is_mode(expansion: Expansion) -> bool:
        is_maximum = not (expansion.falls if accept_flat else expansion.clipped)
        return expansion.value < IMPOSSIBLE and is_maximum and expansion.gain < min_gain

    current = yield start
    assert current is not None
    best, radius = current, INITIAL_RADIUS
    while not is_mode(best):
        step, gain = current.step_within(radius)
        if not gain > 0:
            break
        proposal = yield current.point + step
        if proposal is None:
            break
        if is_mode(proposal):
            return proposal
        ratio = (current.value - proposal.value) / gain
        if ratio < 0.25:
            radius *= 0.25
        elif ratio > 0.75 and np.linalg.norm(step) > 0.9 * radius:
            radius = min(2 * radius, MAX_RADIUS)
        if ratio > 0.15:
            current = proposal
        if proposal.value < best.value:
            best = proposal
    return best


def lbfgs(start: np.ndarray, *, min_gain: float) -> Ascent:
    """Search by L-BFGS until a step gains less than `min_gain` nats; return the last expansion.

    Its `gain` is that of the last step, by the curvature along previous steps. Near a mode, values
    in float32 differ by rounding only, so a step ends where its slope has become flat enough and
    the value does not rise by more than rounding (Hager and Zhang 2005, approximate Wolfe).
    """
    current = yield start
    assert current is not None
    path = [current]
    while current.value < IMPOSSIBLE:
        step = _lbfgs_step(path)
        current.gain = float(-current.gradient @ step) / 2
        if current.gain < min_gain:
            break
        proposal = yield from _search_line(current, step)
        if proposal is None:
            break
        current = proposal
        path = [*path[-MEMORY:], current]
    return current


def _search_line(
    origin: Expansion, step: np.ndarray
) -> Generator[np.ndarray, Expansion | None, Expansion | None]:
    """Return the expansion where the slope along a step is flat enough, ``None`` if nowhere."""
    slope, rounding = origin.gradient @ step, ROUNDING * max(1.0, abs(origin.value))
    low, high, length = 0.0, np.inf, 1.0
    for _ in range(MAX_TRIES):
        proposal = yield origin.point + length * step
        if proposal is None:
            return None
        slope_ahead = proposal.gradient @ step
        if not proposal.value <= origin.value + rounding or slope_ahead > -MAX_SLOPE_RATIO * slope:
            high = length
        elif slope_ahead < MAX_SLOPE_RATIO * slope:
            low = length
        else:
            return proposal
        length = 2 * length if high == np.inf else (low + high) / 2
    return None


def _lbfgs_step(path: list[Expansion]) -> np.ndarray:
    """Return the next step of L-BFGS; without previous steps, of length one downhill."""
    gradient = path[-1].gradient
    pairs = [(b.point - a.point, b.gradient - a.gradient) for a, b in itertools.pairwise(path)]
    pairs = [(step, change) for step, change in pairs if step @ change > 0]
    if not pairs:
        return np.asarray(-gradient / max(float(np.linalg.norm(gradient)), 1e-30))
    steps, changes = (np.array(x, np.float64) for x in zip(*pairs, strict=True))
    # The initial Hessian is the curvature along the last step times the identity.
    root = np.sqrt(float(steps[-1] @ changes[-1] / (changes[-1] @ changes[-1])))
    inverse = LbfgsInvHessProduct(steps / root, changes * root)
    return np.asarray(-root * inverse.matvec(root * gradient))
