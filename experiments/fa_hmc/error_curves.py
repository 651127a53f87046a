"""Marginal errors of the draws so far, at many rounds of a run, from counts that move along."""

from collections.abc import Iterable

import numpy as np

__all__ = ["error_curve", "marks"]

NUM_BINS = 50
CHUNK = 2**24  # numbers that are counted at once


def marks(num_rounds: int) -> list[int]:
    """Return rounds that grow by about a twenty-fourth of a factor e, from 2 to the last one."""
    grid = np.geomspace(2, num_rounds, 1 + int(24 * np.log(num_rounds)))
    return sorted({int(r) for r in [*grid, num_rounds]})


def error_curve(
    stretches: Iterable[np.ndarray], reference: np.ndarray, num_rounds: int, enough: float = 0.0
) -> list[tuple[int, float]]:
    """Return pairs (rounds, marginal error of the draws so far) at `marks`, until it is `enough`.

    The first half of the draws so far is left out, so that the start is forgotten. The error is
    that of `fedmcmc.metrics.marginal_error`, which would compile anew for each number of draws;
    here a draw is counted once when it comes and once when it goes. NaN where a draw is not finite.

    Parameters
    ----------
    stretches
        Draws of consecutive rounds, ``[num_chains, rounds, d]``; no more are asked for than the
        curve needs.
    reference
        ``[num_reference, d]``.
    num_rounds
        Where the curve ends at the latest.
    enough
        The first error that is not above it is the last one.
    """
    source = iter(stretches)
    draws = next(source)
    num_chains, _, dim = draws.shape
    low, high = reference.min(0), reference.max(0)
    wanted = _counts(reference, low, high) / len(reference)
    counts, begin, end, curve = np.zeros_like(wanted), 0, 0, []
    for mark in marks(num_rounds):
        while draws.shape[1] < mark:
            draws = np.concatenate([draws, next(source)], axis=1)
        half = mark // 2
        counts += _counts(draws[:, end:mark].reshape(-1, dim), low, high)
        counts -= _counts(draws[:, begin:half].reshape(-1, dim), low, high)
        begin, end = half, mark
        shares = counts / (num_chains * (mark - half))
        error = np.abs(shares - wanted).sum(1).mean() / 2
        finite = np.isfinite(draws[:, half:mark]).all()
        curve.append((mark, float(error) if finite else float("nan")))
        if curve[-1][1] <= enough:
            break
    return curve


def _counts(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return how many of ``[num, d]`` lie in each bin, and outside of all, ``[d, bins + 1]``."""
    dim = values.shape[1]
    counts = np.zeros(dim * (NUM_BINS + 1))
    first = np.arange(dim) * (NUM_BINS + 1)
    width = np.where(high > low, high - low, 1)
    size = max(1, CHUNK // dim)
    for start in range(0, len(values), size):
        part = values[start : start + size]
        inside = (part >= low) & (part <= high)  # false where it is not finite
        place = np.where(inside, (part - low) / width * NUM_BINS, 0).astype(np.int32)
        place = np.where(inside, np.minimum(place, NUM_BINS - 1), NUM_BINS)
        counts += np.bincount((place + first).ravel(), minlength=len(counts))
    return counts.reshape(dim, -1)
