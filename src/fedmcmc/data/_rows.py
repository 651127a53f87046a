"""Checks, concatenation and types of clients' rows on the host."""

import sys
import warnings
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jax.typing import ArrayLike, DTypeLike

from fedmcmc.types import ArrayTree

Levels = tuple[Any, ...]
"""Meanings of the codes ``0, 1, ...``, or labels of clients."""
CHECKED_ROWS = 2**16
"""Number of rows that are checked at once, which limits the memory of masks."""
MAX_ROUNDING = 1e-3
"""Maximal rounding error without a warning, as a fraction of the range of the numbers."""


def warn_caller(message: str) -> None:
    """Warn with the line outside of fedmcmc that made the call."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("fedmcmc."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def widened_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return the type in which numbers of this type are stored, so that products do not wrap.

    Narrow and unsigned integers become signed integers of 32 bits (of 64 bits, if JAX enables them
    and the type is unsigned with at least 32 bits). Half precision becomes single precision. Other
    types do not change.

    Examples
    --------
    >>> [str(widened_dtype(x)) for x in ("int8", "uint16", "uint32", "float16", "bool", "float64")]
    ['int32', 'int32', 'int32', 'float32', 'bool', 'float64']
    """
    dtype = np.dtype(dtype)
    if dtype.kind in "iu" and dtype.itemsize < 4:
        return np.dtype(np.int32)
    if dtype.kind == "u":
        return np.dtype(jax.dtypes.canonicalize_dtype(np.int64))
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def row_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return the type in which a model sees numbers of this type."""
    return np.dtype(jax.dtypes.canonicalize_dtype(widened_dtype(dtype)))


def concatenate(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the concatenated arrays; integers of different types remain integers."""
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1 and all(dtype.kind in "iu" for dtype in dtypes):
        largest = np.iinfo(np.int64).max
        parts = [
            x if x.dtype.kind == "u" and x.max(initial=0) > largest else x.astype(np.int64)
            for x in parts
        ]
    return np.concatenate(parts)


def concatenate_clients(
    clients: Sequence[ArrayTree], labels: Sequence[Any]
) -> tuple[ArrayTree, np.ndarray]:
    """Return the concatenated rows of all `clients`, and the number of rows of each.

    Messages use `labels` for clients. Raise `ValueError` if there is no client, or if rows differ
    in structure or shape.
    """
    if len(clients) == 0:
        raise ValueError("FederatedData needs at least one client, got none.")
    treedef: Any = jax.tree.structure(clients[0])
    sizes: list[int] = []
    columns: list[list[np.ndarray]] = [[] for _ in range(treedef.num_leaves)]
    for label, client in zip(labels, clients, strict=True):
        if jax.tree.structure(client) != treedef:
            raise ValueError(
                f"Every client needs the same structure of rows: "
                f"{_describe_difference(labels[0], clients[0], label, client)}."
            )
        for name, values in client.items() if isinstance(client, dict) else ():
            if isinstance(values, list) and values and np.ndim(values[0]) == 0:
                raise ValueError(
                    f"Column {name!r} of client {label!r} is a list. Turn it into an array, for "
                    f"example with np.asarray(column)."
                )
        leaves = [as_array(leaf, f"client {label!r}") for leaf in jax.tree.leaves(client)]
        sizes.append(count_rows(leaves, f"client {label!r}"))
        for column, leaf in zip(columns, leaves, strict=True):
            if column and leaf.shape[1:] != column[0].shape[1:]:
                raise ValueError(
                    f"Rows differ in shape: {column[0].shape[1:]} at client {labels[0]!r}, "
                    f"{leaf.shape[1:]} at client {label!r}."
                )
            column.append(leaf)
    rows = jax.tree.unflatten(treedef, [concatenate(column) for column in columns])
    return rows, np.asarray(sizes)


def as_array(leaf: object, where: str) -> np.ndarray:
    """Return rows as a NumPy array; raise `ValueError` if values are masked."""
    if np.ma.is_masked(leaf):
        raise ValueError(
            f"Rows of {where} hold masked values, which would lose their mask. Drop or impute "
            f"them, or fill them with NaN and pass allow_nonfinite=True if the model handles it."
        )
    return np.asarray(leaf)


def _describe_difference(
    label_a: object, rows_a: ArrayTree, label_b: object, rows_b: ArrayTree
) -> str:
    """Describe the different structures of the rows of two clients."""
    if isinstance(rows_a, dict) and isinstance(rows_b, dict):
        for label, rows, expected in ((label_b, rows_b, rows_a), (label_a, rows_a, rows_b)):
            for name in expected:
                if name not in rows:
                    columns = ", ".join(map(repr, rows))
                    return f"client {label!r} has no column {name!r}; its columns are {columns}"
    trees = jax.tree.structure(rows_a), jax.tree.structure(rows_b)
    return f"client {label_a!r} has {trees[0]}, client {label_b!r} has {trees[1]}"


def first_rows(sizes: np.ndarray, labels: Sequence[Any] | None = None) -> np.ndarray:
    """Return the first row of each client; raise `ValueError` if a client has no rows."""
    empty = np.flatnonzero(sizes == 0)
    if empty.size:
        label = int(empty[0]) if labels is None else labels[empty[0]]
        verb = f"and {empty.size - 1} other clients have" if empty.size > 1 else "has"
        raise ValueError(f"Every client needs at least one row; client {label!r} {verb} none.")
    return np.concatenate([[0], np.cumsum(sizes)[:-1]])


def count_rows(leaves: list[np.ndarray], where: str) -> int:
    """Return the length of the first axis, which must be the same for all `leaves`."""
    if not leaves:
        raise ValueError(f"Rows must hold at least one array, {where} holds none.")
    if all(leaf.ndim == 0 for leaf in leaves):
        raise ValueError(
            f"Rows must be arrays with one entry per row on their first axis, {where} holds single "
            f"values. Turn lists into arrays, for example with np.asarray(column)."
        )
    counts = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(counts) != 1 or None in counts:
        raise ValueError(
            f"All arrays of {where} need the same number of rows on their first axis, got shapes "
            f"{[leaf.shape for leaf in leaves]}."
        )
    return leaves[0].shape[0]


def host_view(leaf: ArrayLike) -> Any:
    """Return an array in the CPU's memory as a NumPy array, any other array unchanged.

    NumPy selects rows without a compiled program for each shape.
    """
    if isinstance(leaf, jax.Array) and any(x.platform != "cpu" for x in leaf.devices()):
        return leaf
    return np.asarray(leaf)


def take_rows(leaf: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return ``leaf[order]`` in memory aligned to 64 bytes, which a CPU device uses uncopied."""
    raw = np.empty(leaf.nbytes + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    out = raw[offset : offset + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
    return np.take(leaf, order, axis=0, out=out, mode="clip")


def check_finite(rows: ArrayTree, start: np.ndarray, labels: Sequence[Any]) -> None:
    """Raise `ValueError` if a float is not finite.

    `start` holds the first row of each client in `labels`.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(rows):
        if not np.issubdtype(leaf.dtype, np.inexact):
            continue
        parts = np.split(leaf, range(CHECKED_ROWS, len(leaf), CHECKED_ROWS))
        finite = np.concatenate([np.isfinite(x).reshape(len(x), -1).all(axis=1) for x in parts])
        if not finite.all():
            bad = np.flatnonzero(~finite)
            client = int(np.searchsorted(start, bad[0], side="right")) - 1
            name = jax.tree_util.keystr(path) or "the rows"
            raise ValueError(
                f"{bad.size} rows hold NaN or infinite values in {name}, first row "
                f"{bad[0] - start[client]} of client {labels[client]!r}. Drop or impute them, or "
                f"pass allow_nonfinite=True if the model handles them."
            )


def _warn_of_lost_digits(name: str, leaf: np.ndarray, cast: np.ndarray) -> None:
    """Warn if rounding errors exceed a thousandth of the range of the numbers."""
    parts = range(CHECKED_ROWS, len(leaf), CHECKED_ROWS)
    pairs = zip(np.split(leaf, parts), np.split(cast, parts), strict=True)
    with np.errstate(invalid="ignore"):
        error = np.max([np.abs(exact - rounded).max(axis=0) for exact, rounded in pairs], axis=0)
        spread = leaf.max(axis=0) - leaf.min(axis=0)
        worst = np.argmax(np.where(spread > 0, error - spread * MAX_ROUNDING, -np.inf))
    error, spread, typical = error.flat[worst], spread.flat[worst], leaf[0].flat[worst]
    if spread > 0 and spread * MAX_ROUNDING < error < np.inf:
        warn_caller(
            f"Numbers in {name} differ by {spread:.3g} around {typical:.3g}, and {cast.dtype} "
            f"rounds them by up to {error:.2g}: subtract a constant, or enable 64 bits in JAX "
            f"(jax_enable_x64)."
        )


def as_row_type(path: KeyPath, leaf: np.ndarray) -> np.ndarray:
    """Return `leaf` in the type of `row_dtype`; raise `ValueError` if it holds no numbers.

    JAX would also convert 64-bit numbers to its default width, but without checks and warnings.
    """
    name = jax.tree_util.keystr(path) or "the rows"
    if leaf.dtype.kind == "O":
        leaf = numbers_of_objects(leaf)
    if leaf.dtype.kind not in "fiubc" and not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise ValueError(f"Rows must be numbers, got dtype {leaf.dtype} in {name}: {_remedy(leaf)}")
    dtype = row_dtype(leaf.dtype)
    with np.errstate(over="ignore"):
        cast = leaf.astype(dtype, copy=False)
    if leaf.dtype.kind == "f" and dtype != leaf.dtype and len(leaf):
        _warn_of_lost_digits(name, leaf, cast)
    if leaf.dtype.kind in "iu" and not np.array_equal(cast, leaf):
        raise ValueError(
            f"Integers in {name} do not fit into {dtype}: [{leaf.min()}, {leaf.max()}]. Renumber "
            f"them, or enable 64 bits in JAX (jax_enable_x64)."
        )
    return cast


def is_missing(value: Any) -> bool:
    """Return whether a value is ``None``, NaN or pandas' marker of a missing value."""
    try:
        return value is None or bool(value != value)
    except (TypeError, ValueError):  # pandas.NA is not comparable; an array has no truth value
        return np.ndim(value) == 0


def numbers_of_objects(column: np.ndarray) -> np.ndarray:
    """Return an array of objects as an array of numbers if possible, otherwise unchanged."""
    if not column.size or not all(isinstance(x, Real | Decimal | np.bool_) for x in column.flat):
        return column
    if any(isinstance(x, Decimal | Fraction) for x in column.flat):
        return column.astype(float)
    array = np.array(column.tolist())
    return array if array.dtype.kind in "fiub" else column


def _remedy(leaf: np.ndarray) -> str:
    if leaf.dtype.kind in "mM":
        return "turn dates into numbers, such as days since a fixed day."
    if leaf.dtype.kind == "O" and any(map(is_missing, leaf.flat)):
        return "drop or impute the missing values, and pass an array of numbers."
    return (
        "pass each client's rows as a table (pandas.DataFrame), which codes text, or pass an array "
        "of numbers."
    )
