"""Clients laid out over the devices of a mesh: each holds its own clients' rows and states."""

import heapq
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import register_dataclass

from fedmcmc._types import FederatedState

__all__ = ["AXIS", "CHAINS", "Layout", "balanced", "layout_of", "state_specs"]

AXIS, CHAINS = "clients", "chains"


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
    mesh, per_device, block, num_rows
        Static: the devices, slots and rows of each, rows of all clients.
    totals
        Static: how messages are summed, ``"gather"`` or ``"psum"``.
    """

    places: Array
    used: Array
    slots: Array
    mesh: Mesh = field(metadata={"static": True})
    per_device: int = field(metadata={"static": True})
    block: int = field(metadata={"static": True})
    num_rows: int = field(metadata={"static": True})
    totals: str = field(metadata={"static": True})

    def own(self) -> tuple[Array, Array]:
        """Return this device's clients, and which of them are there, ``[per_device]``."""
        first = jax.lax.axis_index(AXIS) * self.per_device
        return (
            jax.lax.dynamic_slice_in_dim(self.places, first, self.per_device),
            jax.lax.dynamic_slice_in_dim(self.used, first, self.per_device),
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


def balanced(sizes: np.ndarray, num_devices: int) -> list[list[int]]:
    """Return the clients of each device: about as many rows each, and as many clients.

    The largest client goes first, each to the device with the fewest rows among those with room.

    Examples
    --------
    >>> balanced(np.array([9, 1, 2, 8]), 2)
    [[0, 1], [2, 3]]
    """
    room = -(-len(sizes) // num_devices)
    clients: list[list[int]] = [[] for _ in range(num_devices)]
    loads = [(0, device) for device in range(num_devices)]
    for client in np.argsort(-sizes, kind="stable"):
        rows, device = heapq.heappop(loads)
        clients[device].append(int(client))
        if len(clients[device]) < room:
            heapq.heappush(loads, (rows + int(sizes[client]), device))
    return [sorted(own) for own in clients]


def layout_of(
    sizes: np.ndarray, mesh: Mesh, totals: str
) -> tuple[Layout, list[list[int]], np.ndarray]:
    """Return the layout of clients of these sizes, each device's clients, and local starts.

    The local starts ``[num_clients]`` are where clients' rows begin among those of their device.
    """
    clients = balanced(sizes, mesh.shape[AXIS])
    per_device = max(map(len, clients))
    places = np.zeros((len(clients), per_device), np.int32)
    used = np.zeros_like(places, bool)
    slots, starts = (np.zeros(len(sizes), np.int32) for _ in range(2))
    for device, own in enumerate(clients):
        places[device, : len(own)] = own
        used[device, : len(own)] = True
        index = np.asarray(own, int)
        slots[index] = device * per_device + np.arange(len(own))
        starts[index] = np.cumsum(sizes[index]) - sizes[index]
    layout = Layout(
        places=jnp.asarray(places.ravel()),
        used=jnp.asarray(used.ravel()),
        slots=jnp.asarray(slots),
        mesh=Mesh(mesh.devices, mesh.axis_names),
        per_device=per_device,
        block=max(int(sizes[np.asarray(own, int)].sum()) for own in clients),
        num_rows=int(sizes.sum()),
        totals=totals,
    )
    return layout, clients, starts


def state_specs(mesh: Mesh) -> Any:
    """Return how the state of all chains lies on a mesh, as a `FederatedState`."""
    chains = CHAINS if CHAINS in mesh.shape else None
    whole: Any = PartitionSpec(chains)
    return FederatedState(whole, whole, PartitionSpec(chains, AXIS))
