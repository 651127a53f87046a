"""One phase of a round as three functions: `client_step`, `receive` and `server_step`.

The simulator maps `client_step` over clients. In a deployed round each client is a separate
process that exchanges bytes with the server.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.pytrees import trees
from fedmcmc.random import as_key, client_key, cohort_key, phase_key, server_key, shared_key
from fedmcmc.rounds._messages import exclude_non_finite, sum_messages
from fedmcmc.types import (
    ArrayTree,
    Arrivals,
    Broadcast,
    Client,
    Cohort,
    FederatedKernel,
    Participation,
    Phase,
    Sender,
    StepInfo,
    memory_of,
)


class Prepared(NamedTuple):
    """Random numbers of a step, drawn in advance by a phase's `prepare` or `prepare_server`."""

    draws: ArrayTree


class ClientKeys(NamedTuple):
    """Keys of one client's step in one phase, for clients that do not hold the chain's key.

    Attributes
    ----------
    private
        Key for the client's own random numbers, ``()`` if there are none.
    shared
        Key for random numbers that all clients share (`random.shared_key`), ``()`` if there are
        none.
    """

    private: ArrayTree
    shared: ArrayTree


class Received(NamedTuple):
    """Running sum of a phase's messages at the server.

    Attributes
    ----------
    total
        Weighted sum of the messages.
    late
        Weighted sum of the messages that count in the next round, ``()`` if none can be late.
    memories
        The server's copies of the clients' memories, leaves ``[num_clients, ...]``; ``()`` if
        decoding needs none. They persist between rounds.
    before
        These copies before the phase. Codes of the phase are relative to them.
    num_excluded
        ``[]`` int32, number of messages excluded because they were not finite.
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
    """Return a client's encoded message in a phase, its new state and its report.

    Parameters
    ----------
    kernel
        A federated kernel.
    phase
        A phase of ``kernel.phases``, or its index; before the first round a phase of
        ``kernel.setup``, which draws no random numbers and stores no state.
    draws_or_key
        Key of the chain (``fold_in(rng_key, chain)`` in `fedmcmc.sample`); or `ClientKeys`; or
        random numbers drawn in advance (`Prepared`).
    broadcast
        Message from the server.
    client_state
        State of the client, initially from ``kernel.client_init``.
    client
        Rows of the client, ``data.client(index, weight)``.

    Returns
    -------
    code
        Encoded message, which `fedmcmc.wire.encode` converts to bytes.
    client_state
        New state of the client if the server accepts its message.
    info
        `StepInfo`.

    Raises
    ------
    ValueError
        If `phase` belongs to another kernel.
    TypeError
        If the phase returns a tree of an unexpected structure.
    """
    phase, number = _resolve_phase(kernel, phase)
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
            shared = _draw(lambda key: kernel.prepare_shared(key, like), keys.shared)
            broadcast = broadcast._replace(shared=shared)
        draws = _draw(lambda key: phase.prepare(key, like, client), keys.private)
    stepped = phase.step(draws, broadcast, client_state, client)
    if not isinstance(stepped, tuple) or len(stepped) != 3:
        raise TypeError(
            f"{type(phase).__name__}.step must return a message, the client's state and a StepInfo."
        )
    code, new_state, info = stepped
    # The client's state depends on the decoded message, as the server reads it. If `commit` ignores
    # the message, compilation removes the decoding.
    like = phase.message_like(trees.shapes_of(broadcast))
    message = phase.decode(code, client, memory_of(phase, client_state), like)
    check_structure(
        phase, "A message", message, like, "define message_like if it is not a position"
    )
    new_state = phase.commit(message, broadcast, new_state)
    remedy = "step must return it in the structure that client_init returns"
    check_structure(phase, "A client's state", new_state, client_state, remedy)
    return code, new_state, info


def check_structure(phase: Phase, name: str, tree: ArrayTree, like: ArrayTree, remedy: str) -> None:
    """Raise `TypeError` unless two trees have the same structure."""
    structure: Any = jax.tree.structure(tree)
    expected = jax.tree.structure(like)
    if structure != expected:
        raise TypeError(
            f"{name} of {type(phase).__name__} has the structure {structure}; expected {expected}: "
            f"{remedy} (docs/guides/extend.md)."
        )


def initialize_received(
    kernel: FederatedKernel,
    phase: Phase | int,
    broadcast: Broadcast,
    memories: ArrayTree = (),
    *,
    waits: bool = False,
) -> Received:
    """Return the running sum before the first message of a phase.

    Parameters
    ----------
    kernel, phase, broadcast
        See `client_step`.
    memories
        The server's copies of the clients' memories after the previous round, initially from
        `first_memories`.
    waits
        If true, messages may arrive a round late; the kernel must support this (`fedmcmc.faults`).
    """
    phase, _ = _resolve_phase(kernel, phase)
    zeros = trees.zeros_like(phase.message_like(trees.shapes_of(broadcast)))
    num_excluded = jnp.zeros((), jnp.int32)
    return Received(zeros, zeros if waits else (), memories, memories, num_excluded)


def first_memories(
    kernel: FederatedKernel, phase: Phase | int, broadcast: Broadcast, num_clients: int
) -> ArrayTree:
    """Return the server's copies of the clients' memories before the first round.

    If decoding needs no memory, return ``()``, else leaves ``[num_clients, ...]``.
    """
    phase, _ = _resolve_phase(kernel, phase)
    copies = phase.server_memory
    initial = () if copies is None else copies.init(trees.shapes_of(broadcast))
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_clients, *leaf.shape)), initial)


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
    """Decode a message, weight it and add it to the running sum.

    If a cohort contains a client twice, the client answers once and its code is received twice.

    Parameters
    ----------
    kernel, phase
        See `client_step`.
    received
        Running sum of the messages received before.
    code
        Encoded message.
    client_id, weight
        Id of the sender, and the inverse of its probability of taking part.
    late
        If true, the message counts in the next round.

    Raises
    ------
    ValueError
        If `late` is set without ``waits=True`` in `initialize_received`.
    """
    participation = kernel.participation
    phase, _ = _resolve_phase(kernel, phase)
    waits = not trees.is_empty(received.late)
    if late is not False and not waits:
        raise ValueError(
            "late= needs a sum of late messages: start with initialize_received(..., waits=True)."
        )
    index = jnp.asarray(client_id, jnp.int32)
    weight = jnp.asarray(weight, jnp.result_type(float))
    sender = Sender(index, weight)
    memory = jax.tree.map(lambda leaf: leaf[index], received.before)
    message = phase.decode(code, sender, memory, received.total)
    messages = jax.tree.map(lambda leaf: leaf[None], message)
    arrival = jnp.asarray(late)[None] if waits else ()
    cohort = Cohort(index[None], weight[None], jnp.ones(1, bool), arrival)
    excludes_broken_messages = participation.excludes_broken_messages
    if excludes_broken_messages:
        messages, cohort = exclude_non_finite(messages, cohort)
    new = sum_messages(
        messages, cohort, participation, late=waits, may_drop=excludes_broken_messages
    )
    is_accepted = cohort.active[0]
    copies = phase.server_memory
    new_memory = memory if copies is None else copies.update(code, sender, memory)
    memories = jax.tree.map(
        lambda table, new, old: table.at[index].set(jnp.where(is_accepted, new, old)),
        received.memories,
        new_memory,
        memory,
    )
    num_excluded = received.num_excluded + (1 - is_accepted.astype(jnp.int32))
    late_total = received.late
    if isinstance(new, Arrivals):
        late_total, new = trees.add(late_total, new.late), new.now
    total = trees.add(received.total, new)
    return Received(total, late_total, memories, received.before, num_excluded)


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
        See `client_step`.
    draws_or_key
        Key of the chain, or random numbers drawn in advance (`Prepared`).
    broadcast
        Message from the server in this phase.
    server_state
        State of the server.
    total
        Messages received (`Received`), or their weighted sum.
    """
    phase, number = _resolve_phase(kernel, phase)
    if number is None:
        raise ValueError(
            "server_step got a phase of kernel.setup: pass its total to kernel.server_init."
        )
    if isinstance(draws_or_key, Prepared):
        draws = draws_or_key.draws
    else:
        like = _between_rounds(broadcast)
        draws = prepare_server(kernel, number, as_key(draws_or_key), broadcast.round, like)
    if isinstance(total, Received):
        waits = not trees.is_empty(total.late)
        total = Arrivals(total.total, total.late) if waits else total.total
    broadcast, server_state, info = phase.aggregate(draws, broadcast, server_state, total)
    if number == len(kernel.phases) - 1:
        broadcast = broadcast._replace(shared=(), summed=())
    return broadcast, server_state, info


def code_like(kernel: FederatedKernel, phase: Phase | int, broadcast: Broadcast) -> ArrayTree:
    """Return the shapes of a client's code, an argument of `fedmcmc.wire.decode`."""
    return _resolve_phase(kernel, phase)[0].code_like(trees.shapes_of(broadcast))


def cohort_of(kernel: FederatedKernel, rng_key: Array, round_: Array, num_clients: int) -> Cohort:
    """Draw the cohort of a round and its weights from the chain's key."""
    key = cohort_key(as_key(rng_key), jnp.asarray(round_, jnp.int32))
    return draw_cohort(kernel.participation, key, num_clients)


def draw_cohort(participation: Participation, key: Array, num_clients: int) -> Cohort:
    """Return the cohort of a round; raise `ValueError` if its arrays have another length."""
    cohort = participation.prepare(key, num_clients)
    size, reason = participation.cohort_size, "cohort_size"
    if size is None:
        size, reason = num_clients, "the number of clients, because cohort_size is None"
    shapes = {n: jnp.shape(x) for n, x in cohort._asdict().items() if not trees.is_empty(x)}
    wrong = {name: shape for name, shape in shapes.items() if shape != (size,)}
    if wrong:
        raise ValueError(
            f"{type(participation).__name__}.prepare must return a Cohort of arrays of shape "
            f"({size},), {reason}; got {wrong} (docs/guides/extend.md)."
        )
    return cohort


def _resolve_phase(kernel: FederatedKernel, phase: Phase | int) -> tuple[Phase, int | None]:
    """Return a phase and its index in ``kernel.phases``, ``None`` for a phase of the setup."""
    phases = kernel.phases
    if isinstance(phase, int):
        if not 0 <= phase < len(phases):
            raise ValueError(
                f"phase must be in kernel.phases, or an index from 0 to {len(phases) - 1}; got "
                f"{phase}."
            )
        return phases[phase], phase
    for number, candidate in enumerate(phases):
        if candidate is phase:
            return candidate, number
    if any(candidate is phase for candidate in kernel.setup):
        return phase, None
    raise ValueError(
        "phase is not in kernel.phases or kernel.setup: pass an object from there, or the index of "
        "the phase (compiled functions copy their arguments, and a copy is another object)."
    )


def prepare_client(
    kernel: FederatedKernel,
    number: int,
    rng_key: Array,
    round_: Array,
    like: Broadcast,
    client: Client,
) -> ArrayTree:
    """Draw all random numbers of a client's step in phase `number` from the chain's key."""
    key = _client_key(kernel, number, rng_key, round_, client)
    return kernel.phases[number].prepare(key, like, client)


def _client_key(
    kernel: FederatedKernel, number: int, rng_key: Array, round_: Array, client: Client
) -> Array:
    """Derive the key of a client's step in phase `number` from the chain's key."""
    return _phase_key(kernel, number, client_key(rng_key, round_, client.index))


def _draw(prepare: Callable[[Array], ArrayTree], key: ArrayTree) -> ArrayTree:
    """Return ``prepare(key)``; raise if the key is ``()`` and `prepare` draws random numbers."""
    if not trees.is_empty(key):
        return prepare(key)
    draws = prepare(jax.random.key(0))
    if jax.tree.leaves(draws):
        raise ValueError(
            "This kernel's clients draw random numbers, but ClientKeys has no key for them: give "
            "private= and shared=."
        )
    return draws


def client_draws_like(
    kernel: FederatedKernel, phase: Phase | int, broadcast: Broadcast, client: Client
) -> tuple[ArrayTree, ArrayTree]:
    """Return the shapes of a client's private and shared random numbers in a phase.

    A tree without leaves stands for no random numbers. `broadcast` and `client` may be shapes.
    """
    phase, number = _resolve_phase(kernel, phase)
    if number is None:
        return (), ()
    key, like = jax.eval_shape(lambda: jax.random.key(0)), _between_rounds(broadcast)
    private = jax.eval_shape(lambda key, client: phase.prepare(key, like, client), key, client)
    shared = jax.eval_shape(lambda key: kernel.prepare_shared(key, like), key)
    return private, shared


def prepare_server(
    kernel: FederatedKernel, number: int, rng_key: Array, round_: Array, like: Broadcast
) -> ArrayTree:
    """Draw all random numbers of the server's step in phase `number`."""
    key = _phase_key(kernel, number, server_key(rng_key, round_))
    return kernel.phases[number].prepare_server(key, like)


def prepare_shared(
    kernel: FederatedKernel, rng_key: Array, round_: Array, like: Broadcast
) -> ArrayTree:
    """Draw the random numbers that all clients of a round share."""
    return kernel.prepare_shared(shared_key(rng_key, round_), like)


def _phase_key(kernel: FederatedKernel, number: int, key: Array) -> Array:
    """Return the key of a phase, given the key of the round; the last phase uses the latter."""
    return key if number == len(kernel.phases) - 1 else phase_key(key, number)


def _between_rounds(broadcast: Broadcast) -> Broadcast:
    shapes: Broadcast = trees.shapes_of(broadcast._replace(shared=(), summed=()))
    return shapes
