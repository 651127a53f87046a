"""Maxima of a posterior by Newton's method or L-BFGS, on sums over clients alone."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.optimize import LbfgsInvHessProduct, minimize

from fedmcmc._types import ArrayTree, Posterior, compiled
from fedmcmc.gradients import minus_hessian
from fedmcmc.kernels import Expanded, Points, expansions
from fedmcmc.pytrees import trees
from fedmcmc.runs import Consortium

NEWTON_DIMENSIONS = 256
"""Up to here steps are Newton's, with curvatures summed over clients; above L-BFGS's."""
FLAT = 1e-6
"""Eigenvalues below this share of the largest count as none."""
RISING = 1e-3
"""Negative ones beyond this share are no rounding: the place is no maximum."""
HIGH = 1e100
MEMORY = 10
"""Steps that L-BFGS remembers."""
ROUNDING = 1e-6
"""Of values, relative to them."""
STEEP, MAX_TRIES = 0.9, 20
"""Of a slope, what may be left at a step's end; and places that are tried along it."""
MAX_RADIUS = 1e9
"""Largest step: SciPy's own, 1000, does not reach parameters such as 100,000 in time."""
Structure = Literal["dense", "diagonal", "none"]
"""What of a curvature is used: all of it, its diagonal, or nothing."""


class Stopped(Exception):
    """No more evaluations are made."""


class Ledger:
    """Adds up what exchanges cost."""

    def __init__(self, consortium: Consortium) -> None:
        self.consortium, self.rounds, self.up, self.down = consortium, 0, 0.0, 0.0

    def ask(self, question: Any, content: Any) -> Any:
        asked = self.consortium.ask(question, content)
        self.add(asked.rounds, asked.bits_up, asked.bits_down)
        return asked.value

    def add(self, rounds: int, bits_up: float, bits_down: float) -> None:
        self.rounds += rounds
        self.up, self.down = self.up + bits_up, self.down + bits_down


@compiled(static_argnames=("structure",))
def expanded_prior(
    posterior: Posterior, points: ArrayTree, centre: ArrayTree, *, structure: str
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


class Expansion:
    """Minus the log posterior at a point, its gradient, its Hessian, and Newton's step.

    `hessian` is ``[d, d]``, a diagonal ``[d]`` or ``None``. Directions in which it is flat or falls
    are counted in `clipped`, and `falls` says whether it does in one by more than rounding; of a
    dense `hessian` the columns of `flat_along`, ``[d, clipped]``, are these directions. `gain` is
    what the step promises, in nats.
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
            least = FLAT * max(values[-1], np.finfo(float).tiny)
            self.clipped = int((values < least).sum())
            self.falls = bool(values[0] < -RISING * values[-1])
            vectors = scale[:, None] * vectors
            self.flat_along = vectors[:, values < least]
            with np.errstate(over="ignore"):
                self.covariance = (vectors / np.maximum(values, least)) @ vectors.T
            self.step = -self.covariance @ gradient
        self.gain = float(-gradient @ self.step / 2)


class Objective:
    """Expansions of minus the log posterior at points, one exchange for all of them.

    Values are relative to the first center. The center of differences, in which float32 keeps
    digits, is the best place so far: near a mode, where they matter, differences are small.

    `unidentified` are the coordinates, ``[d]`` bool, of which no row said anything at any point,
    neither by itself nor through another one by the prior; ``None`` without dense curvatures.
    `any_finite` is whether value and derivatives were finite at any point.
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
        at = jax.vmap(lambda x: trees.cast_like(trees.unravel(x, self.centre), self.centre))(
            jnp.asarray(points, trees.ravel(self.centre).dtype)
        )
        answer: Expanded = self.ledger.ask(self.question, Points(at, self.centre))
        prior = expanded_prior(self.posterior, at, self.centre, structure=self.structure)
        value = -(np.asarray(prior[0], np.float64) + np.asarray(answer.value, np.float64))
        value = value + self.at_centre
        gradient = -(np.asarray(prior[1], np.float64) + np.asarray(answer.gradient, np.float64))
        num, size = points.shape
        hessians: list[np.ndarray | None] = [None] * num
        if self.structure != "none":
            of_rows = np.asarray(answer.curvature, np.float64)
            if self.structure == "dense":
                of_rows = np.stack([_symmetric(upper, size) for upper in of_rows])
                told = np.asarray(answer.gradient) != 0
                others = np.asarray(prior[2]) * (1 - np.eye(size))
                unidentified = ~(told | (others != 0).any(axis=-1)).any(axis=0)
                self.unidentified = (
                    unidentified if self.unidentified is None else self.unidentified & unidentified
                )
            hessians = list(of_rows + np.asarray(prior[2], np.float64))
        every = list(zip(points, value, gradient, hessians, strict=True))
        found = [Expansion(*x) if _all_finite(x) else self._impossible(x) for x in every]
        self.any_finite |= any(map(_all_finite, every))
        best = int(np.argmin([x.value for x in found]))
        if found[best].value < self.at_centre:
            self.at_centre = found[best].value
            self.centre = jax.tree.map(lambda leaf: leaf[best], at)
        return found

    def _impossible(self, given: tuple[Any, ...]) -> Expansion:
        """Return a place at which no step may end."""
        point, _, gradient, hessian = given
        unit: np.ndarray | None = None
        if hessian is not None:
            unit = np.eye(len(point)) if hessian.ndim == 2 else np.ones(len(point))
        return Expansion(point, HIGH, np.zeros_like(gradient), unit)


def _symmetric(upper: np.ndarray, size: int) -> np.ndarray:
    whole = np.zeros((size, size))
    whole[np.triu_indices(size)] = upper
    symmetric: np.ndarray = whole + np.triu(whole, 1).T
    return symmetric


def _all_finite(given: tuple[Any, ...]) -> bool:
    return all(bool(np.isfinite(x).all()) for x in given if x is not None)


class Arrived(Exception):
    """Ends an optimizer of SciPy whose next step would gain nothing."""


def newton(
    objective: Callable[[np.ndarray], Expansion],
    start: np.ndarray,
    *,
    least_gain: float,
    max_steps: int = 200,
    flat: bool = False,
) -> Expansion:
    """Follow SciPy's trust-region Newton method and return the best place that it saw.

    It ends where a step promises less than `least_gain` nats and the log posterior falls in all
    directions, or with `flat` rises in none.
    """
    seen: dict[bytes, Expansion] = {}
    best: list[Expansion] = []

    def at(x: np.ndarray) -> Expansion:
        key = x.tobytes()
        if key not in seen:
            seen[key] = found = objective(x)
            if not best or found.value < best[0].value:
                best[:] = [found]
            is_maximum = not (found.falls if flat else found.clipped)
            if found.value < HIGH and is_maximum and found.gain < least_gain:
                best[:] = [found]
                raise Arrived
        return seen[key]

    def follow(method: str, begin: np.ndarray) -> None:
        with contextlib.suppress(Arrived, Stopped), np.errstate(all="ignore"):
            minimize(
                lambda x: at(x).value,
                begin,
                jac=lambda x: at(x).gradient,
                hess=lambda x: at(x).hessian,
                method=method,
                options={"gtol": 0.0, "maxiter": max_steps, "max_trust_radius": MAX_RADIUS},
            )

    try:
        follow("trust-exact", start)
    except UnboundLocalError:  # of SciPy: at some saddles it finds no step
        follow("trust-krylov", best[0].point)
    return best[0]


def lbfgs(objective: Callable[[np.ndarray], Expansion], start: np.ndarray) -> Expansion:
    """Follow SciPy's L-BFGS and return the best place that it saw."""
    best: list[Expansion] = []

    def at(x: np.ndarray) -> tuple[float, np.ndarray]:
        found = objective(x)
        if not best or found.value < best[0].value:
            best[:] = [found]
        return found.value, found.gradient

    with contextlib.suppress(Stopped):
        minimize(at, start, jac=True, method="L-BFGS-B", options={"ftol": 1e-7, "maxiter": 500})
    return best[0]


def to_rest(
    objective: Callable[[np.ndarray], Expansion],
    start: np.ndarray,
    *,
    least_gain: float,
    max_steps: int,
) -> Expansion:
    """Follow L-BFGS until a step promises less than `least_gain` nats; return the last place.

    Its `gain` is that promise, by the curvature that the last steps showed. SciPy's L-BFGS gives up
    where values differ by their rounding alone; here a step is as good as the slope at its end
    says, if it raises no value by more than that (Hager and Zhang 2005, approximate Wolfe).
    """
    here = objective(start)
    path = [here]
    with contextlib.suppress(Stopped):
        for _ in range(max_steps):
            step = _step(path)
            here.gain = float(-here.gradient @ step) / 2
            if here.gain < least_gain or not here.value < HIGH:
                break
            following = _along(objective, here, step)
            if following is None:
                break
            here = following
            path = [*path[-MEMORY:], here]
    return here


def _along(
    objective: Callable[[np.ndarray], Expansion], here: Expansion, step: np.ndarray
) -> Expansion | None:
    """Return a place along a step at which the slope is much less steep; ``None`` if none is."""
    slope, rounding = here.gradient @ step, ROUNDING * max(1.0, abs(here.value))
    low, high, length = 0.0, np.inf, 1.0
    for _ in range(MAX_TRIES):
        found = objective(here.point + length * step)
        ahead = found.gradient @ step
        if not found.value <= here.value + rounding or ahead > -STEEP * slope:
            high = length
        elif ahead < STEEP * slope:
            low = length
        else:
            return found
        length = 2 * length if high == np.inf else (low + high) / 2
    return None


def _step(path: list[Expansion]) -> np.ndarray:
    """Return the step of L-BFGS from the last place of a path, at first one of length one."""
    gradient = path[-1].gradient
    pairs = [(b.point - a.point, b.gradient - a.gradient) for a, b in itertools.pairwise(path)]
    kept = [(step, change) for step, change in pairs if step @ change > 0]
    if not kept:
        return np.asarray(-gradient / max(float(np.linalg.norm(gradient)), 1e-30))
    steps, changes = (np.array(x, np.float64) for x in zip(*kept, strict=True))
    scale = float(steps[-1] @ changes[-1] / (changes[-1] @ changes[-1]))
    root = np.sqrt(scale)  # the Hessian before any step is that of the last one
    inverse = LbfgsInvHessProduct(steps / root, changes * root)
    return np.asarray(-root * inverse.matvec(root * gradient))
