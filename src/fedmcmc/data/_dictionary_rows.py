"""Checks of one client's rows against a study dictionary, and their coding."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import narwhals.stable.v2 as nw
import numpy as np

from fedmcmc.data._columns import concatenate_clients, count_all_rows
from fedmcmc.data._dictionary_columns import QUANTITIES, Column
from fedmcmc.data._frames import is_text, read_table, read_text
from fedmcmc.data._inputs import is_table
from fedmcmc.data._known_levels import check_codes, code_text
from fedmcmc.data._levels import TextPart, name_column
from fedmcmc.data._rows import as_array, is_missing, numbers_of_objects
from fedmcmc.types import ArrayTree

TRUE_OR_FALSE = (0, 1)
"""Values of events without levels."""


class _Values(NamedTuple):
    """Values of a column without missing ones, and the rows that have them."""

    num_rows: int
    rows: np.ndarray  # [num_present]
    numbers: np.ndarray  # [num_present], empty for text
    text: TextPart | None

    def split(self, positions: Sequence[np.ndarray]) -> Iterator["_Values"]:
        """Yield the values of each client, whose rows are at these positions."""
        places = np.full(self.num_rows, -1)
        places[self.rows] = np.arange(len(self.rows))
        words = None if self.text is None else np.array([*self.text.values, None], object)[:-1]
        for rows in positions:
            is_present = places[rows] >= 0
            chosen = places[rows][is_present]
            text, numbers = self.text, self.numbers
            if words is None or text is None:
                numbers = numbers[chosen]
            else:
                text = replace(text, values=words[chosen].tolist())
            yield _Values(len(rows), np.flatnonzero(is_present), numbers, text)


class _Place(NamedTuple):
    """Beginning of messages about a column, and numbers of rows for messages."""

    where: str
    row_numbers: Sequence[int] | np.ndarray

    def refuse(self, values: Any, is_wrong: np.ndarray, rows: np.ndarray, problem: str) -> None:
        """Raise `ValueError` with the first wrong value and its row, if there is one."""
        if not is_wrong.any():
            return
        index, num = int(is_wrong.argmax()), int(is_wrong.sum()) - 1
        value = values[index]
        value = value.item() if isinstance(value, np.generic) else value
        more = f" (and {num} more value{'s' * (num > 1)})" if num else ""
        row = self.row_numbers[rows[index]]
        raise ValueError(f"{self.where} holds {value!r} in row {row}{more}, {problem}")


def check_table(dictionary: Any, table: Any, client: Any) -> None:
    """Raise `ValueError` unless a client's rows agree with the dictionary."""
    _code_columns(dictionary, table, client, is_named=client is not None)


def code_table(
    dictionary: Any,
    table: Any,
    client: Any,
    *,
    is_named: bool | None = None,
    columns: Sequence[str] | None = None,
    row_numbers: Sequence[int] | np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Return a client's checked rows as numbers.

    Parameters
    ----------
    dictionary, table, client
        See `Dictionary.code`.
    is_named
        If true, `client` is the name of the client; otherwise it only stands in messages.
    columns
        Columns to return; other columns of the table are not read. By default all columns of rows.
    row_numbers
        Numbers of the rows in messages; by default 0, 1, ...
    """
    is_named = client is not None if is_named is None else is_named
    coded, num_rows = _code_columns(
        dictionary, table, client, columns=columns, row_numbers=row_numbers, is_named=is_named
    )
    rows = {}
    for name, shape in dictionary.rows.items():
        if name not in coded:
            continue
        present, values, place = coded[name]
        is_float = np.issubdtype(shape.dtype, np.floating)
        if len(present) < num_rows and not is_float:
            row = _absent_rows(present, num_rows)[0]
            raise ValueError(
                f"{place.where} has no value in row {place.row_numbers[row]}, and a column of "
                f"whole numbers or codes cannot hold missing values. Drop such rows, or add a "
                f"level for them, such as 'unknown'."
            )
        array = np.full(num_rows, np.nan if is_float else 0, shape.dtype)
        array[present] = values
        rows[name] = array
    return rows


def code_clients(
    dictionary: Any, tables: Sequence[Any], owners: Sequence[Any], *, are_named: bool
) -> tuple[ArrayTree, np.ndarray]:
    """Return the checked rows of all clients as numbers, and the number of rows of each.

    If `are_named` is false, `owners` only stand in messages.
    """
    coded = [
        code_table(dictionary, table, owner, is_named=are_named)
        for owner, table in zip(owners, tables, strict=True)
    ]
    return concatenate_clients(coded.__getitem__, owners, count_all_rows(coded))


def code_parts(
    dictionary: Any,
    frame: object,
    owners: Sequence[Any],
    positions: Sequence[np.ndarray],
    columns: Sequence[str] | None,
) -> ArrayTree:
    """Return the checked rows of one table as numbers, sorted by client.

    `positions` holds the rows of each client in the table; messages name rows of the table.
    """
    table = read_table(frame, "The table")  # libraries read a column faster than its parts
    parts = {
        name: _read_values(table[name], None, name_column(name, None)).split(positions)
        for name in table.columns
        if columns is None or name in columns or name in (dictionary.client, dictionary.group)
    }
    coded = [
        code_table(
            dictionary,
            {name: next(values) for name, values in parts.items()},
            owner,
            columns=columns,
            row_numbers=rows,
        )
        for owner, rows in zip(owners, positions, strict=True)
    ]
    return concatenate_clients(coded.__getitem__, owners, len(table))[0]


def _code_columns(
    dictionary: Any,
    table: Any,
    client: Any,
    *,
    is_named: bool,
    columns: Sequence[str] | None = None,
    row_numbers: Sequence[int] | np.ndarray | None = None,
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray, _Place]], int]:
    """Return the rows with a value, their values and their place by column, and the row count."""
    title = "The table" if client is None else f"The table of client {client!r}"
    tables = _read_columns(table, title)
    names = _select_columns(dictionary, tables, title, columns)
    lengths = {
        name: column.num_rows if isinstance(column, _Values) else len(column)
        for name, column in ((name, tables[name]) for name in names)
    }
    num_rows = next(iter(lengths.values()))
    for name, length in lengths.items():
        if length != num_rows:
            raise ValueError(
                f"{title} has {length} rows in column {name!r} and {num_rows} in column "
                f"{next(iter(lengths))!r}."
            )
    _check_size(dictionary, client, num_rows, is_named)
    numbers = range(num_rows) if row_numbers is None else row_numbers
    coded = {}
    for name in names:
        place = _Place(name_column(name, client), numbers)
        values = _read_values(tables[name], client, place.where)
        _check_missing(place, values.rows, num_rows, dictionary.max_missing(name))
        if name == dictionary.client and is_named:
            _check_owner(place, values, client)
        codes = _code_values(place, values, dictionary.columns[name])
        coded[name] = (values.rows, codes, place)
    for name in dictionary.events:
        num = np.count_nonzero(coded[name][1]) if name in coded else dictionary.rules.min_events
        if num < dictionary.rules.min_events:
            raise ValueError(
                f"{name_column(name, client)} has {num} events, and the rules of the study need "
                f"at least {dictionary.rules.min_events} (min_events)."
            )
    return coded, num_rows


def _read_columns(table: Any, title: str) -> dict[str, Any]:
    """Return the columns of a table or of nested mappings, whose names are joined by dots."""
    if is_table(table):
        frame = read_table(table, title)
        return {name: frame[name] for name in frame.columns}
    if not isinstance(table, Mapping):
        raise TypeError(
            f"{title} must be a DataFrame or a mapping of columns by name, got "
            f"{type(table).__name__}."
        )
    columns: dict[str, Any] = {}
    for name, column in table.items():
        if isinstance(column, Mapping):
            nested = _read_columns(column, title)
            columns |= {f"{name}.{key}": part for key, part in nested.items()}
        else:
            columns[name] = column
    return columns


def _select_columns(
    dictionary: Any, tables: Mapping[str, Any], title: str, columns: Sequence[str] | None
) -> list[str]:
    """Return the columns to read; raise `ValueError` if some are missing or unknown."""
    listed = ", ".join(map(repr, dictionary.columns))
    roles = [x for x in (dictionary.client, dictionary.group) if x is not None]
    if columns is not None:
        unknown = [name for name in columns if name not in dictionary.rows]
        if unknown:
            raise ValueError(
                f"columns has {unknown[0]!r}, which is no column of rows in the dictionary: "
                f"{', '.join(map(repr, dictionary.rows))}."
            )
    else:
        extra = [name for name in tables if name not in dictionary.columns]
        if extra:
            raise ValueError(
                f"{title} has the column {extra[0]!r}, which the dictionary does not list: it has "
                f"the columns {listed}. Remove the column from the table."
            )
    required = [*(dictionary.rows if columns is None else columns)]
    required += [name for name in roles if name == dictionary.group]
    for name in required:
        if name not in tables:
            raise ValueError(
                f"{title} has no column {name!r}, which the dictionary lists; its columns are "
                f"{', '.join(map(repr, tables))}."
            )
    optional = [] if columns is not None else [x for x in tables if x not in required]
    return [*required, *optional]


def _check_size(dictionary: Any, client: Any, num_rows: int, is_named: bool) -> None:
    """Raise `ValueError` if a client is unknown or has too few rows, or more than agreed."""
    title = "The table" if client is None else f"Client {client!r}"
    smallest = dictionary.rules.min_rows
    if num_rows < smallest:
        raise ValueError(
            f"{title} has {num_rows} rows, and the rules of the study need at least {smallest} "
            f"(min_rows)."
        )
    names = () if dictionary.client is None else dictionary.columns[dictionary.client].levels
    for allowed, source in ((names, "the levels of its column"), (dictionary.sites, "the sites")):
        if allowed and not (is_named and client in allowed):
            raise ValueError(
                f"{title} is none of {source} in the dictionary: {', '.join(map(repr, allowed))}. "
                f"Clients have names if they are a mapping of tables by name."
            )
    if dictionary.sites:
        num = dictionary.sites[client]
        low, high = num if isinstance(num, tuple) else (num, num)
        if not low <= num_rows <= high:
            expected = f"{low}" if low == high else f"from {low} to {high}"
            raise ValueError(
                f"{title} has {num_rows} rows, and the dictionary expects {expected} (sites)."
            )


def _read_values(column: Any, client: Any, where: str) -> _Values:
    """Return the values of a column that are not missing."""
    if isinstance(column, _Values):
        return column
    empty, num_rows = np.empty(0), len(column)
    is_series = isinstance(column, nw.Series)
    if is_series and column.dtype != nw.Object:
        mask = np.asarray(column.is_null().to_numpy(), bool)
        rows = np.flatnonzero(~mask)
        if mask.any():
            column = column.filter(~column.is_null())
        if is_text(column):
            return _Values(num_rows, rows, empty, read_text(column, client, where))
        array = np.asarray(column.to_numpy())
    else:
        if is_series:
            column = column.to_list()
        if isinstance(column, list | tuple):  # conversion would turn numbers among text into text
            objects = np.empty(len(column), object)
            objects[:] = column
            column = objects
        array = as_array(column, where)
        if array.ndim != 1:
            raise ValueError(f"{where} must hold one value per row, got the shape {array.shape}.")
        if array.dtype.kind == "O":
            mask = np.array([is_missing(x) for x in array], bool)
            rows, array = np.flatnonzero(~mask), array[~mask]
        else:
            rows = np.arange(len(array))
        if array.dtype.kind == "U" or (array.size and all(isinstance(x, str) for x in array.flat)):
            return _Values(num_rows, rows, empty, TextPart(client, array.tolist()))
    if array.dtype.kind == "O":
        array = numbers_of_objects(array)
    if array.dtype.kind == "f":
        is_present = ~np.isnan(array)
        rows, array = rows[is_present], array[is_present]
    return _Values(num_rows, rows, array, None)


def _absent_rows(rows: np.ndarray, num_rows: int) -> np.ndarray:
    """Return the rows without a value."""
    is_absent = np.ones(num_rows, bool)
    is_absent[rows] = False
    return np.flatnonzero(is_absent)


def _check_missing(place: _Place, rows: np.ndarray, num_rows: int, max_missing: float) -> None:
    """Raise `ValueError` if too many values are missing."""
    num = num_rows - len(rows)
    if num <= max_missing * num_rows + 1e-9 * num_rows:  # 0.29 * 100 is less than 29
        return
    row = _absent_rows(rows, num_rows)[0]
    allowed = f"at most a fraction of {max_missing:g}" if max_missing else "none"
    raise ValueError(
        f"{place.where} has {num} missing value{'s' * (num > 1)} in {num_rows} rows, the first in "
        f"row {place.row_numbers[row]}, and the dictionary allows {allowed} (max_missing). Drop "
        f"these rows, impute them, or change max_missing for all clients."
    )


def _check_owner(place: _Place, values: _Values, client: Any) -> None:
    """Raise `ValueError` if a row belongs to another client."""
    labels = values.numbers if values.text is None else values.text.values
    is_wrong = np.array([str(label) != str(client) for label in labels], bool)
    place.refuse(labels, is_wrong, values.rows, "and must hold the client's name in every row.")


def _code_values(place: _Place, values: _Values, column: Column) -> np.ndarray:
    """Return the values of a column as numbers; raise `ValueError` if one is not allowed."""
    _, rows, array, text = values
    if column.type == "text":
        if text is None:
            place.refuse(array, np.ones(len(array), bool), rows, "which is not text.")
        return array
    if text is not None and column.levels:
        numbers = np.asarray(place.row_numbers)[rows]
        return code_text(place.where, text, column.levels, "", numbers)
    if text is not None or array.dtype.kind not in "biuf":
        is_other = text is not None or array.dtype.kind != "O"
        labels = array if text is None else text.values
        is_word = [is_other or not isinstance(x, int | float) for x in labels]
        problem = f"which is not a number, and the type of the column is {column.type!r}."
        place.refuse(labels, np.array(is_word, bool), rows, problem)
    if column.levels:
        numbers = np.asarray(place.row_numbers)[rows]
        is_boolean = array.dtype.kind == "b"
        return check_codes(place.where, array, column.levels, is_boolean, numbers).astype(np.int32)
    if column.type in QUANTITIES:
        _check_quantities(place, rows, array, column)
    else:
        is_wrong = ~np.isin(array, TRUE_OR_FALSE)
        place.refuse(array, is_wrong, rows, "and an event is 0 or 1, or one of the levels.")
    return array


def _check_quantities(place: _Place, rows: np.ndarray, array: np.ndarray, column: Column) -> None:
    """Raise `ValueError` if numbers are of another type or outside of the plausible range."""
    if column.type != "integer":
        is_wrong = np.full(len(array), array.dtype.kind == "b")
        place.refuse(array, is_wrong, rows, "a boolean: turn booleans into 0 and 1.")
    place.refuse(array, ~np.isfinite(array), rows, "which is not finite.")
    if column.type == "integer":
        place.refuse(array, array != np.round(array), rows, "which is not a whole number.")
        limits = np.iinfo(jax.dtypes.canonicalize_dtype(np.int64))
        is_wrong = (array < limits.min) | (array > limits.max)
        problem = f"which has more than {limits.bits} bits. Declare the column as a number."
        place.refuse(array, is_wrong, rows, problem)
    if column.type == "time":
        place.refuse(array, array < 0, rows, "and a time is at least 0.")
    if column.range is not None:
        low, high = column.range
        unit = f" {column.unit}" if column.unit else ""
        problem = (
            f"outside of the range {low:g} to {high:g}{unit}. Correct the value, or change the "
            f"range for all clients."
        )
        place.refuse(array, (array < low) | (array > high), rows, problem)
