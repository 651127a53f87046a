"""What the numbers of simulated logistic regression say, and what they cannot say."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments.claims import TIMES, Rows

__all__ = [
    "AGAIN",
    "BETTER",
    "THRESHOLDS",
    "WORSE",
    "Best",
    "Compared",
    "Local",
    "Span",
    "at_smallest",
    "best",
    "between_steps",
    "common_limit",
    "compared",
    "gain",
    "gains",
    "local",
    "luck",
    "shortest",
    "span",
]

BETTER, WORSE = "better", "worse"
DECENT = 1.25  # of the better method's best error: step sizes that do
THRESHOLDS = (2.5, 1.5, 1.0)  # times a run's own, to which its curves go too
# Times as many rounds. Errors of few chains have standard errors of several percent, and rounds go
# as one over their square: the quotient of two numbers of rounds is uncertain by two fifths.
AGAIN = 1.5
REACH = 0.8  # of the threshold, which a perfect sampler's error must be below to test a T


class Best(NamedTuple):
    """The smallest error of a column, its standard error, its step size and that one's place.

    `edge` is ``"smallest"`` or ``"largest"`` where the step size is an end of those tried.
    """

    error: float
    deviation: float
    step: float
    edge: str = ""


def _usable(table: Rows, column: str) -> Rows:
    """Return the rows in which no chain was lost."""
    return [row for row in table if row[column] is not None and math.isfinite(row[column])]


def best(table: Rows, column: str) -> Best | None:
    """Return the smallest error of a column, ``None`` where every step size lost a chain."""
    rows = _usable(table, column)
    if not rows:
        return None
    row = min(rows, key=lambda row: row[column])
    deviation = row.get(f"s.e. {column}")
    steps = [r["step size"] for r in table]
    edge = {min(steps): "smallest", max(steps): "largest"}.get(row["step size"], "")
    return Best(
        float(row[column]),
        math.nan if deviation is None else float(deviation),
        float(row["step size"]),
        edge,
    )


def between_steps(table: Rows, column: str) -> float:
    """Return the least error that a step size between those of the grid may have.

    At the bottom of the parabola through the best step size and its neighbors, over the logarithm
    of the step; where it has one neighbor only, the best error itself.
    """
    rows = sorted(
        (math.log(row["step size"]), float(row[column])) for row in _usable(table, column)
    )
    at = min(range(len(rows)), key=lambda i: rows[i][1])
    if not 0 < at < len(rows) - 1:
        return rows[at][1]
    steps, errors = zip(*rows[at - 1 : at + 2], strict=True)
    a, b, c = np.polyfit(steps, errors, 2)
    return min(rows[at][1], float(c - b**2 / (4 * a)))


def shortest(table: Rows, column: str, length: str) -> float:
    """Return the least error that the shortest trajectories of the best ``L`` may have.

    By the rule ``L = floor(pi / (3 step))`` trajectories of as many steps differ in length by a
    factor of up to ``(L + 1) / L``, which two step sizes of the grid may not show. A line through
    the two smallest step sizes of the best ``L`` is drawn on to the shortest, counted from the
    largest; zero, which any error may be, where there is one such step size.
    """
    rows = _usable(table, column)
    num = min(rows, key=lambda row: row[column])[length]
    same = sorted((row["step size"], float(row[column])) for row in rows if row[length] == num)
    if len(same) < 2:
        return 0.0
    (a, first), (b, second) = same[:2]
    least = same[-1][0] * num / (num + 1)
    return min(first, first - (second - first) / (b - a) * max(0.0, a - least))


def luck(table: Rows, column: str, each: int = 1) -> float:
    """Return by how much the least of several noisy errors is expected to be too small, at most.

    The least of ``k`` normal numbers is at most ``sqrt(2 log k)`` standard deviations below their
    mean; ``k`` are those within `TIMES` standard errors of the best, `each` for every step size.
    """
    found = best(table, column)
    if found is None or math.isnan(found.deviation):
        return math.nan
    limit = found.error + TIMES * found.deviation
    near = sum(row[column] <= limit for row in _usable(table, column))
    return math.sqrt(2 * math.log(max(1, near * each))) * found.deviation


def gain(hmc: Best, ld: Best) -> tuple[float, float]:
    """Return by which share of FA-LD's best error FA-HMC's is smaller, and the standard error."""
    ratio = hmc.error / ld.error
    spread = math.hypot(hmc.deviation / hmc.error, ld.deviation / ld.error)
    return 1 - ratio, ratio * spread


class Compared(NamedTuple):
    """FA-HMC's best error against FA-LD's.

    Attributes
    ----------
    hmc, ld
        The two; FA-HMC's with more than one leapfrog step.
    share, error
        As of `gain`.
    least, most
        Of the share, if step sizes between those tried, and with the rule for `L` trajectories
        shorter than those tried, are better by the most that a parabola or a line gives, and the
        least of several numbers is lucky.
    ends
        What FA-HMC's best error has at an end of those tried: a longer list may be better still.
    word
        `BETTER`, `WORSE` or ``""``, where the numbers cannot say.
    why
        Why they cannot.
    """

    hmc: Best
    ld: Best
    share: float
    error: float
    least: float
    most: float
    ends: tuple[str, ...]
    word: str
    why: str


def compared(table: Rows, kind: str) -> Compared | None:
    """Return the comparison with ``"exact"`` or ``"noisy"`` gradients, ``None`` where none is.

    With noisy gradients the best of several numbers of leapfrog steps is that of each step size.
    """
    ours, theirs = f"FA-HMC, {kind}", f"FA-LD, {kind}"
    rows = longer(table, kind)
    hmc, ld = best(rows, ours), best(table, theirs)
    if hmc is None or ld is None:
        return None
    share, error = gain(hmc, ld)
    lengths = {row[f"L, {kind}"] for row in rows} if kind == "noisy" else set()
    lucky = luck(rows, ours, max(1, len(lengths))), luck(table, theirs)
    least = 1 - (hmc.error + lucky[0]) / between_steps(table, theirs)
    finest = between_steps(rows, ours)
    if kind == "exact":
        finest = min(finest, shortest(rows, ours, "L, exact"))
    most = 1 - finest / (ld.error + lucky[1])
    (length,) = {r[f"L, {kind}"] for r in rows if r["step size"] == hmc.step}
    at_end = bool(lengths) and length in {max(lengths), min(lengths)} - {2}
    ends = ("step sizes",) * bool(hmc.edge) + ("L",) * at_end
    word, why = "", ""
    if math.isnan(error):
        why = "no standard error"
    elif abs(share) <= TIMES * error:
        why = "within the noise"
    elif share > 0 and ld.edge:
        why = f"FA-LD's best step size is the {ld.edge} tried"
    elif share > 0 and least <= TIMES * error:
        why = "a finer grid and luck among those tried may make up for it"
    elif share < 0 and hmc.edge:
        why = f"FA-HMC's best step size is the {hmc.edge} tried with more than one leapfrog step"
    elif share < 0 and at_end:
        why = f"FA-HMC's best number of leapfrog steps, {length}, is an end of those tried"
    elif share < 0 and most >= -TIMES * error:
        why = "a finer grid, with shorter trajectories, and luck may make up for it"
    else:
        word = BETTER if share > 0 else WORSE
    return Compared(hmc, ld, share, error, least, most, ends, word, why)


class Span(NamedTuple):
    """Step sizes in a row around the best whose error is low: how many, their least and largest.

    `open` where the range reaches an end of the step sizes tried. None at all has the best step
    size as both ends.
    """

    number: int
    least: float
    largest: float
    open: bool


def longer(table: Rows, kind: str) -> Rows:
    """Return the lines that count for FA-HMC: those with more than one leapfrog step."""
    return [row for row in table if row[f"L, {kind}"] > 1]


def common_limit(table: Rows, kind: str) -> float | None:
    """Return the error up to which a step size does: `DECENT` times the better method's best.

    One limit for both methods: a method whose best error is large is not the easier to tune for
    being as bad everywhere. ``None`` where a method lost chains at every step size.
    """
    both = best(longer(table, kind), f"FA-HMC, {kind}"), best(table, f"FA-LD, {kind}")
    if both[0] is None or both[1] is None:
        return None
    return DECENT * min(both[0].error, both[1].error)


def span(table: Rows, column: str, limit: float) -> Span | None:
    """Return the range of step sizes around the best with errors up to `limit`."""
    rows = sorted(table, key=lambda row: row["step size"])
    found = best(rows, column)
    if found is None:
        return None
    if found.error > limit:
        return Span(0, found.step, found.step, False)
    usable = _usable(rows, column)
    good = [row in usable and row[column] <= limit for row in rows]
    at = next(i for i, row in enumerate(rows) if row["step size"] == found.step)
    low, high = at, at
    while low > 0 and good[low - 1]:
        low -= 1
    while high < len(rows) - 1 and good[high + 1]:
        high += 1
    steps = [float(rows[i]["step size"]) for i in (low, high)]
    return Span(high - low + 1, *steps, low == 0 or high == len(rows) - 1)


def at_smallest(table: Rows, kind: str) -> tuple[int, int] | None:
    """Return at how many of the smaller half of step sizes FA-HMC does, and how many these are.

    ``None`` where no limit is known. With exact gradients the rule gives small steps the most
    leapfrog steps.
    """
    limit = common_limit(table, kind)
    if limit is None:
        return None
    small = sorted(table, key=lambda row: row["step size"])[: len(table) // 2]
    good = [row for row in _usable(small, f"FA-HMC, {kind}") if row[f"FA-HMC, {kind}"] <= limit]
    return len(good), len(small)


def gains(table: Rows, kind: str) -> list[tuple[float, float]]:
    """Return the step sizes, ascending, and the shares by which FA-HMC's error is smaller there."""
    both = f"FA-HMC, {kind}", f"FA-LD, {kind}"
    rows = [row for row in _usable(longer(table, kind), both[0]) if row in _usable(table, both[1])]
    return sorted((row["step size"], 1 - row[both[0]] / row[both[1]]) for row in rows)


class Local(NamedTuple):
    """Rounds to the threshold over numbers of local steps.

    Attributes
    ----------
    fastest, first
        Lines of the run: of the ``T`` with the fewest rounds, and of the first ``T``.
    times
        Rounds of the first over the fewest; at least so many, where the first did not arrive.
    arrived
        Whether the first did.
    largest
        The largest ``T`` that could have arrived.
    more
        Lines of larger ``T`` that need more rounds, by `TIMES` standard errors, or by `AGAIN` times
        where these are not known, or did not arrive although they could have.
    spared
        How many times fewer rounds than the first a perfect sampler needs, ``None`` where it is not
        known.
    """

    fastest: Mapping[str, Any]
    first: Mapping[str, Any]
    times: float
    arrived: bool
    largest: int
    more: Rows
    spared: float | None


def local(metrics: Mapping[str, Any]) -> Local | None:
    """Return what the study of local steps shows, ``None`` where no ``T`` arrived."""
    lines, threshold = metrics["local_steps"], metrics["threshold"]
    reached = [line for line in lines if line["rounds to threshold"] is not None]
    if not reached:
        return None
    fastest = min(reached, key=lambda line: line["rounds to threshold"])
    fewest, first = fastest["rounds to threshold"], lines[0]
    could = [x for x in lines if x in reached or x["floor"] <= REACH * threshold]
    more = [line for line in could if line["T"] > fastest["T"] and _takes_more(line, fastest)]
    arrived = first["rounds to threshold"] is not None
    rounds = first["rounds to threshold"] if arrived else first["rounds run"]
    return Local(
        fastest,
        first,
        rounds / fewest,
        arrived,
        max(line["T"] for line in could),
        more,
        rounds / _of_a_perfect(reached, threshold) if arrived else None,
    )


def _takes_more(line: Mapping[str, Any], fastest: Mapping[str, Any]) -> bool:
    rounds, fewest = (x["rounds to threshold"] or x["rounds run"] for x in (line, fastest))
    own, least = line.get("s.e. rounds"), fastest.get("s.e. rounds")
    if line["rounds to threshold"] is None:
        own = 0.0  # of the rounds that it ran
    if own is None or least is None:
        return bool(rounds >= AGAIN * fewest)
    return bool(rounds - fewest > TIMES * math.hypot(own, least))


def _of_a_perfect(reached: Rows, threshold: float) -> float:
    """Return rounds in which a perfect sampler reaches the threshold.

    Its error falls as the root of its number of draws does, and half of the rounds are left out.
    """
    found = []
    for line in reached:
        rounds = line["rounds to threshold"]
        chains = line["draws"] / (rounds - rounds // 2)
        draws = line["draws"] * (line["floor"] / threshold) ** 2
        found.append(2 * draws / chains)
    return min(found)
