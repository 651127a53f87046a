"""Columns of a study dictionary, and rules for the rows of a client."""

import difflib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from fedmcmc.data._known_levels import check_levels
from fedmcmc.data._rows import Levels

QUANTITIES = ("number", "integer", "time")
"""Types of columns whose values are numbers, which may have a unit and a range."""
CODED = ("event", "category", "ordered")
"""Types of columns whose values are codes of levels."""
TYPES = (*QUANTITIES, *CODED, "text")
"""Types of columns."""
MIN_EVENT_LEVELS = 2
"""Fewest levels of a column of events: no event, and an event."""


@dataclass(frozen=True)
class Column:
    """Column of a study.

    Parameters
    ----------
    type
        ``"number"``; ``"integer"``; ``"time"`` (a number of at least 0); ``"event"`` (0 or 1, or
        `levels`; the first level means that nothing happened); ``"category"`` or ``"ordered"`` with
        `levels`; or ``"text"``, which is checked but never becomes part of the rows.
    levels
        Levels in the order of their codes 0, 1, ...; for ``"ordered"`` from low to high.
    unit
        Unit of a number, such as ``"mg/dL"``.
    range
        Smallest and largest plausible value of a number; may be infinite.
    max_missing
        Largest fraction of missing values in a client's column; by default `Rules.max_missing`.
    description
        Definition of the column, for people.

    Raises
    ------
    ValueError
        If the type is unknown, or an entry does not fit the type.

    Examples
    --------
    >>> Column("number", unit="years", range=(18, 110)).range
    (18, 110)
    """

    type: str
    levels: Levels = ()
    unit: str = ""
    range: tuple[float, float] | None = None
    max_missing: float | None = None
    description: str = ""

    def __post_init__(self) -> None:
        check_names([self.type], TYPES, "type")
        for name in ("unit", "description"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a text, got {getattr(self, name)!r}.")
        if self.max_missing is not None:
            _check_fraction(self.max_missing)
        for name in ("unit", "range"):
            if getattr(self, name) and self.type not in QUANTITIES:
                raise ValueError(
                    f"{name} is for the types {', '.join(QUANTITIES)}, and this type is "
                    f"{self.type!r}."
                )
        if self.range is not None:
            object.__setattr__(self, "range", _check_range(self.range))
        if self.levels and self.type not in CODED:
            raise ValueError(
                f"levels are for the types {', '.join(CODED)}, and this type is {self.type!r}."
            )
        if not self.levels and self.type in ("category", "ordered"):
            raise ValueError(
                f"The type {self.type!r} needs levels in their order, such as "
                f'levels = ["mild", "severe"].'
            )

    @property
    def is_row_value(self) -> bool:
        """True if the column is part of the rows that models see."""
        return self.type != "text"

    def to_dict(self) -> dict[str, Any]:
        """Return the entries of the column in the form of the study's file."""
        entries = {x.name: getattr(self, x.name) for x in fields(self)}
        entries = {key: list(x) if isinstance(x, tuple) else x for key, x in entries.items()}
        return {key: x for key, x in entries.items() if x not in ([], "", None)}


@dataclass(frozen=True)
class Rules:
    """Rules of the owners, which each client's rows must satisfy.

    Parameters
    ----------
    min_rows
        Fewest rows of a client.
    min_events
        Fewest events of a client, in each outcome of the type ``"event"``.
    min_rows_per_parameter
        Fewest rows of a client per parameter of a model; see `Dictionary.check_parameters`.
    max_missing
        Largest fraction of missing values in a client's column, unless the column has its own.

    Raises
    ------
    ValueError
        If a number is out of range.
    """

    min_rows: int = 1
    min_events: int = 0
    min_rows_per_parameter: float = 0
    max_missing: float = 0

    def __post_init__(self) -> None:
        for name, smallest in (("min_rows", 1), ("min_events", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < smallest:
                raise ValueError(
                    f"{name} must be a whole number of at least {smallest}, got {value!r}."
                )
        value = self.min_rows_per_parameter
        if not _is_number(value) or not 0 <= value < math.inf:
            raise ValueError(
                f"min_rows_per_parameter must be a number of at least 0, got {value!r}."
            )
        _check_fraction(self.max_missing)


def read_column(name: object, column: Any) -> Column:
    """Return a column from its entries; raise `ValueError` with its name."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"Names of columns must be text, got {name!r}.")
    if not isinstance(column, Column):
        column = build(Column, column, f"Column {name!r}")
    if not column.levels:
        return column
    levels = check_levels(name, column.levels)
    if column.type == "event" and len(levels) < MIN_EVENT_LEVELS:
        raise ValueError(
            f"Column {name!r} has the level {levels[0]!r} alone. Events need at least two levels; "
            f"the first means that nothing happened."
        )
    return Column(**{x.name: getattr(column, x.name) for x in fields(Column)} | {"levels": levels})


def build(cls: Any, entries: Any, where: str) -> Any:
    """Return an object of a dataclass from a table of its fields."""
    if not isinstance(entries, Mapping):
        raise ValueError(f"{where} must be a table, got {entries!r}.")
    check_names(entries, [x.name for x in fields(cls)], where)
    if cls is Column and "type" not in entries:
        raise ValueError(f"{where} has no type, one of {', '.join(TYPES)}.")
    try:
        return cls(**entries)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def check_names(
    names: Iterable[Any], allowed: Collection[str], where: str, listed: Collection[str] = ()
) -> None:
    """Raise `ValueError` with a hint if a name is not one of the allowed ones."""
    for name in names:
        if not isinstance(name, str) or name not in allowed:
            similar = difflib.get_close_matches(str(name), allowed, 1)
            hint = f" Is {similar[0]!r} meant?" if similar else ""
            raise ValueError(
                f"{where} has {name!r}, which is unknown.{hint} Known are "
                f"{', '.join(listed or allowed)}."
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _check_fraction(value: Any) -> None:
    if not _is_number(value) or not 0 <= value <= 1:
        raise ValueError(f"max_missing must be a fraction from 0 to 1, got {value!r}.")


def _check_range(limits: Any) -> tuple[float, float]:
    """Return the smallest and the largest plausible value."""
    is_pair = isinstance(limits, list | tuple) and len(limits) == 2
    if not is_pair or not all(map(_is_number, limits)) or limits[0] > limits[1]:
        raise ValueError(
            f"range must be the smallest and the largest plausible value, such as [18, 110]; got "
            f"{limits!r}."
        )
    return tuple(limits)
