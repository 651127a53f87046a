"""Histograms of outcomes without small cells."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from fedmcmc.types import ArrayTree


@dataclass(frozen=True, eq=False)
class Histogram:
    """Number of rows with a value in each bin, a statistic for `predictive_check`.

    A client merges small cells with a neighbor before it sends them.

    Parameters
    ----------
    values
        Function ``rows -> [num_rows]``.
    edges
        ``[num_bins - 1]``, ascending: bin ``j`` holds ``edges[j - 1] <= value < edges[j]``; the
        outer bins hold all smaller or larger values. Choose them without looking at the rows.

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
    edges: ArrayLike

    def __post_init__(self) -> None:
        edges = np.asarray(self.edges, np.float64)
        if edges.ndim != 1 or not edges.size or not (np.diff(edges) > 0).all():
            raise ValueError(f"edges must be ascending numbers, got {self.edges!r}.")

    def __call__(self, rows: ArrayTree) -> Array:
        """Return the one-hot bin of each row, ``[num_rows, num_bins]``."""
        values = self.values(rows)
        edges = jnp.asarray(self.edges, jnp.result_type(float))
        index = jnp.searchsorted(edges, values.astype(edges.dtype), side="right")
        bins = jnp.arange(edges.shape[0] + 1)
        return (index[:, None] == bins).astype(jnp.result_type(float))


def merge_targets(counts: Array, minimum: int | Array) -> Array:
    """Return the cell that each cell is merged into, ``[num_bins]`` int32.

    From the left, cells are merged with their right neighbor until they hold at least `minimum`
    rows; a remainder at the right end goes to the nearest such cell. The neighbor does not depend
    on its count: otherwise it would reveal which neighbor is smaller.
    """
    num = counts.shape[0]
    running, closed = jnp.zeros((), counts.dtype), []
    for j in range(num):
        running = running + counts[j]
        closed.append(running >= minimum)
        running = jnp.where(closed[-1], 0, running)
    bins = jnp.arange(num, dtype=jnp.int32)
    ends = jnp.stack(closed)
    final = jnp.max(jnp.where(ends, bins, -1))
    following = jnp.min(jnp.where(ends & (bins >= bins[:, None]), bins, num), axis=1)
    return jnp.where(following < num, following, jnp.where(final >= 0, final, num - 1))


def merge_cells(table: Array, targets: Array) -> Array:
    """Return counts ``[..., num_bins]`` after adding each cell to its target."""
    return jnp.zeros_like(table).at[..., targets].add(table)
