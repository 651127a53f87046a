"""Clients grouped by size."""

import jax.numpy as jnp
import numpy as np

from fedmcmc.rounds import Buckets


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
