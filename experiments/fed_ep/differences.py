"""Differences of accuracies between methods, and what noise would hide of them."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from experiments import claims

__all__ = [
    "FALL",
    "PARTS",
    "Difference",
    "accuracy",
    "difference",
    "difference_noise",
    "fall",
    "fallen_methods",
    "fallen_seeds",
    "fell",
    "margin",
    "within_seeds",
]

TIMES = claims.TIMES
COVERAGE = 0.95
FALL = 2.0  # points of accuracy below the best that do not go unnoticed
PARTS = ("early", "best", "end")  # see `image_runs.measure`


class Difference(NamedTuple):
    """Points of accuracy; the noise beyond which they count; the standard error within seeds.

    `error` is ``None`` where the noise is that of test images.
    """

    points: float
    noise: float
    error: float | None = None

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.points:+.1f} (noise {self.noise:.1f})"
        return f"{self.points:+.2f} (s.e. {self.error:.2f})"

    @property
    def above(self) -> bool:
        """Whether the difference is positive beyond its noise."""
        return self.points > self.noise

    @property
    def below(self) -> bool:
        """Whether the difference is negative beyond its noise."""
        return self.points < -self.noise


def difference(metrics: Mapping[str, Any], one: str, other: str, part: str = "best") -> Difference:
    """Return the accuracy of `one` less that of `other`.

    Parameters
    ----------
    metrics
        Of `image_runs.measure`.
    one, other
        Rows of the table.
    part
        ``"early"``, the first rounds after the burn-in, ``"best"``, or ``"end"``, the last rounds.

    Returns
    -------
    Difference
        Within seeds where the record has two or more of them, else with the noise of test images.
    """
    values = metrics.get(f"{part}_by_seed", {})
    if len(values.get(one) or ()) > 1 and values.get(other):
        return _paired(values[one], values[other])
    rates = [accuracy(metrics, name, part) for name in (one, other)]
    return Difference(rates[0] - rates[1], difference_noise(metrics, *rates))


def fall(metrics: Mapping[str, Any], name: str) -> Difference:
    """Return a method's best accuracy less that of its last rounds."""
    best, end = (metrics.get(f"{part}_by_seed", {}).get(name) for part in ("best", "end"))
    if best and end and len(best) > 1:
        return _paired(best, end)
    rates = [accuracy(metrics, name, part) for part in ("best", "end")]
    return Difference(rates[0] - rates[1], difference_noise(metrics, *rates))


def fell(metrics: Mapping[str, Any], name: str) -> bool:
    """Return whether a method ends more than `FALL` points below its best, or not finite."""
    return not fall(metrics, name).points <= FALL


def fallen_methods(metrics: Mapping[str, Any]) -> list[str]:
    """Return the methods whose last rounds are below their best, beyond noise or by `FALL`."""
    names = [row["method"] for row in metrics["table"]]
    return [name for name in names if fall(metrics, name).above or fell(metrics, name)]


def fallen_seeds(metrics: Mapping[str, Any], name: str) -> int | None:
    """Return how many seeds end more than `FALL` points below their best, if the record has it.

    A mean over seeds hides that some may end at chance and others where they were.
    """
    best, end = (metrics.get(f"{part}_by_seed", {}).get(name) for part in ("best", "end"))
    if not best or not end:
        return None
    falls = np.array(best, float) - np.array(end, float)
    return int(np.sum(~(falls <= FALL)))


def within_seeds(metrics: Mapping[str, Any]) -> bool:
    """Return whether a record has the seeds' own best accuracies, of two or more."""
    return metrics["settings"].get("num_seeds", 1) > 1 and "best_by_seed" in metrics


def accuracy(metrics: Mapping[str, Any], name: str, part: str = "best") -> float:
    """Return a method's accuracy, the mean over seeds; NaN where it turned non-finite."""
    settings = metrics["settings"]
    if part == "best":
        column = f"accuracy in {settings['checkpoints'][-1]} rounds"
        (value,) = [row[column] for row in metrics["table"] if row["method"] == name]
        return math.nan if value is None else float(value)
    curve, window = metrics["by_round"][name], settings["window"]
    if part == "early":
        first = settings["num_burnin"]
        return float(np.mean(curve[first : first + window]))
    return float(np.mean(curve[-window:])) if name not in metrics["diverged"] else math.nan


def difference_noise(metrics: Mapping[str, Any], *rates: float) -> float:
    """Return two standard errors of a difference of accuracies on two independent test sets.

    Of accuracies in percent; one stands for both.
    """
    shares = np.array(rates if len(rates) > 1 else 2 * rates) / 100
    return float(
        TIMES * 100 * np.sqrt((shares * (1 - shares)).sum() / metrics["settings"]["num_test"])
    )


def margin(num: int) -> float:
    """Return how many standard errors of a mean over `num` seeds its noise is, by Student's law.

    Two are too few where the standard error itself comes from some seeds.

    Examples
    --------
    >>> [round(margin(num), 1) for num in (2, 3, 5, 30)]
    [12.7, 4.3, 2.8, 2.0]
    """
    return float(stats.t.ppf((1 + COVERAGE) / 2, num - 1)) if num > 1 else math.inf


def _paired(one: Any, other: Any) -> Difference:
    points, error = claims.paired(one, other)
    num = int(np.isfinite(np.array(one, float) - np.array(other, float)).sum())
    return Difference(points, margin(num) * error, error)
