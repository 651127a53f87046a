"""Histograms of outcomes, whose small cells no client shows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree


@dataclass(frozen=True, eq=False)
class Histogram:
    """How many rows have a value in each of some bins: a statistic for `predictive_check`.

    Small cells are merged with a neighbor before they leave a client.

    Parameters
    ----------
    values
        ``rows -> [num_rows]``.
    edges
        ``[num_bins - 1]``, ascending: bin ``j`` holds ``edges[j - 1] <= value < edges[j]``, the
        first and the last what lies outside. They are fixed before anybody looks at the rows.

    Raises
    ------
    ValueError
        If the edges do not ascend.

    Examples
    --------
    >>> Histogram(lambda rows: rows, [0.5, 1.5])(jnp.array([0.0, 1.0, 7.0])).tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """

    values: Callable[[ArrayTree], Array]
    edges: Any

    def __post_init__(self) -> None:
        edges = np.asarray(self.edges, np.float64)
        if edges.ndim != 1 or not edges.size or not (np.diff(edges) > 0).all():
            raise ValueError(f"edges must be numbers that ascend, got {self.edges!r}.")

    def __call__(self, rows: ArrayTree) -> Array:
        """Return which bin each row is in, ``[num_rows, num_bins]``, one and zeros."""
        values = self.values(rows)
        edges = jnp.asarray(self.edges, jnp.result_type(float))
        place = jnp.searchsorted(edges, values.astype(edges.dtype), side="right")
        bins = jnp.arange(edges.shape[0] + 1)
        return (place[:, None] == bins).astype(jnp.result_type(float))


def receivers(counts: Array, least: Array) -> Array:
    """Return into which cell each goes so that none holds less than `least`, ``[num_bins]`` int32.

    From the left, a cell with fewer goes to its neighbor on the right, together with what it has
    received; what is left over at the end goes to the last cell that holds enough. Which neighbor
    that is depends on the bins alone: chosen by counts, it would say which is the smaller.
    """
    num = counts.shape[0]
    waiting, closed = jnp.zeros((), counts.dtype), []
    for j in range(num):
        waiting = waiting + counts[j]
        closed.append(waiting >= least)
        waiting = jnp.where(closed[-1], 0, waiting)
    places = jnp.arange(num, dtype=jnp.int32)
    ends = jnp.stack(closed)
    last = jnp.max(jnp.where(ends, places, -1))
    following = jnp.min(jnp.where(ends & (places >= places[:, None]), places, num), axis=1)
    return jnp.where(following < num, following, jnp.where(last >= 0, last, num - 1))


def merged(table: Array, receiver: Array) -> Array:
    """Return ``[..., num_bins]`` counts with each cell's in the cell that receives it."""
    return jnp.zeros_like(table).at[..., receiver].add(table)
