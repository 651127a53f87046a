"""Columns of rows of all clients, converted and concatenated in little memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from fedmcmc.data._rows import (
    PART_BYTES,
    as_array,
    count_rows,
    is_missing,
    numbers_of_objects,
    row_dtype,
    small_slices,
    warn_caller,
)
from fedmcmc.types import ArrayTree

MAX_ROUNDING = 1e-3
"""Maximal rounding error without a warning, as a fraction of the range of the numbers."""


class Column:
    """Rows of all clients, written part by part in the type of `row_dtype`.

    Parts are converted in small slices, so that only the result takes memory. JAX would
    also convert 64-bit numbers to its default width, but without checks and warnings.

    Parameters
    ----------
    path
        Path of the column, for messages.
    num_rows
        Number of rows of all parts.
    """

    def __init__(self, path: KeyPath, num_rows: int) -> None:
        self.name = jax.tree_util.keystr(path) or "the rows"
        self.shape: tuple[int, ...] | None = None
        self._num_rows, self._num_written = num_rows, 0
        self._waiting: list[np.ndarray] = []
        self._bytes_waiting = 0
        self._dtype: np.dtype[Any] | None = None  # a type for the numbers of all parts
        self._rows = np.empty(0)
        self._error, self._low, self._high = np.zeros(()), np.full((), np.inf), np.full((), -np.inf)

    def append(self, part: np.ndarray) -> None:
        """Write a part ``[num, ...]``; raise `ValueError` if it holds no numbers or large ones."""
        if part.dtype.kind == "O":
            part = numbers_of_objects(part)
        if part.dtype.kind not in "fiubc" and not jnp.issubdtype(part.dtype, jnp.inexact):
            raise ValueError(
                f"Rows must be numbers, got dtype {part.dtype} in {self.name}: {_remedy(part)}"
            )
        self.shape = part.shape[1:]
        self._waiting.append(part)
        self._bytes_waiting += part.nbytes
        if self._bytes_waiting >= PART_BYTES:
            self._write_waiting()

    def finish(self) -> np.ndarray:
        """Return the rows, ``[num_rows, ...]``, and warn if rounding matters."""
        self._write_waiting()
        self._warn_of_lost_digits()
        return self._rows

    def _write_waiting(self) -> None:
        """Write the parts that wait; small ones together, which is faster."""
        parts, self._waiting, self._bytes_waiting = self._waiting, [], 0
        small, final = parts[:-1], parts[-1:]
        if len({part.dtype for part in small}) == 1:
            small = [np.concatenate(small)]
        for part in small + final:
            self._write(part)

    def _write(self, part: np.ndarray) -> None:
        dtype = part.dtype if self._dtype is None else _common_dtype(self._dtype, part.dtype)
        if self._dtype is None or dtype != self._dtype:
            written, self._num_written = self._rows[: self._num_written], 0
            self._rows = _aligned((self._num_rows, *part.shape[1:]), row_dtype(dtype))
            self._dtype = dtype
            self._copy(written)
        self._copy(part)

    def _copy(self, part: np.ndarray) -> None:
        assert self._dtype is not None
        for rows in small_slices(part):
            exact = part[rows]
            cast = self._rows[self._num_written : self._num_written + len(exact)]
            with np.errstate(over="ignore"):
                cast[...] = exact
            self._num_written += len(exact)
            if self._dtype.kind in "iu" and not np.array_equal(cast, exact):
                raise ValueError(
                    f"Integers in {self.name} do not fit into {cast.dtype}: "
                    f"[{part.min()}, {part.max()}]. Renumber them, or enable 64 bits in JAX "
                    f"(jax_enable_x64)."
                )
            if self._dtype.kind == "f" and self._dtype != cast.dtype and exact.size:
                with np.errstate(invalid="ignore"):
                    self._error = np.maximum(self._error, np.abs(exact - cast).max(axis=0))
                    self._low = np.minimum(self._low, exact.min(axis=0))
                    self._high = np.maximum(self._high, exact.max(axis=0))

    def _warn_of_lost_digits(self) -> None:
        """Warn if rounding errors exceed a thousandth of the range of the numbers."""
        with np.errstate(invalid="ignore"):
            spread = self._high - self._low
            worst = np.argmax(np.where(spread > 0, self._error - spread * MAX_ROUNDING, -np.inf))
        error, spread = self._error.flat[worst], spread.flat[worst]
        if spread > 0 and spread * MAX_ROUNDING < error < np.inf:
            typical = self._rows[0].flat[worst]
            warn_caller(
                f"Numbers in {self.name} differ by {spread:.3g} around {typical:.3g}, and "
                f"{self._rows.dtype} rounds them by up to {error:.2g}: subtract a constant, or "
                f"enable 64 bits in JAX (jax_enable_x64)."
            )


def write_column(path: KeyPath, parts: Iterable[np.ndarray], num_rows: int) -> np.ndarray:
    """Return the concatenated parts of a column in the type of `row_dtype`; see `Column`."""
    column = Column(path, num_rows)
    for part in parts:
        column.append(part)
    return column.finish()


def _common_dtype(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    """Return a type for numbers of both types; integers of different types remain integers."""
    if a != b and a.kind in "iu" and b.kind in "iu":
        return np.dtype(np.int64)
    return np.result_type(a, b)


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return an array without values in memory aligned to 64 bytes."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(num_bytes + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + num_bytes].view(dtype).reshape(shape)


def order_by_client(ids: np.ndarray) -> np.ndarray | None:
    """Return the order that sorts rows by client, ``[num_rows]``, or ``None`` if they are sorted.

    Rows of one client keep their order.
    """
    is_sorted = (ids[1:] >= ids[:-1]).all()
    return None if is_sorted else np.argsort(ids, kind="stable")


def take_rows(leaf: np.ndarray, order: np.ndarray | None) -> Iterator[np.ndarray]:
    """Yield the parts of ``leaf[order]``, or `leaf` itself if there is no order."""
    if order is None:
        yield leaf
        return
    for rows in small_slices(leaf):
        yield np.take(leaf, order[rows], axis=0)


def concatenate_clients(
    read_fn: Callable[[int], ArrayTree], labels: Sequence[Any], num_rows: int
) -> tuple[ArrayTree, np.ndarray]:
    """Return the concatenated rows of all clients, and the number of rows of each.

    ``read_fn(i)`` returns the rows of client ``labels[i]``, which are not kept. `num_rows` is the
    number of rows of all clients. Raise `ValueError` if there is no client, or if rows differ in
    structure or shape.
    """
    if len(labels) == 0:
        raise ValueError("FederatedData needs at least one client, got none.")
    treedef: Any = None
    sizes: list[int] = []
    columns: list[Column] = []
    for i, label in enumerate(labels):
        client = read_fn(i)
        if i == 0:
            keys = jax.tree.map(lambda leaf: 0, client)
            paths, treedef = jax.tree_util.tree_flatten_with_path(keys)
            columns = [Column(path, num_rows) for path, _ in paths]
        if jax.tree.structure(client) != treedef:
            raise ValueError(
                f"Every client needs the same structure of rows: "
                f"{_describe_difference(labels[0], keys, label, client)}."
            )
        _refuse_lists(client, label)
        leaves = [as_array(leaf, f"client {label!r}") for leaf in jax.tree.leaves(client)]
        sizes.append(count_rows(leaves, f"client {label!r}"))
        for column, leaf in zip(columns, leaves, strict=True):
            if column.shape is not None and leaf.shape[1:] != column.shape:
                raise ValueError(
                    f"Rows differ in shape: {column.shape} at client {labels[0]!r}, "
                    f"{leaf.shape[1:]} at client {label!r}."
                )
            column.append(leaf)
        del client, leaves, leaf  # before the next client is read
    return jax.tree.unflatten(treedef, [column.finish() for column in columns]), np.asarray(sizes)


def count_all_rows(clients: Sequence[ArrayTree]) -> int:
    """Return the length of the first array of each client, summed over clients."""
    leaves = [jax.tree.leaves(client)[:1] for client in clients]
    return sum(np.shape(leaf)[0] for (leaf,) in filter(None, leaves) if np.ndim(leaf))


def _refuse_lists(client: ArrayTree, label: object) -> None:
    for name, values in client.items() if isinstance(client, dict) else ():
        if isinstance(values, list) and values and np.ndim(values[0]) == 0:
            raise ValueError(
                f"Column {name!r} of client {label!r} is a list. Turn it into an array, for "
                f"example with np.asarray(column)."
            )


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


def _remedy(leaf: np.ndarray) -> str:
    if leaf.dtype.kind in "mM":
        return "turn dates into numbers, such as days since a fixed day."
    if leaf.dtype.kind == "O" and any(map(is_missing, leaf.flat)):
        return "drop or impute the missing values, and pass an array of numbers."
    return (
        "pass each client's rows as a table (pandas.DataFrame), which codes text, or pass an array "
        "of numbers."
    )
