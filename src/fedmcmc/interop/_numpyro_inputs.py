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


def labels_of(*groups: ArrayTree, local: tuple[str, ...] = ()) -> list[tuple[Any, frozenset]]:
    """Return labels and flags of the flat inputs: a position, parameters and rows.

    Each leaf of rows has two flags, `ROWS` and its own index.
    """
    labels = []
    for group, tree in zip(("position", PARAMS, ROWS), groups, strict=True):
        names = sorted(tree) if group == "position" and local else ()
        for i, _ in enumerate(jax.tree.leaves(tree)):
            flags = {ROWS: (ROWS, i), PARAMS: (PARAMS,)}.get(group, ())
            if names and names[i] in local:
                flags = (LOCAL,)
            labels.append(((group, i), frozenset(flags)))
    return labels
