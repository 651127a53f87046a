"""Columns of one site's table: complete rows, numbers and labels, with clear errors."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmcmc._checks import in_quotes
from fedmcmc.data import is_table


@dataclass(frozen=True)
class SiteRows:
    """Complete rows of a site.

    Attributes
    ----------
    client
        Label of the site.
    columns
        Columns of the complete rows: numbers as ``float64``, labels of factors as text.
    numbers
        ``[num_complete]``, number of each complete row in the site's table.
    num_rows
        Number of rows of the table.
    missing
        Number of missing values of each column.
    """

    client: Any
    columns: dict[str, np.ndarray]
    numbers: np.ndarray
    num_rows: int
    missing: dict[str, int]

    def where(self, name: str, row: int) -> str:
        """Return the beginning of a message about a value of a complete row."""
        return f"{name!r} of client {in_quotes(self.client)} in row {int(self.numbers[row])}"


def split_tables(data: Any, client: str | None) -> dict[Any, Any]:
    """Return the table of each client by its label.

    Parameters
    ----------
    data
        Mapping of labels to tables, list of tables, or one table with the rows of all clients.
    client
        Name of the column with each row's client, which a single table needs.

    Raises
    ------
    ValueError
        If there is no table, or a single table has no column `client`.
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
    *,
    factors: Collection[str] = (),
    client_column: str | None = None,
    may_miss: Collection[str] = (),
) -> SiteRows:
    """Return the complete rows of a site's table.

    Parameters
    ----------
    table, client
        Table and label of the site.
    names
        Columns that are read.
    factors
        Columns whose values become labels (text); other text is also read as labels.
    client_column
        Column that holds the site's label, which the table may lack.
    may_miss
        Columns whose missing values are part of the model.

    Raises
    ------
    ValueError
        If a column is unknown, infinite, or neither numbers nor text, or no row is complete.
    """
    import narwhals.stable.v2 as nw  # slow

    frame = nw.from_native(table, eager_only=True)
    num_rows = len(frame)
    columns: dict[str, np.ndarray] = {}
    for name in names:
        if name == client_column:
            columns[name] = np.full(num_rows, make_label(client), object)
        elif name not in frame.columns:
            raise ValueError(
                f"The table of client {in_quotes(client)} has no column {name!r}; its columns are "
                f"{', '.join(frame.columns)}."
            )
        else:
            columns[name] = _read_column(frame[name], name, client, name in factors)
    is_missing = {name: _find_missing(column) for name, column in columns.items()}
    is_complete = np.ones(num_rows, bool)
    for name, mask in is_missing.items():
        if name not in may_miss:
            is_complete &= ~mask
    if not is_complete.any():
        counts = {name: int(mask.sum()) for name, mask in is_missing.items()}
        name = max(counts, key=lambda x: counts[x], default="")
        raise ValueError(
            f"Client {in_quotes(client)} has no complete row among {num_rows}"
            + (f"; most values are missing in {name!r} ({counts[name]})." if name else ".")
        )
    numbers = np.flatnonzero(is_complete)
    return SiteRows(
        client,
        {name: column[numbers] for name, column in columns.items()},
        numbers,
        num_rows,
        {name: int(mask.sum()) for name, mask in is_missing.items()},
    )


def _read_column(column: Any, name: str, client: Any, is_factor: bool) -> np.ndarray:
    """Return a column as numbers or labels, with NaN or ``None`` for missing values."""
    import narwhals.stable.v2 as nw  # slow

    where = f"Column {name!r} of client {in_quotes(client)}"
    dtype = column.dtype
    is_number = dtype.is_numeric() or dtype == nw.Boolean
    if is_number and not is_factor and not column.is_null().any():
        values = np.asarray(column.to_numpy(), np.float64)
    elif is_number and not is_factor:
        values = np.array([np.nan if x is None else x for x in column.to_list()], np.float64)
    else:
        values = np.array([make_label(x) for x in column.to_list()] or [], object)
        known = [x for x in column.to_list() if x is not None and x == x]
        if not is_factor and not (known and all(isinstance(x, str) for x in known)):
            if not all(isinstance(x, int | float | np.number) for x in known):
                raise ValueError(
                    f"{where} holds {dtype}, which is neither numbers nor text. Turn it into a "
                    f"number (for a date, days since a fixed day)."
                )
            values = np.array(
                [np.nan if x is None else float(x) for x in column.to_list()], np.float64
            )
    if values.dtype == np.float64 and np.isinf(values).any():
        row = int(np.isinf(values).argmax())
        raise ValueError(f"{where} holds {values[row]} in row {row}; values must be finite.")
    return values


def is_text(column: np.ndarray) -> bool:
    """Return whether a column of `SiteRows` holds labels."""
    return column.dtype == object


def make_label(value: Any) -> str | None:
    """Return a value as the text of a level, or ``None`` if it is missing."""
    if value is None or value != value:
        return None
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value)


def sort_labels(labels: Collection[str]) -> tuple[str, ...]:
    """Return labels in numerical order if all are numbers, else in alphabetical order."""
    try:
        return tuple(sorted(labels, key=float))
    except ValueError:
        return tuple(sorted(labels))


def _find_missing(column: np.ndarray) -> np.ndarray:
    if is_text(column):
        return np.array([x is None for x in column], bool)
    return np.isnan(column)
