"""Checks and types of clients' rows on the host."""

import sys
import warnings
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from fedmcmc.types import ArrayTree

Levels = tuple[Any, ...]
"""Meanings of the codes ``0, 1, ...``, or labels of clients."""
PART_BYTES = 2**17
"""Size of the parts of a column that are converted and checked at once."""


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


def as_array(leaf: object, where: str) -> np.ndarray:
    """Return rows as a NumPy array; raise `ValueError` if values are masked."""
    if np.ma.is_masked(leaf):
        raise ValueError(
            f"Rows of {where} hold masked values, which would lose their mask. Drop or impute "
            f"them, or fill them with NaN and pass allow_nonfinite=True if the model handles it."
        )
    return np.asarray(leaf)


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


def small_slices(leaf: np.ndarray) -> Iterator[slice]:
    """Yield slices that divide rows ``[num_rows, ...]`` into parts of about `PART_BYTES`."""
    step = max(PART_BYTES * len(leaf) // max(leaf.nbytes, 1), 1)
    for start in range(0, len(leaf), step):
        yield slice(start, start + step)


def host_view(leaf: ArrayLike) -> Any:
    """Return an array in the CPU's memory as a NumPy array, any other array unchanged.

    NumPy selects rows without a compiled program for each shape.
    """
    if isinstance(leaf, jax.Array) and any(x.platform != "cpu" for x in leaf.devices()):
        return leaf
    return np.asarray(leaf)


def check_finite(rows: ArrayTree, start: np.ndarray, labels: Sequence[Any]) -> None:
    """Raise `ValueError` if a float is not finite.

    `start` holds the first row of each client in `labels`.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(rows):
        if not np.issubdtype(leaf.dtype, np.inexact):
            continue
        parts = [leaf[part] for part in small_slices(leaf)]
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
