"""Which settings of FA-HMC predict better, and by which share of the score of another."""

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from experiments.claims import Number
from experiments.tidy import Row, from_numbers

__all__ = ["SCORES", "Gain", "Score", "better", "compare", "rows"]

SCORES = ("accuracy", "brier", "ece", "nll")
NAMES = {"L": "num_integration_steps", "T": "num_local_steps"}
LEVEL = 0.05


class Score(NamedTuple):
    """Score of a setting at the step size that is best for this score.

    `step_size` is a multiple of the largest stable step, `at_end` whether it is an end of the grid,
    `accuracy` the accuracy there. `chains` has the score of the average prediction of the samples
    so far, ``[num_chains, num_samples]``, and `later` the same of the later samples alone.
    """

    step_size: float
    at_end: bool
    accuracy: float
    chains: np.ndarray
    later: Any = None

    @property
    def curve(self) -> np.ndarray:
        """Mean over chains after every sample."""
        return self.chains.mean(axis=0)

    @property
    def errors(self) -> np.ndarray:
        """Standard errors of `curve`, NaN for one chain."""
        num = len(self.chains)
        return self.chains.std(axis=0) / math.sqrt(num - 1) if num > 1 else 0 * self.curve + np.nan


class Gain(NamedTuple):
    """Share of another score by which a score is better.

    `rank` is 2 if it is significantly better, 1 if only the average of all samples is, 0 if the
    difference is not significant, -1 or -2 if it is worse, and ``None`` if it cannot be judged, and
    then `share` is NaN. Twice the error of `share` is half of the interval of Welch's test.
    `at_half` is the lead after half of the samples if it is significant but has shrunk since.
    """

    rank: int | None
    share: Number
    at_half: float | None = None


def better(name: str, values: Any) -> Any:
    """Return scores with the sign at which larger ones are better."""
    return values if name == "accuracy" else -values


def compare(name: str, ours: Score, theirs: Score, tried: int = 1) -> Gain:
    """Return the gain of a score, the best of `tried` ones, over another.

    It cannot be judged with one chain, or if a best step size is an end of the grid: another one
    outside may be better.
    """
    leads = better(name, ours.curve - theirs.curve)
    variances = np.array([score.errors[-1] ** 2 for score in (ours, theirs)])
    half_width = 0.0
    if variances.any():
        freedom = variances.sum() ** 2 * (len(ours.chains) - 1) / (variances**2).sum()
        quantile = stats.t.ppf(1 - LEVEL / (2 * tried), freedom)
        half_width = quantile * math.sqrt(variances.sum())
    size = abs(theirs.curve[-1])
    error = half_width / size / 2
    if ours.at_end or theirs.at_end or not half_width >= 0:
        return Gain(None, Number(math.nan, error))
    share = Number(leads[-1] / size, error)
    if not abs(leads[-1]) > half_width:
        return Gain(0, share)
    rank = int(np.sign(leads[-1]))
    if ours.later is None:
        return Gain(2 * rank, share)
    later = compare(name, ours.later, theirs.later, tried).rank
    half = leads[max(len(leads) // 2 - 1, 0)]
    shrinks = abs(leads[-1]) < abs(half)
    return Gain(rank * (2 if later == 2 * rank else 1), share, half / size if shrinks else None)


def rows(
    sweeps: Mapping[str, Mapping[int, tuple[int, int]]],
    results: Mapping[tuple[int, int], Mapping[str, Score]],
    **more_settings: str,
) -> list[Row]:
    """Return rows of gains between settings ``(L, T)``.

    `sweeps` has the settings that are compared, by values of ``"L"`` and of ``"T"``.
    """
    pairs = itertools.combinations(sorted(results), 2)
    same_work = [pair for pair in pairs if math.prod(pair[0]) == math.prod(pair[1])]
    tidy_rows = []
    for name in SCORES:
        gains: list[tuple[dict[str, Any], Gain]] = []
        for varied, places in sweeps.items():
            gains += _of_sweep(varied, name, {v: results[p][name] for v, p in places.items()})
        for short, long in same_work:
            settings = {**dict(zip(NAMES.values(), long, strict=True)), "over": "equal_work"}
            gains.append((settings, compare(name, results[long][name], results[short][name])))
        for settings, gain in gains:
            half = {} if gain.at_half is None else {f"{name}_gain_at_half": gain.at_half}
            numbers = {f"{name}_gain": gain.share, **half}
            tidy_rows += from_numbers("FA-HMC", {**settings, **more_settings}, numbers)
    return tidy_rows


def _of_sweep(
    varied: str, name: str, scores: Mapping[int, Score]
) -> list[tuple[dict[str, Any], Gain]]:
    """Return gains of some and of all values over 1, and of each value over 1 and over others."""
    final = {value: better(name, score.curve[-1]) for value, score in scores.items()}
    values = sorted((v for v in scores if np.isfinite(final[v])), key=lambda v: -final[v])
    above = [value for value in values if value > 1]
    if len(above) in (0, len(values)):
        return []
    best = [compare(name, scores[v], scores[1], tried=len(above)) for v in above]
    over_one = {value: compare(name, scores[value], scores[1]) for value in reversed(above)}
    gains = [
        ({"varied": varied, "above_one": "some"}, max(best, key=lambda gain: _rank(gain, 0.5))),
        ({"varied": varied, "above_one": "all"}, min(over_one.values(), key=_rank)),
    ]
    for value in values:
        place = {"varied": varied, NAMES[varied]: value}
        over = [compare(name, scores[value], scores[v]) for v in values if v != value]
        gains.append(({"over": "others", **place}, min(over, key=_rank)))
        if value != 1:
            gains.append(({"over": "one", **place}, over_one[value]))
    return gains


def _rank(gain: Gain, not_judged: float = -0.5) -> float:
    return not_judged if gain.rank is None else gain.rank
