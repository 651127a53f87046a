"""How a program computes clients: together, some at a time, in groups, or over devices."""

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from fedmcmc._types import FederatedKernel, FederatedState, register_dataclass
from fedmcmc.data import FederatedData

AXIS, CHAINS = "clients", "chains"
"""The names of a mesh's axes."""


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
        Static, one ``(end, max_size)`` per bucket: it holds ``order[previous end:end]``.
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
    client_of_slot
        ``[num_slots]`` int32, the client in each slot; slots without one hold client 0, unused.
    used
        ``[num_slots]`` bool, whether a slot holds a client.
    slots
        ``[num_clients]`` int32, the slot of each client.
    parts
        Which slots are computed together.
    mesh, per_device, block
        Static: the devices, and slots and rows of each.
    totals
        Static: how messages are summed, ``"gather"`` or ``"psum"``.
    """

    client_of_slot: Array
    used: Array
    slots: Array
    parts: tuple[Part, ...]
    mesh: Mesh = field(metadata={"static": True})
    per_device: int = field(metadata={"static": True})
    block: int = field(metadata={"static": True})
    totals: str = field(metadata={"static": True})

    @property
    def num_devices(self) -> int:
        """Devices along the mesh's axis ``clients``."""
        return int(self.mesh.shape[AXIS])

    def own(self, part: Part) -> tuple[Array, Array]:
        """Return this device's clients of a part, and which of them are there, ``[count]``."""
        first = jax.lax.axis_index(AXIS) * self.per_device + part.first
        return (
            jax.lax.dynamic_slice_in_dim(self.client_of_slot, first, part.count),
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


@register_dataclass
@dataclass(frozen=True)
class Arrangement:
    """What rounds need to know of where clients are: it goes beside the data into the program.

    Attributes
    ----------
    clients_at_a_time
        How many clients are computed together, static; all of a group if ``None``.
    buckets
        Clients grouped by size, to be computed group by group where all take part.
    slots
        ``[num_clients]``, where a client's state lies, if not in its own order (with a store).
    layout
        Which device holds which clients, if they lie on a mesh; `FederatedData.start`
        then counts among the rows of a client's device.
    members
        Ids of the clients whose first states are made; all if ``None``.
    partial
        Static: whether the store holds the rows of `members` alone (the rest are in other
        processes).
    """

    clients_at_a_time: int | None = field(default=None, metadata={"static": True})
    buckets: Buckets | None = None
    slots: Array | None = None
    layout: Layout | None = None
    members: Array | None = None
    partial: bool = field(default=False, metadata={"static": True})

    def slot(self, ids: Array) -> Array:
        """Return where the states of clients `ids` lie on the leading axis."""
        if self.layout is not None:
            return self.layout.own_slot(ids)
        return ids if self.slots is None else self.slots[ids]


TOGETHER = Arrangement()
"""All clients are computed together, in their own order."""


@runtime_checkable
class PlacementLike(Protocol):
    """What says how a program computes clients: a `fedmcmc.Placement`."""

    def on_one_device(self, data: FederatedData) -> Arrangement:
        """Return how the clients of `data` are computed on one device; raise if on others."""
        ...


def arranged(
    placement: PlacementLike | None, kernel: FederatedKernel, data: FederatedData
) -> Arrangement:
    """Return how a program on one device computes clients.

    Raises
    ------
    TypeError
        If `placement` is no placement.
    ValueError
        If it asks for more than one device, or for a store.
    """
    if placement is None:
        return TOGETHER
    if not isinstance(placement, PlacementLike):
        raise TypeError(f"placement must be a fedmcmc.Placement, got {type(placement).__name__}.")
    arrangement = placement.on_one_device(data)
    return TOGETHER if kernel.participation.pooled else arrangement


def state_specs(mesh: Mesh) -> Any:
    """Return how the state of all chains lies on a mesh, as a `FederatedState`."""
    chains = CHAINS if CHAINS in mesh.shape else None
    whole: Any = PartitionSpec(chains)
    return FederatedState(whole, whole, PartitionSpec(chains, AXIS))
