"""Coding of one client's rows with levels of text columns that are known in advance."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedmcmc.data._inputs import is_table
from fedmcmc.data._levels import TextPart, is_plain_number, report_similar
from fedmcmc.data._rows import Levels
from fedmcmc.types import ArrayTree


def check_levels(name: str, levels: Any) -> Levels:
    """Return the levels of a column as a tuple; raise `ValueError` unless they are valid."""
    is_list = isinstance(levels, Sequence) and not isinstance(levels, str)
    if not is_list or not levels or not all(isinstance(level, str) for level in levels):
        raise ValueError(
            f"levels of column {name!r} must be a list of texts in their order, such as "
            f'["mild", "severe"]; got {levels!r}.'
        )
    repeated = [level for level in levels if list(levels).count(level) > 1]
    if repeated:
        raise ValueError(f"levels of column {name!r} must differ, got {repeated[0]!r} twice.")
    report_similar(dict.fromkeys(levels), f"Column {name!r}", "levels")
    return tuple(levels)


def code_rows(rows: Any, levels: Mapping[str, Levels], owner: Any, *, remedy: str) -> ArrayTree:
    """Return rows as arrays of numbers, with text as codes of known levels.

    Raise `ValueError` if a text column has no levels, a value is none of the levels, or a number or
    boolean may stand for more than one level.

    Parameters
    ----------
    rows
        Arrays ``[num_rows, ...]``, or a table.
    levels
        Levels of text columns in their order, by column; names of nested columns have dots.
    owner
        Client, for messages.
    remedy
        End of the message about a text column without levels.
    """
    if is_table(rows):
        return _code_table(rows, levels, owner, remedy)

    def code(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        column = np.asarray(leaf)
        where = f"Column {name!r} of {owner}" if name else f"The rows of {owner}"
        if _is_text(column):
            part = TextPart(owner, column.tolist())
            return code_text(where, part, levels.get(name), remedy)
        return check_codes(where, column, levels.get(name), column.dtype.kind == "b")

    return jax.tree_util.tree_map_with_path(code, rows)


def _code_table(
    table: object, levels: Mapping[str, Levels], owner: object, remedy: str
) -> dict[str, np.ndarray]:
    import narwhals.stable.v2 as nw  # slow

    from fedmcmc.data._frames import is_text, read_numbers, read_table, read_text

    frame = read_table(table, f"The table of {owner}")
    columns = {}
    for name in frame.columns:
        where, column = f"Column {name!r} of {owner}", frame[name]
        if is_text(column):
            part = read_text(column, owner, where)
            columns[name] = code_text(where, part, levels.get(name), remedy)
        else:
            numbers, is_boolean = read_numbers(where, column, False), column.dtype == nw.Boolean
            columns[name] = check_codes(where, numbers, levels.get(name), is_boolean)
    return columns


def _is_text(column: np.ndarray) -> bool:
    texts = column.dtype.kind == "O" and all(isinstance(x, str) for x in column.flat)
    return column.ndim == 1 and (column.dtype.kind == "U" or (texts and column.size > 0))


def code_text(
    where: str,
    part: TextPart,
    levels: Levels | None,
    remedy: str,
    row_numbers: Sequence[int] | None = None,
) -> np.ndarray:
    """Return the codes of text values; messages name rows by `row_numbers`."""
    if levels is None:
        raise ValueError(f"{where} is text without known levels. {remedy}")
    codes = {level: code for code, level in enumerate(levels)}
    names = ", ".join(map(repr, levels))
    for row, value in enumerate(part.values):
        if value not in codes:
            row = row if row_numbers is None else row_numbers[row]
            raise ValueError(
                f"{where} holds {value!r} in row {row}, which is none of the levels {names}. "
                f"Correct the value, or add a level for all clients."
            )
    categories = [level for level in part.categories or () if level in codes]
    if part.ordered and categories != sorted(categories, key=codes.__getitem__):
        raise ValueError(
            f"{where} has ordered categories {' < '.join(map(repr, categories))}, in another order "
            f"than the levels {names}."
        )
    return np.array([codes[value] for value in part.values], np.int32)


def check_codes(
    where: str,
    column: np.ndarray,
    levels: Levels | None,
    is_boolean: bool,
    row_numbers: Sequence[int] | None = None,
) -> np.ndarray:
    """Return a column of numbers; if it has levels, the numbers must be their codes."""
    if levels is None:
        return column
    names = ", ".join(map(repr, levels))
    if is_boolean and tuple(level.lower() for level in levels) != ("false", "true"):
        raise ValueError(
            f"{where} holds booleans, and its levels are {names}. Turn the booleans into these "
            f"levels, for example with column.map({{False: ..., True: ...}})."
        )
    ambiguous = [x for code, x in enumerate(levels) if is_plain_number(x) and float(x) != code]
    if ambiguous:
        raise ValueError(
            f"{where} holds numbers, which can be levels (such as {ambiguous[0]!r}) or codes of "
            f"the levels {names}. Turn the column into text, for example with column.astype(str)."
        )
    is_wrong = ~np.isin(column, np.arange(len(levels)))
    if is_wrong.any():
        index = int(is_wrong.argmax())
        row = index if row_numbers is None else row_numbers[index]
        raise ValueError(
            f"{where} holds {column[index].item()!r} in row {row}, which is neither one of the "
            f"levels {names} nor a code from 0 to {len(levels) - 1}."
        )
    return column
