"""Conversion of tables to rows: arrays by column name, with codes for text."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import narwhals.stable.v2 as nw
import numpy as np
from jax.tree_util import DictKey

from fedmcmc.data._columns import take_rows, write_column
from fedmcmc.data._levels import (
    TextPart,
    is_number,
    merge_levels,
    name_column,
    report_similar,
    warn_of_names,
)
from fedmcmc.data._rows import Levels, is_missing, numbers_of_objects


def read_owners(frame: object, column: str, noun: str = "client") -> tuple[np.ndarray, Levels]:
    """Return each row's client, ``[num_rows]`` int32, and the clients' sorted labels.

    `noun` is the name of the argument in messages, and may be "group". Raise `ValueError` if there
    is no such column, no row, or a row without a client.
    """
    table = read_table(frame, "The table")
    if column not in table.columns:
        raise ValueError(
            f"{noun} must name the column that holds each row's {noun}, one of "
            f"{', '.join(map(repr, table.columns))}; got {column!r}."
        )
    if not len(table):
        raise ValueError("The table holds no rows.")
    values = table[column].to_list()
    names = {value: _label(value) for value in dict.fromkeys(values) if not is_missing(value)}
    missing = [row for row, value in enumerate(values) if value not in names]
    if missing:
        raise ValueError(
            f"{len(missing)} rows have no {noun} (column {column!r}), the first is row "
            f"{missing[0]}. Drop these rows, or assign a {noun} to them."
        )
    if len({isinstance(name, str) for name in names.values()}) > 1:
        raise ValueError(
            f"Column {column!r} names each row's {noun}, and holds both text and numbers. Turn all "
            f"values into text, for example with column.astype(str)."
        )
    labels = tuple(sorted(dict.fromkeys(names.values())))
    report_similar(dict.fromkeys(labels), f"Column {column!r}", f"{noun}s")
    ids = {label: i for i, label in enumerate(labels)}
    return np.array([ids[names[value]] for value in values], np.int32), labels


def read_columns(
    frames: Sequence[Any],
    columns: Sequence[str] | None = None,
    excluded: Sequence[str] = (),
    *,
    allow_nonfinite: bool,
    owners: Levels | None = None,
    order: np.ndarray | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, Levels], dict[str, str]]:
    """Return the concatenated columns of all `frames`, the levels of text, and their orders.

    By default `columns` are all except for `excluded`, which hold clients and groups. Booleans
    become 0 and 1, and text and categories become codes ``0, 1, ...`` of levels (see
    `merge_levels`). If each table has the rows of one client, `owners` holds the clients' labels.
    `order` is the order in which the rows of a single table are returned. Raise `ValueError` if a
    column is missing in a table, holds missing values or other values than numbers, or is text in
    only some tables.
    """
    clients = [None] if owners is None else list(owners)
    titles = ["The table" if x is None else f"The table of client {x!r}" for x in clients]
    tables = [read_table(frame, title) for frame, title in zip(frames, titles, strict=True)]
    if columns is None:
        names = [name for name in tables[0].columns if name not in excluded]
    else:
        names = list(columns)
    if not names:
        raise ValueError("Rows must hold at least one column besides clients and groups.")
    for table, title in zip(tables, titles, strict=True):
        missing = [name for name in names if name not in table.columns]
        extra = [x for x in table.columns if columns is None and x not in (*names, *excluded)]
        if missing or extra:
            problem = f"no column {missing[0]!r}" if missing else f"an extra column {extra[0]!r}"
            raise ValueError(f"{title} has {problem}; its columns are {', '.join(table.columns)}.")
        if not len(table):
            raise ValueError(f"{title} holds no rows.")
    num_rows = sum(map(len, tables))
    rows: dict[str, np.ndarray] = {}
    levels: dict[str, Levels] = {}
    orders: dict[str, str] = {}
    for name in names:
        parts = [table[name] for table in tables]
        where = [name_column(name, client) for client in clients]
        are_text = [is_text(part) for part in parts]
        if all(are_text):
            texts = [read_text(*x) for x in zip(parts, clients, where, strict=True)]
            levels[name], orders[name] = merge_levels(name, texts)
            if orders[name] == "alphabetical":
                warn_of_names(name, len(levels[name]), sum(len(part.values) for part in texts))
            codes = {level: code for code, level in enumerate(levels[name])}
            numbers = [np.array([codes[x] for part in texts for x in part.values], np.int32)]
        elif any(are_text):
            i, client = are_text.index(True), clients[are_text.index(False)]
            raise ValueError(
                f"{where[i]} is text (such as {_find_word(parts[i])!r}), but this column of client "
                f"{client!r} holds numbers. Use either text or numbers at all clients."
            )
        else:
            numbers = [
                read_numbers(x, y, allow_nonfinite) for x, y in zip(where, parts, strict=True)
            ]
        sorted_parts = (part for x in numbers for part in take_rows(x, order))
        rows[name] = write_column((DictKey(name),), sorted_parts, num_rows)
    return rows, levels, orders


def read_table(frame: object, title: str) -> nw.DataFrame:
    """Return a table as a narwhals data frame.

    Raise `TypeError` if it is not a table or is lazy, and `ValueError` if two columns have the same
    name, or a name is not text.
    """
    if nw.dependencies.is_polars_lazyframe(frame):
        raise TypeError(f"{title} is a LazyFrame, which holds no rows yet: call .collect() first.")
    if not nw.dependencies.is_into_dataframe(frame):
        raise TypeError(f"A table of rows must be a DataFrame, got {type(frame).__name__}.")
    arrow = nw.dependencies.is_pyarrow_table(frame)
    names = Counter(frame.column_names if arrow else frame.columns)
    for name, count in names.items():
        if not isinstance(name, str):
            raise ValueError(
                f"{title} has a column with the name {name!r}, which is not text. Rename it, for "
                f"example with table.columns = [...], because models take columns by name."
            )
        if count > 1:
            raise ValueError(
                f"{title} has {count} columns with the name {name!r}. Rename them, or keep only "
                f"one of them."
            )
    return nw.from_native(frame, eager_only=True)


def is_text(column: nw.Series) -> bool:
    """Return whether a column holds text or categories, which become codes."""
    if column.dtype in (nw.String, nw.Categorical, nw.Enum):
        return True
    if column.dtype != nw.Object:
        return False
    values = column.drop_nulls().to_list()
    return bool(values) and all(isinstance(x, str) for x in values)


def read_text(column: nw.Series, owner: object, where: str) -> TextPart:
    """Return a text column of one table with the categories that it declares."""
    _refuse_missing(where, column)
    is_coded, ordered = column.dtype in (nw.Categorical, nw.Enum), column.dtype == nw.Enum
    values, categories = _as_text(column), None
    # Categories of Polars and Arrow are no declaration: they are in order of first appearance.
    if ordered or (is_coded and column.implementation.is_pandas_like()):
        categories = tuple(_as_text(column.cat.get_categories()))
    return TextPart(owner, values, categories, ordered=ordered, is_coded=is_coded)


def _as_text(column: nw.Series) -> list[str]:
    values = column.to_list()
    return [str(int(x) if isinstance(x, float) and x.is_integer() else x) for x in values]


def _label(value: object) -> Any:
    """Return a value as a label, which is text or a number."""
    plain = value.item() if isinstance(value, np.generic) else value
    return plain if isinstance(plain, str | int | float) else str(plain)


def _find_word(column: nw.Series) -> str:
    """Return a value of a text column, if possible one that is not a number."""
    texts = [str(value) for value in column.drop_nulls().to_list()]
    return next((text for text in texts if not is_number(text)), texts[0] if texts else "")


def _refuse_missing(where: str, column: nw.Series) -> None:
    mask = np.asarray(column.is_null().to_numpy(), bool)
    if mask.any():
        values = "value" if mask.sum() == 1 else "values"
        raise ValueError(
            f"{where} has {mask.sum()} missing {values}, the first in row {int(mask.argmax())}. "
            f"Drop these rows, or impute them."
        )


def read_numbers(where: str, column: nw.Series, allow_nonfinite: bool) -> np.ndarray:
    """Return a column of numbers or booleans (0 and 1); raise `ValueError` for other values."""
    dtype: Any = column.dtype
    if dtype.is_float() and allow_nonfinite:
        values = np.asarray(column.to_numpy())
        return values if values.dtype.kind == "f" else values.astype(float)  # missing becomes NaN
    if dtype.is_numeric() or dtype == nw.Boolean or dtype in (nw.Object, nw.Unknown):
        _refuse_missing(where, column)
        values = np.asarray(column.to_numpy())
        if values.dtype.kind == "O":
            values = numbers_of_objects(values)
        if values.dtype.kind == "b":
            return values.astype(np.int32)
        if values.dtype.kind in "fiu":
            return values
        kinds = dict.fromkeys(type(x).__name__ for x in values.flat)
        if len(kinds) > 1:
            raise ValueError(
                f"{where} holds both {' and '.join(kinds)}. Turn all values into numbers, for "
                f"example with pd.to_numeric(column), or into text, with column.astype(str)."
            )
        dtype = values.dtype if values.dtype.kind != "O" else next(iter(kinds))
    raise ValueError(
        f"{where} holds {dtype}, which is not a number. Turn it into a number (for a date, days "
        f"since a fixed day), or drop the column."
    )
