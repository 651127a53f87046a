"""Shapes and labels of the inputs with which a NumPyro model is traced."""

from typing import Any

import jax
import jax.numpy as jnp

from fedmcmc._types import ArrayTree

COUNTS = (11, 13)
"""Numbers of rows to trace with; any two that no model writes down."""
ROWS, PARAMS, LOCAL = "rows", "params", "local"
"""Flags of what depends on rows, on `numpyro.param` and on local sites."""


def position_shapes(shapes: dict[str, tuple[int, ...]]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a position from those of its sites."""
    dtype = jnp.result_type(float)
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def row_shapes(rows: ArrayTree, count: int) -> ArrayTree:
    """Return the shapes of `count` rows."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), rows)


def labels_of(*groups: ArrayTree, local: tuple[str, ...] = ()) -> list[tuple[Any, frozenset]]:
    """Label the flat inputs: a position, parameters and rows.

    Rows flag all that they reach, each leaf by its index too.
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
