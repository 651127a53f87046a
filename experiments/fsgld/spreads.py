"""Test of Pitman (1939) and Morgan (1939) that two paired spreads are equal."""

from typing import Any, NamedTuple

import numpy as np
from scipy import stats

__all__ = ["Spreads", "compare"]


class Spreads(NamedTuple):
    """Standard deviations of two methods over the same repetitions.

    Attributes
    ----------
    ratio
        Of the first one's to the second one's.
    low, high
        The 95 % interval of `ratio`; 0 and infinity where fewer than three repetitions are left.
    p_value
        Of equal spreads, two-sided.
    """

    ratio: float
    low: float
    high: float
    p_value: float


def compare(one: Any, other: Any) -> Spreads:
    """Compare the spreads of two methods over repetitions that share their data.

    Equal variances are the same as no correlation between sums and differences of the pairs.
    Repetitions in which either is missing or not finite are left out.

    Examples
    --------
    >>> spreads = compare([1.0, 2.1, 2.9, 4.0], [2.0, 4.0, 6.1, 8.0])
    >>> [round(number, 2) for number in (spreads.ratio, spreads.low, spreads.high)]
    [0.49, 0.39, 0.62]
    """
    x, y = np.array(one, float), np.array(other, float)
    kept = np.isfinite(x) & np.isfinite(y)
    x, y = x[kept], y[kept]
    if len(x) < 3:
        return Spreads(float("nan"), 0.0, float("inf"), 1.0)
    ratio = x.var(ddof=1) / y.var(ddof=1)
    left = 1 - np.corrcoef(x, y)[0, 1] ** 2  # what one method's scores leave of the other's
    freedom = len(x) - 2
    t = (ratio - 1) * np.sqrt(freedom / (4 * ratio * left))
    width = 1 + 2 * left * stats.t.ppf(0.975, freedom) ** 2 / freedom
    factor = width + np.sqrt(width**2 - 1)
    low, high = np.sqrt(ratio / factor), np.sqrt(ratio * factor)
    p_value = 2 * stats.t.sf(abs(t), freedom)
    return Spreads(float(np.sqrt(ratio)), float(low), float(high), float(p_value))
