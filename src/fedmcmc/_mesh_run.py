"""A run over the devices of a mesh: clients over one axis, chains over another."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedmcmc import trees
from fedmcmc._run import Keeping, Run
from fedmcmc._segments import state_specs
from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState
from fedmcmc.data import FederatedData
from fedmcmc.layouts import AXIS, CHAINS, layout_of
from fedmcmc.samples import Samples
from fedmcmc.stopping import StoppingRule

__all__ = ["TOTALS", "MeshRun", "check_mesh", "laid_out"]

TOTALS = ("gather", "psum")


class MeshRun(Run):
    """A run whose clients' rows and states lie on the devices that compute with them.

    Shapes are those of a run on one device, and so is what a checkpoint holds, which another mesh
    can go on from.
    """

    def __init__(
        self,
        kernel: FederatedKernel,
        data: FederatedData,
        keys: Array,
        keeping: Keeping,
        state: FederatedState,
        until: StoppingRule | None,
        mesh: Mesh,
        totals: str,
    ) -> None:
        super().__init__(kernel, data, keys, keeping, state, until)
        self.data = laid_out(data, mesh, totals)
        self.chains = CHAINS if CHAINS in mesh.shape else None
        self.keys = self._put(keys, PartitionSpec(self.chains))
        self.found = self._put(self.found, PartitionSpec(self.chains))
        self._restore(self.state)

    def _put(self, tree: ArrayTree, spec: PartitionSpec) -> ArrayTree:
        assert self.data.layout is not None
        place = NamedSharding(self.data.layout.mesh, spec)
        return jax.tree.map(lambda leaf: jax.device_put(leaf, place), tree)

    def _restore(self, state: FederatedState) -> None:
        layout = self.data.layout
        assert layout is not None
        places = np.asarray(layout.places)
        specs = state_specs(layout)
        self.state = FederatedState(
            self._put(state.broadcast, specs.broadcast),
            self._put(state.server, specs.server),
            self._put(
                jax.tree.map(lambda leaf: np.asarray(leaf)[:, places], state.clients),
                specs.clients,
            ),
        )

    def _whole_state(self) -> FederatedState:
        assert self.data.layout is not None
        slots = np.asarray(self.data.layout.slots)
        state = jax.tree.map(np.asarray, self.state)
        return state._replace(clients=jax.tree.map(lambda leaf: leaf[:, slots], state.clients))

    def samples(self) -> Samples:
        """Return what was kept so far, clients in their own order."""
        state = jax.tree.map(jnp.asarray, self._whole_state())
        return replace(super().samples(), state=state)


def laid_out(data: FederatedData, mesh: Mesh, totals: str) -> FederatedData:
    """Return `data` with each device's rows on it, for code that `jax.shard_map` runs there."""
    layout, clients, starts = layout_of(np.asarray(data.size), mesh, totals)
    begin, size = np.asarray(data.start), np.asarray(data.size)

    def of_device(leaf: np.ndarray, own: list[int]) -> np.ndarray:
        parts = [leaf[begin[i] : begin[i] + size[i]] for i in own]
        rows = sum(map(len, parts))
        return np.concatenate(
            [*parts, np.zeros((layout.block - rows, *leaf.shape[1:]), leaf.dtype)]
        )

    def spread(leaf: Any) -> Array:
        host = np.asarray(leaf)
        place = NamedSharding(layout.mesh, PartitionSpec(AXIS))
        shape = (layout.block * len(clients), *host.shape[1:])

        def block_of(index: Any) -> np.ndarray:
            first, last = index[0].start or 0, index[0].stop or shape[0]
            devices = range(first // layout.block, last // layout.block)
            return np.concatenate([of_device(host, clients[d]) for d in devices])

        return jax.make_array_from_callback(shape, place, block_of)

    everywhere = NamedSharding(layout.mesh, PartitionSpec())
    rest = (jnp.asarray(starts), data.size, data.share, layout)
    start, size_, share, layout = jax.tree.map(lambda leaf: jax.device_put(leaf, everywhere), rest)
    return replace(
        data,
        rows=jax.tree.map(spread, data.rows),
        start=start,
        size=size_,
        share=share,
        layout=layout,
    )


def check_mesh(
    mesh: Any, totals: str, kernel: FederatedKernel, data: FederatedData, num_chains: int
) -> None:
    """Raise `TypeError` or `ValueError` where a run cannot be spread over `mesh`."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}.")
    if totals not in TOTALS:
        raise ValueError(f"totals must be one of {TOTALS}, got {totals!r}.")
    if AXIS not in mesh.shape or not set(mesh.axis_names) <= {AXIS, CHAINS}:
        raise ValueError(
            f"The mesh needs an axis named {AXIS!r} and may have one named {CHAINS!r}, got axes "
            f"{tuple(mesh.axis_names)}."
        )
    if num_chains % mesh.shape.get(CHAINS, 1):
        raise ValueError(
            f"num_chains must be a multiple of the mesh's axis {CHAINS!r}, {mesh.shape[CHAINS]}, "
            f"got {num_chains}."
        )
    if kernel.participation.pooled:
        raise ValueError("Pooled rows are those of one client, which no mesh spreads.")
    if data.mesh is not None or data.buckets is not None:
        raise ValueError("Give mesh= data that is neither sharded nor bucketed: it lays it out.")
    if not trees.is_empty((data.members, data.slots)):
        raise ValueError("Data of a store cannot be spread over a mesh.")
