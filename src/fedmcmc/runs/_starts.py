"""Start of a run: checks of arguments, initial states, and the choice of an executor."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.data import ClientLoader, FederatedData, constructor_of
from fedmcmc.gaussian import Gaussian
from fedmcmc.placement import (
    MAX_BUCKET_OPERATIONS,
    NUM_BUCKETS,
    PlacedData,
    Placement,
    choose_mesh,
    devices_of_run,
    has_idle_cores,
    idle_cores_hint,
    is_first,
    merge_processes,
    place,
    spreads_chains_only,
)
from fedmcmc.pytrees import num_operations, schedules, trees
from fedmcmc.random import init_key, start_key
from fedmcmc.rounds import SINGLE_DEVICE, Collect, Layout, Program, initialize
from fedmcmc.runs._executors import (
    ChainDevices,
    Executor,
    MeshDevices,
    RemoteClients,
    StoredClients,
)
from fedmcmc.runs._watch import Messages, warn
from fedmcmc.storage import digest_of_rows
from fedmcmc.types import ArrayTree, FederatedKernel, FederatedState, check_start, compiled

MANY_CLIENTS, COHORT_BYTES = 32, 2**21
"""Least clients per round, and bytes of their positions, for a CPU to compute clients one by one.

The bytes alone decide whether it computes chains one by one.
"""
CACHE_BYTES = 2**20
"""Least bytes of rows for several devices of a CPU to compute clients one by one."""


def check_data(data: object) -> None:
    """Raise `TypeError` unless `data` is a `FederatedData`."""
    if not isinstance(data, FederatedData):
        raise TypeError(
            "data must be a FederatedData (from_clients, from_arrays; for sample also a "
            f"ClientLoader), got {type(data).__name__}. {constructor_of(data)}"
        )


def check_counts(rounds_name: str, num_rounds: int, **counts: int) -> tuple[int, ...]:
    """Return the counts as integers, `num_rounds` before the others; raise if one is invalid."""
    for name, count in {rounds_name: num_rounds, **counts}.items():
        minimum = 0 if name == "num_burnin" else 1
        if int(count) != count or count < minimum:
            raise ValueError(f"{name} must be an integer of at least {minimum}, got {count!r}.")
    num_burnin, thinning = counts["num_burnin"], counts["thinning"]
    if num_burnin > num_rounds:
        raise ValueError(
            f"{rounds_name} includes burn-in: got {rounds_name}={num_rounds}, "
            f"num_burnin={num_burnin}."
        )
    after = num_rounds - num_burnin
    if 0 < after < thinning:
        raise ValueError(f"thinning={thinning} keeps no draw of the {after} rounds after burn-in.")
    return tuple(int(count) for count in (num_rounds, *counts.values()))


def check_state(
    kernel: FederatedKernel,
    data: FederatedData,
    keys: Array,
    state: FederatedState,
    layout: Layout = SINGLE_DEVICE,
) -> None:
    if jnp.shape(state.broadcast.round) != (len(keys),):
        raise ValueError(
            f"state does not fit {len(keys)} chains: its leaves need a first axis of that length, "
            f"as in Samples.state; its round has shape {jnp.shape(state.broadcast.round)}."
        )
    # This also runs the kernel's checks of the data.
    expected = jax.eval_shape(
        lambda keys_, positions: _init_chains(kernel, data, keys_, positions, layout),
        keys,
        state.broadcast.position,
    )
    difference = trees.first_difference(expected, state)
    if difference:
        raise ValueError(
            f"state does not fit this kernel, data and {len(keys)} chains (use fedmcmc.switch to "
            f"convert the state of another kernel): {difference}."
        )


def start(
    kernel: FederatedKernel,
    data: FederatedData,
    keys: Array,
    position: ArrayTree,
    layout: Layout = SINGLE_DEVICE,
) -> FederatedState:
    """Return the state of every chain before the first round, leaves ``[num_chains, ...]``."""
    return _init_chains(kernel, data, *start_positions(keys, position), layout)


def _init_chains(
    kernel: FederatedKernel,
    data: FederatedData,
    keys: Array,
    positions: ArrayTree,
    layout: Layout,
) -> FederatedState:
    if layout.partial or layout.clients_at_a_time is not None:
        return _vmap_init(kernel, data, keys, positions, layout)
    # The check needs values, which are not available inside of a compiled function.
    position = jax.tree.map(lambda leaf: leaf[0], positions)
    check_start(kernel, keys[0], position, data.federation)
    return _compiled_init(kernel, data, keys, positions, layout)


def _vmap_init(
    kernel: FederatedKernel,
    data: FederatedData,
    keys: Array,
    positions: ArrayTree,
    layout: Layout,
) -> FederatedState:
    def init(key: Array, position: ArrayTree, rows: FederatedData) -> FederatedState:
        return initialize(kernel, key, position, rows, layout, combine=merge_processes)

    return jax.vmap(init, in_axes=(0, 0, None))(keys, positions, data)


# One program, because compiling each operation separately took longer than the rounds.
_compiled_init = compiled(_vmap_init)


def start_positions(keys: Array, position: ArrayTree) -> tuple[Array, ArrayTree]:
    """Return the keys of the chains' `init` and their positions, leaves ``[num_chains, ...]``."""
    if position is None:
        raise ValueError("Give a position to start from, or the state of an earlier run.")
    position_keys, init_keys = (jax.vmap(fn)(keys) for fn in (start_key, init_key))
    if callable(position):
        positions = jax.vmap(lambda key: trees.as_floats(position(key), "position(rng_key)"))(
            position_keys
        )
    else:
        positions = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (len(keys), *jnp.shape(x))),
            trees.as_floats(position, "position"),
        )
    if not bool(trees.all_finite(positions)):
        raise ValueError("The start position holds NaN or infinite values.")
    return init_keys, positions


def choose_layout(
    kernel: FederatedKernel,
    data: FederatedData,
    layout: Layout,
    keys: Array,
    positions: ArrayTree,
    *,
    on_many: bool = False,
) -> Layout:
    """Choose what a device of a CPU computes together, as far as the layout leaves it open.

    `positions` have a leading chain axis; `on_many` is true for several devices. If clients or
    chains are computed one by one, data of a client's local steps stay in the cache: see
    `benchmarks/fed_avg.py` for one device, `benchmarks/fa_hmc.py` for two and
    `benchmarks/fed_ep.py` for chains.
    """
    on_cpu = {device.platform for device in keys.devices()} == {"cpu"}
    if not (on_cpu and kernel.traits.has_local_steps):
        return layout
    num_clients = kernel.participation.cohort_size or data.num_clients
    size = num_clients * trees.num_bytes(positions) // len(keys)
    layout = replace(layout, chains_one_by_one=size >= COHORT_BYTES)
    if layout.clients_at_a_time is not None:
        return layout
    is_large = num_clients >= MANY_CLIENTS and size >= COHORT_BYTES
    # With one device per core, computing clients together no longer uses several cores.
    is_large |= on_many and trees.num_bytes(data.rows) >= CACHE_BYTES
    return replace(layout, clients_at_a_time=1) if is_large else layout


class Start(NamedTuple):
    """Start of a run.

    Attributes
    ----------
    executor, state
        Executor of the run and its first state.
    digest
        Digest of the rows, empty without a checkpoint.
    placement
        Devices of the run.
    hint
        Hint at idle cores, or empty.
    messages
        Warnings.
    """

    executor: Executor
    state: Any
    digest: str
    placement: Placement
    hint: str = ""
    messages: Messages = ()


def begin(
    kernel: FederatedKernel,
    data: FederatedData | ClientLoader | RemoteClients,
    keys: Array,
    placement: Placement | None,
    *,
    num_rounds: int,
    collect: Collect | None,
    keeps_latents: bool,
    position: ArrayTree,
    state: FederatedState | None,
    surrogates: Gaussian | None,
    has_checkpoint: bool,
    replaces_files: bool,
) -> Start:
    """Return the start of a run; without a placement, choose devices and clients together."""
    given = placement
    messages: Messages = ()
    executor: Executor
    placement = Placement() if placement is None else placement
    if isinstance(data, RemoteClients):
        _check_remote(placement, collect, keeps_latents)
        executor, state, digest = data.start_run(kernel, keys, position, state)
        if surrogates is not None:
            messages = _warn_of_bias(kernel, data, state, surrogates)
        return Start(executor, state, digest, placement, messages=messages)
    mesh, store, by_client = placement.mesh, placement.client_store, isinstance(data, ClientLoader)
    if keeps_latents:
        _check_latents(kernel, placement)
    pooled = kernel.participation.pooled
    layout = local_layout = SINGLE_DEVICE if pooled else placement.layout(data)
    placed: PlacedData | None = None
    if mesh is not None and isinstance(data, ClientLoader):
        if surrogates is not None:
            raise ValueError(
                "surrogates= needs all rows in one process: give a FederatedData instead of a "
                "ClientLoader, or leave out surrogates=."
            )
        placed = place(data, layout, mesh, placement.totals)
        rows, local, ids = placed.unplaced, placed.local, placed.ids
        local_layout = placed.local_layout
    else:
        data = data.load() if isinstance(data, ClientLoader) else data
        rows = local = data.pooled() if pooled else data
        ids = np.arange(rows.num_clients)
    # Computed here, so that the copy of the rows on the host can be released.
    digest = digest_of_rows(local, ids if by_client else None) if has_checkpoint else ""
    if state is not None:
        check_state(kernel, local, keys, state, layout)
        ids = np.arange(rows.num_clients)
        if store is not None:
            state = store.adopt(state, replace_files=replaces_files)
    elif store is None:
        state = start(kernel, local, keys, position, local_layout)
    else:
        state = store.start(
            lambda ids: start(kernel, local, keys, position, replace(local_layout, members=ids)),
            rows.num_clients,
            replace_files=replaces_files,
        )
    if surrogates is not None and isinstance(data, FederatedData) and is_first():
        messages = _warn_of_bias(kernel, data, state, surrogates)
    state = jax.tree.map(trees.strip_weak_type, state)
    program, hint = Program(kernel, rows, layout, collect, keeps_latents), ""
    if given is None:
        placement, hint = _choose_devices(program, keys, state, num_rounds)
        mesh = placement.mesh
        layout = layout if pooled else placement.layout(rows)
    positions, on_many = state.broadcast.position, mesh is not None and mesh.size > 1
    layout = choose_layout(kernel, rows, layout, keys, positions, on_many=on_many)
    program = replace(program, layout=layout)
    if mesh is None:
        executor = Executor(program, keys, state)
        if store is not None and not trees.is_empty(state.clients):
            executor = StoredClients(program, keys, state, store)
    elif spreads_chains_only(mesh):
        executor = ChainDevices(program, keys, state, mesh)
    else:
        if placed is None:
            placed = place(rows, layout, mesh, placement.totals)
        executor = MeshDevices(placed, program, keys, state)
        return Start(executor, executor.lay_out(state, ids), digest, placement, hint, messages)
    return Start(executor, executor.lay_out(state), digest, placement, hint, messages)


def _choose_devices(
    program: Program, keys: Array, state: FederatedState, num_rounds: int
) -> tuple[Placement, str]:
    """Return the fastest placement on the devices of this process, and a hint at idle cores."""
    devices, has_idle = devices_of_run(keys), has_idle_cores()
    if program.keeps_latents or (len(devices) == 1 and not has_idle):
        return Placement(), ""
    participation, data = program.kernel.participation, program.data
    operations = _operations(program, keys, state)
    num_clients = participation.cohort_size or data.num_clients
    if program.collect is not None:
        num_clients = 1  # `collect` reads the states of all clients of a chain
    if has_idle:
        return Placement(), idle_cores_hint(len(keys), num_clients, operations, num_rounds)
    mesh = choose_mesh(devices, len(keys), num_clients, operations)
    if mesh is None:
        return Placement(), ""
    if not spreads_chains_only(mesh):
        return Placement(mesh, totals="psum"), ""
    grouped = Placement(mesh, num_buckets=NUM_BUCKETS)
    if participation.cohort_size is None and not participation.pooled:
        in_groups = replace(program, layout=grouped.layout(data))
        if _operations(in_groups, keys, state) <= MAX_BUCKET_OPERATIONS * operations:
            return grouped, ""
    return Placement(mesh), ""


def _operations(program: Program, keys: Array, state: FederatedState) -> int:
    """Return the number of operations of a round of one chain."""
    # `Run` needs the same trace.
    tabulated = replace(program, kernel=schedules.tabulate(program.kernel, 0, 1, 0))
    return num_operations(tabulated.traced_round(keys, trees.shapes_but_keys(state)).jaxpr)


def _warn_of_bias(
    kernel: FederatedKernel, data: object, state: FederatedState, surrogates: Gaussian
) -> Messages:
    round_ = int(np.asarray(state.broadcast.round)[0])
    from fedmcmc.tuning import predict_bias  # few runs need it

    predicted = predict_bias(kernel, data, surrogates, round_=round_)
    return warn(str(predicted), depth=5) if predicted.is_biased else ()


def _check_latents(kernel: FederatedKernel, placement: Placement) -> None:
    """Raise `ValueError` if latents cannot be recorded."""
    if not kernel.traits.keeps_latents:
        raise ValueError(
            "Record(local=True) is for kernels that sample latents of groups together with the "
            "shared parameters: fedmcmc.lsd(posterior, refresh=...) and fedmcmc.fed_gibbs. For "
            "fed_ep, draw latents after the run with fedmcmc.local_draws(posterior, data, "
            "samples.final_draws, rng_key=...)."
        )
    if placement.mesh is not None or placement.client_store is not None:
        raise ValueError(
            "Record(local=True) needs all clients' states on one device: leave out mesh= and "
            "client_store=. The last latents are in samples.state.clients."
        )


def _check_remote(placement: Placement, collect: Collect | None, keeps_latents: bool) -> None:
    """Raise `ValueError` if a run needs data that remote clients do not send."""
    if keeps_latents:
        raise ValueError("Record(local=True) reads latents, which stay at their sites.")
    if collect is not None:
        raise ValueError("collect= reads clients' states, which stay at their sites.")
    if placement != Placement():
        raise ValueError("placement= and mesh= are for simulated clients, not for sites.")
