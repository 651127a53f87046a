"""Executors of a run's segments: one device, a mesh, or one device with a client store.

An executor lays out rows and states, runs a segment, and gathers states again.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedmcmc.placement import (
    HostStore,
    PlacedData,
    has_other_processes,
    on_host,
    on_words,
    put,
    read,
    write,
)
from fedmcmc.pytrees import trees
from fedmcmc.random import cohort_key
from fedmcmc.records import Samples
from fedmcmc.rounds import (
    CHAIN_AXIS,
    Accumulators,
    Plan,
    Program,
    Segment,
    run_segment,
    state_specs,
)
from fedmcmc.types import ArrayTree, FederatedKernel, FederatedState, Participation, compiled


@dataclass(frozen=True)
class SegmentWork:
    """Work of a segment, without the program, keys and state that an executor provides.

    Executors in this process call it; executors of remote clients read its attributes.
    """

    kernel: FederatedKernel  # with schedules tabulated over the segment's rounds
    plan: Plan
    accumulators: Accumulators
    accumulator_states: dict[str, ArrayTree]
    block: int
    capacity: int
    canonical: bool

    def __call__(self, program: Program, keys: Array, state: FederatedState) -> Segment:
        """Run the rounds for all chains."""
        return run_segment(
            replace(program, kernel=self.kernel),
            keys,
            state,
            self.plan,
            self.accumulators,
            self.accumulator_states,
            block=self.block,
            capacity=self.capacity,
            canonical=self.canonical,
        )


class RunHalted(RuntimeError):
    """Error of an executor that cannot continue a run.

    Attributes
    ----------
    samples
        `fedmcmc.Samples` kept before the error; ``None`` before the first round.
    """

    samples: Samples | None = None


class Executor:
    """Executor of a run's segments that keeps all rows and states on JAX's default device.

    Other executors override what differs.

    Attributes
    ----------
    plain
        Program of the run on one device, which defines the block length and the run's identity.
    program
        Program that this executor runs.
    keys
        Keys of the chains.
    shapes
        Shapes of the state that `gather` returns, with all clients; typed keys stay arrays.
    table_shapes
        Shapes of the state passed to `plain`.
    simulated_shapes
        Shapes of the state as if one process simulated all clients, for the run's identity.
    longest
        Maximum number of rounds in a segment, ``None`` without a limit.
    shared
        Flag for several processes: all of them run the same segments and get the draws, and the
        first process writes files.
    in_place
        If true, a gathered state is valid until the next round, so that a checkpoint must be
        written before the run continues.
    finished_rounds
        If `run` raised: the first unfinished round, and the segment of the rounds before. ``None``
        if the run must continue from the beginning of the segment.
    """

    longest: int | None = None
    shared: bool = False
    in_place: bool = False
    finished_rounds: tuple[int, Segment] | None = None

    def __init__(self, program: Program, keys: Array, state: FederatedState) -> None:
        self.plain = self.program = program
        self.keys = keys
        self.simulated_shapes = self.shapes = self.table_shapes = trees.shapes_but_keys(state)

    def run(self, segment: SegmentWork, state: Any, start: int, stop: int) -> Segment:
        """Run rounds ``[start, stop)`` from a state that `lay_out` returned."""
        return segment(self.program, self.keys, state)

    def lay_out(self, state: FederatedState) -> Any:
        """Move the state of all clients, in client order, to the devices that use it."""
        return jax.tree.map(jnp.asarray, state)

    def gather(self, state: Any) -> Any:
        """Return a state as it was before `lay_out`."""
        return state

    def lay_out_chains(self, tree: ArrayTree) -> ArrayTree:
        """Move arrays with a leading chain axis to the devices that use them."""
        return jax.tree.map(jnp.asarray, tree)

    def to_host(self, tree: ArrayTree) -> ArrayTree:
        """Return arrays with a leading chain axis as NumPy arrays; typed keys stay typed keys."""
        return jax.tree.map(lambda leaf: leaf if trees.is_key(leaf) else np.asarray(leaf), tree)


class MeshDevices(Executor):
    """Executor that spreads clients' rows and states over the devices of a mesh.

    Its checkpoints have the format of one device, so a run can continue on another mesh. The
    initial state has only this process's clients.
    """

    def __init__(
        self, placed: PlacedData, plain: Program, keys: Array, state: FederatedState
    ) -> None:
        mesh_layout = placed.layout.mesh_layout
        assert mesh_layout is not None
        self.plain, self.shared, self.mesh = plain, has_other_processes(), mesh_layout.mesh
        layout = replace(
            placed.layout,
            clients_at_a_time=plain.layout.clients_at_a_time,
            chains_one_by_one=plain.layout.chains_one_by_one,
        )
        self.program = replace(plain, data=placed.data, layout=layout)
        self.client_of_slot = np.asarray(mesh_layout.client_of_slot)
        self.slots = np.asarray(mesh_layout.slots)
        self.chains: Any = PartitionSpec(CHAIN_AXIS if CHAIN_AXIS in self.mesh.shape else None)
        self.keys = put(keys, self.mesh, self.chains)

        def for_all_clients(leaf: Array) -> Any:
            shape = (leaf.shape[0], len(self.slots), *leaf.shape[2:])
            if trees.is_key(leaf):
                return jnp.broadcast_to(leaf[:, :1], shape)
            return jax.ShapeDtypeStruct(shape, leaf.dtype)

        shapes = trees.shapes_but_keys(state)
        shapes = shapes._replace(clients=jax.tree.map(for_all_clients, shapes.clients))
        self.simulated_shapes = self.table_shapes = self.shapes = shapes

    def lay_out(self, state: FederatedState, ids: np.ndarray | None = None) -> Any:
        """Move a state to the devices. `ids` are the clients in `state`, by default all."""
        ids = np.arange(len(self.slots)) if ids is None else ids
        index = np.zeros(len(self.slots), np.int64)  # entries of other processes are never read
        index[ids] = np.arange(len(ids))
        specs = state_specs(self.mesh)

        def spread(leaf: Array) -> Array:
            host = np.asarray(leaf)
            shape = (host.shape[0], len(self.client_of_slot), *host.shape[2:])

            def part(indices: Any) -> np.ndarray:
                chains, slots, *trailing = indices
                entries = index[self.client_of_slot[slots]]
                return host[chains][:, entries][(slice(None), slice(None), *trailing)]

            sharding = NamedSharding(self.mesh, specs.clients)
            return jax.make_array_from_callback(shape, sharding, part)

        return FederatedState(
            put(state.broadcast, self.mesh, specs.broadcast),
            put(state.server, self.mesh, specs.server),
            jax.tree.map(on_words(spread), state.clients),
        )

    def gather(self, state: FederatedState) -> Any:
        host = on_host(state, self.mesh)
        return host._replace(clients=jax.tree.map(lambda leaf: leaf[:, self.slots], host.clients))

    def lay_out_chains(self, tree: ArrayTree) -> ArrayTree:
        return put(tree, self.mesh, self.chains)

    def to_host(self, tree: ArrayTree) -> ArrayTree:
        return on_host(tree, self.mesh)


class ChainDevices(Executor):
    """Executor that spreads chains over devices, each of which has all rows."""

    def __init__(self, program: Program, keys: Array, state: FederatedState, mesh: Mesh) -> None:
        super().__init__(program, keys, state)
        self.mesh = mesh
        self.keys = self.lay_out_chains(keys)
        data, layout = put((program.data, program.layout), mesh, PartitionSpec())
        self.program = replace(program, data=data, layout=replace(layout, chain_mesh=mesh))

    def lay_out(self, state: FederatedState) -> Any:
        return self.lay_out_chains(state)

    def gather(self, state: FederatedState) -> Any:
        return on_host(state, self.mesh)

    def lay_out_chains(self, tree: ArrayTree) -> ArrayTree:
        return put(tree, self.mesh, PartitionSpec(CHAIN_AXIS))

    def to_host(self, tree: ArrayTree) -> ArrayTree:
        return on_host(tree, self.mesh)


class _Prefetch(NamedTuple):
    """States of clients `ids` that a thread reads for the rounds from `start` on."""

    start: int
    ids: np.ndarray
    table: Future[ArrayTree]


class _Returned(NamedTuple):
    """States of clients `ids` that a segment returned."""

    ids: np.ndarray
    table: ArrayTree  # leaves [num_chains, num_slots, ...]


class StoredClients(Executor):
    """Executor that keeps clients' states on the host, except for upcoming cohorts.

    The length of segments is limited, so that the states of their cohorts fit on the device. The
    program is the program of a run without a store. Only its table of states is shorter, and
    `Layout.slots` maps clients to entries of the table.

    Between segments ``state.clients`` is a `_Returned`, which is written to the store before the
    next read. After an interrupt it is written again, so that the store matches the run's round.
    """

    in_place = True

    def __init__(
        self, program: Program, keys: Array, state: FederatedState, store: HostStore
    ) -> None:
        self.all_states, self.num_clients = state.clients, program.data.num_clients
        super().__init__(self._with_slots(program, np.zeros(0, np.int64)), keys, state)
        self.participation = program.kernel.participation
        cohort_size = self.participation.cohort_size
        assert cohort_size is not None  # see `placement.check_fits`
        bytes_per_slot = max(trees.num_bytes(self.all_states) // self.num_clients, 1)  # all chains
        slots_per_round = cohort_size * len(keys)
        affordable = store.device_bytes // (bytes_per_slot * slots_per_round)
        self.num_ahead = int(max(1, min(affordable, -(-self.num_clients // slots_per_round))))
        self.longest = self.num_ahead
        self.num_slots = min(slots_per_round * self.num_ahead, self.num_clients)
        self.table_shapes = self.shapes._replace(
            clients=jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(
                    (leaf.shape[0], self.num_slots, *leaf.shape[2:]), leaf.dtype
                ),
                state.clients,
            )
        )
        self.reader = ThreadPoolExecutor(1)
        self.prefetch: _Prefetch | None = None

    def _with_slots(self, program: Program, ids: np.ndarray) -> Program:
        slots = np.zeros(self.num_clients, np.int32)
        slots[ids] = np.arange(len(ids))
        return replace(program, layout=replace(program.layout, slots=jnp.asarray(slots)))

    def run(self, segment: SegmentWork, state: FederatedState, start: int, stop: int) -> Segment:
        ids, table = self._states_for(start, state.clients)
        on_device = state._replace(clients=jax.tree.map(jnp.asarray, table))
        result = segment(self._with_slots(self.program, ids), self.keys, on_device)
        # Read while the device computes; `_states_for` updates states that this segment changes.
        next_ids = self._cohorts(stop)
        table = self.reader.submit(read, self.all_states, next_ids, self.num_slots)
        self.prefetch = _Prefetch(stop, next_ids, table)
        returned = _Returned(ids, jax.tree.map(np.asarray, result.state.clients))
        return result._replace(state=result.state._replace(clients=returned))

    def _states_for(self, start: int, returned: _Returned | None) -> tuple[np.ndarray, ArrayTree]:
        """Return the clients of the rounds from `start` on, and their states."""
        prefetch, self.prefetch = self.prefetch, None
        table = None if prefetch is None else prefetch.table.result()  # end reading before writing
        self._write(returned)
        if prefetch is None or prefetch.start != start:
            ids = self._cohorts(start)
            return ids, read(self.all_states, ids, self.num_slots)
        if returned is not None:
            changed = np.flatnonzero(np.isin(prefetch.ids, returned.ids))
            for leaf, old in self._with_leaves_of(table):
                old[:, changed] = leaf[:, prefetch.ids[changed]]
        return prefetch.ids, table

    def _with_leaves_of(self, tree: ArrayTree) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return zip(jax.tree.leaves(self.all_states), jax.tree.leaves(tree), strict=True)

    def _write(self, returned: _Returned | None) -> None:
        if returned is not None:
            write(self.all_states, *returned)

    def _cohorts(self, start: int) -> np.ndarray:
        cohorts = _cohorts_from(
            self.participation,
            self.keys,
            jnp.asarray(start, jnp.int32),
            num_rounds=self.num_ahead,
            num_clients=self.num_clients,
        )
        return np.unique(np.asarray(cohorts))

    def lay_out(self, state: FederatedState) -> Any:
        for leaf, new in self._with_leaves_of(state.clients):
            if leaf is not new:
                leaf[...] = new
        return jax.tree.map(jnp.asarray, state._replace(clients=None))

    def gather(self, state: FederatedState) -> Any:
        self._write(state.clients)
        return state._replace(clients=self.all_states)


@runtime_checkable
class RemoteClients(Protocol):
    """Clients whose rows are not on the server: `fedmcmc.deploy.Sites`.

    `sample` accepts it in place of data.
    """

    def adapt_kernel(self, kernel: FederatedKernel) -> FederatedKernel:
        """Return the kernel that these clients run, for example as a secure sum under masks."""

    def start_run(
        self,
        kernel: FederatedKernel,
        keys: Array,
        position: ArrayTree,
        state: FederatedState | None,
    ) -> tuple[Executor, FederatedState, str]:
        """Return the executor of a run, its first state, and a digest in place of the rows."""


@compiled(static_argnames=("num_rounds", "num_clients"))
def _cohorts_from(
    participation: Participation, keys: Array, start: Array, *, num_rounds: int, num_clients: int
) -> Array:
    """Return the clients of the rounds from `start` on, for all chains, ``[...]``."""

    def cohort(key: Array, round_: Array) -> Array:
        return participation.prepare(cohort_key(key, round_), num_clients).ids

    rounds = start + jnp.arange(num_rounds, dtype=jnp.int32)
    return jax.vmap(lambda key: jax.vmap(lambda r: cohort(key, r))(rounds))(keys)
