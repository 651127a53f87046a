"""Verdicts on the claims of a paper: ``notes/<paper>.claims.yaml`` on the tidy rows of its studies.

A claim compares expressions, such as ``value("error", method="QLSD++", bits=8)``, whose values
carry standard errors. `EXPRESSIONS` lists the functions.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from experiments import tidy
from experiments.tidy import Row

NOTES = Path(__file__).resolve().parents[1] / "notes"
WORDS = ("reproduced", "partly", "contradicted", "inconclusive", "not run", "drawn")
TIMES = 2.0
"""Standard errors beyond which a difference counts."""
CAPS = {
    # A claim that holds on other data holds partly, and one that fails there is inconclusive.
    "other data": {"reproduced": "partly", "contradicted": "inconclusive"},
    # With settings that the paper does not state, a claim can hold but not fail.
    "unknown settings": {"contradicted": "inconclusive"},
    # On a part of the targets, or at an end of a grid, what holds does so partly.
    "a part": {"reproduced": "partly"},
}


@dataclasses.dataclass(frozen=True)
class Number:
    """A number with its standard error, for arithmetic with independent errors."""

    value: float
    error: float = 0.0

    def __add__(self, right: Any) -> "Number":
        right = _number(right)
        return Number(self.value + right.value, math.hypot(self.error, right.error))

    def __mul__(self, right: Any) -> "Number":
        right = _number(right)
        error = math.hypot(self.error * right.value, right.error * self.value)
        return Number(self.value * right.value, error)

    def __truediv__(self, right: Any) -> "Number":
        right = _number(right)
        if right.value == 0:
            return Number(math.nan, math.inf)
        ratio = self.value / right.value
        return Number(ratio, math.hypot(self.error, ratio * right.error) / abs(right.value))

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> "Number":
        return Number(-self.value, self.error)

    def __sub__(self, right: Any) -> "Number":
        return self + -_number(right)

    def __rsub__(self, right: Any) -> "Number":
        return _number(right) - self

    def __rtruediv__(self, right: Any) -> "Number":
        return _number(right) / self

    def __float__(self) -> float:
        return self.value

    def __eq__(self, right: object) -> bool:
        if isinstance(right, Number):
            return (self.value, self.error) == (right.value, right.error)
        return self.value == right

    def __lt__(self, right: Any) -> bool:
        return self.value < float(right)

    def __le__(self, right: Any) -> bool:
        return self.value <= float(right)

    def __gt__(self, right: Any) -> bool:
        return self.value > float(right)

    def __ge__(self, right: Any) -> bool:
        return self.value >= float(right)

    def __abs__(self) -> "Number":
        return Number(abs(self.value), self.error)

    def __format__(self, form: str) -> str:
        return format(self.value, form)


def _number(value: Any) -> Number:
    return value if isinstance(value, Number) else Number(float(value))


# The functions of expressions receive the rows of the study first.


def _rows(rows: Sequence[Row], metric: str, where: Mapping[str, Any]) -> list[Row]:
    matching = [row for row in rows if row.metric == metric and row.matches(where)]
    if not matching:
        metrics = sorted({row.metric for row in rows})
        raise LookupError(f"No row has the metric {metric!r} and {dict(where)}; metrics: {metrics}")
    return matching


def _with_error(rows: Sequence[Row], row: Row) -> Number:
    name, place = f"{row.metric} s.e.", (row.method, row.settings, row.seed, row.x)
    errors = (r for r in rows if r.metric == name)
    same = (r.value for r in errors if (r.method, r.settings, r.seed, r.x) == place)
    return Number(row.value, next(same, 0.0))


def value(rows: Sequence[Row], metric: str, **where: Any) -> Number:
    """Return the one number with this metric, method, settings, seed and x."""
    matching = _rows(rows, metric, where)
    if len(matching) > 1:
        raise LookupError(f"{len(matching)} rows have the metric {metric!r} and {where}.")
    return _with_error(rows, matching[0])


def values(rows: Sequence[Row], metric: str, **where: Any) -> list[Number]:
    """Return all such numbers that are finite, in the order of the file."""
    return [_with_error(rows, row) for row in _finite(rows, metric, where)]


def _finite(rows: Sequence[Row], metric: str, where: Mapping[str, Any]) -> list[Row]:
    return [row for row in _rows(rows, metric, where) if math.isfinite(row.value)]


def smallest(rows: Sequence[Row], metric: str, **where: Any) -> Number:
    """Return the smallest of `values`."""
    return min(values(rows, metric, **where), key=float)


def largest(rows: Sequence[Row], metric: str, **where: Any) -> Number:
    """Return the largest of `values`."""
    return max(values(rows, metric, **where), key=float)


def where_smallest(rows: Sequence[Row], metric: str, name: str, **where: Any) -> Any:
    """Return the setting `name`, or ``"x"`` or ``"method"``, of the smallest of `values`."""
    return _place(min(_finite(rows, metric, where), key=lambda row: row.value), name)


def _place(row: Row, name: str) -> Any:
    return {"x": row.x, "method": row.method}.get(name, row.settings.get(name))


def choices(rows: Sequence[Row], metric: str, name: str, **where: Any) -> list[Any]:
    """Return the values of the setting `name`, or of ``"x"`` or ``"method"``, that occur."""
    return list(dict.fromkeys(_place(row, name) for row in _rows(rows, metric, where)))


def reaches(rows: Sequence[Row], level: float, metric: str, **where: Any) -> Number:
    """Return the first x at which a curve is at most `level`, infinity if it never is."""
    curve = sorted(_rows(rows, metric, where), key=lambda row: row.x or 0.0)
    return Number(next((row.x or 0.0 for row in curve if row.value <= level), math.inf))


def paired(
    rows: Sequence[Row],
    metric: str,
    left: Mapping[str, Any],
    right: Mapping[str, Any],
    **where: Any,
) -> Number:
    """Return the mean over seeds of differences between two methods or settings."""
    by_seed = [
        {row.seed: row.value for row in _rows(rows, metric, {**where, **side})}
        for side in (left, right)
    ]
    seeds = sorted(set(by_seed[0]) & set(by_seed[1]), key=str)
    return mean([by_seed[0][seed] - by_seed[1][seed] for seed in seeds])


def mean(numbers: Sequence[Any]) -> Number:
    """Return the mean of numbers with its standard error from their spread."""
    finite = np.array([float(number) for number in numbers])
    finite = finite[np.isfinite(finite)]
    error = finite.std(ddof=1) / math.sqrt(len(finite)) if len(finite) > 1 else math.inf
    return Number(float(finite.mean()) if len(finite) else math.nan, float(error))


def less(left: Any, right: Any) -> bool:
    """Return whether a number is smaller than another by more than two standard errors."""
    difference = _number(right) - _number(left)
    return difference.value > TIMES * difference.error


OF_ROWS = (value, values, smallest, largest, where_smallest, choices, reaches, paired)
OF_NUMBERS = (
    less,
    math.log,
    math.sqrt,
    abs,
    all,
    any,
    dict,
    float,
    len,
    max,
    min,
    sorted,
    sum,
    zip,
)
EXPRESSIONS = (*(f.__name__ for f in (*OF_ROWS, *OF_NUMBERS)), "setting", "other")
"""Names that an expression may use. ``setting("dim")`` is an entry of the run's configuration,
``other("fa_hmc/drift", "value(...)")`` the value of an expression on the rows of another study."""


def evaluate(expression: str, study: str, root: Path = tidy.RECORDS) -> Any:
    """Return the value of an expression on the rows and the settings of a study.

    Raises
    ------
    ValueError
        If it cannot be evaluated, with the study and the expression.
    """
    rows, record = tidy.read(study, root), tidy.read_record(study, root)
    names: dict[str, Any] = {f.__name__: f for f in OF_NUMBERS}
    names |= {f.__name__: partial(f, rows) for f in OF_ROWS}
    names["setting"] = record["config"].__getitem__
    names["other"] = lambda name, text: evaluate(text, name, root)
    try:
        return eval(expression, {"__builtins__": {}, **names})
    except Exception as error:
        raise ValueError(f"{study}: {expression}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim of a paper, or a question of ours.

    Attributes
    ----------
    id
        Name by which pages refer to it.
    where
        Figure, table or section.
    claim
        The claim in one sentence.
    study
        Studies that try it; the first with a record counts. Empty if none does.
    checks
        Comparisons ``{left, relation, right, margin}``, or ``{holds: expression}``. All hold:
        reproduced. Some hold: partly. None holds and some fail: contradicted. With the margin
        ``2 s.e.``, the default, a smaller difference neither holds nor fails; with ``none`` a
        comparison holds or fails. With few seeds the margin is Student's, ``2.8 s.e.`` for five. A
        check with ``studies`` is made on each of these studies.
    cases
        In place of checks, pairs ``{word, when}`` of which the first that is true counts; no case:
        inconclusive.
    needs
        Expressions without which the verdict is inconclusive.
    deviations
        Of ``other data``, ``unknown settings`` and ``a part``: they limit the verdict (`CAPS`).
    ours
        The number to show, ``"text {expression:.3g} text"``.
    paper
        The paper's number.
    expect
        The verdict that the page was written for.
    figure
        File in ``docs/results/figures`` that shows it.
    is_ours
        True if the question is ours and not the paper's.
    """

    id: str
    where: str
    claim: str
    expect: str
    study: tuple[str, ...] = ()
    checks: tuple[Mapping[str, Any], ...] = ()
    cases: tuple[Mapping[str, str], ...] = ()
    needs: tuple[str, ...] = ()
    deviations: tuple[str, ...] = ()
    ours: str = ""
    paper: str = ""
    figure: str = ""
    is_ours: bool = False

    def __post_init__(self) -> None:
        if self.expect not in WORDS:
            raise ValueError(f"{self.id}: expect is one of {WORDS}, got {self.expect!r}.")
        for name in self.deviations:
            if name not in CAPS:
                raise ValueError(f"{self.id}: a deviation is one of {[*CAPS]}, got {name!r}.")
        for check in self.checks:
            keys = {"holds"} if "holds" in check else {"left", "relation", "right"}
            if not keys <= check.keys() <= keys | {"margin", "studies"}:
                raise ValueError(f"{self.id}: a check has the entries {keys}, got {[*check]}.")
            if "holds" not in check and check["relation"] not in ("<", ">"):
                raise ValueError(f"{self.id}: a relation is < or >, got {check['relation']!r}.")
            if not re.fullmatch(r"none|[\d.]+ s\.e\.", str(check.get("margin", "none"))):
                raise ValueError(
                    f"{self.id}: a margin is 'none' or such as '2 s.e.', got {check['margin']!r}."
                )
        for case in self.cases:
            if {*case} != {"word", "when"} or case["word"] not in WORDS:
                raise ValueError(f"{self.id}: a case is {{word, when}}, got {dict(case)}.")

    def run(self, root: Path = tidy.RECORDS) -> str:
        """Return the study whose record counts, empty if there is none."""
        return next((name for name in self.study if (root / f"{name}.csv").exists()), "")


def claims_of(paper: str, notes: Path = NOTES) -> list[Claim]:
    """Return the claims of a paper in its order."""
    listed = yaml.safe_load((notes / f"{paper}.claims.yaml").read_text())
    claims = [Claim(**{name: _fixed(entry) for name, entry in each.items()}) for each in listed]
    names = [claim.id for claim in claims]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"{paper}: claims have the same id: {sorted(twice)}.")
    return [
        dataclasses.replace(c, study=(c.study,) if isinstance(c.study, str) else c.study)
        for c in claims
    ]


def _fixed(entry: Any) -> Any:
    return tuple(entry) if isinstance(entry, list) else entry


def judge(claim: Claim, root: Path = tidy.RECORDS) -> str:
    """Return the verdict on a claim, one of `WORDS`."""
    study = claim.run(root)
    if not study:
        return "not run"
    word = _word(claim, study, root)
    for deviation in claim.deviations:
        word = CAPS[deviation].get(word, word)
    return word


def _word(claim: Claim, study: str, root: Path) -> str:
    if not claim.checks and not claim.cases:
        return "drawn"
    if not all(evaluate(need, study, root) for need in claim.needs):
        return "inconclusive"
    for case in claim.cases:
        if evaluate(case["when"], study, root):
            return case["word"]
    outcomes = [
        _outcome(check, name, root)
        for check in claim.checks
        for name in check.get("studies", (study,))
    ]
    if outcomes and all(outcome is True for outcome in outcomes):
        return "reproduced"
    if any(outcome is True for outcome in outcomes):
        return "partly"
    return "contradicted" if any(outcome is False for outcome in outcomes) else "inconclusive"


def _outcome(check: Mapping[str, Any], study: str, root: Path) -> bool | None:
    """Return whether a comparison holds, ``None`` if its error is too large."""
    if "holds" in check:
        return bool(evaluate(check["holds"], study, root))
    left, right = (_number(evaluate(str(check[side]), study, root)) for side in ("left", "right"))
    sign = {"<": 1.0, ">": -1.0}[check["relation"]]
    difference = (right - left) * sign
    times, _, unit = check.get("margin", "2 s.e.").partition(" ")
    margin = float(times) * difference.error if unit == "s.e." else 0.0
    if math.isnan(difference.value):
        return None
    if difference.value > margin:
        return True
    return None if -margin <= difference.value and margin > 0 else False
