"""`sample`: run a kernel on data and keep draws."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from tqdm import tqdm

from fedmcmc._checks import expect
from fedmcmc.data import ClientLoader, FederatedData, in_words
from fedmcmc.diagnostics import DiagnosisWarning, StoppingRule
from fedmcmc.gaussian import Gaussian
from fedmcmc.placement import Placement, check_fits, has_other_processes, is_first
from fedmcmc.random import as_key
from fedmcmc.records import Record, Samples
from fedmcmc.rounds import Collect, RoundInfo
from fedmcmc.runs._executors import RemoteClients
from fedmcmc.runs._interrupts import Interrupts
from fedmcmc.runs._run import Run, Settings
from fedmcmc.runs._starts import begin, check_counts, check_data
from fedmcmc.runs._unjudged import add_reason, missing_target
from fedmcmc.runs._watch import finish, warn
from fedmcmc.storage import (
    Checkpoint,
    checkpoint_of_call,
    hands_on_interrupts,
    lock_checkpoint,
    without_resumable,
)
from fedmcmc.types import ArrayTree, FederatedKernel, FederatedState, as_functions


def local_positions(state: FederatedState, info: RoundInfo) -> ArrayTree:
    """Collect the local iterates of the cohort's first client, ``[num_local_steps, *event]``.

    Use it as `collect` of `sample` for kernels that visit one client per round, such as FSGLD.
    Other kernels lose the iterates of all other clients.
    """
    del state
    return jax.tree.map(lambda leaf: leaf[0], info.clients.local_positions)


def sample(
    rng_key: Array,
    kernel: FederatedKernel,
    data: FederatedData | ClientLoader | RemoteClients,
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
    record: Record | None = None,
    checkpoint: Checkpoint | None = None,
    mesh: Mesh | None = None,
    placement: Placement | None = None,
) -> Samples:
    """Run `kernel` on `data` and return its draws; problems cause a `SamplingWarning`.

    Parameters
    ----------
    rng_key
        Key of the run. Chain ``c`` uses ``fold_in(rng_key, c)``, so its draws do not depend on the
        number of chains (except with JAX's ``rbg`` keys).
    kernel, data
        Federated kernel, and every client's rows; or a `ClientLoader`, from which each process
        loads its own clients if there is a `mesh`; or real sites (`fedmcmc.deploy.Sites`).
    position
        Initial position, unless there is a `state`: a pytree, or a function ``rng_key -> pytree``.
    num_rounds
        Number of rounds, including burn-in.
    num_burnin, thinning
        Number of initial rounds without draws, and number of rounds per draw after them; the last
        of these rounds is kept.
    num_chains
        Number of chains, by default one, or the number of chains in `state`.
    collect
        Function ``(state, RoundInfo) -> pytree`` whose result is kept instead of the kernel's draw.
        `fedmcmc.runs.local_positions` keeps the iterates of the client that a round visits.
    state
        ``samples.state`` of an earlier run, which continues. The same `rng_key` gives the draws of
        an uninterrupted run.
    until, max_rounds
        Stopping rule (`fedmcmc.rhat_below`) instead of `num_rounds`, and maximum number of rounds.
    surrogates
        One `Gaussian` per client, with which `fedmcmc.predict_bias` predicts a bias before the run.
    record, checkpoint
        Recorded quantities besides draws in memory (`fedmcmc.Record`), and directory and interval
        of checkpoints, from which the same call continues an interrupted run
        (`fedmcmc.Checkpoint`).
    progress
        If true, a progress bar is shown.
    mesh, placement
        Devices of the run, by default all devices of a CPU on which the run is faster
        (`fedmcmc.use_all_cores`). ``mesh=mesh`` is short for ``placement=Placement(mesh=mesh)``.

    Raises
    ------
    ValueError, TypeError
        If settings, data or the checkpoint (`CheckpointError`) do not fit, before compilation.
    NonFiniteError
        If a chain turns non-finite; the draws before are in its `samples`.
    """
    if not isinstance(kernel, FederatedKernel):
        raise TypeError(f"kernel must be a FederatedKernel, got {type(kernel).__name__}.")
    if not isinstance(data, ClientLoader | RemoteClients):
        check_data(data)
    limit = _round_limit(num_rounds, until, max_rounds)
    if num_chains is None:
        num_chains = 1 if state is None else jnp.size(state.broadcast.round)
    counts = dict(num_burnin=num_burnin, thinning=thinning, num_chains=num_chains)
    name = "num_rounds" if until is None else "max_rounds"
    limit, num_burnin, thinning, num_chains = check_counts(name, limit, **counts)
    if until is not None and num_chains < until.min_chains:
        raise ValueError(
            f"{until.name}: needs num_chains of at least {until.min_chains}, got {num_chains}."
        )
    if until is not None and until.reads == "info" and not kernel.traits.approximates:
        raise ValueError(
            f"{until.name}: needs a kernel with an approximation, such as fedmcmc.fed_ep."
        )
    kernel = as_functions(kernel)
    if isinstance(data, RemoteClients):
        kernel = data.adapt_kernel(kernel)
    keys = jax.vmap(lambda c: jax.random.fold_in(as_key(rng_key), c))(jnp.arange(num_chains))
    if placement is not None:
        expect(placement, Placement, "placement")
        if mesh is not None:
            raise ValueError("Give mesh= or placement=, not both: Placement(mesh=mesh, ...).")
    elif mesh is not None:
        placement = Placement(mesh=mesh)
    record = Record() if record is None else record
    expect(record, Record, "record")
    given = Placement() if placement is None else placement
    check_fits(given, kernel, num_chains)
    client_store = given.client_store
    store_directory = None if client_store is None else client_store.directory
    if has_other_processes() and given.mesh is None:
        if any(x is not None for x in (checkpoint, record.draws_to, store_directory)):
            raise ValueError(
                "All processes of this run would write the same files (checkpoint=, draws_to=, the "
                "store's directory): give mesh=, over which they share one run. If a mesh is not "
                "possible (pooled rows, a client_store), leave these files out."
            )
        checkpoint_of_call(None)  # `resumable` counts this call as it does in a single process
    else:
        checkpoint = checkpoint_of_call(checkpoint)
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            f"checkpoint must be a fedmcmc.Checkpoint(directory), got {type(checkpoint).__name__}."
        )
    if until is not None and (record.draws_to is not None or not record.keep_draws):
        raise ValueError("until= needs the draws in memory: remove draws_to= or keep_draws=False.")
    # The lock comes before any other access to the disk.
    with Interrupts() as interrupts, lock_checkpoint(checkpoint):
        replaces_files = (
            checkpoint is not None
            and is_first()
            and checkpoint.claims(record.draws_to, store_directory)
        )
        begun = begin(
            kernel,
            data,
            keys,
            placement,
            num_rounds=limit,
            collect=collect,
            keeps_latents=record.local,
            position=position,
            state=state,
            surrogates=surrogates,
            has_checkpoint=checkpoint is not None,
            replaces_files=replaces_files,
        )
        source: Any = data
        source = source if isinstance(data, ClientLoader) else source.federation
        settings = Settings(
            num_clients=source.num_clients,
            num_rounds=limit,
            num_burnin=num_burnin,
            thinning=thinning,
            record=record,
            until=until,
            placement=begun.placement,
            checkpoint=checkpoint,
            replaces_files=replaces_files,
            reraises_interrupts=hands_on_interrupts(checkpoint),
            description={
                **_describe_data(kernel, data),
                "method": kernel.name,
                "kernel": str(kernel),
                "data": str(data),
                "chains": num_chains,
                "rounds": f"{limit:,}" if until is None else f"at most {limit:,}",
                "burn-in rounds, not kept": f"{num_burnin:,}",
                "rounds per draw (thinning)": thinning,
                "starts": "from a position" if state is None else "where an earlier run ended",
                "ends": "after these rounds" if until is None else f"when {until.name}",
                "record": str(record),
                "checkpoints": "none" if checkpoint is None else "written",
            },
            warnings=begun.messages,
        )
        run = Run(begun.executor, begun.state, begun.digest, keys, settings)
        where = str(run.chosen_placement())
        if progress and begun.hint:
            tqdm.write(f"{where}; {begun.hint}", file=sys.stderr)
        bar = tqdm(total=limit, unit="round", desc=where, disable=not progress)
        with bar, without_resumable():
            samples = run.execute(bar, interrupts)
        if samples.local is not None and isinstance(data, FederatedData):
            samples = replace(samples, local_mask=data.group_mask)
        has_positions = collect is None
        samples = finish(
            samples,
            kernel,
            keys,
            data,
            start=run.initial_scale,
            has_positions=has_positions,
            interrupts=interrupts,
            reraises_interrupts=settings.reraises_interrupts,
        )
        samples = add_reason(samples, kernel, has_positions=has_positions)
        if has_positions and (missing := missing_target(samples.draws, kernel)):
            messages = warn(missing, depth=3, category=DiagnosisWarning)
            samples = replace(samples, warnings=samples.warnings + messages)
        if interrupts.num_held:
            if settings.reraises_interrupts or begun.executor.shared:
                raise KeyboardInterrupt
            messages = warn("Interrupted while the run ended; returning all draws.", depth=3)
            samples = replace(samples, warnings=samples.warnings + messages)
        return samples


def _describe_data(
    kernel: FederatedKernel, data: FederatedData | ClientLoader | RemoteClients
) -> dict[str, str]:
    """Return names of clients, columns and outcome, if available."""
    names = in_words(data) if isinstance(data, FederatedData) else {}
    outcome = "" if kernel.target is None else kernel.target.observed
    return names | ({"outcome": outcome} if outcome else {})


def _round_limit(num_rounds: int | None, until: StoppingRule | None, max_rounds: int | None) -> int:
    """Return the maximum number of rounds; raise unless exactly one way to end a run is given."""
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
