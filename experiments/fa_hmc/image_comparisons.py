"""When a difference of scores on images says something, and what it says."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from scipy import stats

from experiments.fa_hmc.image_tuning import orientation

__all__ = [
    "END",
    "NOISE",
    "ONE_CHAIN",
    "ONE_CHAIN_AT_END",
    "WORST_FIRST",
    "Against",
    "against",
    "against_one",
    "compare",
    "larger_or_smaller",
    "of_later_samples",
    "of_share",
    "ranking",
    "share",
    "standard_error",
    "told",
]

Score = Mapping[str, Any]
LEVEL = 0.05  # of the tests
NOISE = "within the noise"
ONE_CHAIN = "not judged (one chain)"
ONE_CHAIN_AT_END = "not judged (one chain; best step size at an end of the grid)"
END = "not judged (best step size at an end of the grid)"
LOST = "not judged (diverged)"
OPEN = (LOST, END, ONE_CHAIN_AT_END, ONE_CHAIN)
BEST_FIRST = ("better", "better so far", *OPEN, NOISE, "worse so far", "worse")
WORST_FIRST = ("worse", "worse so far", *OPEN, NOISE, "better so far", "better")


class Against(NamedTuple):
    """How a score of ``L`` or ``T`` above one compares with that of one.

    Attributes
    ----------
    word
        As of `compare`.
    value
        The ``L`` or ``T`` whose gain is shown, ``None`` where there is none: the best of some, the
        one that decides of all.
    gain, error
        By which share of the score of one it is better, and the standard error of that share:
        infinite for one chain.
    half
        The lead after half of the samples, as a share of the same score, where it has shrunk since;
        else not a number.
    later, later_error
        By which share it is better in the later samples alone, and the standard error of that, for
        a significant difference in a run that scores them; else not a number.
    by
        The ``L`` or ``T`` that decides, where it is another one; the best mean may be noisier.
    """

    word: str
    value: int | None = None
    gain: float = math.nan
    error: float = math.inf
    by: int | None = None
    half: float = math.nan
    later: float = math.nan
    later_error: float = math.inf


def ranking(results: list[dict[str, Any]], varied: str, name: str) -> list[tuple[int, Score]]:
    """Return the values of ``L`` or ``T`` and their scores, best first, without diverged ones."""
    found = [(r[varied], r["scores"][name]) for r in results if varied in r["sweeps"]]
    good = [(value, score) for value, score in found if score["mean"] is not None]
    return sorted(good, key=lambda pair: -orientation(name) * pair[1]["mean"])


def of_later_samples(results: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return results with the scores of the later samples alone, ``None`` in a run without them.

    They are judged at the end of the run. So that no lead counts as one that still shrinks, their
    curves have that point twice.
    """
    scores = [score for result in results for score in result["scores"].values()]
    if not all("later" in score for score in scores):
        return None

    def at_end(score: Score) -> dict[str, Any]:
        later = score["later"]
        return later | {"curve": None if later["curve"] is None else 2 * later["curve"][-1:]}

    return [
        result | {"scores": {name: at_end(score) for name, score in result["scores"].items()}}
        for result in results
    ]


def compare(
    name: str, ours: Score, theirs: Score, num_chains: int, *, tried: int = 1
) -> tuple[str, float]:
    """Return how one score compares with another, and by how much it is better.

    ``"better"`` or ``"worse"`` where the difference of the means over chains is significant
    (Welch's test, of the 95 % level divided by the number of values `tried`), with ``" so far"``
    where it may be of the transient alone: where it is not significant in the later samples,
    reversed there or not judged, or, in a run that does not score these, where it still shrinks.
    Else `NOISE`; `ONE_CHAIN`, `END` and `ONE_CHAIN_AT_END` where nothing can be said: another step
    size, outside of the grid, may be better still.
    """
    word, gain = _compare(name, ours, theirs, num_chains, tried)
    if word not in ("better", "worse"):
        return word, gain
    later = _later(ours, theirs)
    if later is None:
        return word + " so far" * _shrinks(ours, theirs), gain
    return word + " so far" * (_compare(name, *later, num_chains, tried)[0] != word), gain


def _later(ours: Score, theirs: Score) -> tuple[Score, Score] | None:
    """Return both scores of the later samples alone, if the run has them."""
    return (ours["later"], theirs["later"]) if "later" in ours and "later" in theirs else None


def _compare(
    name: str, ours: Score, theirs: Score, num_chains: int, tried: int
) -> tuple[str, float]:
    gain = orientation(name) * (ours["mean"] - theirs["mean"])
    at_end = bool(ours["edge"] or theirs["edge"])
    if ours["sd"] is None or theirs["sd"] is None:
        return (ONE_CHAIN_AT_END if at_end else ONE_CHAIN), gain
    if at_end:
        return END, gain
    if abs(gain) <= _noise(ours, theirs, num_chains, tried):
        return NOISE, gain
    return ("better" if gain > 0 else "worse"), gain


def standard_error(ours: Score, theirs: Score, num_chains: int) -> float:
    """Return the standard error of a difference of two means over chains."""
    if ours["sd"] is None or theirs["sd"] is None:
        return math.inf
    return math.hypot(ours["sd"], theirs["sd"]) / math.sqrt(num_chains)


def _noise(ours: Score, theirs: Score, num_chains: int, tried: int) -> float:
    error = standard_error(ours, theirs, num_chains)
    squares = [(score["sd"] ** 2 / num_chains) ** 2 for score in (ours, theirs)]
    if error == 0:
        return 0.0
    freedom = error**4 * (num_chains - 1) / sum(squares)
    return float(stats.t.ppf(1 - LEVEL / (2 * tried), freedom)) * error


def _shrinks(ours: Score, theirs: Score) -> bool:
    """Return whether a difference is smaller at the end than at half of the samples."""
    gaps = [abs(a - b) for a, b in zip(ours["curve"], theirs["curve"], strict=True)]
    return len(gaps) < 2 or gaps[-1] < gaps[len(gaps) // 2 - 1]


def against(
    name: str, value: int, ours: Score, theirs: Score, num_chains: int, *, tried: int = 1
) -> Against:
    """Return how the score of a value compares with another, as shares of the other's."""
    word, gain = compare(name, ours, theirs, num_chains, tried=tried)
    mean, sign = abs(theirs["mean"]), orientation(name)
    found = Against(word, value, gain / mean, standard_error(ours, theirs, num_chains) / mean)
    if not word.startswith(("better", "worse")):
        return found
    later = _later(ours, theirs)
    if later is not None:
        own, other = later
        return found._replace(
            later=sign * (own["mean"] - other["mean"]) / abs(other["mean"]),
            later_error=standard_error(own, other, num_chains) / abs(other["mean"]),
        )
    if word.endswith("so far") and len(ours["curve"]) > 1:
        then, before = (score["curve"][len(score["curve"]) // 2 - 1] for score in (ours, theirs))
        return found._replace(half=sign * (then - before) / mean)
    return found


def against_one(
    results: list[dict[str, Any]],
    varied: str,
    name: str,
    num_chains: int,
    *,
    all_of_them: bool = False,
) -> Against:
    """Return how values above one, some or all of them, compare with one in a score.

    Some are better where any of them is, and all are where none is not. What cannot be judged
    leaves the answer open, unless others give it.
    """
    ordered = ranking(results, varied, name)
    one = next((score for value, score in ordered if value == 1), None)
    others = [pair for pair in ordered if pair[0] > 1]
    if one is None or not others:
        return Against(LOST)
    tried = 1 if all_of_them else len(others)
    found = [
        against(name, value, score, one, num_chains, tried=tried)
        for value, score in (reversed(others) if all_of_them else others)
    ]
    order = WORST_FIRST if all_of_them else BEST_FIRST
    decides = min(found, key=lambda one: order.index(one.word))
    if all_of_them or decides.value == found[0].value:
        return decides
    unknown = dict(half=math.nan, later=math.nan)
    return found[0]._replace(word=decides.word, by=decides.value, **unknown)


def told(found: Against) -> str:
    """Return a difference in words, with its standard error where there is one.

    Examples
    --------
    >>> told(Against("better", 50, 0.0123, 0.002)), told(Against(ONE_CHAIN, 10, -0.1))
    ('+1.2 % (s.e. 0.2 %) with 50', '-10 % with 10')
    >>> told(Against("better", 50, 0.02, 0.02, by=10))
    '+2 % (s.e. 2 %) with 50, judged by 10'
    """
    if found.value is None:
        return "-"
    judged = "" if found.by is None else f", judged by {found.by}"
    return f"{of_share(found)} with {found.value}{judged}"


def of_share(found: Against) -> str:
    """Return a share, and beside it that of the later samples or that after half of the rounds.

    Examples
    --------
    >>> of_share(Against("better so far", 50, 0.02, 0.001, half=0.03))
    '+2 % (s.e. 0.1 %; +3 % after half of the rounds)'
    >>> of_share(Against("better so far", 50, 0.02, 0.001, later=0.001, later_error=0.002))
    '+2 % (s.e. 0.1 %; +0.1 % (s.e. 0.2 %) in the later samples)'
    """
    text = share(found.gain, found.error)
    if not math.isnan(found.later):
        beside = f"{share(found.later, found.later_error)} in the later samples"
    elif not math.isnan(found.half):
        beside = f"{share(found.half, math.inf)} after half of the rounds"
    else:
        return text
    return f"{text.removesuffix(')')}; {beside})"


def larger_or_smaller(found: Against, varied: str, name: str, title: str) -> str:
    """Return how a value above one compares with one in a score, as a clause.

    Examples
    --------
    >>> larger_or_smaller(Against(ONE_CHAIN, 50, 0.25), "L", "brier", "Brier score")
    'L = 50 has a Brier score 25 % smaller than L = 1'
    >>> late = Against("better", 50, 0.25, later=0.1)
    >>> larger_or_smaller(late, "L", "brier", "Brier score")
    'L = 50 has a Brier score 25 % smaller than L = 1 (10 % smaller in the later samples)'
    """

    def told_(gain: float, error: float) -> str:
        rises = orientation(name) * gain > 0
        of = share(0, error).partition(" %")[2]
        return f"{100 * abs(gain):.2g} %{of} {'larger' if rises else 'smaller'}"

    text = (
        f"{varied} = {found.value} has a {title} {told_(found.gain, found.error)} than {varied} = 1"
    )
    if not math.isnan(found.later):
        return f"{text} ({told_(found.later, found.later_error)} in the later samples)"
    if not math.isnan(found.half):
        return f"{text} ({told_(found.half, math.inf)} after half of the rounds)"
    return text


def share(gain: float, error: float) -> str:
    """Return a share in percent, with its standard error where it is finite.

    Examples
    --------
    >>> share(0.234, 0.123), share(-0.1, math.inf)
    ('+23 % (s.e. 12 %)', '-10 %')
    """
    digits = ".0f" if error >= 0.095 else ".1g"
    told_ = f" (s.e. {format(100 * error, digits)} %)" if math.isfinite(error) else ""
    return f"{100 * gain:+.2g} %{told_}"
