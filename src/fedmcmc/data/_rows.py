"""Rows of clients on the host: checked, joined, in types that JAX takes."""

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc._types import ArrayTree

Levels = tuple[Any, ...]
"""What the codes ``0, 1, ...`` stand for, or what clients are called."""
CHECKED_ROWS = 2**16
"""Rows of which a check for NaN makes a table at a time."""
DIGITS_LOST = 1e-3
"""Rounding may move numbers by this share of what they differ by."""


def joined(
    clients: Sequence[ArrayTree], ids: Sequence[int] | None = None
) -> tuple[ArrayTree, np.ndarray]:
    """Return the rows of all `clients`, one after the other, and the sizes of each.

    Messages name them by `ids`, by default their places.

    Raises
    ------
    ValueError
        If there is none, or their rows do not fit together.
    """
    if len(clients) == 0:
        raise ValueError("FederatedData needs at least one client, got none.")
    ids = range(len(clients)) if ids is None else ids
    treedef: Any = jax.tree.structure(clients[0])
    sizes: list[int] = []
    columns: list[list[np.ndarray]] = [[] for _ in range(treedef.num_leaves)]
    for i, client in zip(ids, clients, strict=True):
        if jax.tree.structure(client) != treedef:
            raise ValueError(
                f"Every client needs the same structure of rows: client {ids[0]} has {treedef}, "
                f"client {i} has {jax.tree.structure(client)}."
            )
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(client)]
        sizes.append(count_rows(leaves, f"client {i}"))
        for column, leaf in zip(columns, leaves, strict=True):
            if column and leaf.shape[1:] != column[0].shape[1:]:
                raise ValueError(
                    f"Rows differ in shape: {column[0].shape[1:]} at client {ids[0]}, "
                    f"{leaf.shape[1:]} at client {i}."
                )
            column.append(leaf)
    rows = jax.tree.unflatten(treedef, [np.concatenate(column) for column in columns])
    return rows, np.asarray(sizes)


def starts_of(sizes: np.ndarray) -> np.ndarray:
    """Return where each client's rows begin; raise `ValueError` if one has none."""
    empty = np.flatnonzero(sizes == 0)
    if empty.size:
        raise ValueError(
            f"Every client needs at least one row; client {empty[0]} has none"
            + (f" (nor have {empty.size - 1} others)." if empty.size > 1 else ".")
        )
    return np.concatenate([[0], np.cumsum(sizes)[:-1]])


def count_rows(leaves: list[np.ndarray], where: str) -> int:
    """Return the length of the first axis, which all `leaves` must share."""
    if not leaves:
        raise ValueError(f"Rows must hold at least one array, {where} holds none.")
    counts = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(counts) != 1 or None in counts:
        raise ValueError(
            f"All arrays of {where} need the same number of rows on their first axis, got shapes "
            f"{[leaf.shape for leaf in leaves]}."
        )
    return leaves[0].shape[0]


def gathered(leaf: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return ``leaf[order]`` in memory that a CPU device takes as it is, aligned to 64 bytes."""
    raw = np.empty(leaf.nbytes + 64, np.uint8)
    first = -raw.ctypes.data % 64
    out = raw[first : first + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
    return np.take(leaf, order, axis=0, out=out, mode="clip")


def _finite_rows(leaf: np.ndarray) -> np.ndarray:
    """Return which rows are finite, some rows at a time."""
    parts = np.split(leaf, range(CHECKED_ROWS, len(leaf), CHECKED_ROWS))
    return np.concatenate([np.isfinite(x).reshape(len(x), -1).all(axis=1) for x in parts])


def check_finite(rows: ArrayTree, start: np.ndarray, ids: Sequence[int]) -> None:
    """Raise `ValueError` if a float is not finite; `start` says where the rows of `ids` begin."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(rows):
        if np.issubdtype(leaf.dtype, np.inexact):
            finite = _finite_rows(leaf)
            if not finite.all():
                bad = np.flatnonzero(~finite)
                place = int(np.searchsorted(start, bad[0], side="right")) - 1
                name = jax.tree_util.keystr(path) or "the rows"
                raise ValueError(
                    f"{bad.size} rows hold NaN or infinite values in {name}, first row "
                    f"{bad[0] - start[place]} of client {ids[place]}. Drop or impute them, or pass "
                    f"allow_nonfinite=True if the model handles them."
                )


def _warn_of_lost_digits(path: Any, leaf: np.ndarray, cast: np.ndarray) -> None:
    """Warn where rounding moves numbers by more than a thousandth of what they differ by."""
    parts = range(CHECKED_ROWS, len(leaf), CHECKED_ROWS)
    pairs = zip(np.split(leaf, parts), np.split(cast, parts), strict=True)
    with np.errstate(invalid="ignore"):
        moved = np.max([np.abs(exact - rounded).max(axis=0) for exact, rounded in pairs], axis=0)
        spread = leaf.max(axis=0) - leaf.min(axis=0)
        worst = np.argmax(np.where(spread > 0, moved - spread * DIGITS_LOST, -np.inf))
    moved, spread, typical = moved.flat[worst], spread.flat[worst], leaf[0].flat[worst]
    if spread > 0 and spread * DIGITS_LOST < moved < np.inf:
        name = jax.tree_util.keystr(path) or "the rows"
        warnings.warn(
            f"Numbers in {name} differ by {spread:.3g} around {typical:.3g}, and {cast.dtype} "
            f"moves them by up to {moved:.2g}: subtract a constant, or enable 64 bits in JAX "
            f"(jax_enable_x64).",
            stacklevel=5,  # who calls `from_clients` and its like
        )


def as_row_type(path: Any, leaf: np.ndarray) -> np.ndarray:
    """Return `leaf` in the type in which JAX holds it; raise `ValueError` if it has none."""
    # What JAX would do on its own (64-bit numbers to its default width), but not in silence.
    if leaf.dtype.kind not in "fiubc" and not jnp.issubdtype(leaf.dtype, jnp.inexact):
        name = jax.tree_util.keystr(path) or "the rows"
        raise ValueError(f"Rows must be numbers, got dtype {leaf.dtype} in {name}: encode it.")
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    with np.errstate(over="ignore"):
        cast = leaf.astype(dtype, copy=False)
    if leaf.dtype.kind == "f" and dtype != leaf.dtype and len(leaf):
        _warn_of_lost_digits(path, leaf, cast)
    if leaf.dtype.kind in "iu" and not np.array_equal(cast, leaf):
        name = jax.tree_util.keystr(path) or "the rows"
        raise ValueError(
            f"Integers in {name} do not fit into {dtype}: [{leaf.min()}, {leaf.max()}]. Renumber "
            f"them, or enable 64 bits in JAX (jax_enable_x64)."
        )
    return cast
