"""How runs start: checks of arguments, first states, and the executor that a placement takes."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState, check_start, compiled
from fedmcmc.data import ClientLoader, FederatedData, constructor_of
from fedmcmc.gaussian import Gaussian
from fedmcmc.placement import Placement, combined, is_first, place
from fedmcmc.pytrees import trees
from fedmcmc.random import init_key, start_key
from fedmcmc.rounds import TOGETHER, Arrangement, Collect, Program, initialize
from fedmcmc.runs._executors import Elsewhere, Executor, MeshDevices, OneDevice, StoredClients
from fedmcmc.runs._watch import Messages, warn
from fedmcmc.storage import digest_of_rows
from fedmcmc.tuning import predict_bias

MANY_CLIENTS, COHORT_BYTES = 32, 2**21
"""From so many clients per round and bytes of positions on, a CPU takes them one by one."""
CACHE_BYTES = 2**20
"""So do many devices of a CPU, from so many bytes of rows on."""


def check_data(data: Any) -> None:
    """Raise unless `data` are a federation's."""
    if not isinstance(data, FederatedData):
        raise TypeError(
            "data must be a FederatedData (from_clients, from_arrays; for sample also a "
            f"ClientLoader), got {type(data).__name__}. {constructor_of(data)}"
        )


def check_counts(rounds: str, most: int, **given: Any) -> tuple[int, ...]:
    """Return the counts as integers, the one called `rounds` first; raise if one is off."""
    given = {rounds: most, **given}
    for name, count in given.items():
        least = 0 if name == "num_burnin" else 1
        if int(count) != count or count < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {count!r}.")
    if given["num_burnin"] > most:
        raise ValueError(
            f"{rounds} counts burn-in too: got {rounds}={most}, num_burnin={given['num_burnin']}."
        )
    after = most - given["num_burnin"]
    if 0 < after < given["thinning"]:
        raise ValueError(
            f"thinning={given['thinning']} keeps no draw of the {after} rounds after burn-in."
        )
    return tuple(int(count) for count in given.values())


def check_state(
    kernel: FederatedKernel,
    data: FederatedData,
    keys: Array,
    state: FederatedState,
    arrangement: Arrangement = TOGETHER,
) -> None:
    if jnp.shape(state.broadcast.round) != (len(keys),):
        raise ValueError(
            f"state does not fit {len(keys)} chains: its leaves need a first axis of that length, "
            f"as in Samples.state; its round has shape {jnp.shape(state.broadcast.round)}."
        )
    # Also runs the kernel's own checks of the data, as a fresh start would.
    wanted = jax.eval_shape(
        lambda keys_, positions: _every_chain(kernel, data, keys_, positions, arrangement),
        keys,
        state.broadcast.position,
    )
    difference = trees.first_difference(wanted, state)
    if difference:
        raise ValueError(
            f"state does not fit this kernel, data and {len(keys)} chains (switch makes one that "
            f"does of another kernel's): {difference}."
        )


def start(
    kernel: FederatedKernel,
    data: FederatedData,
    keys: Array,
    position: ArrayTree,
    arrangement: Arrangement = TOGETHER,
) -> FederatedState:
    """Return the state of every chain before the first round, leaves ``[num_chains, ...]``."""
    return _every_chain(kernel, data, *start_positions(keys, position), arrangement)


def _every_chain(
    kernel: FederatedKernel,
    data: FederatedData,
    keys: Array,
    positions: ArrayTree,
    arrangement: Arrangement,
) -> FederatedState:
    if arrangement.partial or arrangement.clients_at_a_time is not None:
        return _mapped(kernel, data, keys, positions, arrangement)
    # Where the kernel's own numbers are known: a program knows their shapes alone.
    first = jax.tree.map(lambda leaf: leaf[0], positions)
    check_start(kernel, keys[0], first, data.federation)
    return _together(kernel, data, keys, positions, arrangement)


def _mapped(
    kernel: FederatedKernel,
    data: FederatedData,
    keys: Array,
    positions: ArrayTree,
    arrangement: Arrangement,
) -> FederatedState:
    def one(key: Array, position: ArrayTree, rows: FederatedData) -> FederatedState:
        return initialize(kernel, key, position, rows, arrangement, combine=combined)

    return jax.vmap(one, in_axes=(0, 0, None))(keys, positions, data)


# One program: operation by operation, some starts took longer to compile than the rounds.
_together = compiled(_mapped)


def start_positions(keys: Array, position: ArrayTree) -> tuple[Array, ArrayTree]:
    """Return the keys of every chain's `init` and its position, leaves ``[num_chains, ...]``."""
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


def chosen(
    kernel: FederatedKernel,
    data: FederatedData,
    arrangement: Arrangement,
    keys: Array,
    positions: ArrayTree,
    *,
    on_many: bool = False,
) -> Arrangement:
    """Choose how many clients are computed together, where the arrangement leaves it open.

    `positions` have a leading chain axis; `on_many` says whether there are several devices. What
    one client's steps use over and over is to stay in the cache: measured in
    `benchmarks/fed_avg.py` for one device and in `benchmarks/fa_hmc.py` for two.
    """
    on_cpu = {device.platform for device in keys.devices()} == {"cpu"}
    if not (on_cpu and kernel.traits.has_local_steps and arrangement.clients_at_a_time is None):
        return arrangement
    clients = kernel.participation.cohort_size or data.num_clients
    size = clients * trees.num_bytes(positions) // len(keys)
    large = clients >= MANY_CLIENTS and size >= COHORT_BYTES
    # One device per core: what is computed together is not shared out over cores any more.
    large |= on_many and trees.num_bytes(data.rows) >= CACHE_BYTES
    return replace(arrangement, clients_at_a_time=1) if large else arrangement


def begin(
    kernel: FederatedKernel,
    data: FederatedData | ClientLoader | Elsewhere,
    keys: Array,
    placement: Placement,
    *,
    collect: Collect | None,
    keeps_latents: bool,
    position: ArrayTree,
    state: FederatedState | None,
    surrogates: Gaussian | None,
    has_checkpoint: bool,
    replaces_files: bool,
) -> tuple[Executor, Any, str, Messages]:
    """Return the executor of a run, the first state there, and the digest of the rows if needed.

    Last, what it warned of.

    Raises
    ------
    ValueError
        If surrogates are to predict from rows that no process has whole.
    """
    messages: Messages = ()
    executor: Executor
    if isinstance(data, Elsewhere):
        _check_elsewhere(placement, collect, keeps_latents)
        executor, state, digest = data.begin(kernel, keys, position, state)
        if surrogates is not None:
            messages = _warn_of_bias(kernel, data, state, surrogates)
        return executor, state, digest, messages
    mesh, store, by_client = placement.mesh, placement.client_store, isinstance(data, ClientLoader)
    if keeps_latents:
        _check_latents(kernel, placement)
    if mesh is not None:
        if surrogates is not None and by_client:
            raise ValueError(
                "surrogates= predicts from all rows, which a ClientLoader has in no one place."
            )
        arrangement = placement.arrangement(data)
        placed = place(data, arrangement, mesh, placement.totals)
        rows, own, ids = placed.unplaced, placed.local, placed.ids
        first = placed.local_arrangement
    else:
        data = data.load() if isinstance(data, ClientLoader) else data
        pooled = kernel.participation.pooled
        first = arrangement = TOGETHER if pooled else placement.arrangement(data)
        rows = own = data.pooled() if pooled else data
        ids = np.arange(rows.num_clients)
    # Now, so that rows that lie on devices need not be kept beside these.
    digest = digest_of_rows(own, ids if by_client else None) if has_checkpoint else ""
    if state is not None:
        check_state(kernel, own, keys, state, arrangement)
        ids = np.arange(rows.num_clients)
        if store is not None:
            state = store.adopt(state, replace_files=replaces_files)
    elif store is None:
        state = start(kernel, own, keys, position, first)
    else:
        state = store.start(
            lambda ids: start(kernel, own, keys, position, replace(first, members=ids)),
            rows.num_clients,
            replace_files=replaces_files,
        )
    if surrogates is not None and isinstance(data, FederatedData) and is_first():
        messages = _warn_of_bias(kernel, data, state, surrogates)
    starts, on_many = state.broadcast.position, mesh is not None and mesh.size > 1
    arrangement = chosen(kernel, rows, arrangement, keys, starts, on_many=on_many)
    program = Program(kernel, rows, arrangement, collect, keeps_latents)
    state = jax.tree.map(trees.strong, state)
    if mesh is not None:
        mesh_devices = MeshDevices(placed, program, keys, state)
        return mesh_devices, mesh_devices.lay_out(state, ids), digest, messages
    executor = OneDevice(program, keys, state)
    if store is not None and not trees.is_empty(state.clients):
        executor = StoredClients(program, keys, state, store)
    return executor, executor.lay_out(state), digest, messages


def _warn_of_bias(
    kernel: FederatedKernel, data: Any, state: FederatedState, surrogates: Gaussian
) -> Messages:
    round_ = int(np.asarray(state.broadcast.round)[0])
    predicted = predict_bias(kernel, data, surrogates, round_=round_)
    return warn(str(predicted), depth=5) if predicted.is_off else ()


def _check_latents(kernel: FederatedKernel, placement: Placement) -> None:
    """Raise `ValueError` where latents cannot be kept."""
    if not kernel.traits.keeps_latents:
        raise ValueError(
            "Record(local=True) is for kernels that move latents of groups along with the shared "
            "parameters: fedmcmc.lsd(posterior, refresh=...) and fedmcmc.fed_gibbs. Of fed_ep "
            "draw them afterwards: fedmcmc.local_draws(posterior, data, samples.final_draws, ...)."
        )
    if placement.mesh is not None or placement.client_store is not None:
        raise ValueError(
            "Record(local=True) needs all clients' states on one device: leave out mesh= and "
            "client_store=. The last latents are in samples.state.clients."
        )


def _check_elsewhere(placement: Placement, collect: Collect | None, keeps_latents: bool) -> None:
    """Raise `ValueError` where a run asks for what clients elsewhere keep to themselves."""
    if keeps_latents:
        raise ValueError("Record(local=True) reads latents, which stay at their sites.")
    if collect is not None:
        raise ValueError("collect= reads what clients keep, which stays at their sites.")
    if placement != Placement():
        raise ValueError("placement= and mesh= are for clients in this program, not at sites.")
