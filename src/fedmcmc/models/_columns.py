"""Columns of one site's table: complete rows, numbers and labels, with clear errors."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedmcmc._checks import in_quotes
from fedmcmc.data import is_table
from fedmcmc.models._formula import Formula, evaluate, names_in

Levels = dict[str, tuple[str, ...]]
"""Levels of factors by the name of the column."""


@dataclass(frozen=True)
class SiteRows:
    """Complete rows of a site.

    Attributes
    ----------
    client, num_rows
        Label of the site, and number of rows of its table.
    columns
        Columns of the complete rows: numbers as ``float64``, labels of factors as text.
    numbers
        ``[num_complete]``, number of each complete row in the site's table.
    missing
        Number of missing values of each column.
    """

    client: Any
    num_rows: int
    columns: dict[str, np.ndarray]
    numbers: np.ndarray
    missing: dict[str, int]

    def require(self, is_valid: np.ndarray, name: str, values: np.ndarray, expected: str) -> None:
        """Raise `ValueError` with client, row and value unless all rows are valid."""
        if not is_valid.all():
            row = int((~is_valid).argmax())
            value = repr(values[row]) if is_text(values) else f"{values[row]:g}"
            raise ValueError(
                f"{name!r} of client {in_quotes(self.client)} in row {int(self.numbers[row])} is "
                f"{value}; it must be {expected}."
            )

    def codes(self, name: str, levels: Sequence[str]) -> np.ndarray:
        """Return the number of each row's level; raise `ValueError` for a value that is none."""
        numbers = {level: i for i, level in enumerate(levels)}
        values = self.columns[name]
        codes = np.array([numbers.get(x, -1) for x in values], np.int32)
        expected = f"one of the levels {', '.join(map(repr, levels))}"
        self.require(codes >= 0, name, values, expected)
        return codes


def split_tables(data: Any, client: str | None) -> dict[Any, Any]:
    """Return the table of each client by its label.

    `data` is a mapping of labels to tables, a list of tables, or one table whose column `client`
    holds each row's client. Raise `ValueError` if it is none of these.
    """
    import narwhals.stable.v2 as nw  # slow

    if is_table(data):
        frame = nw.from_native(data, eager_only=True)
        if client not in frame.columns:
            raise ValueError(
                f"client must name the column of the table that holds each row's client, one of "
                f"{', '.join(map(repr, frame.columns))}; got {client!r}."
            )
        values = frame[client].to_list()
        labels = np.array([make_label(x) for x in values], object)
        if None in labels:
            row = labels.tolist().index(None)
            raise ValueError(f"Row {row} has no client (column {client!r}).")
        keys = dict(zip(labels, values, strict=True))
        return {
            keys[name]: frame.filter((labels == name).tolist()).to_native()
            for name in sort_labels(set(labels))
        }
    tables = dict(data) if isinstance(data, Mapping) else dict(enumerate(data))
    if not tables or not all(map(is_table, tables.values())):
        raise ValueError(
            "data must be a table with client=, a dictionary with the table of each client, or a "
            "list of tables."
        )
    return tables


def read_site(
    table: Any,
    client: Any,
    names: Collection[str],
    factors: Collection[str],
    client_column: str | None = None,
    may_miss: Collection[str] = (),
) -> SiteRows:
    """Return the complete rows of a site's table.

    Values of `factors` become labels, and `client_column` holds the site's label, even if the table
    lacks it. Rows may have missing values in `may_miss`. Raise `ValueError` if a column is unknown,
    infinite, or neither numbers nor text, or no row is complete.
    """
    import narwhals.stable.v2 as nw  # slow

    frame = nw.from_native(table, eager_only=True)
    columns: dict[str, np.ndarray] = {}
    for name in names:
        if name == client_column:
            columns[name] = np.full(len(frame), make_label(client), object)
            labels = [make_label(x) for x in frame[name].to_list()] if name in frame.columns else []
            other = [x for x in labels if x not in (None, make_label(client))]
            if other:
                raise ValueError(
                    f"Column {name!r} names each row's client, and the table of client "
                    f"{in_quotes(client)} holds {other[0]!r} there."
                )
        elif name not in frame.columns:
            raise ValueError(
                f"The table of client {in_quotes(client)} has no column {name!r}; its columns are "
                f"{', '.join(frame.columns)}."
            )
        else:
            columns[name] = _read_column(frame[name], name, client, name in factors)
    missing = {
        name: np.array([y is None for y in x]) if is_text(x) else np.isnan(x)
        for name, x in columns.items()
    }
    masks = [mask for name, mask in missing.items() if name not in may_miss]
    numbers = np.flatnonzero(~np.any(masks, axis=0)) if masks else np.arange(len(frame))
    counts = {name: int(mask.sum()) for name, mask in missing.items()}
    if not len(numbers):
        detail = ", ".join(f"{name!r} lacks {num}" for name, num in counts.items() if num)
        raise ValueError(
            f"Client {in_quotes(client)} has no complete row among {len(frame)}. {detail}."
        )
    columns = {name: column[numbers] for name, column in columns.items()}
    return SiteRows(client, len(frame), columns, numbers, counts)


def _read_column(column: Any, name: str, client: Any, is_factor: bool) -> np.ndarray:
    """Return a column as numbers or labels, with NaN or ``None`` for missing values."""
    is_null = np.asarray(column.is_null().to_numpy(), bool)
    where = f"Column {name!r} of client {in_quotes(client)}"
    is_factor |= type(column.dtype).__name__ in ("Categorical", "Enum")
    if is_factor or not column.dtype.is_numeric() or is_null.any():
        values = [None if null else x for x, null in zip(column.to_list(), is_null, strict=True)]
        if is_factor or any(isinstance(x, str) for x in values):
            labels = np.empty(len(values), object)
            labels[:] = [make_label(x) for x in values]
            return labels
    else:
        values = column.to_numpy()
    try:
        numbers = np.array(values, np.float64)  # None becomes NaN
    except (TypeError, ValueError):
        raise ValueError(
            f"{where} holds {column.dtype}, which is neither numbers nor text. Turn it into a "
            f"number (for a date, days since a fixed day)."
        ) from None
    if np.isinf(numbers).any():
        row = int(np.isinf(numbers).argmax())
        raise ValueError(f"{where} holds {numbers[row]} in row {row}; values must be finite.")
    return numbers


def is_text(column: np.ndarray) -> bool:
    """Return whether a column of `SiteRows` holds labels."""
    return column.dtype == object


def make_label(value: Any) -> str | None:
    """Return a value as the text of a level, or ``None`` if it is missing."""
    if value is None or value != value:
        return None
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def sort_labels(labels: Collection[str]) -> tuple[str, ...]:
    """Return labels in numerical order if all are numbers, else in alphabetical order."""
    try:
        return tuple(sorted(labels, key=float))
    except ValueError:
        return tuple(sorted(labels))


def read_rows(
    formula: Formula, table: Any, label: Any, factors: Sequence[str], client: str | None
) -> SiteRows:
    """Return a site's complete rows of the columns that the formula needs.

    Rows with the frequency weight 0 do not count.
    """
    rows = formula.rows
    may_miss = [name for name, _ in formula.missing]
    if "upper" in rows:
        may_miss += [*names_in(rows["time"]), *names_in(rows["upper"])]
    site = read_site(table, label, formula.columns, factors, client, may_miss)
    keep = row_weights(formula, site) > 0
    columns = {name: column[keep] for name, column in site.columns.items()}
    num_rows = site.num_rows - int((~keep).sum())
    return replace(site, columns=columns, numbers=site.numbers[keep], num_rows=num_rows)


def row_values(site: SiteRows, name: str, expression: str, levels: Levels) -> np.ndarray:
    """Return an array with one number per row, such as the outcome; text becomes codes."""
    column = column_of(expression)
    if column in levels:
        return site.codes(column, levels[column]).astype(np.float64)
    values = np.asarray(evaluate(expression, site.columns))
    if values.dtype.kind not in "fiub":
        raise ValueError(
            f"{expression!r} ({name}) of client {in_quotes(site.client)} is not a number."
        )
    values = np.broadcast_to(values, (len(site.numbers),)).astype(np.float64)
    if name == "upper" or (name == "time" and np.isnan(values).any()):  # an unknown bound
        values = np.where(np.isnan(values), np.inf if name == "upper" else 0.0, values)
        return values
    site.require(np.isfinite(values), expression, values, "finite")
    return values


def row_weights(formula: Formula, site: SiteRows) -> np.ndarray:
    """Return the frequency weight of each row."""
    if formula.weights is None:
        return np.ones(len(site.numbers))
    weights = row_values(site, "weights", formula.weights, {})
    site.require(weights >= 0, formula.weights, weights, "at least 0, because it is a weight")
    return weights


def group_labels(site: SiteRows, factors: Sequence[str]) -> list[str]:
    """Return each row's label of a combination of factors, such as ``"Bern:3"``."""
    return [":".join(x) for x in zip(*(site.columns[name] for name in factors), strict=True)]


def column_of(expression: str) -> str:
    """Return the column in ``C(column)`` or of a plain name, else the expression."""
    is_factor = expression.startswith("C(") and expression.endswith(")")
    return (expression[2:-1] if is_factor else expression).strip("` ")
