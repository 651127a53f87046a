"""One phase of a round as three functions: a client's step, the receipt of its code, the server's.

Whatever runs a kernel uses these: the simulator, which maps over clients what they do, and a
deployed round, in which every client is a process of its own and bytes are all that crosses.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import (
    ArrayTree,
    Arrivals,
    Broadcast,
    Client,
    Cohort,
    FederatedKernel,
    Phase,
    Sender,
    StepInfo,
    memory_of,
)
from fedmcmc.pytrees import trees
from fedmcmc.random import as_key, client_key, cohort_key, phase_key, server_key, shared_key
from fedmcmc.rounds._messages import guarded, sum_of


class Prepared(NamedTuple):
    """What is random in a step, drawn ahead: what a phase's `prepare` or `prepare_server` made."""

    draws: ArrayTree


class ClientKeys(NamedTuple):
    """Keys of one client's step in one phase, where the chain's key is not at the client.

    Attributes
    ----------
    private
        Key from which the client alone draws, ``()`` where it draws nothing.
    shared
        Key from which all clients draw alike, that of `random.shared_key`; ``()`` where they draw
        nothing.
    """

    private: ArrayTree
    shared: ArrayTree


class Received(NamedTuple):
    """What a server holds of a phase's messages while they come in.

    Attributes
    ----------
    total
        The weighted sum of the messages.
    late
        The sum of those that count in the next round, ``()`` where none can be late.
    memories
        The server's copies of the clients' memories, leaves ``[num_clients, ...]``; ``()`` where
        decoding needs none. They outlive the round.
    before
        These copies as they were before the phase: what its codes are relative to.
    num_excluded
        ``[]`` int32, messages that were left out because they were not finite.
    """

    total: ArrayTree
    late: ArrayTree
    memories: ArrayTree
    before: ArrayTree
    num_excluded: Array


def client_step(
    kernel: FederatedKernel,
    phase: Phase | int,
    draws_or_key: Prepared | ClientKeys | Array,
    broadcast: Broadcast,
    client_state: ArrayTree,
    client: Client,
) -> tuple[ArrayTree, ArrayTree, StepInfo]:
    """Return what one client sends in a phase, what it keeps, and what it reports.

    Parameters
    ----------
    kernel
        A federated kernel.
    phase
        One of ``kernel.phases``, or its number there; before the first round one of
        ``kernel.setup``, in which nothing is random and nothing is kept.
    draws_or_key
        The key of the chain (``fold_in(rng_key, chain)`` in `fedmcmc.sample`), from which the
        client draws what is random in its step; or `ClientKeys`; or the draws, drawn ahead.
    broadcast
        What the server sent down.
    client_state
        What the client kept, first of ``kernel.client_init``.
    client
        The client's rows, as of ``data.client(index, weight)``.

    Returns
    -------
    code
        What crosses; `fedmcmc.wire.encode` writes it.
    client_state
        As the client keeps it if the server takes its message.
    info
        `StepInfo`.

    Raises
    ------
    ValueError
        If `phase` is none of the kernel's.
    """
    phase, number = _resolved(kernel, phase)
    draws: ArrayTree = ()
    if isinstance(draws_or_key, Prepared):
        draws = draws_or_key.draws
    elif number is not None:
        keys, like = draws_or_key, _between_rounds(broadcast)
        if not isinstance(keys, ClientKeys):
            chain, round_ = as_key(keys), broadcast.round
            private = _client_key(kernel, number, chain, round_, client)
            keys = ClientKeys(private, shared_key(chain, round_))
        if trees.is_empty(broadcast.shared):
            shared = _drawn(lambda key: kernel.prepare_shared(key, like), keys.shared)
            broadcast = broadcast._replace(shared=shared)
        draws = _drawn(lambda key: phase.prepare(key, like, client), keys.private)
    stepped = phase.step(draws, broadcast, client_state, client)
    if not isinstance(stepped, tuple) or len(stepped) != 3:
        raise TypeError(
            f"{type(phase).__name__}.step must return a message, the client's state and a StepInfo."
        )
    code, kept, info = stepped
    # The client keeps of its message what the server reads; compiled, a phase that keeps nothing
    # decodes nothing.
    like = phase.message_like(trees.shapes_of(broadcast))
    message = phase.decode(code, client, memory_of(phase, client_state), like)
    check_structure(
        phase, "A message", message, like, "define message_like if it is not a position"
    )
    kept = phase.commit(message, broadcast, kept)
    first = "step must return it in the structure that client_init returns"
    check_structure(phase, "A client's state", kept, client_state, first)
    return code, kept, info


def check_structure(phase: Phase, what: str, tree: ArrayTree, like: ArrayTree, remedy: str) -> None:
    """Raise `TypeError` unless two trees have the same structure."""
    structure: Any = jax.tree.structure(tree)
    expected = jax.tree.structure(like)
    if structure != expected:
        raise TypeError(
            f"{what} of {type(phase).__name__} has the structure {structure}, and {expected} is "
            f"expected: {remedy} (docs/extend.md)."
        )


def nothing_received(
    kernel: FederatedKernel,
    phase: Phase | int,
    broadcast: Broadcast,
    memories: ArrayTree = (),
    *,
    waits: bool = False,
) -> Received:
    """Return what a server holds before the first message of a phase.

    Parameters
    ----------
    kernel, phase, broadcast
        As those of `client_step`.
    memories
        The server's copies of the clients' memories after the round before, first those of
        `first_memories`.
    waits
        Whether messages may arrive a round late, which the kernel must know (`fedmcmc.faults`).
    """
    phase, _ = _resolved(kernel, phase)
    zeros = trees.zeros_like(phase.message_like(trees.shapes_of(broadcast)))
    none = jnp.zeros((), jnp.int32)
    return Received(zeros, zeros if waits else (), memories, memories, none)


def first_memories(
    kernel: FederatedKernel, phase: Phase | int, broadcast: Broadcast, num_clients: int
) -> ArrayTree:
    """Return the server's copies of the clients' memories before the first round.

    ``()`` where decoding needs none, else leaves ``[num_clients, ...]``.
    """
    phase, _ = _resolved(kernel, phase)
    copies = phase.server_memory
    first = () if copies is None else copies.init(trees.shapes_of(broadcast))
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_clients, *leaf.shape)), first)


def receive(
    kernel: FederatedKernel,
    phase: Phase | int,
    received: Received,
    code: ArrayTree,
    client_id: Array | int,
    weight: Array | float,
    *,
    late: Array | bool = False,
) -> Received:
    """Return what the server holds after one more code: decoded, weighted and added.

    A client that a cohort holds twice answers once, and its code is received twice.

    Parameters
    ----------
    kernel, phase
        As those of `client_step`.
    received
        What the server holds so far.
    code
        What the client sent.
    client_id, weight
        The sender, and one over its probability of taking part.
    late
        Whether the message counts in the next round.

    Raises
    ------
    ValueError
        If `phase` is none of the kernel's, or `late` is given and nothing waits for it.
    """
    participation = kernel.participation
    phase, _ = _resolved(kernel, phase)
    waits = not trees.is_empty(received.late)
    if late is not False and not waits:
        raise ValueError(
            "A late message needs a sum that waits for the next round: "
            "nothing_received(..., waits=True)."
        )
    index = jnp.asarray(client_id, jnp.int32)
    weight = jnp.asarray(weight, jnp.result_type(float))
    sender = Sender(index, weight)
    memory = jax.tree.map(lambda leaf: leaf[index], received.before)
    message = phase.decode(code, sender, memory, received.total)
    one = jax.tree.map(lambda leaf: leaf[None], message)
    arrival = jnp.asarray(late)[None] if waits else ()
    cohort = Cohort(index[None], weight[None], jnp.ones(1, bool), arrival)
    if participation.guards:
        one, cohort = guarded(one, cohort)
    added = sum_of(one, cohort, participation, late=waits, drops=participation.guards)
    taken = cohort.active[0]
    copies = phase.server_memory
    moved = memory if copies is None else copies.update(code, sender, memory)
    memories = jax.tree.map(
        lambda table, new, old: table.at[index].set(jnp.where(taken, new, old)),
        received.memories,
        moved,
        memory,
    )
    excluded = received.num_excluded + (1 - taken.astype(jnp.int32))
    later = received.late
    if isinstance(added, Arrivals):
        later, added = trees.add(later, added.late), added.now
    total = trees.add(received.total, added)
    return received._replace(total=total, late=later, memories=memories, num_excluded=excluded)


def server_step(
    kernel: FederatedKernel,
    phase: Phase | int,
    draws_or_key: Prepared | Array,
    broadcast: Broadcast,
    server_state: ArrayTree,
    total: Received | ArrayTree,
) -> tuple[Broadcast, ArrayTree, ArrayTree]:
    """Return the next broadcast, the server's new state and its report.

    Parameters
    ----------
    kernel, phase
        As those of `client_step`.
    draws_or_key
        The key of the chain, or what is random in the server's step, drawn ahead.
    broadcast
        What was sent down in this phase.
    server_state
        What the server kept.
    total
        What was received, or the weighted sum of the messages itself.

    Raises
    ------
    ValueError
        If `phase` is none of the kernel's.
    """
    phase, number = _resolved(kernel, phase)
    if number is None:
        raise ValueError(
            "The totals of kernel.setup go to kernel.server_init, and not to server_step."
        )
    if isinstance(draws_or_key, Prepared):
        draws = draws_or_key.draws
    else:
        like = _between_rounds(broadcast)
        draws = prepare_server(kernel, number, as_key(draws_or_key), broadcast.round, like)
    if isinstance(total, Received):
        waits = not trees.is_empty(total.late)
        total = Arrivals(total.total, total.late) if waits else total.total
    moved, server_state, info = phase.aggregate(draws, broadcast, server_state, total)
    if number == len(kernel.phases) - 1:
        moved = moved._replace(shared=(), summed=())
    return moved, server_state, info


def code_like(kernel: FederatedKernel, phase: Phase | int, broadcast: Broadcast) -> ArrayTree:
    """Return the shapes of a client's code, with which `fedmcmc.wire.decode` reads it."""
    return _resolved(kernel, phase)[0].code_like(trees.shapes_of(broadcast))


def cohort_of(kernel: FederatedKernel, rng_key: Array, round_: Array, num_clients: int) -> Cohort:
    """Return who takes part in a round, with which weights, from the chain's key."""
    key = cohort_key(as_key(rng_key), jnp.asarray(round_, jnp.int32))
    return kernel.participation.prepare(key, num_clients)


def _resolved(kernel: FederatedKernel, phase: Phase | int) -> tuple[Phase, int | None]:
    """Return a phase and which of ``kernel.phases`` it is, ``None`` for one of ``kernel.setup``.

    Raises
    ------
    ValueError
        If it is none of them.
    """
    phases = kernel.phases
    if isinstance(phase, int):
        if not 0 <= phase < len(phases):
            raise ValueError(
                f"phase must be one of kernel.phases or its number, below {len(phases)}; got "
                f"{phase}."
            )
        return phases[phase], phase
    for number, own in enumerate(phases):
        if own is phase:
            return own, number
    if any(own is phase for own in kernel.setup):
        return phase, None
    raise ValueError(
        "phase is none of kernel.phases and kernel.setup: take it from there, or give its number "
        "(a compiled function makes copies of what it is given, and copies are other objects)."
    )


def prepare_client(
    kernel: FederatedKernel,
    number: int,
    rng_key: Array,
    round_: Array,
    like: Broadcast,
    client: Client,
) -> ArrayTree:
    """Return all that is random in a client's step of phase `number`, from the chain's key."""
    key = _client_key(kernel, number, rng_key, round_, client)
    return kernel.phases[number].prepare(key, like, client)


def _client_key(
    kernel: FederatedKernel, number: int, rng_key: Array, round_: Array, client: Client
) -> Array:
    """Return the key of a client's step in phase `number`, from the chain's key."""
    return _phase_key(kernel, number, client_key(rng_key, round_, client.index))


def _drawn(prepare: Callable[[Array], ArrayTree], key: ArrayTree) -> ArrayTree:
    """Return ``prepare(key)``; without a key ``()`` nothing may be random in it."""
    if not trees.is_empty(key):
        return prepare(key)
    draws = prepare(jax.random.key(0))
    if jax.tree.leaves(draws):
        raise ValueError(
            "This kernel's clients draw random numbers: ClientKeys needs a key for them."
        )
    return draws


def client_draws_like(
    kernel: FederatedKernel, phase: Phase | int, broadcast: Broadcast, client: Client
) -> tuple[ArrayTree, ArrayTree]:
    """Return the shapes of what one client draws alone in a phase, and of what all draw alike.

    A tree without leaves means that nothing is random. Shapes of `broadcast` and `client` are
    enough.
    """
    phase, number = _resolved(kernel, phase)
    if number is None:
        return (), ()
    key, like = jax.eval_shape(lambda: jax.random.key(0)), _between_rounds(broadcast)
    private = jax.eval_shape(lambda key, client: phase.prepare(key, like, client), key, client)
    shared = jax.eval_shape(lambda key: kernel.prepare_shared(key, like), key)
    return private, shared


def prepare_server(
    kernel: FederatedKernel, number: int, rng_key: Array, round_: Array, like: Broadcast
) -> ArrayTree:
    """Return all that is random in the server's step of phase `number`."""
    key = _phase_key(kernel, number, server_key(rng_key, round_))
    return kernel.phases[number].prepare_server(key, like)


def prepare_shared(
    kernel: FederatedKernel, rng_key: Array, round_: Array, like: Broadcast
) -> ArrayTree:
    """Return what all clients of a round draw alike."""
    return kernel.prepare_shared(shared_key(rng_key, round_), like)


def _phase_key(kernel: FederatedKernel, number: int, key: Array) -> Array:
    """Return the key of a phase from that of the round; the kernel's own is the round's."""
    return key if number == len(kernel.phases) - 1 else phase_key(key, number)


def _between_rounds(broadcast: Broadcast) -> Broadcast:
    shapes: Broadcast = trees.shapes_of(broadcast._replace(shared=(), summed=()))
    return shapes
