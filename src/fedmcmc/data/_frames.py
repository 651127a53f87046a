"""Tables of rows: columns by their names, strings as codes."""

import warnings
from collections.abc import Sequence
from typing import Any

import narwhals.stable.v2 as nw
import numpy as np

from fedmcmc.data._rows import Levels

MOST_LEVELS = 20
"""Of text that is different in most rows: more of them are rather names than categories."""


def owners_of(frame: Any, client: str, what: str = "client") -> tuple[np.ndarray, Levels]:
    """Return each row's client, ``[num_rows]`` int32, and the clients' labels in sorted order.

    `what` a row has one of: the name of the argument, for messages.

    Raises
    ------
    ValueError
        If there is no such column, no row, or a row without a client.
    """
    table = _eager(frame)
    if client not in table.columns:
        raise ValueError(
            f"{what} must name the column that holds each row's {what}, one of "
            f"{', '.join(map(repr, table.columns))}; got {client!r}."
        )
    if not len(table):
        raise ValueError("The table holds no rows.")
    column = table[client]
    missing = column.is_null().to_numpy()
    if missing.any():
        raise ValueError(
            f"{missing.sum()} rows have no {what} (column {client!r}), the first is row "
            f"{int(missing.argmax())}. Drop them, or give them one."
        )
    labels, ids = np.unique(_strings_or_numbers(column), return_inverse=True)
    return ids.astype(np.int32), tuple(labels.tolist())


def columns_of(
    frames: Sequence[Any],
    columns: Sequence[str] | None = None,
    beside: Sequence[str] = (),
    *,
    allow_nonfinite: bool,
    owners: Levels | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, Levels]]:
    """Return the columns of all `frames`, one after the other, and the levels of those coded.

    They are `columns`, by default all but those `beside` them, of clients and groups. Numbers stay
    as they are, booleans become 0 and 1, and strings and categories become codes ``0, 1, ...`` in
    the order of their levels: that of the categories, else sorted. `owners` are what the tables'
    clients are called, where each table is one client's.

    Raises
    ------
    ValueError
        If a column is missing in a table, or holds missing values or what is no number, or is text
        in some tables alone.
    """
    tables = [_eager(frame) for frame in frames]
    if columns is None:
        names = [name for name in tables[0].columns if name not in beside]
    else:
        names = list(columns)
    if not names:
        raise ValueError("Rows must hold at least one column, besides who owns them.")
    for place, table in enumerate(tables):
        lacks = [name for name in names if name not in table.columns]
        extra = [x for x in table.columns if columns is None and x not in (*names, *beside)]
        if lacks or extra:
            which = "The table" if owners is None else f"The table of client {owners[place]!r}"
            what = f"has no column {lacks[0]!r}" if lacks else f"alone has a column {extra[0]!r}"
            raise ValueError(f"{which} {what}; its columns are {', '.join(table.columns)}.")
    rows, levels = {}, {}
    for name in names:
        parts = [table[name] for table in tables]
        whose = [f"Column {name!r}"]
        if owners is not None:
            whose = [f"Column {name!r} of client {owner!r}" for owner in owners]
        text = [_is_text(part) for part in parts]
        if all(text):
            rows[name], levels[name] = _coded(name, whose, parts)
        elif any(text):
            raise ValueError(
                f"{whose[text.index(True)]} is text (its first value that is no number is "
                f"{_first_word(parts[text.index(True)])!r}), and that of client "
                f"{(owners or ())[text.index(False)]!r} holds numbers. Give all clients one kind."
            )
        else:
            numbers = [_numbers(x, y, allow_nonfinite) for x, y in zip(whose, parts, strict=True)]
            rows[name] = np.concatenate(numbers)
    return rows, levels


def _first_word(column: Any) -> str:
    """Return the first value of a text column that is no number."""

    def is_number(value: str) -> bool:
        try:
            float(value)
        except ValueError:
            return False
        return True

    texts = [str(value) for value in column.drop_nulls().to_list()]
    return next((text for text in texts if not is_number(text)), texts[0] if texts else "")


def _eager(frame: Any) -> Any:
    if not nw.dependencies.is_into_dataframe(frame):
        raise TypeError(f"A table of rows must be a DataFrame, got {type(frame).__name__}.")
    return nw.from_native(frame, eager_only=True)


def _is_text(column: Any) -> bool:
    return column.dtype in (nw.String, nw.Categorical, nw.Enum) or (
        column.dtype == nw.Object and all(isinstance(x, str) for x in column.drop_nulls())
    )


def _strings_or_numbers(column: Any) -> np.ndarray:
    return np.asarray(column.cast(nw.String) if _is_text(column) else column.to_numpy())


def _refuse_missing(whose: str, column: Any) -> None:
    missing = column.is_null().to_numpy()
    if missing.any():
        values = "value" if missing.sum() == 1 else "values"
        raise ValueError(
            f"{whose} has {missing.sum()} missing {values}, the first in row "
            f"{int(missing.argmax())}. Drop these rows, or impute them."
        )


def _coded(name: str, whose: list[str], parts: list[Any]) -> tuple[np.ndarray, Levels]:
    for owner, part in zip(whose, parts, strict=True):
        _refuse_missing(owner, part)
    texts = np.concatenate([np.asarray(part.cast(nw.String).to_numpy(), str) for part in parts])
    levels: dict[str, None] = {}
    for part in parts:
        if part.dtype in (nw.Categorical, nw.Enum):
            levels |= dict.fromkeys(map(str, part.cat.get_categories().to_list()))
    levels |= dict.fromkeys(np.unique(texts).tolist())
    if len(levels) > MOST_LEVELS and 2 * len(levels) > len(texts):
        warnings.warn(
            f"Column {name!r} is text of {len(levels)} different values in {len(texts)} rows, "
            f"which become codes in alphabetical order. If it names rows, or its numbers are "
            f"written as text, leave it out or turn it into numbers.",
            stacklevel=4,
        )
    places = {level: code for code, level in enumerate(levels)}
    return np.array([places[text] for text in texts.tolist()], np.int32), tuple(levels)


def _numbers(whose: str, column: Any, allow_nonfinite: bool) -> np.ndarray:
    if not (column.dtype.is_numeric() or column.dtype == nw.Boolean):
        raise ValueError(
            f"{whose} holds {column.dtype}, which is no number: turn it into one (of a date, days "
            f"since a day), or drop it from the table."
        )
    if column.dtype.is_float() and allow_nonfinite:
        return column.to_numpy().astype(float)  # a missing value is NaN
    _refuse_missing(whose, column)
    values = np.asarray(column.to_numpy())
    return values.astype(np.int32) if column.dtype == nw.Boolean else values
