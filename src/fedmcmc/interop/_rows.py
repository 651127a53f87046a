"""Rows of an example, for traces and checks of a model."""

from typing import Any

import jax
import numpy as np

from fedmcmc.data import FederatedData, constructor_of, is_table, row_dtype
from fedmcmc.types import ArrayTree

ROW_TOLERANCE = 1e-3
"""Tolerated relative change of a row's log likelihood when other rows join its batch."""


def is_shapes(example: ArrayTree | FederatedData) -> bool:
    """Return whether an example has shapes and dtypes of rows in place of values."""
    if isinstance(example, FederatedData):
        return False
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(example))


def client_rows(example: ArrayTree | FederatedData) -> Any:
    """Return one client's rows. If the example has shapes only, return rows of zeros."""
    if is_table(example):
        raise TypeError(
            f"example must be a FederatedData or arrays, got {type(example).__name__}. "
            f"{constructor_of(example)}"
        )
    if isinstance(example, FederatedData):
        return example.client_rows(0)
    if not is_shapes(example):
        return example
    return jax.tree.map(lambda leaf: np.zeros((2, *leaf.shape[1:]), leaf.dtype), example)


def checked_rows(rows: ArrayTree, description: str) -> Any:
    """Return the rows as NumPy arrays in the dtypes that JAX gives them inside of kernels.

    Functions that close over NumPy arrays can be traced anywhere.
    """
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(rows)]
    if len({shape[:1] for shape in shapes}) != 1 or shapes[0][:1] in ((), (0,)):
        raise ValueError(
            f"example must hold {description}, arrays with the same number of rows (at least one) "
            f"on their first axis; got shapes {shapes}."
        )
    arrays = jax.tree.map(np.asarray, rows)
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        if leaf.dtype.kind in "OSUmM":
            name = jax.tree_util.keystr(path) or "the rows"
            raise ValueError(
                f"example must hold numbers, got dtype {leaf.dtype} in {name}: create a "
                f"FederatedData from tables, which codes text as numbers."
            )
    return jax.tree.map(lambda x: x.astype(row_dtype(x.dtype)), arrays)


def describe_row(row: int, data: FederatedData | None) -> str:
    """Return a description of a row, such as "row 3 of client 'Bern'", from its number."""
    if data is None:
        return f"row {row} of example"
    client = int(np.searchsorted(np.asarray(data.start), row, side="right")) - 1
    return f"row {row - int(data.start[client])} of client {data.labels[client]!r}"
