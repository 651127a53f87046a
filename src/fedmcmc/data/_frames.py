"""Tables of rows: columns by their names, text as codes."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import narwhals.stable.v2 as nw
import numpy as np

from fedmcmc.data._levels import TextPart, is_number, merge_levels, report_similar, warn_of_names
from fedmcmc.data._rows import Levels, concatenated, is_missing, numbers_of_objects


def owners_of(frame: Any, client: str, what: str = "client") -> tuple[np.ndarray, Levels]:
    """Return each row's client, ``[num_rows]`` int32, and the clients' labels in sorted order.

    `what` a row has one of: the name of the argument, for messages.

    Raises
    ------
    ValueError
        If there is no such column, no row, or a row without a client.
    """
    table = eager(frame, "The table")
    if client not in table.columns:
        raise ValueError(
            f"{what} must name the column that holds each row's {what}, one of "
            f"{', '.join(map(repr, table.columns))}; got {client!r}."
        )
    if not len(table):
        raise ValueError("The table holds no rows.")
    values = table[client].to_list()
    names = {value: _label(value) for value in dict.fromkeys(values) if not is_missing(value)}
    missing = [row for row, value in enumerate(values) if value not in names]
    if missing:
        raise ValueError(
            f"{len(missing)} rows have no {what} (column {client!r}), the first is row "
            f"{missing[0]}. Drop them, or give them one."
        )
    if len({isinstance(name, str) for name in names.values()}) > 1:
        raise ValueError(
            f"Column {client!r} names each row's {what}, and holds both text and numbers. Turn all "
            f"into text, as by column.astype(str)."
        )
    labels = tuple(sorted(dict.fromkeys(names.values())))
    report_similar(dict.fromkeys(labels), f"Column {client!r}", f"{what}s")
    places = {label: place for place, label in enumerate(labels)}
    ids = {value: places[name] for value, name in names.items()}
    return np.array([ids[value] for value in values], np.int32), labels


def columns_of(
    frames: Sequence[Any],
    columns: Sequence[str] | None = None,
    beside: Sequence[str] = (),
    *,
    allow_nonfinite: bool,
    owners: Levels | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, Levels], dict[str, str]]:
    """Return the columns of all `frames`, one after the other, levels of text, and their orders.

    They are `columns`, by default all but those `beside` them, of clients and groups. Numbers stay
    as they are, booleans become 0 and 1, and text and categories become codes ``0, 1, ...`` of
    levels (see `merge_levels`). `owners` are the labels of the tables' clients, if each table has
    the rows of one client.

    Raises
    ------
    ValueError
        If a column is missing in a table, or holds missing values or what is no number, or is text
        in some tables alone.
    """
    places = [None] if owners is None else list(owners)
    which = ["The table" if x is None else f"The table of client {x!r}" for x in places]
    tables = [eager(frame, where) for frame, where in zip(frames, which, strict=True)]
    if columns is None:
        names = [name for name in tables[0].columns if name not in beside]
    else:
        names = list(columns)
    if not names:
        raise ValueError("Rows must hold at least one column, besides who owns them.")
    for table, where in zip(tables, which, strict=True):
        lacks = [name for name in names if name not in table.columns]
        extra = [x for x in table.columns if columns is None and x not in (*names, *beside)]
        if lacks or extra:
            what = f"has no column {lacks[0]!r}" if lacks else f"alone has a column {extra[0]!r}"
            raise ValueError(f"{where} {what}; its columns are {', '.join(table.columns)}.")
        if not len(table):
            raise ValueError(f"{where} holds no rows.")
    rows: dict[str, np.ndarray] = {}
    levels: dict[str, Levels] = {}
    orders: dict[str, str] = {}
    for name in names:
        parts = [table[name] for table in tables]
        whose = [column_of(name, owner) for owner in places]
        text = [is_text(part) for part in parts]
        if all(text):
            texts = [text_part(*x) for x in zip(parts, places, whose, strict=True)]
            levels[name], orders[name] = merge_levels(name, texts)
            if orders[name] == "alphabetical":
                warn_of_names(name, len(levels[name]), sum(len(part.values) for part in texts))
            codes = {level: code for code, level in enumerate(levels[name])}
            rows[name] = np.array([codes[x] for part in texts for x in part.values], np.int32)
        elif any(text):
            raise ValueError(
                f"{whose[text.index(True)]} is text (such as "
                f"{_first_word(parts[text.index(True)])!r}), and that of client "
                f"{places[text.index(False)]!r} holds numbers. Give all clients one kind."
            )
        else:
            found = [numeric(x, y, allow_nonfinite) for x, y in zip(whose, parts, strict=True)]
            rows[name] = concatenated(found)
    return rows, levels, orders


def column_of(name: str, owner: Any) -> str:
    """Return the beginning of a message about a column."""
    return f"Column {name!r}" + ("" if owner is None else f" of client {owner!r}")


def eager(frame: Any, where: str) -> Any:
    """Return a table as narwhals reads it.

    Raises
    ------
    TypeError
        If it is no table, or one that is not computed yet.
    ValueError
        If two columns have one name, or a name is no text.
    """
    if nw.dependencies.is_polars_lazyframe(frame):
        raise TypeError(f"{where} is a LazyFrame, which holds no rows yet: call .collect() first.")
    if not nw.dependencies.is_into_dataframe(frame):
        raise TypeError(f"A table of rows must be a DataFrame, got {type(frame).__name__}.")
    arrow = nw.dependencies.is_pyarrow_table(frame)
    names = Counter(frame.column_names if arrow else frame.columns)
    for name, count in names.items():
        if not isinstance(name, str):
            raise ValueError(
                f"{where} has a column with the name {name!r}, which is no text. Rename it, as by "
                f"table.columns = [...]: models take columns by name."
            )
        if count > 1:
            raise ValueError(
                f"{where} has {count} columns with the name {name!r}. Rename them, or "
                f"drop all but one."
            )
    return nw.from_native(frame, eager_only=True)


def is_text(column: Any) -> bool:
    """Return whether a column holds text or categories, which become codes."""
    if column.dtype in (nw.String, nw.Categorical, nw.Enum):
        return True
    if column.dtype != nw.Object:
        return False
    values = column.drop_nulls().to_list()
    return bool(values) and all(isinstance(x, str) for x in values)


def text_part(column: Any, owner: Any, whose: str) -> TextPart:
    """Return a text column of one table, with the categories that it declares.

    Raises
    ------
    ValueError
        If a value is missing.
    """
    _refuse_missing(whose, column)
    coded = column.dtype in (nw.Categorical, nw.Enum)
    values = _names(column.to_list())
    declares = column.dtype == nw.Enum or (coded and column.implementation.is_pandas_like())
    if not declares:  # Polars and Arrow list categories as they come
        return TextPart(owner, values, is_coded=coded)
    categories = tuple(_names(column.cat.get_categories().to_list()))
    return TextPart(owner, values, categories, column.dtype == nw.Enum, True)


def _names(values: Iterable[Any]) -> list[str]:
    names: dict[Any, str] = {}
    values = list(values)
    for value in dict.fromkeys(values):
        whole = isinstance(value, float) and value.is_integer()
        names[value] = str(int(value) if whole else value)
    return [names[value] for value in values]


def _label(value: Any) -> Any:
    """Return a value as a label: text or a number."""
    plain = value.item() if isinstance(value, np.generic) else value
    return plain if isinstance(plain, str | int | float) else str(plain)


def _first_word(column: Any) -> str:
    """Return the first value of a text column that is no number, or its first if all are."""
    texts = [str(value) for value in column.drop_nulls().to_list()]
    return next((text for text in texts if not is_number(text)), texts[0] if texts else "")


def _missing(column: Any) -> np.ndarray:
    return np.asarray(column.is_null().to_numpy(), bool)


def _refuse_missing(whose: str, column: Any) -> None:
    missing = _missing(column)
    if missing.any():
        values = "value" if missing.sum() == 1 else "values"
        raise ValueError(
            f"{whose} has {missing.sum()} missing {values}, the first in row "
            f"{int(missing.argmax())}. Drop these rows, or impute them."
        )


def numeric(whose: str, column: Any, allow_nonfinite: bool) -> np.ndarray:
    """Return a column of numbers; booleans become 0 and 1.

    Raises
    ------
    ValueError
        If values are missing, or are no numbers.
    """
    dtype = column.dtype
    if dtype.is_float() and allow_nonfinite:
        return np.asarray(column.to_numpy()).astype(float)  # a missing value is NaN
    if dtype.is_numeric() or dtype == nw.Boolean or dtype in (nw.Object, nw.Unknown):
        _refuse_missing(whose, column)
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
                f"{whose} holds both {' and '.join(kinds)}. Turn all values into numbers, as by "
                f"pd.to_numeric(column), or all into text, as by column.astype(str)."
            )
        dtype = values.dtype if values.dtype.kind != "O" else next(iter(kinds))
    raise ValueError(
        f"{whose} holds {dtype}, which is no number: turn it into one (of a date, days "
        f"since a day), or drop it from the table."
    )
