"""The simulated rows of Figure 1, and how curved their posterior is."""

import math

import numpy as np

__all__ = ["curvatures", "simulated"]

NEWTON_STEPS = 20  # by far enough: the potential is smooth, and nearly quadratic


def simulated(
    seed: int, num_rows: int, dim: int, prior_precision: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return features, uniform on the unit sphere, and labels of coefficients from the prior."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(num_rows, dim))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    theta = rng.normal(size=dim) / math.sqrt(prior_precision)
    chance = 1 / (1 + np.exp(-features @ theta))
    labels = (rng.uniform(size=num_rows) < chance).astype(np.int32)
    return features, labels


def curvatures(seed: int, num_rows: int, dim: int, prior_precision: float) -> tuple[float, float]:
    """Return the least and largest curvature of the potential at the posterior's mode.

    Examples
    --------
    >>> low, high = curvatures(0, 50, 3, 1.0)
    >>> 1 < low < high < 1 + 50 / 4
    True
    """
    features, labels = simulated(seed, num_rows, dim, prior_precision)
    theta, prior = np.zeros(dim), prior_precision * np.eye(dim)
    for _ in range(NEWTON_STEPS):
        chance = 1 / (1 + np.exp(-features @ theta))
        curved = prior + (features.T * (chance * (1 - chance))) @ features
        step = np.linalg.solve(curved, features.T @ (labels - chance) - prior_precision * theta)
        theta = theta + step
        if np.abs(step).max() < 1e-9:
            break
    values = np.linalg.eigvalsh(curved)
    return float(values[0]), float(values[-1])
