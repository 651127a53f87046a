"""Data on the devices of a mesh: each device gets the rows of its own clients."""

import zlib
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedmcmc.data import ClientLoader, FederatedData
from fedmcmc.placement._layouts import layout_of
from fedmcmc.placement._processes import all_equal, put
from fedmcmc.rounds import AXIS, Arrangement, Layout


class Placed(NamedTuple):
    """Data of a run over a mesh."""

    # The rows lie on the devices of the mesh, for code that `jax.shard_map` runs.
    data: FederatedData
    # This is the arrangement of `data`, with its layout.
    arrangement: Arrangement
    # The rows lie as one device would hold them; those of a loader are shapes alone.
    unplaced: FederatedData
    # It holds the rows of this process's clients, from which their first states are made.
    local: FederatedData
    # This is the arrangement of `local`, in which first states are made.
    local_arrangement: Arrangement
    # These are the clients of `local`.
    ids: np.ndarray


def place(
    data: FederatedData | ClientLoader, arrangement: Arrangement, mesh: Mesh, totals: str
) -> Placed:
    """Lay `data` out over `mesh`; of a loader only this process's clients are loaded.

    Raises
    ------
    ValueError
        If a process has no client of a loader, or the rows of processes differ in structure, shape
        or type.
    """
    sizes = np.asarray(data.size if isinstance(data, FederatedData) else data.sizes)
    layout, clients, starts = layout_of(sizes, mesh, totals, arrangement.buckets)
    if isinstance(data, FederatedData):
        unplaced = local = data
        local_arrangement = arrangement
        ids = np.arange(len(sizes))
    else:
        ids = _own_clients(mesh, clients)
        local = _loaded(data, ids)
        _check_alike(local)
        total = int(sizes.sum())
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((total, *leaf.shape[1:]), leaf.dtype), local.rows
        )
        unplaced = replace(local, rows=shapes)
        members = jnp.asarray(ids, jnp.int32)
        local_arrangement = replace(arrangement, members=members, partial=True)
    laid_out = _laid_out(local, layout, clients, starts)
    buckets, layout = put((arrangement.buckets, layout), layout.mesh, PartitionSpec())
    on_devices = replace(arrangement, buckets=buckets, layout=layout)
    return Placed(laid_out, on_devices, unplaced, local, local_arrangement, ids)


def _own_clients(mesh: Mesh, clients: list[list[int]]) -> np.ndarray:
    """Return the clients that this process's devices compute."""
    by_place = np.moveaxis(mesh.devices, mesh.axis_names.index(AXIS), 0).reshape(len(clients), -1)
    here = jax.process_index()
    of_process: dict[int, set[int]] = {here: set()}
    for own, devices in zip(clients, by_place, strict=True):
        for device in devices:
            of_process.setdefault(device.process_index, set()).update(own)
    # All processes raise: the others would wait for the one that does.
    without = [process for process, own in sorted(of_process.items()) if not own]
    if without:
        raise ValueError(
            f"Process {without[0]} of {jax.process_count()} has no client: "
            f"{sum(map(len, clients))} clients are spread over {len(clients)} devices along the "
            f"mesh's axis {AXIS!r}."
        )
    return np.asarray(sorted(of_process[here]))


def _loaded(data: ClientLoader, ids: np.ndarray) -> FederatedData:
    """Return this process's data; raise in all processes if one cannot load its own."""
    own, error = None, None
    try:
        own = data.load(ids)
    except Exception as raised:
        error = raised
    together = all_equal(int(own is None))
    if error is not None:
        raise error
    if own is None or not together:
        raise RuntimeError("Another process could not load its clients; it says why.")
    return own


def _check_alike(own: FederatedData) -> None:
    """Raise `ValueError` in all processes unless their rows make one array."""
    shapes = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape[1:])}", own.rows)
    if not all_equal(zlib.crc32(str(shapes).encode()) >> 1):
        raise ValueError(
            "The clients of all processes need rows of one structure, shape and type; those of "
            f"this process are {shapes} per row."
        )


def _laid_out(
    own: FederatedData, layout: Layout, clients: list[list[int]], starts: np.ndarray
) -> FederatedData:
    """Return the data on the mesh of `layout`, from rows of which `own` has those needed here."""
    begin, size = np.asarray(own.start), np.asarray(own.size)

    def of_device(leaf: np.ndarray, ids: list[int]) -> np.ndarray:
        parts = [leaf[begin[i] : begin[i] + size[i]] for i in ids]
        rest = layout.block - sum(map(len, parts))
        return np.concatenate([*parts, np.zeros((rest, *leaf.shape[1:]), leaf.dtype)])

    def spread(leaf: Any) -> Array:
        host = np.asarray(leaf)
        where = NamedSharding(layout.mesh, PartitionSpec(AXIS))
        shape = (layout.block * len(clients), *host.shape[1:])

        def block_of(index: Any) -> np.ndarray:
            first, last = index[0].start or 0, index[0].stop or shape[0]
            devices = range(first // layout.block, last // layout.block)
            return np.concatenate([of_device(host, clients[d]) for d in devices])

        return jax.make_array_from_callback(shape, where, block_of)

    rest = (starts, own.size, own.share)
    start, size_, share = put(rest, layout.mesh, PartitionSpec())
    rows = jax.tree.map(spread, own.rows)
    return replace(own, rows=rows, start=start, size=size_, share=share)
