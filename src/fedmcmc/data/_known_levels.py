"""Rows of one client as numbers, where the levels of its text columns are known in advance."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedmcmc._types import ArrayTree
from fedmcmc.data._inputs import is_table
from fedmcmc.data._levels import TextPart, is_plain_number, report_similar
from fedmcmc.data._rows import Levels


def check_levels(name: str, levels: Any) -> Levels:
    """Return the levels of a column as a tuple.

    Raises
    ------
    ValueError
        If they are no list of different texts, or two of them look the same.
    """
    is_list = isinstance(levels, Sequence) and not isinstance(levels, str)
    if not is_list or not levels or not all(isinstance(level, str) for level in levels):
        raise ValueError(
            f"levels of column {name!r} must be a list of texts in their order, as "
            f'["mild", "severe"]; got {levels!r}.'
        )
    repeated = [level for level in levels if list(levels).count(level) > 1]
    if repeated:
        raise ValueError(f"levels of column {name!r} must differ, got {repeated[0]!r} twice.")
    report_similar(dict.fromkeys(levels), f"Column {name!r}", "levels")
    return tuple(levels)


def code_rows(rows: Any, levels: Mapping[str, Levels], owner: Any, *, remedy: str) -> ArrayTree:
    """Return rows as arrays of numbers, text as codes of known levels.

    Parameters
    ----------
    rows
        Arrays ``[num_rows, ...]``, or a table.
    levels
        Levels of text columns in their order, by column; columns of trees have names with dots.
    owner
        Label of the client, for messages.
    remedy
        End of the message about a column of text without levels.

    Raises
    ------
    ValueError
        If a column of text has no levels, a value is none of the levels, or it is open which level
        a number or a boolean stands for.
    """
    if is_table(rows):
        return _code_table(rows, levels, owner, remedy)

    def code(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        column = np.asarray(leaf)
        whose = f"Column {name!r} of {owner}" if name else f"The rows of {owner}"
        if _is_text(column):
            known = _known(whose, levels.get(name), remedy)
            return _codes(whose, TextPart(owner, column.tolist()), known)
        return _checked(whose, column, levels.get(name), column.dtype.kind == "b")

    return jax.tree_util.tree_map_with_path(code, rows)


def _code_table(
    table: Any, levels: Mapping[str, Levels], owner: Any, remedy: str
) -> dict[str, np.ndarray]:
    import narwhals.stable.v2 as nw  # takes a while

    from fedmcmc.data._frames import eager, is_text, numeric, text_part

    frame = eager(table, f"The table of {owner}")
    columns = {}
    for name in frame.columns:
        whose, column = f"Column {name!r} of {owner}", frame[name]
        if is_text(column):
            known = _known(whose, levels.get(name), remedy)
            columns[name] = _codes(whose, text_part(column, owner, whose), known)
        else:
            numbers, is_boolean = numeric(whose, column, False), column.dtype == nw.Boolean
            columns[name] = _checked(whose, numbers, levels.get(name), is_boolean)
    return columns


def _is_text(column: np.ndarray) -> bool:
    texts = column.dtype.kind == "O" and all(isinstance(x, str) for x in column.flat)
    return column.ndim == 1 and (column.dtype.kind == "U" or (texts and column.size > 0))


def _known(whose: str, levels: Levels | None, remedy: str) -> Levels:
    if levels is None:
        raise ValueError(f"{whose} is text without known levels. {remedy}")
    return levels


def _codes(whose: str, part: TextPart, levels: Levels) -> np.ndarray:
    places = {level: place for place, level in enumerate(levels)}
    listed = ", ".join(map(repr, levels))
    for row, value in enumerate(part.values):
        if value not in places:
            raise ValueError(
                f"{whose} holds {value!r} in row {row}, which is none of the levels {listed}. "
                f"Correct the value, or have the levels completed for all clients."
            )
    own = [level for level in part.categories or () if level in places]
    if part.ordered and own != sorted(own, key=places.__getitem__):
        raise ValueError(
            f"{whose} has ordered categories {' < '.join(map(repr, own))}, in another order than "
            f"the levels {listed}."
        )
    return np.array([places[value] for value in part.values], np.int32)


def _checked(whose: str, column: np.ndarray, levels: Levels | None, is_boolean: bool) -> np.ndarray:
    """Return a column of numbers; if it has levels, its numbers must be codes of these."""
    if levels is None:
        return column
    listed = ", ".join(map(repr, levels))
    if is_boolean and tuple(level.lower() for level in levels) != ("false", "true"):
        raise ValueError(
            f"{whose} holds booleans, and its levels are {listed}. Turn the booleans into these "
            f"levels, as by column.map({{False: ..., True: ...}})."
        )
    others = [x for place, x in enumerate(levels) if is_plain_number(x) and float(x) != place]
    if others:
        raise ValueError(
            f"{whose} holds numbers, which can be levels (such as {others[0]!r}) or codes of the "
            f"levels {listed}. Turn the column into text, as by column.astype(str)."
        )
    wrong = ~np.isin(column, np.arange(len(levels)))
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"{whose} holds {column[row].item()!r} in row {row}, which is neither one of the "
            f"levels {listed} nor a code from 0 to {len(levels) - 1}."
        )
    return column
