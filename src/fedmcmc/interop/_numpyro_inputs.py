"""Shapes and labels of the inputs with which a NumPyro model is traced."""

from typing import Any

import jax
import jax.numpy as jnp

from fedmcmc._types import ArrayTree

COUNTS = (11, 13)
"""Two numbers of rows for traces, chosen so that no model is likely to use them as constants."""
ROWS, PARAMS, LOCAL = "rows", "params", "local"
"""Flags of values that depend on rows, on a `numpyro.param` and on local sites."""


def position_shapes(shapes: dict[str, tuple[int, ...]]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of a position from the shapes of its sites."""
    dtype = jnp.result_type(float)
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def row_shapes(rows: ArrayTree, count: int) -> ArrayTree:
    """Return the shapes and dtypes of `count` rows."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), rows)


def labels_of(
    position: dict[str, Any], params: ArrayTree, rows: ArrayTree, local: tuple[str, ...] = ()
) -> list[tuple[Any, frozenset]]:
    """Return labels and flags of the flat inputs of a trace.

    Each leaf of rows has two flags, `ROWS` and its own index.
    """
    labels: list[tuple[Any, frozenset]] = [
        (("position", name), frozenset({LOCAL} if name in local else ()))
        for name in sorted(position)
    ]
    labels += [((PARAMS, i), frozenset({PARAMS})) for i, _ in enumerate(jax.tree.leaves(params))]
    labels += [((ROWS, i), frozenset({ROWS, i})) for i, _ in enumerate(jax.tree.leaves(rows))]
    return labels
