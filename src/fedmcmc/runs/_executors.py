"""Where the segments of a run are computed: on one device, over a mesh, or with a client store.

An executor lays out rows and states, runs a segment, and gathers states again. `Run` knows no more
of a placement.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState, Participation, compiled
from fedmcmc.placement import HostStore, Placed, on_host, on_words, put, read, several, write
from fedmcmc.pytrees import trees
from fedmcmc.random import cohort_key
from fedmcmc.rounds import (
    CHAINS,
    Accumulators,
    Plan,
    Program,
    Segment,
    run_segment,
    state_specs,
)


@dataclass(frozen=True)
class Work:
    """The rounds of a segment: all of it but where its arguments lie.

    Called with a program, keys and a state it runs the rounds. Where clients are elsewhere its
    parts say what to do.
    """

    kernel: FederatedKernel  # its schedules tabulated over the segment's rounds
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
    """An executor cannot go on with a run.

    Attributes
    ----------
    samples
        The `fedmcmc.Samples` that were kept before; ``None`` before the first round.
    """

    samples: Any = None


class OneDevice:
    """All rows and states lie on the device that JAX takes by itself.

    Attributes
    ----------
    plain
        The program as one device would run it; sets the block length and the run's identity.
    program
        The program as it is run here.
    table_shapes
        Shapes of the state passed to `plain`; typed keys stay as they are.
    shapes
        Shapes of the state with all clients, likewise, as `gather` returns it.
    simulated_shapes
        Those that it has with all clients in this program: of these a run's identity is made.
    longest
        Rounds in a segment at most, ``None`` without a limit.
    shared
        Whether other processes run this alike. Each asks for the same segments, all get the draws,
        and the first one writes.
    in_place
        Whether a gathered state changes while the run goes on.
    finished_rounds
        Where `run` ended with an exception: the first round that is not finished, and the segment
        of the rounds before it; ``None`` if the run goes on from the beginning of the segment.
    """

    longest: int | None = None
    shared = in_place = False
    finished_rounds: tuple[int, Segment] | None = None

    def __init__(self, program: Program, keys: Array, state: FederatedState) -> None:
        self.plain = self.program = program
        self.keys = keys
        self.simulated_shapes = self.shapes = self.table_shapes = trees.shapes_but_keys(state)

    def run(self, segment: Work, state: Any, at: int, stop: int) -> Segment:
        """Run rounds ``[at, stop)`` from a state that was laid out."""
        return segment(self.program, self.keys, state)

    def lay_out(self, state: FederatedState) -> Any:
        """Take the state of all clients, in their own order, to where it is computed with."""
        return jax.tree.map(jnp.asarray, state)

    def gather(self, state: Any) -> Any:
        """Return a state as it was before `lay_out`."""
        return state

    def lay_out_chains(self, tree: ArrayTree) -> ArrayTree:
        """Take arrays with a leading chain axis to where they are computed with."""
        return jax.tree.map(jnp.asarray, tree)

    def to_host(self, tree: ArrayTree) -> ArrayTree:
        """Return arrays with a leading chain axis as NumPy arrays, typed keys as they are."""
        return jax.tree.map(lambda leaf: leaf if trees.is_key(leaf) else np.asarray(leaf), tree)


class MeshDevices:
    """Clients' rows and states lie on the devices of a mesh that compute with them.

    A checkpoint holds what that of one device does, so another mesh can go on from it. Attributes
    and methods are those of `OneDevice`; `state` has this process's clients.
    """

    longest: int | None = None
    in_place = False
    finished_rounds: tuple[int, Segment] | None = None

    def __init__(self, placed: Placed, plain: Program, keys: Array, state: FederatedState) -> None:
        layout = placed.arrangement.layout
        assert layout is not None
        self.plain, self.shared, self.mesh = plain, several(), layout.mesh
        at_a_time = plain.arrangement.clients_at_a_time
        arrangement = replace(placed.arrangement, clients_at_a_time=at_a_time)
        self.program = replace(plain, data=placed.data, arrangement=arrangement)
        self.client_of_slot = np.asarray(layout.client_of_slot)
        self.slots = np.asarray(layout.slots)
        self.chains: Any = PartitionSpec(CHAINS if CHAINS in self.mesh.shape else None)
        self.keys = put(keys, self.mesh, self.chains)

        def of_all_clients(leaf: Any) -> Any:
            shape = (leaf.shape[0], len(self.slots), *leaf.shape[2:])
            if trees.is_key(leaf):
                return jnp.broadcast_to(leaf[:, :1], shape)
            return jax.ShapeDtypeStruct(shape, leaf.dtype)

        shapes = trees.shapes_but_keys(state)
        self.shapes = shapes._replace(clients=jax.tree.map(of_all_clients, shapes.clients))
        self.simulated_shapes = self.table_shapes = self.shapes

    def run(self, segment: Work, state: Any, at: int, stop: int) -> Segment:
        return segment(self.program, self.keys, state)

    def lay_out(self, state: FederatedState, ids: np.ndarray | None = None) -> Any:
        """Take a state to the devices; its clients are `ids`, this process's, or else all."""
        ids = np.arange(len(self.slots)) if ids is None else ids
        at = np.zeros(len(self.slots), np.int64)  # others' states are not asked for
        at[ids] = np.arange(len(ids))
        specs = state_specs(self.mesh)

        def spread(leaf: Any) -> Array:
            host = np.asarray(leaf)
            shape = (host.shape[0], len(self.client_of_slot), *host.shape[2:])

            def part(index: Any) -> np.ndarray:
                chains, slots, *rest = index
                entries = at[self.client_of_slot[slots]]
                return host[chains][:, entries][(slice(None), slice(None), *rest)]

            where = NamedSharding(self.mesh, specs.clients)
            return jax.make_array_from_callback(shape, where, part)

        return FederatedState(
            put(state.broadcast, self.mesh, specs.broadcast),
            put(state.server, self.mesh, specs.server),
            jax.tree.map(on_words(spread), state.clients),
        )

    def gather(self, state: Any) -> Any:
        host = on_host(state, self.mesh)
        return host._replace(clients=jax.tree.map(lambda leaf: leaf[:, self.slots], host.clients))

    def lay_out_chains(self, tree: ArrayTree) -> ArrayTree:
        return put(tree, self.mesh, self.chains)

    def to_host(self, tree: ArrayTree) -> ArrayTree:
        return on_host(tree, self.mesh)


class _Ahead(NamedTuple):
    """The states of clients `ids` that are being read for the rounds from `at` on."""

    at: int
    ids: np.ndarray
    table: Future[ArrayTree]


class _Returned(NamedTuple):
    """The states of clients `ids` that a segment returned."""

    ids: np.ndarray
    table: ArrayTree  # leaves [num_chains, num_slots, ...]


class StoredClients:
    """Clients' states stay on the host; only those of coming cohorts are on the device.

    Segments are so short that the states of their cohorts fit on the device. The program is that of
    a run with all states there; only the table in which it looks up states is shorter, and
    `Arrangement.slots` says where a client's state lies in it.

    Attributes and methods are those of `OneDevice`. Between segments ``state.clients`` is
    `_Returned`. It is written before the store is next read or gathered. Writing twice does no
    harm, so after an interrupt the store matches the run's round.
    """

    shared = False
    in_place = True
    finished_rounds: tuple[int, Segment] | None = None

    def __init__(
        self, program: Program, keys: Array, state: FederatedState, store: HostStore
    ) -> None:
        self.keys, self.all_states = keys, state.clients
        self.participation = program.kernel.participation
        self.num_clients = program.data.num_clients
        cohort_size = self.participation.cohort_size
        assert cohort_size is not None  # `sample` checks
        per_slot = max(trees.num_bytes(self.all_states) // self.num_clients, 1)  # of all chains
        per_round = cohort_size * len(keys)
        affordable = store.device_bytes // (per_slot * per_round)
        self.num_ahead = int(max(1, min(affordable, -(-self.num_clients // per_round))))
        self.longest: int | None = self.num_ahead
        self.num_slots = min(per_round * self.num_ahead, self.num_clients)
        self.plain = self.program = self._with_slots(program, np.zeros(0, np.int64))
        self.simulated_shapes = self.shapes = trees.shapes_but_keys(state)
        self.table_shapes = self.shapes._replace(
            clients=jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(
                    (leaf.shape[0], self.num_slots, *leaf.shape[2:]), leaf.dtype
                ),
                state.clients,
            )
        )
        self.reader = ThreadPoolExecutor(1)
        self.ahead: _Ahead | None = None

    def _with_slots(self, program: Program, ids: np.ndarray) -> Program:
        slots = np.zeros(self.num_clients, np.int32)
        slots[ids] = np.arange(len(ids))
        return replace(program, arrangement=replace(program.arrangement, slots=jnp.asarray(slots)))

    def run(self, segment: Work, state: Any, at: int, stop: int) -> Segment:
        ids, table = self._states_for(at, state.clients)
        on_device = state._replace(clients=jax.tree.map(jnp.asarray, table))
        result = segment(self._with_slots(self.program, ids), self.keys, on_device)
        # Read while the device computes; what this segment changes is read again.
        coming = self._cohorts(stop)
        table = self.reader.submit(read, self.all_states, coming, self.num_slots)
        self.ahead = _Ahead(stop, coming, table)
        returned = _Returned(ids, jax.tree.map(np.asarray, result.state.clients))
        return result._replace(state=result.state._replace(clients=returned))

    def _states_for(self, at: int, returned: _Returned | None) -> tuple[np.ndarray, ArrayTree]:
        """Return the clients of the rounds from `at` on, and their states."""
        ahead, self.ahead = self.ahead, None
        table = None if ahead is None else ahead.table.result()  # nothing is read while we write
        self._write(returned)
        if ahead is None or ahead.at != at:
            ids = self._cohorts(at)
            return ids, read(self.all_states, ids, self.num_slots)
        if returned is not None:
            places = np.flatnonzero(np.isin(ahead.ids, returned.ids))
            for leaf, old in self._with_leaves_of(table):
                old[:, places] = leaf[:, ahead.ids[places]]
        return ahead.ids, table

    def _with_leaves_of(self, tree: ArrayTree) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return zip(jax.tree.leaves(self.all_states), jax.tree.leaves(tree), strict=True)

    def _write(self, returned: _Returned | None) -> None:
        if returned is not None:
            write(self.all_states, *returned)

    def _cohorts(self, at: int) -> np.ndarray:
        cohorts = _cohorts_of(
            self.participation,
            self.keys,
            jnp.asarray(at, jnp.int32),
            num_rounds=self.num_ahead,
            num_clients=self.num_clients,
        )
        return np.unique(np.asarray(cohorts))

    def lay_out(self, state: FederatedState) -> Any:
        for leaf, new in self._with_leaves_of(state.clients):
            if leaf is not new:
                leaf[...] = new
        return jax.tree.map(jnp.asarray, state._replace(clients=None))

    def gather(self, state: Any) -> Any:
        self._write(state.clients)
        return state._replace(clients=self.all_states)

    def lay_out_chains(self, tree: ArrayTree) -> ArrayTree:
        return jax.tree.map(jnp.asarray, tree)

    def to_host(self, tree: ArrayTree) -> ArrayTree:
        return jax.tree.map(lambda leaf: leaf if trees.is_key(leaf) else np.asarray(leaf), tree)


class Executor(Protocol):
    """What a run needs of the place where its segments are computed; see `OneDevice`."""

    plain: Program
    program: Program
    table_shapes: Any
    shapes: Any
    simulated_shapes: Any
    longest: int | None
    shared: bool
    in_place: bool
    finished_rounds: tuple[int, Segment] | None

    def run(self, segment: Work, state: Any, at: int, stop: int) -> Segment:
        """Run rounds ``[at, stop)`` from a state that was laid out."""
        ...

    def lay_out(self, state: FederatedState) -> Any:
        """Take the state of all clients, in their own order, to where it is computed with."""
        ...

    def gather(self, state: Any) -> Any:
        """Return a state as it was before `lay_out`."""
        ...

    def lay_out_chains(self, tree: ArrayTree) -> ArrayTree:
        """Take arrays with a leading chain axis to where they are computed with."""
        ...

    def to_host(self, tree: ArrayTree) -> ArrayTree:
        """Return arrays with a leading chain axis as NumPy arrays, typed keys as they are."""
        ...


@runtime_checkable
class Elsewhere(Protocol):
    """Clients whose rows are in no process of the server: `fedmcmc.deploy.Sites`.

    `sample` takes it in place of data.
    """

    def own(self, kernel: FederatedKernel) -> FederatedKernel:
        """Return the kernel as these clients run it: under masks a secure sum."""
        ...

    def begin(
        self, kernel: FederatedKernel, keys: Array, position: ArrayTree, state: Any
    ) -> tuple[Executor, FederatedState, str]:
        """Return where a run is computed, its first state, and a digest that stands for rows."""
        ...


@compiled(static_argnames=("num_rounds", "num_clients"))
def _cohorts_of(
    participation: Participation, keys: Array, at: Array, *, num_rounds: int, num_clients: int
) -> Array:
    """Return the clients of the rounds from `at` on, all chains together, ``[...]``."""

    def cohort(key: Array, round_: Array) -> Array:
        return participation.prepare(cohort_key(key, round_), num_clients).ids

    rounds = at + jnp.arange(num_rounds, dtype=jnp.int32)
    return jax.vmap(lambda key: jax.vmap(lambda r: cohort(key, r))(rounds))(keys)
