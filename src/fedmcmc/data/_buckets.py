"""Clients grouped by size."""

from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

__all__ = ["Buckets", "by_size", "cheapest_ends"]


@register_dataclass
@dataclass(frozen=True)
class Buckets:
    """Clients grouped by size.

    Attributes
    ----------
    order
        ``[num_clients]`` int32, ids from the smallest client to the largest.
    place
        ``[num_clients]`` int32, where each client stands in `order`.
    bounds
        Static, one ``(end, max_size)`` a bucket: it holds ``order[previous end:end]``.
    """

    order: Array
    place: Array
    bounds: tuple[tuple[int, int], ...] = field(metadata={"static": True})

    def groups(self) -> list[tuple[Array, int]]:
        """Return the ids in each bucket and the size of its largest client."""
        ends = [end for end, _ in self.bounds]
        starts = [0, *ends[:-1]]
        sizes = [size for _, size in self.bounds]
        return [(self.order[a:b], size) for a, b, size in zip(starts, ends, sizes, strict=True)]


def by_size(sizes: np.ndarray, num_buckets: int) -> Buckets:
    """Group clients of these sizes ``[num_clients]`` so that padding costs least."""
    order = np.argsort(sizes, kind="stable").astype(np.int32)
    ends = cheapest_ends(sizes[order], num_buckets)
    return Buckets(
        order=jnp.asarray(order),
        place=jnp.asarray(np.argsort(order).astype(np.int32)),
        bounds=tuple((end, int(sizes[order[end - 1]])) for end in ends),
    )


def cheapest_ends(sizes: np.ndarray, num_buckets: int) -> list[int]:
    """Return where to cut ascending `sizes` so that ``sum(count * largest)`` is least."""
    # Candidates: the last client of each distinct size, thinned to a few dozen.
    last = np.flatnonzero(np.append(np.diff(sizes) > 0, True)) + 1
    ends = np.unique(np.append(last[:: max(len(last) // 64, 1)], len(sizes)))
    cost = sizes[ends - 1] * ends.astype(np.int64)  # of one bucket up to each end
    cuts: list[list[int]] = [[int(end)] for end in ends]
    for _ in range(min(num_buckets, len(ends)) - 1):
        width = ends[:, None] - ends[None, :]
        total = np.where(
            width > 0, cost[None, :] + sizes[ends - 1][:, None] * width, cost.max() + 1
        )
        best = total.argmin(axis=1)
        better = total[np.arange(len(ends)), best] < cost
        cuts = [[*cuts[best[i]], int(end)] if better[i] else cuts[i] for i, end in enumerate(ends)]
        cost = np.minimum(cost, total[np.arange(len(ends)), best])
    return cuts[-1]
