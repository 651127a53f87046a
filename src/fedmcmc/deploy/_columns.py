"""Columns of a study: types, shapes and levels, as its file declares them."""

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedmcmc._types import ArrayTree
from fedmcmc.data import Levels, check_levels, widened_dtype

KEYS = ("dtype", "shape", "levels")
"""Keys of a column in a study's file."""


def check_keys(given: Any, wanted: Collection[str], allowed: Collection[str], where: str) -> None:
    """Raise unless a table of a settings file has all wanted keys and no unknown ones.

    Raises
    ------
    ValueError
        With the known keys, and for an unknown one the known key that resembles it.
    """
    known = [*wanted, *(name for name in allowed if name not in wanted)]
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} must be a table, got {given!r}.")
    may = ", ".join(sorted(name for name in known if name not in wanted))
    keys = f"{where} must hold {', '.join(sorted(wanted)) or 'nothing'} and may hold {may}"
    for name in given:
        if name not in known:
            similar = difflib.get_close_matches(str(name), known, 1)
            hint = f" Is {similar[0]} meant?" if similar else ""
            raise ValueError(f"{keys}; it holds {name}, which is unknown.{hint}")
    for name in wanted:
        if name not in given:
            raise ValueError(f"{keys}; it holds no {name}, only {', '.join(sorted(given))}.")


def read_columns(tree: Any, path: str | Path) -> tuple[ArrayTree, dict[str, Levels]]:
    """Return the shapes and types of one row, and the levels of columns that have some.

    Raises
    ------
    ValueError
        If a column has unknown keys, or lacks its type.
    """
    levels: dict[str, Levels] = {}

    def read(part: Any, name: str) -> ArrayTree:
        where = f"{path}: column {name!r} of rows" if name else f"{path}: rows"
        if isinstance(part, dict) and part and all(isinstance(x, dict) for x in part.values()):
            return {key: read(x, f"{name}.{key}" if name else key) for key, x in part.items()}
        if not isinstance(part, dict) or not part:
            raise ValueError(f"{where} needs a dtype, and a shape if it has one; got {part!r}.")
        check_keys(part, () if "levels" in part else ("dtype",), KEYS, where)
        if "levels" in part:
            levels[name] = part["levels"]
        try:
            shape = tuple(part.get("shape", ()))
            return jax.ShapeDtypeStruct(shape, np.dtype(part.get("dtype", "int32")))
        except TypeError as error:
            raise ValueError(f"{where}: {error}.") from None

    return read(tree, ""), levels


def wide_shapes(rows: ArrayTree) -> ArrayTree:
    """Return shapes of rows with the types that a site's rows have, no integer below 32 bits."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, widened_dtype(leaf.dtype)), rows
    )


def checked_levels(levels: Mapping[str, Any], rows: ArrayTree) -> dict[str, Levels]:
    """Return levels by column.

    Raises
    ------
    ValueError
        If they are no lists of texts, or no levels of a column of integers.
    """
    columns = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(rows)
    }
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
    return {name: check_levels(name, own) for name, own in levels.items()}
