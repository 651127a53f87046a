"""`sample`: run a kernel on data and keep draws."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from tqdm import tqdm

from fedmcmc._checks import expect
from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState, as_functions
from fedmcmc.data import ClientLoader, FederatedData, in_words
from fedmcmc.diagnostics import DiagnosisWarning, StoppingRule
from fedmcmc.gaussian import Gaussian
from fedmcmc.placement import Placement, check_fits, is_first, several
from fedmcmc.random import as_key
from fedmcmc.records import Record, Samples
from fedmcmc.rounds import Collect, RoundInfo
from fedmcmc.runs._executors import Elsewhere
from fedmcmc.runs._interrupts import Interrupts
from fedmcmc.runs._run import Run, Settings
from fedmcmc.runs._starts import begin, check_counts, check_data
from fedmcmc.runs._unjudged import missing_target, with_reason
from fedmcmc.runs._watch import finished, warn
from fedmcmc.storage import (
    Checkpoint,
    checkpoint_of_call,
    hands_on_interrupts,
    owned,
    without_resumable,
)


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
    data: FederatedData | ClientLoader | Elsewhere,
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
    """Run `kernel` on `data` and keep draws.

    Parameters
    ----------
    rng_key
        Key of the run. Chain ``c`` uses ``fold_in(rng_key, c)``, so its draws do not depend on
        the number of chains (with JAX's ``rbg`` keys they do: mapped over keys, its functions draw
        other numbers).
    kernel
        A federated kernel.
    data
        Every client's rows, or a `ClientLoader`, of which with `mesh` a process loads its own; or
        clients at real sites (`fedmcmc.deploy.Sites`).
    position
        Where each chain starts: a pytree, or ``rng_key -> pytree`` for a
        different start per chain. Not needed where `state` is given.
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
        One `Gaussian` per client for its likelihood (`fedmcmc.surrogates`): where
        `fedmcmc.predict_bias` finds with them that the kernel diverges or is off, the run warns
        before it begins. The noise of minibatches is left out, and kernels that compress messages
        are simulated for some seconds.
    record
        What is kept besides, and where, if not draws in memory: see `fedmcmc.Record`.
    checkpoint
        Where and how often the run writes down where it is; the same call then goes on after an
        interruption. See `fedmcmc.Checkpoint`, and `fedmcmc.resumable` for many calls.
    mesh
        Devices to run on, short for ``placement=Placement(mesh=mesh)``.
    placement
        Where clients and chains lie, and how many clients are computed together: see
        `fedmcmc.Placement`. With a store for the clients' states `collect` sees those of coming
        cohorts alone.

    Returns
    -------
    Samples
        ``samples.diagnosis`` says whether chains agree, whether draws are enough, and whether they
        are the posterior's.

    Raises
    ------
    ValueError, TypeError
        On settings or data that do not fit, before anything is compiled.
    CheckpointError
        If the checkpoint is that of another run, in use, or damaged; a `ValueError`.
    NonFiniteError
        If a chain turns non-finite; the draws before are in its `samples`.

    Warns
    -----
    SamplingWarning
        If 400 draws or more were kept and they are too few or wrong, see `fedmcmc.diagnostics`; if
        most clients' results were lost; if positions ran away.
    """
    if not isinstance(kernel, FederatedKernel):
        raise TypeError(f"kernel must be a FederatedKernel, got {type(kernel).__name__}.")
    if not isinstance(data, ClientLoader | Elsewhere):
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
    if until is not None and until.reads == "info" and not kernel.traits.approximates:
        raise ValueError(f"{until.name}: is for kernels that refine one, as fedmcmc.fed_ep.")
    kernel = as_functions(kernel)
    if isinstance(data, Elsewhere):
        kernel = data.own(kernel)
    keys = jax.vmap(lambda c: jax.random.fold_in(as_key(rng_key), c))(jnp.arange(num_chains))
    both = mesh is not None and placement is not None
    placement = Placement(mesh=mesh) if placement is None else placement
    expect(placement, Placement, "placement")
    if both:
        raise ValueError("Give mesh= or placement=, and not both: Placement(mesh=mesh, ...).")
    record = Record() if record is None else record
    expect(record, Record, "record")
    check_fits(placement, kernel, num_chains)
    client_store = placement.client_store
    store_directory = None if client_store is None else client_store.directory
    if several() and placement.mesh is None:
        if any(x is not None for x in (checkpoint, record.draws_to, store_directory)):
            raise ValueError(
                "Each process of this run would write the same files (checkpoint, draws_to, those "
                "of the store): give mesh=, over which they share one run, or leave these out "
                "where there can be no mesh (pooled rows, a client_store)."
            )
        checkpoint_of_call(None)  # counted: later calls have the numbers that they have alone
    else:
        checkpoint = checkpoint_of_call(checkpoint)
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            f"checkpoint must be a fedmcmc.Checkpoint(directory), got {type(checkpoint).__name__}."
        )
    if until is not None and (record.draws_to is not None or not record.keep_draws):
        raise ValueError("until= needs the draws in memory: remove draws_to= or keep_draws=False.")
    # Before anything on a disk is touched.
    with Interrupts() as interrupts, owned(checkpoint):
        replaces_files = (
            checkpoint is not None
            and is_first()
            and checkpoint.claims(record.draws_to, store_directory)
        )
        executor, first, rows, messages = begin(
            kernel,
            data,
            keys,
            placement,
            collect=collect,
            keeps_latents=record.local,
            position=position,
            state=state,
            surrogates=surrogates,
            has_checkpoint=checkpoint is not None,
            replaces_files=replaces_files,
        )
        known: Any = data
        num_clients = (known if isinstance(data, ClientLoader) else known.federation).num_clients
        settings = Settings(
            num_clients=num_clients,
            num_rounds=most,
            num_burnin=num_burnin,
            thinning=thinning,
            record=record,
            until=until,
            placement=placement,
            checkpoint=checkpoint,
            replaces_files=replaces_files,
            hands_on_interrupts=hands_on_interrupts(checkpoint),
            description={
                **_who_and_what(kernel, data),
                "method": kernel.name,
                "kernel": str(kernel),
                "data": str(data),
                "chains": num_chains,
                "rounds": f"{most:,}" if until is None else f"at most {most:,}",
                "rounds not kept at the beginning (burn-in)": f"{num_burnin:,}",
                "one draw is kept of so many rounds (thinning)": thinning,
                "begins": "anew" if state is None else "where an earlier run ended",
                "ends": "after these rounds" if until is None else f"when {until.name}",
                "record": str(record),
                "checkpoints": "none" if checkpoint is None else "written",
            },
            warnings=messages,
        )
        run = Run(executor, first, rows, keys, settings)
        where = str(run.chosen_placement())
        bar = tqdm(total=most, unit="round", desc=where, disable=not progress)
        with bar, without_resumable():
            samples = run.go(bar, interrupts)
        if samples.local is not None and isinstance(data, FederatedData):
            samples = replace(samples, local_mask=data.group_mask)
        samples = finished(
            samples,
            kernel,
            keys,
            data,
            start=run.start,
            positions=collect is None,
            interrupts=interrupts,
            hands_on_interrupts=settings.hands_on_interrupts,
        )
        samples = with_reason(samples, kernel, positions=collect is None)
        if collect is None and (missing := missing_target(samples.draws, kernel)):
            told = warn(missing, depth=3, category=DiagnosisWarning)
            samples = replace(samples, warnings=samples.warnings + told)
        if interrupts.num_held:
            if settings.hands_on_interrupts or executor.shared:
                raise KeyboardInterrupt
            told = warn("Interrupted while the run ended; returning all that was kept.", depth=3)
            samples = replace(samples, warnings=samples.warnings + told)
        return samples


def _who_and_what(kernel: FederatedKernel, data: Any) -> dict[str, str]:
    """Return names of clients, columns and outcome, as far as they are known."""
    named = in_words(data) if isinstance(data, FederatedData) else {}
    observed = "" if kernel.target is None else kernel.target.observed
    return named | ({"outcome": observed} if observed else {})


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
