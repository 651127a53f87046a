"""Verdicts on the claims of a paper: ``notes/<paper>.claims.yaml`` on the tidy rows of its studies.

A claim compares Python expressions, such as ``value("error", method="QLSD++", bits=8)``, whose
values carry standard errors; `evaluate` describes them.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from experiments import tidy
from experiments.tidy import Row

NOTES = Path(__file__).resolve().parents[1] / "notes"
WORDS = ("reproduced", "partly", "contradicted", "inconclusive", "not run", "drawn")
CAPS = {
    # A claim that holds on other data holds partly, and one that fails there is inconclusive.
    "other data": {"reproduced": "partly", "contradicted": "inconclusive"},
    # With settings that the paper does not state, a claim can hold but not fail.
    "unknown settings": {"contradicted": "inconclusive"},
    # On a part of the targets, or at an end of a grid, what holds does so partly.
    "a part": {"reproduced": "partly"},
}


Rows = Sequence[Row]


class Number(float):
    """A number with its standard error, for arithmetic with independent errors."""

    error: float
    __array_ufunc__ = None  # NumPy's scalars leave arithmetic to this class

    def __new__(cls, value: Any, error: float = 0.0) -> "Number":
        """Return a number with an error."""
        number = super().__new__(cls, value)
        number.error = error
        return number

    @property
    def value(self) -> float:
        """Return the number without its error."""
        return float(self)

    def __add__(self, right: Any) -> "Number":
        return Number(self.value + float(right), math.hypot(self.error, _error(right)))

    def __mul__(self, right: Any) -> "Number":
        error = math.hypot(self.error * float(right), _error(right) * self.value)
        return Number(self.value * float(right), error)

    def __truediv__(self, right: Any) -> "Number":
        if right == 0:
            return Number(math.nan, math.inf)
        ratio = self.value / float(right)
        return Number(ratio, math.hypot(self.error, ratio * _error(right)) / abs(float(right)))

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> "Number":
        return Number(-self.value, self.error)

    def __abs__(self) -> "Number":
        return Number(abs(self.value), self.error)

    def __sub__(self, right: Any) -> "Number":
        return self + -right

    def __rsub__(self, right: Any) -> "Number":
        return -self + right

    def __rtruediv__(self, right: Any) -> "Number":
        return Number(right) / self


def _error(number: Any) -> float:
    return getattr(number, "error", 0.0)


# The functions of expressions receive the rows of the study first.


def _find(rows: Rows, metric: str, where: Mapping[str, Any]) -> list[tuple[Any, Number]]:
    """Return places and numbers, in the order of the file."""
    names = (metric, f"{metric} s.e.")
    table = tidy.by_place(row for row in rows if row.metric in names and row.matches(where))
    matching = [
        (dict(place), Number(numbers[metric], numbers.get(names[1], 0.0)))
        for place, numbers in table.items()
        if metric in numbers
    ]
    if not matching:
        metrics = sorted({row.metric for row in rows})
        raise LookupError(f"No row has the metric {metric!r} and {dict(where)}; metrics: {metrics}")
    return matching


def value(rows: Rows, metric: str, **where: Any) -> Number:
    """Return the one number with this metric, method, settings, seed and x."""
    matching = _find(rows, metric, where)
    if len(matching) > 1:
        raise LookupError(f"{len(matching)} rows have the metric {metric!r} and {where}.")
    return matching[0][1]


def values(rows: Rows, metric: str, **where: Any) -> list[Number]:
    """Return all such numbers that are finite, in the order of the file."""
    return [number for _, number in _find(rows, metric, where) if math.isfinite(number)]


def choices(rows: Rows, metric: str, name: str, **where: Any) -> list[Any]:
    """Return the values of the setting `name`, or of ``"x"`` or ``"method"``, that occur."""
    return list(dict.fromkeys(place.get(name) for place, _ in _find(rows, metric, where)))


def paired(rows: Rows, metric: str, left: Any, right: Any, **where: Any) -> Number:
    """Return the mean over seeds of differences between two mappings of method or settings."""
    by_seed = [
        {place["seed"]: number.value for place, number in _find(rows, metric, {**where, **side})}
        for side in (left, right)
    ]
    return mean([by_seed[0][seed] - by_seed[1][seed] for seed in by_seed[0] if seed in by_seed[1]])


def mean(numbers: Sequence[Any]) -> Number:
    """Return the mean of the finite ones of numbers, with its standard error from their spread."""
    finite = np.array([float(number) for number in numbers])
    finite = finite[np.isfinite(finite)]
    error = finite.std(ddof=1) / math.sqrt(len(finite)) if len(finite) > 1 else math.inf
    return Number(finite.mean() if len(finite) else math.nan, float(error))


def less(left: Any, right: Any) -> bool:
    """Return whether a number is smaller than another by more than two standard errors."""
    difference = right - left
    return bool(difference > 2 * _error(difference))


OF_ROWS = (value, values, choices, paired)


def evaluate(expression: str, study: str, root: Path = tidy.RECORDS) -> Any:
    """Return the value of a Python expression on the rows and the settings of a study.

    It may call `less`, ``log``, ``sqrt``, and the functions in `OF_ROWS` without their first
    argument. ``setting("dim")`` is an entry of the run's configuration, ``other("fa_hmc/drift",
    "value(...)")`` the value of an expression on another study. Any error becomes a `ValueError`
    with the study and the expression.
    """
    names: dict[str, Any] = {f.__name__: partial(f, tidy.read(study, root)) for f in OF_ROWS}
    names |= {"less": less, "log": math.log, "sqrt": math.sqrt}
    names["setting"] = tidy.read_record(study, root)["config"].__getitem__
    names["other"] = lambda name, text: evaluate(text, name, root)
    try:
        return eval(expression, names)
    except Exception as error:
        raise ValueError(f"{study}: {expression}: {error}") from error


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, or a question of ours: an entry of ``notes/<paper>.claims.yaml``.

    Checks are comparisons ``{left, relation, right, margin}``, or ``{holds: expression}``. If all
    hold, the verdict is "reproduced"; if some do, "partly"; if none does and some fail,
    "contradicted". With the margin ``2 s.e.``, the default, a smaller difference neither holds nor
    fails; with ``none`` a comparison holds or fails. With few seeds the margin is Student's, ``2.8
    s.e.`` for five. A check with ``studies`` is made on each of these studies.
    """

    id: str  # name by which pages refer to it
    where: str  # figure, table or section
    claim: str
    expect: str  # the verdict that the page was written for
    study: str | Sequence[str] = ()  # studies that try it: the first with a record counts
    checks: Sequence[Mapping[str, Any]] = ()
    needs: Sequence[str] = ()  # expressions without which the verdict is inconclusive
    deviations: Sequence[str] = ()  # names of `CAPS`, which limit the verdict
    ours: str = ""  # the number to show, "text {expression:.3g} text"
    paper: str = ""  # the paper's number
    figure: str = ""  # file in docs/results/figures that shows it
    is_ours: bool = False  # a question of ours

    def __post_init__(self) -> None:
        def require(condition: Any, rule: str, entry: Any) -> None:
            if not condition:
                raise ValueError(f"{self.id}: {rule}, got {entry!r}.")

        require(self.expect in WORDS, f"expect is one of {WORDS}", self.expect)
        for name in self.deviations:
            require(name in CAPS, f"a deviation is one of {[*CAPS]}", name)
        for check in self.checks:
            keys = {"holds"} if "holds" in check else {"left", "relation", "right"}
            has_keys = keys <= check.keys() <= keys | {"margin", "studies"}
            require(has_keys, f"a check has the entries {keys}", [*check])
            relation, margin = check.get("relation", "<"), str(check.get("margin", "none"))
            require(relation in ("<", ">"), "a relation is < or >", relation)
            is_margin = re.fullmatch(r"none|[\d.]+ s\.e\.", margin)
            require(is_margin, "a margin is 'none' or such as '2 s.e.'", margin)

    def run(self, root: Path = tidy.RECORDS) -> str:
        """Return the study whose record counts, empty if there is none."""
        studies = [self.study] if isinstance(self.study, str) else self.study
        return next((name for name in studies if (root / f"{name}.csv").exists()), "")


def claims_of(paper: str, notes: Path = NOTES) -> list[Claim]:
    """Return the claims of a paper in its order."""
    text = (notes / f"{paper}.claims.yaml").read_text()
    claims = [Claim(**entry) for entry in yaml.safe_load(text)]
    names = [claim.id for claim in claims]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"{paper}: claims have the same id: {sorted(twice)}.")
    return claims


def judge(claim: Claim, root: Path = tidy.RECORDS) -> str:
    """Return the verdict on a claim, one of `WORDS`."""
    study = claim.run(root)
    if not study:
        return "not run"
    if not claim.checks:
        return "drawn"
    if not all(evaluate(need, study, root) for need in claim.needs):
        return "inconclusive"
    outcomes = {
        _outcome(check, name, root)
        for check in claim.checks
        for name in check.get("studies", (study,))
    }
    word = "contradicted" if False in outcomes else "inconclusive"
    if True in outcomes:
        word = "reproduced" if outcomes == {True} else "partly"
    for deviation in claim.deviations:
        word = CAPS[deviation].get(word, word)
    return word


def _outcome(check: Mapping[str, Any], study: str, root: Path) -> bool | None:
    """Return whether a comparison holds, ``None`` if its error is too large."""
    if "holds" in check:
        return bool(evaluate(check["holds"], study, root))
    left, right = (evaluate(str(check[side]), study, root) for side in ("left", "right"))
    difference = right - left if check["relation"] == "<" else left - right
    times, _, unit = check.get("margin", "2 s.e.").partition(" ")
    margin = float(times) * _error(difference) if unit else 0.0
    if math.isnan(difference) or (margin > 0 and abs(difference) <= margin):
        return None
    return bool(difference > margin)
