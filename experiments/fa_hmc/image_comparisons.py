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
        The lead after half of the rounds, as a share of the same score, where it has shrunk since
        by more than noise; else not a number.
    by
        The ``L`` or ``T`` that decides, where it is another one; the best mean may be noisier.
    """

    word: str
    value: int | None = None
    gain: float = math.nan
    error: float = math.inf
    by: int | None = None
    half: float = math.nan


def ranking(results: list[dict[str, Any]], varied: str, name: str) -> list[tuple[int, Score]]:
    """Return the values of ``L`` or ``T`` and their scores, best first, without diverged ones."""
    found = [(r[varied], r["scores"][name]) for r in results if varied in r["sweeps"]]
    good = [(value, score) for value, score in found if score["mean"] is not None]
    return sorted(good, key=lambda pair: -orientation(name) * pair[1]["mean"])


def compare(
    name: str, ours: Score, theirs: Score, num_chains: int, *, tried: int = 1
) -> tuple[str, float]:
    """Return how one score compares with another, and by how much it is better.

    ``"better"`` or ``"worse"`` where the difference of the means over chains is significant
    (Welch's test, of the 95 % level divided by the number of values `tried`), with ``" so far"``
    where the difference has shrunk since half of the rounds by more than its standard error; else
    `NOISE`. `ONE_CHAIN`, `END` and `ONE_CHAIN_AT_END` where nothing can be said: another step size,
    outside of the grid, may be better still.
    """
    gain = orientation(name) * (ours["mean"] - theirs["mean"])
    at_end = bool(ours["edge"] or theirs["edge"])
    if ours["sd"] is None or theirs["sd"] is None:
        return (ONE_CHAIN_AT_END if at_end else ONE_CHAIN), gain
    if at_end:
        return END, gain
    if abs(gain) <= _noise(ours, theirs, num_chains, tried):
        return NOISE, gain
    shrinks = _shrinks(ours, theirs, num_chains)
    return ("better" if gain > 0 else "worse") + " so far" * shrinks, gain


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


def _shrinks(ours: Score, theirs: Score, num_chains: int) -> bool:
    """Return whether a difference has shrunk since half of the samples, beyond the noise.

    The noise of what it shrank by is taken as that of two independent differences; chains of one
    run make it smaller.
    """
    gaps = [abs(a - b) for a, b in zip(ours["curve"], theirs["curve"], strict=True)]
    if len(gaps) < 2:
        return True
    at = len(gaps) // 2 - 1
    deviations = [score["curve_sd"][i] for score in (ours, theirs) for i in (at, -1)]
    return bool(gaps[at] - gaps[-1] > math.hypot(*deviations) / math.sqrt(num_chains))


def against(
    name: str, value: int, ours: Score, theirs: Score, num_chains: int, *, tried: int = 1
) -> Against:
    """Return how the score of a value compares with another, as shares of the other's."""
    word, gain = compare(name, ours, theirs, num_chains, tried=tried)
    error, mean, half = standard_error(ours, theirs, num_chains), abs(theirs["mean"]), math.nan
    if word.endswith("so far") and len(ours["curve"]) > 1:
        then, other = (score["curve"][len(score["curve"]) // 2 - 1] for score in (ours, theirs))
        half = orientation(name) * (then - other) / mean
    return Against(word, value, gain / mean, error / mean, half=half)


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
    return found[0]._replace(word=decides.word, by=decides.value, half=math.nan)


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
    """Return a share with what it was after half of the rounds, where the lead has shrunk since.

    Examples
    --------
    >>> of_share(Against("better so far", 50, 0.02, 0.001, half=0.03))
    '+2 % (s.e. 0.1 %; +3 % after half of the rounds)'
    """
    text = share(found.gain, found.error)
    if math.isnan(found.half):
        return text
    return f"{text.removesuffix(')')}; {share(found.half, math.inf)} after half of the rounds)"


def larger_or_smaller(found: Against, varied: str, name: str, title: str) -> str:
    """Return how a value above one compares with one in a score, as a clause.

    Examples
    --------
    >>> larger_or_smaller(Against(ONE_CHAIN, 50, 0.25), "L", "brier", "Brier score")
    'L = 50 has a Brier score 25 % smaller than L = 1'
    """
    rises = orientation(name) * found.gain > 0
    error = share(0, found.error).partition(" %")[2]
    text = (
        f"{varied} = {found.value} has a {title} {100 * abs(found.gain):.2g} %{error} "
        f"{'larger' if rises else 'smaller'} than {varied} = 1"
    )
    if math.isnan(found.half):
        return text
    return f"{text} ({100 * abs(found.half):.2g} % after half of the rounds)"


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
