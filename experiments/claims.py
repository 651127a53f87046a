"""What a paper claims, and what a run says about each claim: the table that opens a page.

``experiments/<paper>/claims.py`` holds ``CLAIMS``, in the order of the paper. Every verdict is
computed from the metrics of a committed run.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "CONTRADICTED",
    "DRAWN",
    "NOT_RUN",
    "PARTLY",
    "REPRODUCED",
    "UNTESTABLE",
    "Claim",
    "Finding",
    "Given",
    "Rows",
    "Verdict",
    "all_or_some",
    "first_that_holds",
    "on_other_data",
    "paired",
    "rows_of",
    "with_lost_settings",
]

Given = Mapping[str, Any]
"""The metrics of a run, or its settings."""
Rows = list[dict[str, Any]]

REPRODUCED = "reproduced"
PARTLY = "partly"
CONTRADICTED = "contradicted"
UNTESTABLE = "untestable here"
DRAWN = "drawn"
NOT_RUN = "not run"

TIMES = 2.0  # standard errors, beyond which a difference counts


class Verdict(NamedTuple):
    """What a run says about a claim: one of the words above, and the numbers that say so."""

    word: str
    number: str


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim of a paper.

    Attributes
    ----------
    where
        Its figure, table or section.
    text
        What the paper says, in our words; of a variant of ours, what it is.
    experiment
        The experiment that tries it, ``None`` if none does.
    judge
        From the metrics and the settings of a run to the verdict.
    figure
        The file that shows it, as the run names it.
    runs
        The settings files whose run is judged, the first that was run; by default all of the
        experiment, the paper's own first.
    ours
        Whether the paper does not have it; such rows form a table of their own.
    """

    where: str
    text: str
    experiment: str | None = None
    judge: Callable[[Given, Given], Verdict] | None = None
    figure: str | None = None
    runs: tuple[str, ...] = ()
    ours: bool = False


class Finding(NamedTuple):
    """What runs of a method say to whoever chooses one; the page of findings lists them.

    Attributes
    ----------
    title
        The finding, as a sentence.
    advice
        What to do, as a sentence.
    runs
        Those that show it; of several names in one place the first that was run.
    tell
        From the metrics of each, with its settings as ``config``, to the text.
    figure
        Of the first run, as it names it.
    """

    title: str
    advice: str
    runs: tuple[str | tuple[str, ...], ...]
    tell: Callable[..., str]
    figure: str | None = None

    def runs_of(self, records: Mapping[str, Any]) -> list[str]:
        """Return the names of the runs that are told, whether or not they are in `records`."""
        places = [(of,) if isinstance(of, str) else of for of in self.runs]
        return [next((name for name in of if name in records), of[0]) for of in places]


def rows_of(metrics: Given, column: str, start: str) -> Rows:
    """Return the rows of a run's table whose `column` starts with `start`.

    Examples
    --------
    >>> rows_of({"table": [{"method": "QLSD, 4 bits"}, {"method": "LSD"}]}, "method", "QLSD")
    [{'method': 'QLSD, 4 bits'}]
    """
    return [row for row in metrics["table"] if row[column].startswith(start)]


def first_that_holds(*cases: tuple[bool, str], otherwise: str) -> str:
    """Return the word of the first condition that is true."""
    return next((word for holds, word in cases if holds), otherwise)


def all_or_some(holds: list[bool], fails: list[bool]) -> str:
    """Return the word for parts of a claim, of which some may neither hold nor fail."""
    return first_that_holds(
        (all(holds), REPRODUCED),
        (any(holds), PARTLY),
        (any(fails), CONTRADICTED),
        otherwise=UNTESTABLE,
    )


def on_other_data(word: str, other: bool) -> str:
    """Return `word`; on other data what holds does so partly, and what fails says nothing."""
    return {REPRODUCED: PARTLY, CONTRADICTED: UNTESTABLE}.get(word, word) if other else word


def with_lost_settings(word: str, number: str) -> Verdict:
    """Return a verdict; what fails with settings that we had to guess says nothing of the paper's.

    Examples
    --------
    >>> with_lost_settings(CONTRADICTED, "-5 %")
    Verdict(word='untestable here', number='fails with settings of ours: -5 %')
    """
    if word != CONTRADICTED:
        return Verdict(word, number)
    return Verdict(UNTESTABLE, f"fails with settings of ours: {number}")


def paired(one: Any, other: Any) -> tuple[float, float]:
    """Return the mean of differences within repetitions, and its standard error.

    Repetitions in which either is missing or not finite are left out; with fewer than two the
    standard error is infinite.

    Examples
    --------
    >>> paired([1.0, 2.0, None], [0.0, 0.0, 1.0])
    (1.5, 0.5)
    """
    difference = np.array(one, float) - np.array(other, float)
    kept = difference[np.isfinite(difference)]
    if len(kept) < 2:
        return (float(kept.mean()) if len(kept) else math.nan), math.inf
    return float(kept.mean()), float(kept.std(ddof=1) / len(kept) ** 0.5)
