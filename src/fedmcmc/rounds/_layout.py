"""How a program computes clients: all at once, in batches, by size, or over devices."""

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from fedmcmc.data import FederatedData
from fedmcmc.types import FederatedKernel, FederatedState, register_dataclass

CLIENT_AXIS, CHAIN_AXIS = "clients", "chains"
"""Names of the axes of a mesh."""


@register_dataclass
@dataclass(frozen=True)
class Buckets:
    """Clients grouped by size.

    Attributes
    ----------
    order
        ``[num_clients]`` int32, ids from the smallest client to the largest.
    rank
        ``[num_clients]`` int32, the index of each client in `order`.
    bounds
        Static, one ``(end, max_size)`` per bucket, which holds ``order[previous end:end]``.
    """

    order: Array
    rank: Array
    bounds: tuple[tuple[int, int], ...] = field(metadata={"static": True})

    def groups(self) -> list[tuple[Array, int]]:
        """Return the ids in each bucket and the size of its largest client."""
        starts = [0, *(end for end, _ in self.bounds[:-1])]
        return [
            (self.order[start:end], size)
            for start, (end, size) in zip(starts, self.bounds, strict=True)
        ]


@register_dataclass
@dataclass(frozen=True)
class MeshPart:
    """Clients that each device computes together: all, or one bucket.

    Attributes
    ----------
    members
        ``[num_members]`` int32, ids in the order in which one device computes them.
    gathered
        ``[num_members]`` int32, the index of each member after the part's slots of all devices
        are concatenated.
    start, count
        Static: the part occupies slots ``[start, start + count)`` of each device.
    bound
        Static upper bound on the sizes of these clients.
    """

    members: Array
    gathered: Array
    start: int = field(metadata={"static": True})
    count: int = field(metadata={"static": True})
    bound: int = field(metadata={"static": True})


@register_dataclass
@dataclass(frozen=True)
class MeshLayout:
    """Assignment of clients to the devices of a mesh.

    Device ``d`` along the axis ``clients`` holds slots ``[d * per_device, (d + 1) * per_device)``
    of the clients' states, and `block` rows. The methods are for code that runs on one device
    (inside `jax.shard_map`).

    Attributes
    ----------
    client_of_slot
        ``[num_slots]`` int32, the client in each slot, 0 in unused slots.
    used
        ``[num_slots]`` bool, true for slots that hold a client.
    slots
        ``[num_clients]`` int32, the slot of each client.
    parts
        Slots that are computed together.
    mesh, per_device, block
        Static: the devices, and the number of slots and rows per device.
    totals
        Static: how messages are summed, ``"gather"`` or ``"psum"``.
    """

    client_of_slot: Array
    used: Array
    slots: Array
    parts: tuple[MeshPart, ...]
    mesh: Mesh = field(metadata={"static": True})
    per_device: int = field(metadata={"static": True})
    block: int = field(metadata={"static": True})
    totals: str = field(metadata={"static": True})

    @property
    def num_devices(self) -> int:
        """Number of devices along the axis ``clients``."""
        return int(self.mesh.shape[CLIENT_AXIS])

    def local_clients(self, part: MeshPart) -> tuple[Array, Array]:
        """Return this device's clients of a part and a mask of used slots, each ``[count]``."""
        start = jax.lax.axis_index(CLIENT_AXIS) * self.per_device + part.start
        return (
            jax.lax.dynamic_slice_in_dim(self.client_of_slot, start, part.count),
            jax.lax.dynamic_slice_in_dim(self.used, start, part.count),
        )

    def is_local(self, ids: Array) -> Array:
        """Return true for the clients `ids` that this device holds."""
        return self.slots[ids] // self.per_device == jax.lax.axis_index(CLIENT_AXIS)

    def local_slot(self, ids: Array) -> Array:
        """Return the slots of clients `ids` on this device, `per_device` for remote clients.

        That index is out of bounds: writes are dropped and the values that are read stay unused.
        """
        local = self.slots[ids] - jax.lax.axis_index(CLIENT_AXIS) * self.per_device
        return jnp.where(self.is_local(ids), local, self.per_device)


@register_dataclass
@dataclass(frozen=True)
class Layout:
    """Placement of clients as a compiled program sees it, passed next to the data.

    Attributes
    ----------
    clients_at_a_time
        Static number of clients computed together; all clients of a group if ``None``.
    chains_one_by_one
        Static flag: a device computes its chains one after the other, all rounds of each.
    buckets
        Clients grouped by size, computed group by group if all take part in a round.
    slots
        ``[num_clients]``, the index of each client's state, if states are not in client order
        (with a client store).
    mesh_layout
        Assignment of clients to the devices of a mesh. With a mesh, `FederatedData.start` counts
        rows within a client's device.
    chain_mesh
        Static mesh whose devices compute different chains and have all clients each.
    members
        Ids of the clients whose first states are computed; all if ``None``.
    partial
        Static flag: only the rows of `members` are in this process.
    """

    clients_at_a_time: int | None = field(default=None, metadata={"static": True})
    chains_one_by_one: bool = field(default=False, metadata={"static": True})
    buckets: Buckets | None = None
    slots: Array | None = None
    mesh_layout: MeshLayout | None = None
    chain_mesh: Mesh | None = field(default=None, metadata={"static": True})
    members: Array | None = None
    partial: bool = field(default=False, metadata={"static": True})

    def slot(self, ids: Array) -> Array:
        """Return the indices of the states of clients `ids` on the leading axis."""
        if self.mesh_layout is not None:
            return self.mesh_layout.local_slot(ids)
        return ids if self.slots is None else self.slots[ids]


SINGLE_DEVICE = Layout()
"""Layout that computes all clients together, in client order."""


@runtime_checkable
class PlacementLike(Protocol):
    """Interface of `fedmcmc.Placement` that programs on one device use."""

    def on_one_device(self, data: FederatedData) -> Layout:
        """Return how one device computes the clients of `data`; raise if others are needed."""


def layout_on_one_device(
    placement: PlacementLike | None, kernel: FederatedKernel, data: FederatedData
) -> Layout:
    """Return how one device computes clients; raise if `placement` needs more than that."""
    if placement is None:
        return SINGLE_DEVICE
    if not isinstance(placement, PlacementLike):
        raise TypeError(f"placement must be a fedmcmc.Placement, got {type(placement).__name__}.")
    layout = placement.on_one_device(data)
    return SINGLE_DEVICE if kernel.participation.pooled else layout


def state_specs(mesh: Mesh) -> Any:
    """Return the partition specs of the state of all chains, as a `FederatedState`."""
    chains = CHAIN_AXIS if CHAIN_AXIS in mesh.shape else None
    replicated: Any = PartitionSpec(chains)
    return FederatedState(replicated, replicated, PartitionSpec(chains, CLIENT_AXIS))
