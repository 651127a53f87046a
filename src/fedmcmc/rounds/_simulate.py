"""One round of communication in simulation, and the `(init, step)` pair made of it."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import (
    Adjusted,
    ArrayTree,
    Broadcast,
    Cohort,
    FederatedKernel,
    FederatedState,
    Refined,
    StepInfo,
    as_functions,
)
from fedmcmc.data import FederatedData
from fedmcmc.pytrees import trees
from fedmcmc.random import as_key, cohort_key
from fedmcmc.rounds._arrangement import Arrangement, PlacementLike, arranged
from fedmcmc.rounds._clients import (
    Task,
    all_states,
    groups_of,
    own_states,
    prepare_group,
    run_task,
)
from fedmcmc.rounds._phases import (
    Prepared,
    check_structure,
    prepare_server,
    prepare_shared,
    server_step,
)
from fedmcmc.rounds._starts import initialize


class RoundInfo(NamedTuple):
    """What happened in one round.

    Attributes
    ----------
    round
        ``[]`` int32, counted from zero.
    num_active
        ``[]`` int32, clients whose messages were summed; late ones count when they are sent.
    bits_up, bits_down
        ``[]``, all messages of the round to and from the server, exact (int32) below ``2**31``
        bits per round, else float32.
    gradient_norm
        ``[]``, root mean square over the active clients' gradient calls.
    clients
        `StepInfo` of the cohort, leaves ``[cohort_size, ...]``; of the round's last phase.
    server
        Whatever the kernel's `aggregate` reports.
    num_lost
        ``[]`` int32, active clients of the last phase whose result was of no use; ``()`` for
        kernels where that cannot be.
    num_excluded
        ``[]`` int32, clients whose message the server left out because it was not finite; ``()``
        where it does not look (see `fedmcmc.faults`).
    shift
        ``[]``, how far the round moved the approximation of a kernel that refines one, in its sds;
        ``()`` of others.
    acceptance
        ``[]``, of a kernel that accepts or rejects proposals: the probability with which the last
        one that came to its end was accepted; ``()`` of others.
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
    """All that is random in a round, besides its cohort."""

    # Of `prepare`, one entry per phase, in it one per group, leaves [size, ...] (no axis for one).
    clients: list[list[ArrayTree]]
    server: list[ArrayTree]  # of `prepare_server`, one entry per phase
    shared: ArrayTree  # of `prepare_shared`


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
    kernel
        A federated kernel.
    data
        Every client's rows. A compiled caller holds them as constants; `fedmcmc.sample` passes
        them as arguments.
    placement
        A `fedmcmc.Placement` on one device: how many clients are computed together
        (`clients_at_a_time`), and in how many groups of similar size (`num_buckets`).

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
    arrangement = arranged(placement, kernel, data)
    rows = data.pooled() if kernel.participation.pooled else data

    def init(position: ArrayTree, rng_key: Array | None = None) -> FederatedState:
        key = jax.random.key(0) if rng_key is None else as_key(rng_key)
        return initialize(kernel, key, position, rows, arrangement)

    def step(rng_key: Array, state: FederatedState) -> tuple[FederatedState, RoundInfo]:
        like, round_ = state.broadcast, state.broadcast.round
        prepared = prepare_round(kernel, rows, arrangement, as_key(rng_key), like, round_)
        return run_round(kernel, rows, arrangement, state, *prepared)

    return Simulation(init, step)


def prepare_round(
    kernel: FederatedKernel,
    data: FederatedData,
    arrangement: Arrangement,
    rng_key: Array,
    like: Broadcast,
    round_: Array,
) -> tuple[Cohort, RoundDraws]:
    """Draw the cohort of a round and all that is random in its steps and at the server."""
    participation = kernel.participation
    shapes = trees.shapes_of(like)
    cohort = participation.prepare(cohort_key(rng_key, round_), data.num_clients)
    shared = prepare_shared(kernel, rng_key, round_, shapes)
    groups = groups_of(participation, data, arrangement, cohort)
    numbers = range(len(kernel.phases))
    server = [prepare_server(kernel, n, rng_key, round_, shapes) for n in numbers]
    clients = [
        [
            prepare_group(kernel, n, data, arrangement, group, rng_key, round_, shapes)
            for group in groups
        ]
        for n in numbers
    ]
    return cohort, RoundDraws(clients, server, shared)


def run_round(
    kernel: FederatedKernel,
    data: FederatedData,
    arrangement: Arrangement,
    state: FederatedState,
    cohort: Cohort,
    draws: RoundDraws,
) -> tuple[FederatedState, RoundInfo]:
    """Run one round: the cohort's steps, the sum of their messages, the server's update."""
    participation = kernel.participation
    groups = groups_of(participation, data, arrangement, cohort)
    states = own_states(participation, arrangement, groups, state.clients)
    broadcast, server = state.broadcast._replace(shared=draws.shared), state.server
    up, down, most_up, most_down = [], [], 0, 0
    active = cohort.active
    for number, (randomness, at_server) in enumerate(zip(draws.clients, draws.server, strict=True)):
        task = Task(kernel, number, data, arrangement, broadcast)
        outputs = run_task(task, cohort._replace(active=active), groups, states, randomness)
        states, info = outputs.states, outputs.info
        whole = trees.num_bits(broadcast._replace(shared=()))
        up.append(info.bits)
        down.append(whole if trees.is_empty(info.bits_down) else info.bits_down)
        if participation.guards:
            # A message is sent before it is left out; who has sent one such sends no other.
            up[-1], down[-1] = (jnp.where(active, sent[-1], 0) for sent in (up, down))
            active = outputs.active
            groups = groups_of(participation, data, arrangement, cohort._replace(active=active))
        most_up, most_down = most_up + outputs.bits, most_down + whole
        broadcast, server, server_info = server_step(
            kernel, number, Prepared(at_server), broadcast, server, outputs.total
        )
    num_active = jnp.sum(active.astype(jnp.int32))
    sends = 0 if participation.silent else 1
    square = jnp.where(active, info.gradient_norm**2, 0)
    sent_up, sent_down = (jnp.where(cohort.active, sends * sum(sent), 0) for sent in (up, down))
    round_info = RoundInfo(
        round=state.broadcast.round,
        num_active=num_active,
        # A code is at most twice as long as the numbers that it codes.
        bits_up=_sum_bits(sent_up, 2 * most_up),
        bits_down=_sum_bits(sent_down, most_down * cohort.active.shape[0]),
        gradient_norm=jnp.sqrt(jnp.sum(square) / jnp.maximum(num_active, 1).astype(square.dtype)),
        clients=info,
        server=server_info,
        num_lost=()
        if trees.is_empty(info.usable)
        else jnp.sum(active & ~info.usable, dtype=jnp.int32),
        num_excluded=jnp.sum(cohort.active & ~active, dtype=jnp.int32)
        if participation.guards
        else (),
        shift=server_info.shift if isinstance(server_info, Refined) else (),
        acceptance=server_info.acceptance if isinstance(server_info, Adjusted) else (),
    )
    clients = all_states(participation, arrangement, groups, state.clients, states)
    first = "aggregate must return it in the structure of its first value"
    check_structure(kernel, "The server's state", server, state.server, first)
    return FederatedState(broadcast, server, clients), round_info


def _sum_bits(bits: Array, bound: int) -> Array:
    return jnp.sum(bits) if bound < 2**31 else jnp.sum(bits.astype(jnp.float32))
