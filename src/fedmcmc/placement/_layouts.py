"""Clients grouped by size, and laid out over the devices of a mesh."""

import heapq
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedmcmc.rounds import AXIS, Buckets, Layout, Part


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


def balanced(
    sizes: np.ndarray, num_devices: int, loads: Sequence[int] | None = None
) -> list[list[int]]:
    """Return the clients of each device: about as many rows each, and as many clients.

    The largest client goes first, each to the device with the fewest rows among those with room;
    `loads` are the rows that devices have already.

    Examples
    --------
    >>> balanced(np.array([9, 1, 2, 8]), 2)
    [[0, 1], [2, 3]]
    """
    room = -(-len(sizes) // num_devices)
    clients: list[list[int]] = [[] for _ in range(num_devices)]
    heap = [(rows, device) for device, rows in enumerate(loads or [0] * num_devices)]
    heapq.heapify(heap)
    for client in np.argsort(-sizes, kind="stable"):
        rows, device = heapq.heappop(heap)
        clients[device].append(int(client))
        if len(clients[device]) < room:
            heapq.heappush(heap, (rows + int(sizes[client]), device))
    return [sorted(own) for own in clients]


def layout_of(
    sizes: np.ndarray, mesh: Mesh, totals: str, buckets: Buckets | None = None
) -> tuple[Layout, list[list[int]], np.ndarray]:
    """Return the layout of clients of these sizes, each device's clients, and local starts.

    The local starts ``[num_clients]`` are where clients' rows begin among those of their device.
    Of each bucket every device gets as many clients.
    """
    num, num_devices = len(sizes), mesh.shape[AXIS]
    groups: list[tuple[Any, int]] = [(np.arange(num), int(sizes.max()))]
    if buckets is not None and len(buckets.bounds) > 1:
        groups = buckets.groups()
    clients: list[list[int]] = [[] for _ in range(num_devices)]
    device, local, at = (np.zeros(num, np.int32) for _ in range(3))
    parts: list[Part] = []
    first = 0
    for some, bound in groups:
        ids = np.asarray(some)
        loads = [int(sizes[own].sum()) for own in clients]
        shared = [ids[own] for own in balanced(sizes[ids], num_devices, loads)]
        count = max(map(len, shared))
        for d, own in enumerate(shared):
            device[own], local[own] = d, first + np.arange(len(own))
            at[own] = d * count + np.arange(len(own))
            clients[d] += own.tolist()
        parts.append(Part(jnp.asarray(ids), jnp.asarray(at[ids]), first, count, bound))
        first += count
    client_of_slot = np.zeros((num_devices, first), np.int32)
    used = np.zeros_like(client_of_slot, bool)
    client_of_slot[device, local], used[device, local] = np.arange(num), True
    starts = np.zeros(num, np.int32)
    for ids in map(np.asarray, clients):
        starts[ids.astype(int)] = np.cumsum(sizes[ids.astype(int)]) - sizes[ids.astype(int)]
    layout = Layout(
        client_of_slot=jnp.asarray(client_of_slot.ravel()),
        used=jnp.asarray(used.ravel()),
        slots=jnp.asarray(device * first + local),
        parts=tuple(parts),
        mesh=Mesh(mesh.devices, mesh.axis_names),
        per_device=first,
        block=max(int(sizes[own].sum()) for own in clients),
        totals=totals,
    )
    return layout, clients, starts
