"""A run over the devices of a mesh: clients over one axis, chains over another."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState
from fedmcmc.diagnostics import StoppingRule
from fedmcmc.placement import (
    Placed,
    Placement,
    agreed,
    all_equal,
    combined,
    is_first,
    on_host,
    on_words,
    put,
    several,
)
from fedmcmc.pytrees import trees
from fedmcmc.records import Keeper, Samples, ZarrReader
from fedmcmc.rounds import CHAINS, Arrangement, Kept, Layout, state_specs
from fedmcmc.runs._errors import NonFiniteError
from fedmcmc.runs._run import Keeping, Run
from fedmcmc.storage import Checkpoint, Saved, digest, digests_of_clients

__all__ = ["MeshRun"]


class MeshRun(Run):
    """A run whose clients' rows and states lie on the devices that compute with them.

    Shapes are those of a run on one device, and so is what a checkpoint holds, which another mesh
    can go on from. Of `state`, `ids` are the clients whose states this process has; `plain` is how
    one device would compute the clients.

    Where several processes share the mesh, all of them run this alike: each asks for the same
    segments, all get the draws, and the first one writes.
    """

    def __init__(
        self,
        kernel: FederatedKernel,
        placed: Placed,
        plain: Arrangement,
        placement: Placement,
        keys: Array,
        keeping: Keeping,
        state: FederatedState,
        until: StoppingRule | None,
        ids: np.ndarray,
    ) -> None:
        assert placed.arrangement.layout is not None
        self.layout: Layout = placed.arrangement.layout
        self.mesh = self.layout.mesh
        self.places, self.slots = (
            np.asarray(table) for table in (self.layout.places, self.layout.slots)
        )
        # Now, so that this process's rows need not be kept beside those on the devices.
        self.rows_digest = "" if keeping.checkpoint is None else _digest_of(placed, keeping)
        shapes = trees.shapes_but_keys(jax.tree.map(trees.strong, state))

        def of_all(leaf: Any) -> Any:
            shape = (leaf.shape[0], len(self.slots), *leaf.shape[2:])
            if trees.is_key(leaf):
                return jnp.broadcast_to(leaf[:, :1], shape)
            return jax.ShapeDtypeStruct(shape, leaf.dtype)

        self.shapes = shapes._replace(clients=jax.tree.map(of_all, shapes.clients))
        given = (kernel, placed.plain, keys, keeping, state, until)
        super().__init__(*given, like=self.shapes, arrangement=plain, placement=placement)
        self.data, self.arrangement = placed.data, placed.arrangement
        self.chains: Any = PartitionSpec(CHAINS if CHAINS in self.mesh.shape else None)
        self.keys = put(keys, self.mesh, self.chains)
        self._restore_found(self.found)
        self._lay_out(self.state, ids)

    def _lay_out(self, state: FederatedState, ids: np.ndarray) -> None:
        """Take a state whose clients are `ids` to the devices."""
        specs = state_specs(self.mesh)
        at = np.zeros(len(self.slots), np.int64)  # others' states are not asked for
        at[ids] = np.arange(len(ids))
        num_slots, where = len(self.places), NamedSharding(self.mesh, specs.clients)

        def spread(leaf: Any) -> Array:
            host = np.asarray(leaf)
            shape = (host.shape[0], num_slots, *host.shape[2:])

            def part(index: Any) -> np.ndarray:
                chains, slots, *rest = index
                return host[chains][:, at[self.places[slots]]][(slice(None), slice(None), *rest)]

            return jax.make_array_from_callback(shape, where, part)

        self.state = FederatedState(
            put(state.broadcast, self.mesh, specs.broadcast),
            put(state.server, self.mesh, specs.server),
            jax.tree.map(on_words(spread), state.clients),
        )

    def _restore(self, state: FederatedState) -> None:
        self._lay_out(state, np.arange(len(self.slots)))

    def _restore_found(self, found: dict[str, ArrayTree]) -> None:
        self.found = put(found, self.mesh, self.chains)

    def _host(self, tree: ArrayTree) -> ArrayTree:
        return on_host(tree, self.mesh)

    def _whole_state(self) -> FederatedState:
        state: FederatedState = self._host(self.state)
        return state._replace(clients=jax.tree.map(lambda leaf: leaf[:, self.slots], state.clients))

    def _whole_shapes(self) -> FederatedState:
        return self.shapes

    def _whole_found(self) -> dict[str, ArrayTree]:
        found: dict[str, ArrayTree] = self._host(self.found)
        return found

    def samples(self) -> Samples:
        """Return what was kept so far, clients in their own order."""
        state = jax.tree.map(jnp.asarray, self._whole_state())
        if several() and self.keeping.draws_to is not None:
            self.keeper.finish()
            agreed(0.0)  # the others read what is now on disk
        return replace(super().samples(), state=state)

    def _keeper(self, shapes: Kept) -> Keeper:
        if self.keeping.draws_to is None or is_first():
            return super()._keeper(shapes)
        return ZarrReader(self.keeping.draws_to, shapes)

    def _agreed(self, number: float) -> float:
        return agreed(number)

    def _writes(self) -> bool:
        return is_first()

    def _check_loaded(self, checkpoint: Checkpoint, saved: Saved | None) -> None:
        if not all_equal(-1 if saved is None else saved.round):
            raise ValueError(
                f"The processes of this run do not find the same checkpoint in "
                f"{checkpoint.directory}: it must be a folder that all of them see."
            )

    def _rows_digest(self) -> str:
        return self.rows_digest

    def _can_save(self, error: BaseException | None) -> bool:
        # Other processes may be elsewhere, and would be waited for for ever.
        return not several() or error is None or isinstance(error, NonFiniteError)

    def _interrupted(self) -> None:
        if several():
            raise  # as above

    def go(self, num_burnin: int, num_rounds: int, thinning: int, bar: Any) -> Samples:
        """Run all rounds and return what was kept."""
        try:
            samples = super().go(num_burnin, num_rounds, thinning, bar)
        except NonFiniteError:
            agreed(0.0)  # as below
            raise
        agreed(0.0)  # nobody goes on before the last checkpoint is on disk
        return samples


def _digest_of(placed: Placed, keeping: Keeping) -> str:
    own = placed.own
    if not keeping.by_client:
        return digest((own.rows, own.start, own.size))
    words = combined(digests_of_clients(own, placed.ids))
    return digest((words, np.asarray(own.size)))
