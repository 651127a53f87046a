"""The simulated rows of Figure 1."""

import math

import numpy as np

__all__ = ["simulated"]


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
