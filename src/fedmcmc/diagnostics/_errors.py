"""Monte Carlo errors of posterior means and standard deviations."""

from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

MEAN_ERROR, SD_ERROR = 0.05, 0.05
"""Largest Monte Carlo errors that pass: means in posterior sds, sds relative to the sd."""
HEAVY_TAIL = 0.3
"""Tail index above which fourth moments are infinite, so that an sd has no standard error."""
MIN_DRAWS_FOR_TAIL = 400
"""Smallest number of draws from which a tail index is estimated."""
QUANTILES = (0.05, 0.95)


class MonteCarloErrors(NamedTuple):
    """Estimated standard errors, the largest over all coordinates.

    Attributes
    ----------
    mean
        Error of a posterior mean, in posterior sds.
    sd
        Relative error of a posterior sd. For coordinates whose draws have no finite fourth moment,
        relative error of the width of the central 90 % interval.
    """

    mean: float
    sd: float

    @property
    def are_small(self) -> bool:
        """True if both errors are at most 0.05."""
        return self.mean <= MEAN_ERROR and self.sd <= SD_ERROR

    @property
    def excess(self) -> float:
        """Factor by which the number of draws must grow to reduce both errors to 0.05."""
        return float(max(self.mean / MEAN_ERROR, self.sd / SD_ERROR) ** 2)


def errors_of_weighted(values: np.ndarray, weights: np.ndarray) -> MonteCarloErrors:
    """Return the errors of self-normalized importance sampling.

    Parameters
    ----------
    values
        ``[num, d]``.
    weights
        ``[num]``, normalized to sum to one.

    Examples
    --------
    >>> values = np.random.default_rng(0).normal(size=(10_000, 1))
    >>> errors = errors_of_weighted(values, np.full(10_000, 1e-4))
    >>> round(errors.mean, 3), round(errors.sd, 3)
    (0.01, 0.007)
    """
    gaps = values - weights @ values
    variance = weights @ gaps**2
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_error = np.sqrt(weights**2 @ gaps**2 / variance)
        sd_error = np.sqrt(weights**2 @ (gaps**2 / variance - 1) ** 2) / 2
    heavy = _heavy_tailed(values, weights)
    if heavy.any():
        ess = 1 / np.sum(weights**2)
        sd_error[heavy] = _error_of_width(ess)
    return _largest(mean_error, sd_error, variance)


def chain_errors(values: np.ndarray) -> MonteCarloErrors:
    """Return the errors of chains ``[num_chains, num_draws, d]`` from effective sample sizes."""
    variance = values.var(axis=(0, 1))
    stats = import_module("arviz_stats.base").array_stats  # the import takes half a second
    with np.errstate(invalid="ignore", divide="ignore"):
        axes: dict[str, Any] = dict(chain_axis=0, draw_axis=1)
        mean_error = 1 / np.sqrt(stats.ess(values, method="mean", **axes))
        squares = (values - values.mean(axis=(0, 1))) ** 2
        square_error = np.sqrt(squares.var(axis=(0, 1)) / stats.ess(squares, method="mean", **axes))
        sd_error = square_error / variance / 2
        flat = values.reshape(-1, values.shape[-1])
        heavy = _heavy_tailed(flat, np.full(len(flat), 1 / len(flat)))
        if heavy.any():
            ess = stats.ess(values, method="tail", prob=QUANTILES, **axes)
            sd_error[heavy] = _error_of_width(ess)[heavy]
    return _largest(mean_error, sd_error, variance)


def group_errors(values: np.ndarray) -> MonteCarloErrors:
    """Return the errors of pooled draws from the differences between independent groups.

    Parameters
    ----------
    values
        ``[num_groups, num_draws, d]``, at least four groups; draws of a group may be dependent.
    """
    num = len(values)
    mean, variance = values.mean((0, 1)), values.var((0, 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_error = values.mean(1).std(0, ddof=1) / np.sqrt(num * variance)
        squares = ((values - mean) ** 2).mean(1)
        sd_error = squares.std(0, ddof=1) / np.sqrt(num) / variance / 2
        flat = values.reshape(-1, values.shape[-1])
        heavy = _heavy_tailed(flat, np.full(len(flat), 1 / len(flat)))
        if heavy.any():
            low, high = np.quantile(values, QUANTILES, axis=1)
            width = high - low
            sd_error[heavy] = (width.std(0, ddof=1) / np.sqrt(num) / width.mean(0))[heavy]
    return _largest(mean_error, sd_error, variance)


def _largest(
    mean_error: np.ndarray, sd_error: np.ndarray, variance: np.ndarray
) -> MonteCarloErrors:
    """Return the largest errors of the coordinates that moved."""
    moved = variance > 0
    if not moved.any():
        return MonteCarloErrors(0.0, 0.0)
    largest = (float(np.max(np.nan_to_num(x[moved], nan=np.inf))) for x in (mean_error, sd_error))
    return MonteCarloErrors(*largest)


def _error_of_width(ess: np.ndarray) -> Any:
    """Return the relative error of the central 90 % interval's width, for Gaussian tails.

    A quantile at ``q`` has variance ``q (1 - q) / (ess f**2)`` if ``f`` is the density there.
    """
    density, width = 0.1031, 3.290
    variance = 0.05 * 0.95 / density**2
    covariance = 0.05**2 / density**2
    return np.sqrt((2 * variance - 2 * covariance) / ess) / width


def _heavy_tailed(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return true for coordinates whose draws have no finite fourth moment, ``[d]``.

    Hill's estimator is applied to the largest distances to the median, weighted.
    """
    num, size = values.shape
    if num < MIN_DRAWS_FOR_TAIL:
        return np.zeros(size, bool)
    gaps = np.abs(values - np.median(values, axis=0))
    order = np.argsort(-gaps, axis=0)
    sorted_gaps = np.take_along_axis(gaps, order, 0)
    above = np.cumsum(weights[order], axis=0)
    share = min(0.02, 3 / np.sqrt(num))
    inside = above <= share
    count = np.maximum(inside.sum(0), 5)
    threshold = np.take_along_axis(sorted_gaps, count[None], 0)[0]
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.where(inside, np.log(sorted_gaps / threshold), 0.0)
        tail_weights = np.where(inside, weights[order], 0.0)
        hill = (logs * tail_weights).sum(0) / tail_weights.sum(0)
    return np.nan_to_num(hill) > HEAVY_TAIL
