"""The law of FA-HMC on isotropic Gaussian clients, in closed form, coordinate by coordinate.

With the same scalars in every coordinate, mean and variance after any number of rounds are two
numbers, and the 2-Wasserstein distance is the root of the dimension times that of one coordinate.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Scalars", "first_to", "map_of_round", "rounds_to", "target", "w2_curve"]


class Scalars(NamedTuple):
    """One coordinate of the clients: weighted losses ``curvature (theta - mean)^2 / 2``."""

    curvatures: np.ndarray  # [b]
    means: np.ndarray  # [b]
    weights: np.ndarray  # [b], summing to one


def target(clients: Scalars) -> tuple[float, float]:
    """Return mean and variance of the posterior."""
    total = float(clients.weights @ clients.curvatures)
    return float(clients.weights @ (clients.curvatures * clients.means)) / total, 1 / total


def map_of_round(
    clients: Scalars,
    *,
    step_size: Any,
    num_steps: int,
    num_local_steps: int,
    rho: float,
    noise: float = 0.0,
) -> tuple[Any, Any, Any]:
    """Return ``(A, b, V)`` of a round, ``theta' = A theta + b + N(0, V)``, for each step size.

    A trajectory of client ``c`` is ``theta - m -> P (theta - m) + Q p`` with ``P = cos(L phi)``,
    ``Q = step_size sin(L phi) / sin(phi)`` and ``cos phi = 1 - step_size^2 curvature / 2``. The
    noise of a gradient, of standard deviation `noise`, is a momentum of ``step_size`` times as much
    at the end of its leapfrog step (half as much at the start of a trajectory), if the two half
    kicks between two drifts share it.

    Raises
    ------
    ValueError
        If a step size is too large for a client, ``step_size^2 curvature >= 4``.
    """
    step = np.asarray(step_size, float)[..., None]
    cosine = 1 - step**2 * clients.curvatures / 2
    if np.abs(cosine).max() >= 1:
        raise ValueError(
            f"step_size must be below {2 / math.sqrt(clients.curvatures.max()):.4g}, where every "
            f"client is stable, got {step.max():.4g}."
        )
    angle = np.arccos(cosine)

    def pushed(num: int) -> np.ndarray:
        return step * np.sin(num * angle) / np.sin(angle)

    keep, push = np.cos(num_steps * angle), pushed(num_steps)
    w = clients.weights
    called = (step * push / 2) ** 2 + sum((step * pushed(n)) ** 2 for n in range(1, num_steps))
    variance = np.zeros(step.shape[:-1])
    for t in range(num_local_steps):
        gain = keep**t * push
        variance += rho * (gain @ w) ** 2 + (1 - rho) * (gain**2 @ w)
        variance += noise**2 * ((keep ** (2 * t) * called) @ w**2)
    left = keep**num_local_steps
    return left @ w, ((1 - left) * clients.means) @ w, variance


def w2_curve(
    clients: Scalars, round_map: tuple[Any, Any, Any], *, start: float, num_rounds: int
) -> np.ndarray:
    """Return the distance from the posterior a coordinate after ``0 .. num_rounds`` rounds."""
    mean, variance = start, 0.0
    right_mean, right_variance = target(clients)
    found = []
    for _ in range(num_rounds + 1):
        spread = math.sqrt(variance) - math.sqrt(right_variance)
        found.append(math.hypot(mean - right_mean, spread))
        factor, shift, noise = round_map
        mean, variance = factor * mean + shift, factor**2 * variance + noise
    return np.array(found)


def rounds_to(curve: np.ndarray, level: float) -> int | None:
    """Return the first round at which a curve is at most `level`, or ``None``."""
    reached = np.flatnonzero(curve <= level)
    return int(reached[0]) if reached.size else None


def first_to(
    clients: Scalars,
    map_of: Callable[[int], tuple[Any, Any, Any]],
    level: float,
    *,
    start: float,
    most: int,
) -> tuple[int, int] | None:
    """Return in how many rounds the first of several chains is at most `level` away, and which.

    `map_of` gives the maps of all chains, ``[num_chains]``, in a round. ``None`` if none arrives in
    `most` rounds.
    """
    right_mean, right_variance = target(clients)
    mean: Any = start
    variance: Any = 0.0
    for round_ in range(most):
        factor, shift, noise = map_of(round_)
        mean, variance = factor * mean + shift, factor**2 * variance + noise
        away = np.hypot(mean - right_mean, np.sqrt(variance) - math.sqrt(right_variance))
        nearest = int(np.argmin(away))
        if away[nearest] <= level:
            return round_ + 1, nearest
    return None
