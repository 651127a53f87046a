"""Data on the devices of a mesh: each device gets its own clients' rows."""

import zlib
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedmcmc.data import ClientLoader, FederatedData
from fedmcmc.placement._layouts import mesh_layout_of
from fedmcmc.placement._processes import all_equal, put
from fedmcmc.rounds import CLIENT_AXIS, Layout, MeshLayout


class PlacedData(NamedTuple):
    """Data of a run over a mesh."""

    data: FederatedData  # rows on the devices of the mesh, for `jax.shard_map`
    layout: Layout  # of `data`, with a mesh
    unplaced: FederatedData  # rows as on one device; shapes only for a loader
    local: FederatedData  # rows of this process's clients, for their initial states
    local_layout: Layout  # of `local`
    ids: np.ndarray  # clients of `local`


def place(
    data: FederatedData | ClientLoader, layout: Layout, mesh: Mesh, totals: str
) -> PlacedData:
    """Move `data` to the devices of `mesh`; a loader only loads this process's clients."""
    sizes = np.asarray(data.size if isinstance(data, FederatedData) else data.sizes)
    mesh_layout, clients, starts = mesh_layout_of(sizes, mesh, totals, layout.buckets)
    if isinstance(data, FederatedData):
        unplaced = local = data
        local_layout = layout
        ids = np.arange(len(sizes))
    else:
        ids = _local_clients(mesh, clients)
        local = _load(data, ids)
        _check_same_shapes(local)
        total = int(sizes.sum())
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((total, *leaf.shape[1:]), leaf.dtype), local.rows
        )
        unplaced = replace(local, rows=shapes)
        members = jnp.asarray(ids, jnp.int32)
        local_layout = replace(layout, members=members, partial=True)
    on_mesh = _move_to_mesh(local, mesh_layout, clients, starts)
    buckets, mesh_layout = put((layout.buckets, mesh_layout), mesh_layout.mesh, PartitionSpec())
    layout_on_mesh = replace(layout, buckets=buckets, mesh_layout=mesh_layout)
    return PlacedData(on_mesh, layout_on_mesh, unplaced, local, local_layout, ids)


def _local_clients(mesh: Mesh, clients: list[list[int]]) -> np.ndarray:
    """Return the clients that this process's devices compute."""
    along_axis = np.moveaxis(mesh.devices, mesh.axis_names.index(CLIENT_AXIS), 0)
    of_process: dict[int, set[int]] = {jax.process_index(): set()}
    for ids, devices in zip(clients, along_axis.reshape(len(clients), -1), strict=True):
        for device in devices:
            of_process.setdefault(device.process_index, set()).update(ids)
    # If only one process raised, the others would wait for it.
    empty = [process for process, ids in sorted(of_process.items()) if not ids]
    if empty:
        raise ValueError(
            f"Process {empty[0]} of {jax.process_count()} has no client: "
            f"{sum(map(len, clients))} clients are spread over {len(clients)} devices along the "
            f"mesh's axis {CLIENT_AXIS!r}. Use fewer processes, or a mesh with fewer devices."
        )
    return np.asarray(sorted(of_process[jax.process_index()]))


def _load(data: ClientLoader, ids: np.ndarray) -> FederatedData:
    """Load this process's clients; raise in all processes if any process fails."""
    local, error = None, None
    try:
        local = data.load(ids)
    except Exception as exception:
        error = exception
    is_same = all_equal(int(local is None))
    if error is not None:
        raise error
    if local is None or not is_same:
        raise RuntimeError("Another process could not load its clients: see its error.")
    return local


def _check_same_shapes(local: FederatedData) -> None:
    """Raise `ValueError` in all processes unless their rows have the same shapes and types."""
    shapes = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape[1:])}", local.rows)
    if not all_equal(zlib.crc32(str(shapes).encode()) >> 1):
        raise ValueError(
            "The clients of all processes need rows of the same structure, shape and type; this "
            f"process has {shapes} per row."
        )


def _move_to_mesh(
    local: FederatedData, mesh_layout: MeshLayout, clients: list[list[int]], starts: np.ndarray
) -> FederatedData:
    """Return the data on the mesh; `local` has the rows of this process's devices."""
    start, size = np.asarray(local.start), np.asarray(local.size)

    def device_block(leaf: np.ndarray, ids: list[int]) -> np.ndarray:
        parts = [leaf[start[i] : start[i] + size[i]] for i in ids]
        num_padding = mesh_layout.block - sum(map(len, parts))
        return np.concatenate([*parts, np.zeros((num_padding, *leaf.shape[1:]), leaf.dtype)])

    def spread(leaf: Array) -> Array:
        host = np.asarray(leaf)
        sharding = NamedSharding(mesh_layout.mesh, PartitionSpec(CLIENT_AXIS))
        shape = (mesh_layout.block * len(clients), *host.shape[1:])

        def blocks(index: Any) -> np.ndarray:
            begin, end = index[0].start or 0, index[0].stop or shape[0]
            devices = range(begin // mesh_layout.block, end // mesh_layout.block)
            return np.concatenate([device_block(host, clients[d]) for d in devices])

        return jax.make_array_from_callback(shape, sharding, blocks)

    small = (starts, local.size, local.share)
    start_, size_, share = put(small, mesh_layout.mesh, PartitionSpec())
    rows = jax.tree.map(spread, local.rows)
    return replace(local, rows=rows, start=start_, size=size_, share=share)
