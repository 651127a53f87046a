"""Acceptance of proposals on Gaussian targets, by simulation in float64: NumPy and SciPy alone."""

import numpy as np
from scipy.stats import norm

NUM = 200_000


def mean_and_error(probabilities):
    return probabilities.mean(), probabilities.std() / np.sqrt(len(probabilities))


def penalized(log_ratio, variance):
    """Return ``E min(1, exp(log_ratio + e - variance / 2))`` with ``e ~ N(0, variance)``."""
    sd = np.sqrt(variance)
    certain = norm.cdf(log_ratio / sd - sd / 2)
    return certain + np.exp(log_ratio + norm.logcdf(-log_ratio / sd - sd / 2))


def hmc(step_size, curvatures, num_steps, seed=0, noise=0.0):
    """Return the mean acceptance of leapfrog trajectories on N(0, diag(1 / curvatures)), and se.

    With `noise` of that variance in the difference of log densities, and the penalty for it.
    """
    rng = np.random.default_rng(seed)
    h = np.asarray(curvatures, float)
    x, p = rng.normal(size=(2, NUM, len(h)))
    x = x / np.sqrt(h)

    def energy(x, p):
        return (h * x**2 + p**2).sum(1) / 2

    before = energy(x, p)
    for _ in range(num_steps):
        p = p - step_size / 2 * h * x
        x = x + step_size * p
        p = p - step_size / 2 * h * x
    gap = before - energy(x, p)
    return mean_and_error(penalized(gap, noise) if noise else np.exp(np.minimum(0, gap)))


def gaussian_mh(num_dimensions, variance, distance, correlation, seed=0):
    """Return the mean acceptance on N(0, I) of proposals by N(m, v I), ``|m|`` the distance."""
    rng = np.random.default_rng(seed)
    x, z = rng.normal(size=(2, NUM, num_dimensions))
    mean = np.zeros(num_dimensions)
    mean[0] = distance
    y = mean + correlation * (x - mean) + np.sqrt((1 - correlation**2) * variance) * z

    def log_weight(x):
        return (((x - mean) ** 2).sum(1) / variance - (x**2).sum(1)) / 2

    return mean_and_error(np.exp(np.minimum(0, log_weight(y) - log_weight(x))))


def multiple_try(num_dimensions, variance, distance, num_tries, seed=0):
    """Return how often a choice by weight leaves the old point, on N(0, I), and se."""
    rng = np.random.default_rng(seed)
    num = NUM // num_tries
    mean = np.zeros(num_dimensions)
    mean[0] = distance
    fresh = mean + np.sqrt(variance) * rng.normal(size=(num, num_tries - 1, num_dimensions))
    points = np.concatenate([rng.normal(size=(num, 1, num_dimensions)), fresh], axis=1)
    log_weights = (((points - mean) ** 2).sum(-1) / variance - (points**2).sum(-1)) / 2
    weights = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
    return mean_and_error(1 - weights[:, 0] / weights.sum(1))
