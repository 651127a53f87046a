"""Summary of numbers of all sites."""

from dataclasses import dataclass
from typing import Any

import numpy as np

NUM_BINS = 1024
"""Number of bins of a histogram."""


@dataclass(frozen=True)
class Numbers:
    """Summary of numbers of all sites.

    Attributes
    ----------
    count, mean, sd
        Number of rows (sum of the weights), mean, and standard deviation with ``count - 1``.
    histogram, low, high
        Number of rows in each of 1,024 bins of the range, for numerical columns and outcomes.
    """

    count: float
    mean: float
    sd: float
    histogram: tuple[float, ...] = ()
    low: float = 0.0
    high: float = 0.0

    def quantile(self, probability: Any) -> np.ndarray:
        """Return quantiles, linear within a bin; 0 and 1 are the edges of the occupied bins."""
        counts = np.asarray(self.histogram)
        occupied = np.flatnonzero(counts)
        begin, end = occupied[0], occupied[-1] + 1
        edges = np.linspace(self.low, self.high, NUM_BINS + 1)[begin : end + 1]
        cumulative = np.concatenate(([0.0], np.cumsum(counts[begin:end]))) / counts.sum()
        return np.interp(probability, cumulative, edges)
