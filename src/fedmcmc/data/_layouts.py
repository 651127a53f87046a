"""Clients laid out over the devices of a mesh: each holds its own clients' rows and states."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import register_dataclass

from fedmcmc._types import FederatedState
from fedmcmc.data._buckets import Buckets

__all__ = ["AXIS", "CHAINS", "Layout", "Part", "balanced", "layout_of", "state_specs"]

AXIS, CHAINS = "clients", "chains"


@register_dataclass
@dataclass(frozen=True)
class Part:
    """Clients that are computed together on each device: all, or those of one bucket.

    Attributes
    ----------
    members
        ``[num_members]`` int32, who they are, in the order of one device.
    at
        ``[num_members]`` int32, where each is among the part's slots of all devices.
    first, count
        Static: slots ``[first, first + count)`` of each device are this part's.
    bound
        Static, on the sizes of these clients.
    """

    members: Array
    at: Array
    first: int = field(metadata={"static": True})
    count: int = field(metadata={"static": True})
    bound: int = field(metadata={"static": True})


@register_dataclass
@dataclass(frozen=True)
class Layout:
    """Where clients are.

    Device ``d`` of the mesh's axis ``clients`` holds slots ``[d * per_device, (d + 1) *
    per_device)`` of the clients' states, and `block` rows. Its methods are for code that runs on
    one device (inside of `jax.shard_map`).

    Attributes
    ----------
    places
        ``[num_slots]`` int32, the client in each slot; slots without one hold client 0, unused.
    used
        ``[num_slots]`` bool, whether a slot holds a client.
    slots
        ``[num_clients]`` int32, the slot of each client.
    parts
        Which slots are computed together.
    mesh, per_device, block, num_rows
        Static: the devices, slots and rows of each, rows of all clients.
    totals
        Static: how messages are summed, ``"gather"`` or ``"psum"``.
    """

    places: Array
    used: Array
    slots: Array
    parts: tuple[Part, ...]
    mesh: Mesh = field(metadata={"static": True})
    per_device: int = field(metadata={"static": True})
    block: int = field(metadata={"static": True})
    num_rows: int = field(metadata={"static": True})
    totals: str = field(metadata={"static": True})

    @property
    def num_devices(self) -> int:
        """Devices along the mesh's axis ``clients``."""
        return int(self.mesh.shape[AXIS])

    def own(self, part: Part) -> tuple[Array, Array]:
        """Return this device's clients of a part, and which of them are there, ``[count]``."""
        first = jax.lax.axis_index(AXIS) * self.per_device + part.first
        return (
            jax.lax.dynamic_slice_in_dim(self.places, first, part.count),
            jax.lax.dynamic_slice_in_dim(self.used, first, part.count),
        )

    def owned(self, ids: Array) -> Array:
        """Return whether clients `ids` are this device's."""
        return self.slots[ids] // self.per_device == jax.lax.axis_index(AXIS)

    def own_slot(self, ids: Array) -> Array:
        """Return where clients' states lie on this device, `per_device` for those of others.

        An index out of bounds: nothing is written there, and what is read is not used.
        """
        local = self.slots[ids] - jax.lax.axis_index(AXIS) * self.per_device
        return jnp.where(self.owned(ids), local, self.per_device)


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
    places = np.zeros((num_devices, first), np.int32)
    used = np.zeros_like(places, bool)
    places[device, local], used[device, local] = np.arange(num), True
    starts = np.zeros(num, np.int32)
    for ids in map(np.asarray, clients):
        starts[ids.astype(int)] = np.cumsum(sizes[ids.astype(int)]) - sizes[ids.astype(int)]
    layout = Layout(
        places=jnp.asarray(places.ravel()),
        used=jnp.asarray(used.ravel()),
        slots=jnp.asarray(device * first + local),
        parts=tuple(parts),
        mesh=Mesh(mesh.devices, mesh.axis_names),
        per_device=first,
        block=max(int(sizes[own].sum()) for own in clients),
        num_rows=int(sizes.sum()),
        totals=totals,
    )
    return layout, clients, starts


def state_specs(mesh: Mesh) -> Any:
    """Return how the state of all chains lies on a mesh, as a `FederatedState`."""
    chains = CHAINS if CHAINS in mesh.shape else None
    whole: Any = PartitionSpec(chains)
    return FederatedState(whole, whole, PartitionSpec(chains, AXIS))
