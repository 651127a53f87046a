"""One simulated round of communication, and the pair `(init, step)` built from it."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.data import FederatedData
from fedmcmc.pytrees import trees
from fedmcmc.random import as_key, cohort_key
from fedmcmc.rounds._clients import (
    PhaseTask,
    merge_states,
    prepare_group,
    run_task,
    split_cohort,
    split_states,
)
from fedmcmc.rounds._layout import Layout, PlacementLike, layout_on_one_device
from fedmcmc.rounds._phases import (
    Prepared,
    check_structure,
    draw_cohort,
    prepare_server,
    prepare_shared,
    server_step,
)
from fedmcmc.rounds._starts import initialize
from fedmcmc.types import (
    ApproximationReport,
    ArrayTree,
    Broadcast,
    Cohort,
    FederatedKernel,
    FederatedState,
    MetropolisReport,
    StepInfo,
    as_functions,
)


class RoundInfo(NamedTuple):
    """Summary of one round.

    Attributes
    ----------
    round
        ``[]`` int32, index of the round, from zero.
    num_active
        ``[]`` int32, clients whose messages were summed; late messages count when they are sent.
    bits_up, bits_down
        ``[]``, bits of all messages to and from the server: exact (int32) below ``2**31`` bits per
        round, else float32.
    gradient_norm
        ``[]``, root mean square of the active clients' `StepInfo.gradient_norm`.
    clients
        `StepInfo` of the cohort in the last phase, leaves ``[cohort_size, ...]``.
    server
        Report of the kernel's `aggregate`.
    num_lost
        ``[]`` int32, active clients of the last phase whose result was unusable; ``()`` for kernels
        whose results are always usable.
    num_excluded
        ``[]`` int32, clients whose message the server excluded because it was not finite; ``()``
        if the server does not check (see `fedmcmc.faults`).
    shift
        ``[]``, distance by which the round moved the kernel's approximation, in its standard
        deviations; ``()`` for kernels without an approximation.
    acceptance
        ``[]``, probability of accepting the last completed proposal; ``()`` for kernels without
        proposals.
    """

    round: Array
    num_active: Array
    bits_up: Array
    bits_down: Array
    gradient_norm: Array
    clients: StepInfo
    server: ArrayTree
    num_lost: ArrayTree = ()
    num_excluded: ArrayTree = ()
    shift: ArrayTree = ()
    acceptance: ArrayTree = ()


class RoundDraws(NamedTuple):
    """Random numbers of a round, except for its cohort."""

    # From `prepare`, per phase and group, leaves [size, ...] (no axis for groups of one client).
    clients: list[list[ArrayTree]]
    server: list[ArrayTree]  # from `prepare_server`, one entry per phase
    shared: ArrayTree  # from `prepare_shared`


class Simulation(NamedTuple):
    """A kernel bound to data, in the shape of a BlackJAX sampling algorithm.

    `init` is ``(position, rng_key=None) -> state``, `step` is
    ``(rng_key, state) -> (state, RoundInfo)``.
    """

    init: Callable[..., FederatedState]
    step: Callable[[Array, FederatedState], tuple[FederatedState, RoundInfo]]


def simulate(
    kernel: FederatedKernel, data: FederatedData, *, placement: PlacementLike | None = None
) -> Simulation:
    """Bind `kernel` to `data`: one step is one round of communication.

    Parameters
    ----------
    kernel, data
        A federated kernel, and every client's rows. If a caller compiles `step`, the rows become
        constants of its program; `fedmcmc.sample` passes them as arguments.
    placement
        A `fedmcmc.Placement` on one device: the number of clients computed together
        (`clients_at_a_time`), and of groups of similar size (`num_buckets`).

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> init, step = simulate(fedmcmc.sgld(posterior, step_size=0.05), data)
    >>> state, info = jax.jit(step)(jax.random.key(0), init(jnp.array(0.0)))
    >>> int(state.broadcast.round), int(info.num_active)
    (1, 1)
    """
    kernel = as_functions(kernel)
    layout = layout_on_one_device(placement, kernel, data)
    rows = data.pooled() if kernel.participation.pooled else data

    def init(position: ArrayTree, rng_key: Array | None = None) -> FederatedState:
        key = jax.random.key(0) if rng_key is None else as_key(rng_key)
        return initialize(kernel, key, position, rows, layout)

    def step(rng_key: Array, state: FederatedState) -> tuple[FederatedState, RoundInfo]:
        like, round_ = state.broadcast, state.broadcast.round
        prepared = prepare_round(kernel, rows, layout, as_key(rng_key), like, round_)
        return run_round(kernel, rows, layout, state, *prepared)

    return Simulation(init, step)


def prepare_round(
    kernel: FederatedKernel,
    data: FederatedData,
    layout: Layout,
    rng_key: Array,
    like: Broadcast,
    round_: Array,
) -> tuple[Cohort, RoundDraws]:
    """Draw the cohort of a round and all random numbers of its clients and the server."""
    participation = kernel.participation
    shapes = trees.shapes_of(like)
    cohort = draw_cohort(participation, cohort_key(rng_key, round_), data.num_clients)
    shared = prepare_shared(kernel, rng_key, round_, shapes)
    groups = split_cohort(participation, data, layout, cohort)
    numbers = range(len(kernel.phases))
    server = [prepare_server(kernel, n, rng_key, round_, shapes) for n in numbers]
    tasks = [PhaseTask(kernel, n, data, layout, shapes) for n in numbers]
    clients = [[prepare_group(task, group, rng_key, round_) for group in groups] for task in tasks]
    return cohort, RoundDraws(clients, server, shared)


def run_round(
    kernel: FederatedKernel,
    data: FederatedData,
    layout: Layout,
    state: FederatedState,
    cohort: Cohort,
    draws: RoundDraws,
) -> tuple[FederatedState, RoundInfo]:
    """Run one round: the cohort's steps, the sum of their messages, the server's update."""
    participation = kernel.participation
    groups = split_cohort(participation, data, layout, cohort)
    states = split_states(participation, layout, groups, state.clients)
    broadcast, server = state.broadcast._replace(shared=draws.shared), state.server
    up, down, bound_up, bound_down = [], [], 0, 0
    active = cohort.active
    for number, (client_draws, server_draws) in enumerate(
        zip(draws.clients, draws.server, strict=True)
    ):
        task = PhaseTask(kernel, number, data, layout, broadcast)
        outputs = run_task(task, cohort._replace(active=active), groups, states, client_draws)
        states, info = outputs.states, outputs.info
        broadcast_bits = trees.num_bits(broadcast._replace(shared=()))
        up.append(info.bits)
        down.append(broadcast_bits if trees.is_empty(info.bits_down) else info.bits_down)
        if participation.excludes_broken_messages:
            # An excluded message was sent, so its bits count; its client is inactive from then on.
            up[-1], down[-1] = (jnp.where(active, bits[-1], 0) for bits in (up, down))
            active = outputs.active
            groups = split_cohort(participation, data, layout, cohort._replace(active=active))
        bound_up, bound_down = bound_up + outputs.bits, bound_down + broadcast_bits
        broadcast, server, server_info = server_step(
            kernel, number, Prepared(server_draws), broadcast, server, outputs.total
        )
    num_active = jnp.sum(active.astype(jnp.int32))
    sends = 0 if participation.silent else 1
    square = jnp.where(active, info.gradient_norm**2, 0)
    sent_up, sent_down = (jnp.where(cohort.active, sends * sum(bits), 0) for bits in (up, down))
    num_lost: ArrayTree = ()
    if not trees.is_empty(info.usable):
        num_lost = jnp.sum(active & ~info.usable, dtype=jnp.int32)
    num_excluded: ArrayTree = ()
    if participation.excludes_broken_messages:
        num_excluded = jnp.sum(cohort.active & ~active, dtype=jnp.int32)
    round_info = RoundInfo(
        round=state.broadcast.round,
        num_active=num_active,
        # A code is at most twice as long as the numbers that it encodes.
        bits_up=_sum_bits(sent_up, 2 * bound_up),
        bits_down=_sum_bits(sent_down, bound_down * cohort.active.shape[0]),
        gradient_norm=jnp.sqrt(jnp.sum(square) / jnp.maximum(num_active, 1).astype(square.dtype)),
        clients=info,
        server=server_info,
        num_lost=num_lost,
        num_excluded=num_excluded,
        shift=server_info.shift if isinstance(server_info, ApproximationReport) else (),
        acceptance=server_info.acceptance if isinstance(server_info, MetropolisReport) else (),
    )
    clients = merge_states(participation, layout, groups, state.clients, states)
    remedy = "aggregate must return it in the structure of its initial value"
    check_structure(kernel, "The server's state", server, state.server, remedy)
    return FederatedState(broadcast, server, clients), round_info


def _sum_bits(bits: Array, bound: int) -> Array:
    return jnp.sum(bits) if bound < 2**31 else jnp.sum(bits.astype(jnp.float32))
