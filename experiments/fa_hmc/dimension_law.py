"""The law of FA-HMC on isotropic Gaussian clients, in closed form, coordinate by coordinate.

With the same scalars in every coordinate, mean and variance after any number of rounds are two
numbers, and the 2-Wasserstein distance is the root of the dimension times that of one coordinate.
"""

import math
from typing import NamedTuple

import numpy as np

__all__ = ["Scalars", "map_of_round", "rounds_to", "target", "w2_curve"]


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
    clients: Scalars, *, step_size: float, num_steps: int, num_local_steps: int, rho: float
) -> tuple[float, float, float]:
    """Return ``(A, b, V)`` of a round, ``theta' = A theta + b + N(0, V)``.

    A trajectory of client ``c`` is ``theta - m -> P (theta - m) + Q p`` with ``P = cos(L phi)``,
    ``Q = step_size sin(L phi) / sin(phi)`` and ``cos phi = 1 - step_size^2 curvature / 2``.

    Raises
    ------
    ValueError
        If the step size is too large for a client, ``step_size^2 curvature >= 4``.
    """
    cosine = 1 - step_size**2 * clients.curvatures / 2
    if np.abs(cosine).max() >= 1:
        raise ValueError(
            f"step_size must be below {2 / math.sqrt(clients.curvatures.max()):.4g}, where every "
            f"client is stable, got {step_size:.4g}."
        )
    angle = np.arccos(cosine)
    keep = np.cos(num_steps * angle)
    push = step_size * np.sin(num_steps * angle) / np.sin(angle)
    w = clients.weights
    variance = 0.0
    for t in range(num_local_steps):
        gain = keep**t * push
        variance += rho * float(w @ gain) ** 2 + (1 - rho) * float(w @ gain**2)
    left = keep**num_local_steps
    return float(w @ left), float(w @ ((1 - left) * clients.means)), variance


def w2_curve(
    clients: Scalars, round_map: tuple[float, float, float], *, start: float, num_rounds: int
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
