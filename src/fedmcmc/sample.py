"""`sample`: run a kernel on data and keep draws."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from tqdm import tqdm

from fedmcmc import streams as random_streams
from fedmcmc import trees
from fedmcmc._mesh_run import MeshRun, check_mesh
from fedmcmc._run import Keeping, Run
from fedmcmc._segments import Collect
from fedmcmc._stored_run import StoredRun
from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState, as_functions
from fedmcmc.checkpoints import Checkpoint
from fedmcmc.data import FederatedData
from fedmcmc.gaussian import Gaussian
from fedmcmc.predictions import predict_bias
from fedmcmc.resuming import alone, checkpoint_of_call
from fedmcmc.samples import Samples
from fedmcmc.simulate import RoundInfo, as_key
from fedmcmc.stopping import StoppingRule
from fedmcmc.stores import HostStore
from fedmcmc.streaming import Accumulator

__all__ = ["local_positions", "sample"]

CACHE_BYTES = 2**20
"""Above this size of all rows, devices of a CPU take clients that move by themselves one by one."""
MANY_CLIENTS, COHORT_BYTES = 32, 2**21
"""So does a CPU that is one device, from so many clients a round and bytes of positions on."""


def local_positions(state: FederatedState, info: RoundInfo) -> ArrayTree:
    """Collect all local iterates of the round, leaves ``[num_local_steps, *event]``.

    For `collect` of `sample`, with kernels that hand one chain from client to client: FSGLD's
    chain is all its local states.
    """
    del state
    return jax.tree.map(lambda leaf: leaf[0], info.clients.local_positions)


def sample(
    rng_key: Array,
    kernel: FederatedKernel,
    data: FederatedData,
    position: ArrayTree | Callable[[Array], ArrayTree] | None = None,
    *,
    num_rounds: int | None = None,
    num_burnin: int = 0,
    thinning: int = 1,
    num_chains: int | None = None,
    collect: Collect | None = None,
    progress: bool = True,
    state: FederatedState | None = None,
    until: StoppingRule | None = None,
    max_rounds: int | None = None,
    surrogates: Gaussian | None = None,
    client_store: HostStore | None = None,
    streams: Mapping[str, Accumulator] | None = None,
    keep_draws: bool = True,
    draws_to: str | Path | None = None,
    checkpoint: Checkpoint | None = None,
    mesh: Mesh | None = None,
    totals: Literal["gather", "psum"] = "gather",
) -> Samples:
    """Run `kernel` on `data` and keep draws.

    Parameters
    ----------
    rng_key
        Key of the run. Chain ``c`` uses ``fold_in(rng_key, c)``, so its draws do not depend on
        the number of chains.
    kernel
        A federated kernel.
    data
        Every client's rows.
    position
        Where each chain starts: a pytree, or ``rng_key -> pytree`` for a start a chain. Not
        needed where `state` is given.
    num_rounds
        Rounds to run, burn-in included; not with `until`.
    num_burnin
        The first rounds, not kept.
    thinning
        Of the rest every `thinning`-th round is kept (the last of each group):
        ``num_draws = (num_rounds - num_burnin) // thinning``.
    num_chains
        Chains, vmapped; by default one, or as many as `state` holds.
    collect
        ``(state, RoundInfo) -> pytree``, what is kept of a round; by default the kernel's draw.
        `fedmcmc.local_positions` keeps all local iterates.
    progress
        Whether to show a progress bar.
    state
        ``samples.state`` of an earlier run to go on from, instead of `position`. With the same
        key the two runs give the very draws of an uninterrupted one.
    until
        A rule that is asked between segments whether the draws so far suffice, instead of
        `num_rounds`; see `fedmcmc.rhat_below`. What it said is in ``samples.stopped``.
    max_rounds
        With `until`: rounds at most, burn-in included. Stopping there warns.
    surrogates
        One `Gaussian` a client for its likelihood (`fedmcmc.surrogates`): what
        `fedmcmc.predict_bias` makes of them is printed before the run.
    client_store
        Where clients' states lie, if not on the device: see `fedmcmc.HostStore`. `collect` then
        sees the states of coming cohorts alone.
    streams
        Accumulators by name (`fedmcmc.streaming`) that take in every kept draw on the device, or
        what `collect` made of it; what they found is in ``samples.streams``.
    keep_draws
        Whether to keep draws and ``info``; without, the memory of a run does not grow with its
        rounds, and `streams` is what it gives.
    draws_to
        A Zarr store to which draws and ``info`` go while the run goes on, in place of memory.
    checkpoint
        Where and how often the run writes down where it is; the same call then goes on after an
        interruption. See `fedmcmc.Checkpoint`, and `fedmcmc.resumable` for many calls.
    mesh
        Devices to run on: each holds the rows and the states of its own clients along the axis
        ``clients`` (balanced by rows), and its own chains along an axis ``chains``, if there is
        one.
    totals
        With `mesh`, how messages are summed: ``"gather"`` sends them all to every device, which
        sums them in the order of one device; ``"psum"`` sends the devices' own sums, which is less,
        and rounds otherwise.

    Returns
    -------
    Samples

    Raises
    ------
    ValueError, TypeError
        On settings or data that do not fit, before anything is compiled; also where the checkpoint
        is that of another run.
    NonFiniteError
        If a chain turns non-finite; the draws before are in its `samples`.
    """
    if not isinstance(kernel, FederatedKernel):
        raise TypeError(f"kernel must be a FederatedKernel, got {type(kernel).__name__}.")
    check_data(data)
    most = _most_rounds(num_rounds, until, max_rounds)
    if num_chains is None:
        num_chains = 1 if state is None else jnp.size(state.broadcast.round)
    counts = dict(num_burnin=num_burnin, thinning=thinning, num_chains=num_chains)
    name = "num_rounds" if until is None else "max_rounds"
    most, num_burnin, thinning, num_chains = check_counts(name, most, **counts)
    if until is not None and num_chains < until.min_chains:
        raise ValueError(
            f"{until.name}: needs num_chains of at least {until.min_chains}, got {num_chains}."
        )
    checkpoint = checkpoint_of_call(checkpoint)
    keeping = _keeping(collect, streams, keep_draws, draws_to, checkpoint, until)
    kernel = as_functions(kernel)
    rows = data.pooled() if kernel.participation.pooled else data
    keys = jax.vmap(lambda c: jax.random.fold_in(as_key(rng_key), c))(jnp.arange(num_chains))
    if client_store is not None:
        _check_store(kernel, client_store)
    if mesh is not None:
        check_mesh(mesh, totals, kernel, data, num_chains)
        if client_store is not None:
            raise ValueError("Give mesh= or client_store=, and not both.")
    sites = None if client_store is None else client_store.directory
    if checkpoint is not None and checkpoint.claims(keeping.draws_to, sites):
        keeping = keeping._replace(replaces_files=True)
    if state is not None:
        _check_state(kernel, rows, keys, state)
        if client_store is not None:
            state = client_store.adopt(state, replace_files=keeping.replaces_files)
    elif client_store is None:
        state = start(kernel, rows, keys, position)
    else:
        state = client_store.start(
            lambda some: start(kernel, some, keys, position),
            rows,
            replace_files=keeping.replaces_files,
        )
    first = int(state.broadcast.round[0])
    if surrogates is not None:
        print(predict_bias(kernel, data, surrogates, round_=first))
    rows = laid_out(kernel, rows, keys, state.broadcast.position)
    run: Run
    if mesh is not None:
        run = MeshRun(kernel, rows, keys, keeping, state, until, mesh, totals)
    elif client_store is None or trees.is_empty(state.clients):
        run = Run(kernel, rows, keys, keeping, state, until)
    else:
        run = StoredRun(kernel, rows, keys, keeping, state, until, client_store)
    with tqdm(total=most, unit="round", disable=not progress) as bar, alone():
        return run.go(num_burnin, most, thinning, bar)


def check_data(data: Any) -> None:
    """Raise unless `data` are a federation's."""
    if not isinstance(data, FederatedData):
        raise TypeError(
            f"data must be a FederatedData (from_clients, from_arrays), got {type(data).__name__}."
        )


def _keeping(
    collect: Collect | None,
    accumulators: Mapping[str, Accumulator] | None,
    keep_draws: bool,
    draws_to: str | Path | None,
    checkpoint: Checkpoint | None,
    until: StoppingRule | None,
) -> Keeping:
    found = dict(accumulators or {})
    for name, accumulator in found.items():
        if not isinstance(name, str) or not isinstance(accumulator, Accumulator):
            raise TypeError(
                "streams must be a mapping of names to accumulators (fedmcmc.streaming.moments()), "
                f"got {name!r}: {type(accumulator).__name__}."
            )
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            f"checkpoint must be a fedmcmc.Checkpoint(directory), got {type(checkpoint).__name__}."
        )
    if draws_to is not None and not keep_draws:
        raise ValueError("Give draws_to=, or keep_draws=False, and not both.")
    if until is not None and (draws_to is not None or not keep_draws):
        raise ValueError("until= judges draws in memory: not with draws_to= or keep_draws=False.")
    path = None if draws_to is None else Path(draws_to)
    return Keeping(collect, found, keep_draws, path, checkpoint)


def _check_store(kernel: FederatedKernel, client_store: Any) -> None:
    if not isinstance(client_store, HostStore):
        raise TypeError(
            f"client_store must be a fedmcmc.HostStore, got {type(client_store).__name__}."
        )
    if kernel.participation.cohort_size is None:
        raise ValueError(
            "With client_store= only a cohort's states are on the device: use a participation that "
            "chooses a cohort, uniform(cohort_size) or categorical(...)."
        )


def laid_out(
    kernel: FederatedKernel, data: FederatedData, keys: Array, positions: ArrayTree
) -> FederatedData:
    """Choose how many clients are computed together, where the data leaves it open.

    `positions` have a leading chain axis. What one client's steps use over and over is to stay in
    the cache: measured in `benchmarks/fed_avg.py`.
    """
    on_cpu = {device.platform for device in keys.devices()} == {"cpu"}
    if not (on_cpu and kernel.clients_apart.value and data.at_a_time is None):
        return data

    def num_bytes(tree: ArrayTree) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    if data.mesh is not None:
        large = num_bytes(data.rows) >= CACHE_BYTES
    else:
        clients = kernel.participation.cohort_size or data.num_clients
        size = clients * num_bytes(positions) // len(keys)
        large = clients >= MANY_CLIENTS and size >= COHORT_BYTES
    return data.chunked(1) if large else data


def _most_rounds(num_rounds: int | None, until: StoppingRule | None, max_rounds: int | None) -> int:
    """Return the number of rounds at most; raise unless one way to end a run is given."""
    if until is None:
        if num_rounds is None or max_rounds is not None:
            raise ValueError("Give num_rounds=, or until= and max_rounds=.")
        return num_rounds
    if not isinstance(until, StoppingRule):
        raise TypeError(
            f"until must be a stopping rule (fedmcmc.rhat_below), got {type(until).__name__}."
        )
    if max_rounds is None or num_rounds is not None:
        raise ValueError("With until= give max_rounds= in place of num_rounds=.")
    return max_rounds


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
    return tuple(int(count) for count in given.values())


def _check_state(
    kernel: FederatedKernel, data: FederatedData, keys: Array, state: FederatedState
) -> None:
    if jnp.shape(state.broadcast.round) != (len(keys),):
        raise ValueError(
            f"state does not fit {len(keys)} chains: its leaves need a first axis of that length, "
            f"as in Samples.state; its round has shape {jnp.shape(state.broadcast.round)}."
        )
    # Also runs the kernel's own checks of the data, as a fresh start would.
    init = jax.vmap(kernel.init, in_axes=(0, 0, None))
    wanted = jax.eval_shape(
        lambda keys_, place: init(keys_, place, data), keys, state.broadcast.position
    )
    difference = trees.first_difference(wanted, state)
    if difference:
        raise ValueError(
            f"state does not fit this kernel, data and {len(keys)} chains (switch makes one that "
            f"does of another kernel's): {difference}."
        )


def start(
    kernel: FederatedKernel, data: FederatedData, keys: Array, position: ArrayTree
) -> FederatedState:
    """Return the state of every chain before the first round, leaves ``[num_chains, ...]``."""
    init_keys, places = start_positions(keys, position)
    return jax.vmap(kernel.init, in_axes=(0, 0, None))(init_keys, places, data)


def start_positions(keys: Array, position: ArrayTree) -> tuple[Array, ArrayTree]:
    """Return the keys of every chain's `init` and its position, leaves ``[num_chains, ...]``."""
    if position is None:
        raise ValueError("Give a position to start from, or the state of an earlier run.")
    place_keys, init_keys = (
        jax.vmap(lambda key, i=i: random_streams.draw_key(key, jnp.uint32(2**32 - 1 - i)))(keys)
        for i in range(2)
    )
    if callable(position):
        places = jax.vmap(position)(place_keys)
    else:
        places = jax.tree.map(
            lambda x: jnp.broadcast_to(jnp.asarray(x), (len(keys), *jnp.shape(x))), position
        )
    places = jax.tree.map(trees.as_float, places)
    if not bool(trees.all_finite(places)):
        raise ValueError("The start position holds NaN or infinite values.")
    return init_keys, places
