"""Whether one of two paired spreads is the smaller: the test of Pitman (1939) and Morgan (1939)."""

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

    def __str__(self) -> str:
        """Return the ratio with its interval."""
        if not np.isfinite(self.high):
            return "too few repetitions"
        interval = f"95 % interval {self.low:.2f} to {self.high:.2f}, p = {self.p_value:.2g}"
        return f"{self.ratio:.2f} ({interval})"


def compare(one: Any, other: Any) -> Spreads:
    """Compare the spreads of two methods over repetitions that share their data.

    Equal variances are the same as no correlation between sums and differences of the pairs.
    Repetitions in which either is missing or not finite are left out.

    Examples
    --------
    >>> print(compare([1.0, 2.1, 2.9, 4.0], [2.0, 4.0, 6.1, 8.0]))
    0.49 (95 % interval 0.39 to 0.62, p = 0.0048)
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
