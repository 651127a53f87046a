"""Marginal errors of the draws so far, at many rounds of a run, from counts that move along."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

__all__ = ["Arrival", "ErrorCurve", "arrival", "error_curve", "marks"]

NUM_BINS = 50
CHUNK = 2**24  # numbers that are counted at once


def marks(num_rounds: int) -> list[int]:
    """Return rounds that grow by about a twenty-fourth of a factor e, from 2 to the last one."""
    grid = np.geomspace(2, num_rounds, 1 + int(24 * np.log(num_rounds)))
    return sorted({int(r) for r in [*grid, num_rounds]})


class ErrorCurve(NamedTuple):
    """Marginal errors of the draws so far, ``[num_marks]``, NaN where a draw is not finite.

    `without` are the errors where one chain is left out, ``[num_marks, num_chains]``; NaN for one.
    """

    rounds: list[int]
    errors: list[float]
    without: np.ndarray


class Arrival(NamedTuple):
    """Rounds to an error, between marks, and their standard error: NaN where it is not known."""

    rounds: float
    error: float


def error_curve(
    stretches: Iterable[np.ndarray], reference: np.ndarray, num_rounds: int, enough: float = 0.0
) -> ErrorCurve:
    """Return the marginal error of the draws so far at `marks`, until it is `enough`.

    The first half of the draws so far is left out, so that the start is forgotten. The error is
    that of `fedmcmc.metrics.marginal_error`, which would compile anew for each number of draws;
    here a draw is counted once when it comes and once when it goes.

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
        The curve ends where no error is above it any more, with all chains or without any one.
    """
    source = iter(stretches)
    draws = next(source)
    num_chains = len(draws)
    low, high = reference.min(0), reference.max(0)
    wanted = _counts(reference[None], low, high)[0] / len(reference)
    counts, begin, end = np.zeros((num_chains, *wanted.shape)), 0, 0
    rounds: list[int] = []
    errors: list[float] = []
    without: list[list[float]] = []
    for mark in marks(num_rounds):
        while draws.shape[1] < mark:
            draws = np.concatenate([draws, next(source)], axis=1)
        half = mark // 2
        counts += _counts(draws[:, end:mark], low, high)
        counts -= _counts(draws[:, begin:half], low, high)
        begin, end = half, mark
        finite, total = np.isfinite(draws[:, half:mark]).all(), counts.sum(0)

        def error(of: np.ndarray, chains: int, each: int = mark - half) -> float:
            return float(np.abs(of / (chains * each) - wanted).sum(1).mean() / 2)

        rounds.append(mark)
        errors.append(error(total, num_chains) if finite else math.nan)
        known = finite and num_chains > 1
        without.append([error(total - c, num_chains - 1) if known else math.nan for c in counts])
        if max([errors[-1], *(without[-1] if known else [])]) <= enough:
            break
    return ErrorCurve(rounds, errors, np.array(without))


def arrival(curve: ErrorCurve, enough: float) -> Arrival | None:
    """Return the rounds to an error, ``None`` where the curve does not come so far.

    The standard error is a jackknife over chains. Where a curve without one chain does not arrive,
    it is not known.

    Examples
    --------
    >>> curve = ErrorCurve([10, 20], [0.4, 0.1], np.array([[0.4, 0.4], [0.1, 0.1]]))
    >>> arrival(curve, 0.2)
    Arrival(rounds=14.142135623730951, error=0.0)
    """
    found = _crossing(curve.rounds, curve.errors, enough)
    if math.isnan(found):
        return None
    parts = np.array([_crossing(curve.rounds, errors, enough) for errors in curve.without.T])
    num = len(parts)
    return Arrival(found, float(np.sqrt((num - 1) / num * ((parts - parts.mean()) ** 2).sum())))


def _crossing(rounds: list[int], errors: Iterable[float], enough: float) -> float:
    """Return where errors fall to a level, on straight lines between logarithms; else NaN."""
    before: tuple[int, float] | None = None
    for place in zip(rounds, errors, strict=True):
        if place[1] <= enough:
            if before is None or not before[1] > enough or place[1] <= 0:
                return float(place[0])
            way = math.log(before[1] / enough) / math.log(before[1] / place[1])
            return before[0] * (place[0] / before[0]) ** way
        before = place
    return math.nan


def _counts(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return how many of ``[num_chains, num, d]`` lie in each bin, and outside of all.

    The result is ``[num_chains, d, bins + 1]``.
    """
    num_chains, num, dim = values.shape
    size = dim * (NUM_BINS + 1)
    counts = np.zeros(num_chains * size)
    first = np.arange(dim) * (NUM_BINS + 1) + size * np.arange(num_chains)[:, None, None]
    width = np.where(high > low, high - low, 1)
    each = max(1, CHUNK // (num_chains * dim))
    for start in range(0, num, each):
        part = values[:, start : start + each]
        inside = (part >= low) & (part <= high)  # false where it is not finite
        place = np.where(inside, (part - low) / width * NUM_BINS, 0).astype(np.int32)
        place = np.where(inside, np.minimum(place, NUM_BINS - 1), NUM_BINS)
        counts += np.bincount((place + first).ravel(), minlength=len(counts))
    return counts.reshape(num_chains, dim, -1)
