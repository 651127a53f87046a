"""Grouping of clients by size, and their assignment to the devices of a mesh."""

import heapq
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedmcmc.rounds import CHAIN_AXIS, CLIENT_AXIS, Buckets, MeshLayout, MeshPart


def mesh_of(devices: Sequence[jax.Device], chains: int) -> Mesh:
    """Return a mesh with `chains` devices along the axis of chains, which is left out for one."""
    array = np.asarray(devices)
    if chains == 1:
        return Mesh(array, (CLIENT_AXIS,))
    return Mesh(array.reshape(chains, -1), (CHAIN_AXIS, CLIENT_AXIS))


def by_size(sizes: np.ndarray, num_buckets: int) -> Buckets:
    """Group clients with the given sizes ``[num_clients]`` so that padding costs least."""
    order = np.argsort(sizes, kind="stable").astype(np.int32)
    ends = cheapest_ends(sizes[order], num_buckets)
    return Buckets(
        order=jnp.asarray(order),
        rank=jnp.asarray(np.argsort(order).astype(np.int32)),
        bounds=tuple((end, int(sizes[order[end - 1]])) for end in ends),
    )


def cheapest_ends(sizes: np.ndarray, num_buckets: int) -> list[int]:
    """Return the ends of the groups of ascending `sizes` with least ``sum(count * largest)``."""
    # Candidates: the last client of each distinct size, thinned to a few dozen.
    candidates = np.flatnonzero(np.append(np.diff(sizes) > 0, True)) + 1
    ends = np.unique(np.append(candidates[:: max(len(candidates) // 64, 1)], len(sizes)))
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
    """Return the clients of each device, with balanced numbers of rows and of clients.

    Clients are assigned from the largest to the smallest, each to the device with the fewest rows
    that is not full. `loads` are the numbers of rows that the devices hold before.

    Examples
    --------
    >>> balanced(np.array([9, 1, 2, 8]), 2)
    [[0, 1], [2, 3]]
    """
    max_clients = -(-len(sizes) // num_devices)
    clients: list[list[int]] = [[] for _ in range(num_devices)]
    heap = [(rows, device) for device, rows in enumerate(loads or [0] * num_devices)]
    heapq.heapify(heap)
    for client in np.argsort(-sizes, kind="stable"):
        rows, device = heapq.heappop(heap)
        clients[device].append(int(client))
        if len(clients[device]) < max_clients:
            heapq.heappush(heap, (rows + int(sizes[client]), device))
    return [sorted(ids) for ids in clients]


def mesh_layout_of(
    sizes: np.ndarray, mesh: Mesh, totals: str, buckets: Buckets | None = None
) -> tuple[MeshLayout, list[list[int]], np.ndarray]:
    """Return the layout over a mesh, each device's clients, and the local starts of their rows.

    The local starts ``[num_clients]`` are the indices of clients' first rows on their device. All
    devices get the same number of clients of each bucket, up to one.
    """
    num, num_devices = len(sizes), mesh.shape[CLIENT_AXIS]
    groups: list[tuple[Any, int]] = [(np.arange(num), int(sizes.max()))]
    if buckets is not None and len(buckets.bounds) > 1:
        groups = buckets.groups()
    clients: list[list[int]] = [[] for _ in range(num_devices)]
    device, local, gathered = (np.zeros(num, np.int32) for _ in range(3))
    parts: list[MeshPart] = []
    num_slots = 0
    for group, bound in groups:
        members = np.asarray(group)
        loads = [int(sizes[ids].sum()) for ids in clients]
        shares = [members[ids] for ids in balanced(sizes[members], num_devices, loads)]
        count = max(map(len, shares))
        for d, ids in enumerate(shares):
            device[ids], local[ids] = d, num_slots + np.arange(len(ids))
            gathered[ids] = d * count + np.arange(len(ids))
            clients[d] += ids.tolist()
        indices = jnp.asarray(gathered[members])
        parts.append(MeshPart(jnp.asarray(members), indices, num_slots, count, bound))
        num_slots += count
    client_of_slot = np.zeros((num_devices, num_slots), np.int32)
    used = np.zeros_like(client_of_slot, bool)
    client_of_slot[device, local], used[device, local] = np.arange(num), True
    starts = np.zeros(num, np.int32)
    for ids in (np.asarray(ids, int) for ids in clients):
        starts[ids] = np.cumsum(sizes[ids]) - sizes[ids]
    mesh_layout = MeshLayout(
        client_of_slot=jnp.asarray(client_of_slot.ravel()),
        used=jnp.asarray(used.ravel()),
        slots=jnp.asarray(device * num_slots + local),
        parts=tuple(parts),
        mesh=Mesh(mesh.devices, mesh.axis_names),
        per_device=num_slots,
        block=max(int(sizes[ids].sum()) for ids in clients),
        totals=totals,
    )
    return mesh_layout, clients, starts
