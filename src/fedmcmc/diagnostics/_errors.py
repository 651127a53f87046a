"""Monte Carlo errors of posterior means and standard deviations."""

from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

MEAN_ERROR, SD_ERROR = 0.05, 0.05
"""Largest Monte Carlo errors that pass: of means, in posterior sds; of sds, relative to them."""
HEAVY_TAIL = 0.3
"""Tail index above which fourth moments are infinite, so that an sd has no standard error."""
FEWEST_FOR_TAIL = 400
"""Draws from which a tail index is estimated."""
QUANTILES = (0.05, 0.95)


class MonteCarloErrors(NamedTuple):
    """Estimated standard errors, the largest of all coordinates.

    Attributes
    ----------
    mean
        Error of a posterior mean, in posterior sds.
    sd
        Error of a posterior sd, relative to it. For coordinates whose draws have no finite fourth
        moment, that of the width of the central 90 % interval, relative to the width.
    """

    mean: float
    sd: float

    @property
    def are_small(self) -> bool:
        """Whether both are at most 0.05."""
        return self.mean <= MEAN_ERROR and self.sd <= SD_ERROR

    @property
    def excess(self) -> float:
        """Factor by which the number of draws would have to grow for both to be at most 0.05."""
        return float(max(self.mean / MEAN_ERROR, self.sd / SD_ERROR) ** 2)


def errors_of_weighted(values: np.ndarray, weights: np.ndarray) -> MonteCarloErrors:
    """Return the errors of self-normalized importance sampling.

    Parameters
    ----------
    values
        ``[num, d]``.
    weights
        ``[num]``, which sum to one.

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
        of_mean = np.sqrt(weights**2 @ gaps**2 / variance)
        of_sd = np.sqrt(weights**2 @ (gaps**2 / variance - 1) ** 2) / 2
    heavy = _heavy_tailed(values, weights)
    if heavy.any():
        ess = 1 / np.sum(weights**2)
        of_sd[heavy] = _error_of_width(ess)
    return _largest(of_mean, of_sd, variance)


def errors_of_chains(values: np.ndarray) -> MonteCarloErrors:
    """Return the errors of chains ``[num_chains, num_draws, d]``, by effective sample sizes."""
    variance = values.var(axis=(0, 1))
    stats = import_module("arviz_stats.base").array_stats  # takes half a second
    with np.errstate(invalid="ignore", divide="ignore"):
        axes: dict[str, Any] = dict(chain_axis=0, draw_axis=1)
        of_mean = 1 / np.sqrt(stats.ess(values, method="mean", **axes))
        squares = (values - values.mean(axis=(0, 1))) ** 2
        of_squares = np.sqrt(squares.var(axis=(0, 1)) / stats.ess(squares, method="mean", **axes))
        of_sd = of_squares / variance / 2
        flat = values.reshape(-1, values.shape[-1])
        heavy = _heavy_tailed(flat, np.full(len(flat), 1 / len(flat)))
        if heavy.any():
            ess = stats.ess(values, method="tail", prob=QUANTILES, **axes)
            of_sd[heavy] = _error_of_width(ess)[heavy]
    return _largest(of_mean, of_sd, variance)


def errors_of_groups(values: np.ndarray) -> MonteCarloErrors:
    """Return the errors of pooled draws of independent groups, by how the groups differ.

    Parameters
    ----------
    values
        ``[num_groups, num_draws, d]``, at least four groups; draws within one may depend.
    """
    num = len(values)
    mean, variance = values.mean((0, 1)), values.var((0, 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        of_mean = values.mean(1).std(0, ddof=1) / np.sqrt(num * variance)
        squares = ((values - mean) ** 2).mean(1)
        of_sd = squares.std(0, ddof=1) / np.sqrt(num) / variance / 2
        flat = values.reshape(-1, values.shape[-1])
        heavy = _heavy_tailed(flat, np.full(len(flat), 1 / len(flat)))
        if heavy.any():
            low, high = np.quantile(values, QUANTILES, axis=1)
            width = high - low
            of_sd[heavy] = (width.std(0, ddof=1) / np.sqrt(num) / width.mean(0))[heavy]
    return _largest(of_mean, of_sd, variance)


def _largest(of_mean: np.ndarray, of_sd: np.ndarray, variance: np.ndarray) -> MonteCarloErrors:
    """Return the largest of each; a coordinate that never moved has no error to speak of."""
    moved = variance > 0
    if not moved.any():
        return MonteCarloErrors(0.0, 0.0)
    largest = (float(np.max(np.nan_to_num(x[moved], nan=np.inf))) for x in (of_mean, of_sd))
    return MonteCarloErrors(*largest)


def _error_of_width(ess: Any) -> Any:
    """Return the relative error of the central 90 % interval's width, for tails like a Gaussian's.

    Each quantile ``q`` has variance ``q (1 - q) / (ess f**2)`` with the density ``f`` there.
    """
    density, width = 0.1031, 3.290
    each = 0.05 * 0.95 / density**2
    both = 0.05**2 / density**2
    return np.sqrt((2 * each - 2 * both) / ess) / width


def _heavy_tailed(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return which coordinates have draws without a finite fourth moment, ``[d]`` bool.

    By Hill's estimate from the largest distances to the median, each draw counted by its weight.
    """
    num, size = values.shape
    if num < FEWEST_FOR_TAIL:
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
