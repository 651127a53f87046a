"""Columns of a study: types, shapes and levels, as its file declares them."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedmcmc.data import (
    Dictionary,
    FederatedData,
    Levels,
    check_levels,
    code_rows,
    is_table,
    widened_dtype,
)
from fedmcmc.deploy._row_ranges import find_problem
from fedmcmc.deploy._settings import hint
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree

DICTIONARY_KEYS = ("outcome", "client", "group", "rules", "model")
"""Keys of `study.toml` that only a study with a dictionary has; ``model`` is for `fedmcmc fit`."""
KEYS = ("dtype", "shape", "levels")
"""Keys of a column in a study's file."""
DTYPES = (
    *("bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
)
"""Types that a column can have."""


def check_keys(
    table: object, required: Collection[str], optional: Collection[str], where: str
) -> None:
    """Raise `ValueError` unless a table has all required keys and no unknown ones."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{where} must be a table, got {table!r}.")
    optional = sorted({*optional} - {*required})
    names = ", ".join(sorted(required)) or "nothing"
    expected = f"{where} must hold {names} and may hold {', '.join(optional)}"
    allowed = [*required, *optional]
    for name in table:
        if name not in allowed:
            raise ValueError(f"{expected}; it holds {name}, which is unknown.{hint(name, allowed)}")
    for name in required:
        if name not in table:
            raise ValueError(f"{expected}; it holds no {name}, only {', '.join(sorted(table))}.")


def read_columns(content: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """Return the arguments of `Study` that describe columns: a dictionary, or rows and levels.

    Raise `ValueError` if a column has unknown keys, no type, or no valid shape.
    """
    if "columns" not in content:
        return _read_rows(content["rows"], path)
    try:
        return {"dictionary": Dictionary.from_dict(content)}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read_rows(tree: object, path: str | Path) -> dict[str, Any]:
    """Return the shapes and types of one row, and the levels of text columns."""
    levels: dict[str, Levels] = {}

    def read(part: object, name: str) -> ArrayTree:
        where = f"{path}: column {name!r} of rows" if name else f"{path}: rows"
        if isinstance(part, dict) and part and all(isinstance(x, dict) for x in part.values()):
            return {key: read(x, f"{name}.{key}" if name else key) for key, x in part.items()}
        if not isinstance(part, dict) or not part:
            raise ValueError(f"{where} needs a dtype, and a shape if it has one; got {part!r}.")
        check_keys(part, () if "levels" in part else ("dtype",), KEYS, where)
        if "levels" in part:
            levels[name] = part["levels"]
        dtype, shape = part.get("dtype", "int32"), part.get("shape", [])
        if not _is_numeric(dtype):
            raise ValueError(
                f"{where} has the dtype {dtype!r}, which is unknown.{hint(dtype, DTYPES)} Known "
                f"are {', '.join(DTYPES)}."
            )
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(
                f"{where} has the shape {shape!r}, which must be a list of whole numbers of at "
                f"least 0, such as [3]."
            )
        return jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype))

    return {"rows": read(tree, ""), "levels": levels}


def _is_numeric(dtype: object) -> bool:
    """Return true if this is the name of a numeric type."""
    if not isinstance(dtype, str):
        return False
    try:
        parsed = np.dtype(dtype)
    except TypeError:
        return False
    return parsed.isnative and parsed.name in DTYPES


def column_names(rows: ArrayTree) -> list[str]:
    """Return the names of the columns of rows, with dots where they are nested."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(rows)]
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]


def wide_shapes(rows: ArrayTree) -> ArrayTree:
    """Return shapes of rows with integers of at least 32 bits, the types of a site's rows."""
    for name, leaf in zip(column_names(rows), jax.tree.leaves(rows), strict=True):
        if any(length < 0 for length in leaf.shape):
            raise ValueError(f"Column {name!r} of rows has a negative length: {leaf.shape}.")
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, widened_dtype(leaf.dtype)), rows
    )


def checked_levels(levels: Mapping[str, Any], rows: ArrayTree) -> dict[str, Levels]:
    """Return levels by column; raise `ValueError` unless they are texts for a column of codes."""
    columns = dict(zip(column_names(rows), jax.tree.leaves(rows), strict=True))
    for name in levels:
        if not name or name not in columns:
            raise ValueError(
                f"levels are of column {name!r}, and rows have the columns "
                f"{', '.join(map(repr, columns))}."
            )
        column = columns[name]
        if np.dtype(column.dtype).kind != "i" or column.shape:
            raise ValueError(
                f"Column {name!r} has levels, so that its codes need the dtype int32 and no shape; "
                f"got {column.dtype}{list(column.shape)}."
            )
    return {name: check_levels(name, texts) for name, texts in levels.items()}


def rows_of_site(study: Any, site: str, rows: Any) -> ArrayTree:
    """Return the rows of a site as numbers, text as codes of the study's levels.

    Raise `ValueError` if the rows differ from the study's declaration, or a text is not a level.
    """
    if study.dictionary is None:
        coded = _code_rows(study, site, rows)
    else:
        # A single array without a name has the name "rows", as in an .npz file.
        table = rows if is_table(rows) or isinstance(rows, Mapping) else {"rows": rows}
        coded = study.dictionary.code(table, site)
        # The dictionary has checked which numbers may be missing.
        coded = FederatedData.from_clients({site: coded}, allow_nonfinite=True).rows
    num = jax.tree.leaves(coded)[0].shape[0]
    problem = find_problem(study, site, num)
    if problem:
        raise ValueError(f"{site} {problem}")
    one_row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), coded)
    difference = trees.first_difference(study.rows, one_row)
    if difference:
        raise ValueError(
            f"The rows of {site} are not those of the study {study.name!r}: {difference}."
        )
    return coded


def _code_rows(study: Any, site: str, rows: Any) -> ArrayTree:
    """Return the rows of a site as numbers, for a study without a dictionary."""
    remedy = (
        f"Sites code text by the levels that the study {study.name!r} declares: add "
        f"levels = [...], all of them in their order, to this column in [rows] of study.toml "
        f"(the digest changes, so that all owners approve it again), or remove the column."
    )
    _check_names(study, site, rows)
    coded = code_rows(rows, study.levels, site, remedy=remedy)
    return FederatedData.from_clients({site: coded}).rows


def _check_names(study: Any, site: str, rows: Any) -> None:
    """Raise `ValueError` if columns are missing in the rows of a site or in the study."""
    expected = column_names(study.rows)
    names = getattr(rows, "column_names", rows.columns) if is_table(rows) else column_names(rows)
    if "" in expected or "" in names:
        return  # rows without names of columns
    extra = [repr(name) for name in names if name not in expected]
    missing = [repr(name) for name in expected if name not in names]
    lack = f"lack {', '.join(missing)}, which the study {study.name!r} has in [rows]."
    if extra:
        columns, verb = ("columns", "are") if len(extra) > 1 else ("column", "is")
        raise ValueError(
            f"The rows of {site} have the {columns} {', '.join(extra)}, which {verb} not in [rows] "
            f"of the study {study.name!r}: remove the {columns} from the site's rows. The study "
            f"has the columns {', '.join(map(repr, expected))}."
            + (f" The rows {lack}" if missing else "")
        )
    if missing:
        raise ValueError(f"The rows of {site} {lack}")


def columns_of_dictionary(study: Any) -> dict[str, Any]:
    """Return a study's rows and levels by its dictionary; raise `ValueError` if it has others."""
    columns = {"rows": study.dictionary.rows, "levels": study.dictionary.levels}
    # `dataclasses.replace` passes the columns of the dictionary.
    if study.rows not in (None, columns["rows"]) or study.levels not in ({}, columns["levels"]):
        raise ValueError("A study has either a dictionary (columns), or rows and levels: not both.")
    group = study.dictionary.group
    if group is not None:
        raise ValueError(
            f"The dictionary has groups of rows (group = {group!r}), and at real sites each site "
            f"is one group: remove group, or let the column be part of the rows."
        )
    return columns


def describe_rows(rows: ArrayTree) -> dict[str, Any]:
    """Return types and shapes of the columns of one row."""
    return {
        jax.tree_util.keystr(path): [str(np.dtype(leaf.dtype)), list(leaf.shape)]
        for path, leaf in jax.tree_util.tree_leaves_with_path(rows)
    }
