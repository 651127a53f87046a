"""What sites and server compute, compiled: steps of one client, and what becomes of all codes.

All chains of a run are computed together; their axis is the first of all leaves.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    Cohort,
    FederatedKernel,
    FederatedState,
    user_position,
)
from fedmcmc.deploy._shapes import Report
from fedmcmc.deploy._study import Study
from fedmcmc.pytrees import trees
from fedmcmc.random import CHACHA, draw_key, shared_key
from fedmcmc.rounds import (
    ClientKeys,
    Received,
    client_step,
    cohort_of,
    first_memories,
    nothing_received,
    receive,
    server_step,
)


def chain_of(tree: ArrayTree, chain: int) -> ArrayTree:
    """Return one chain of a tree, as NumPy arrays."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[chain], tree)


def stacked(parts: list[ArrayTree]) -> ArrayTree:
    """Return NumPy arrays with a leading axis, of one chain without copying them.

    A compiled function takes them sooner than JAX arrays that would have to be made of them.
    """
    if len(parts) == 1:
        return jax.tree.map(lambda leaf: leaf[None], parts[0])
    return jax.tree.map(lambda *leaves: np.stack(leaves), *parts)


def over_chains(fn: Any, *trees_: ArrayTree) -> ArrayTree:
    """Return ``fn`` of every chain, whose axis is the first of all leaves.

    A single chain is computed without that axis, as in a simulated run.
    """
    if jax.tree.leaves(trees_)[0].shape[0] == 1:
        alone = jax.tree.map(lambda leaf: leaf[0], trees_)
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], fn(*alone))
    return jax.vmap(fn)(*trees_)


def one_round(broadcasts: Broadcast) -> tuple[Broadcast, Array]:
    """Return broadcasts of many chains without the round's number, and that, which is one of all.

    A condition on the round then stays a branch for all chains.
    """
    return broadcasts._replace(round=jnp.zeros_like(broadcasts.round)), broadcasts.round[0]


# At a site


@jax.jit
def first_states(kernel: FederatedKernel, client: Client, broadcasts: Broadcast) -> ArrayTree:
    """Return what a client keeps before the first round."""
    return over_chains(lambda broadcast: kernel.client_init(broadcast, client), broadcasts)


@partial(jax.jit, static_argnames=("number", "setup", "generator"))
def steps(
    kernel: FederatedKernel,
    client: Client,
    keys: Array | ClientKeys,
    broadcasts: Broadcast,
    states: ArrayTree,
    weights: Array,
    active: Array,
    *,
    number: int,
    setup: bool,
    generator: Any = None,
) -> tuple[ArrayTree, ArrayTree, Report]:
    """Return codes, states and reports of all chains; where not active, the state as it was.

    `keys` are those of the chains, or, as words, of the client in this phase of this round: of
    this package's generator what it draws alone, of the server's `generator` what all draw alike.
    """
    if isinstance(keys, ClientKeys):
        keys = ClientKeys(_typed(keys.private, CHACHA), _typed(keys.shared, generator))
    phase = kernel.setup[number] if setup else kernel.phases[number]
    broadcasts, round_ = one_round(broadcasts)

    def one(
        key: Array | ClientKeys,
        broadcast: Broadcast,
        state: ArrayTree,
        weight: Array,
        on: Array,
    ) -> tuple[ArrayTree, ArrayTree, Report]:
        broadcast = broadcast._replace(round=round_)
        own = replace(client, weight=weight)
        code, new, info = client_step(kernel, phase, key, broadcast, state, own)
        return code, trees.select(on, new, state), Report.of(info)

    outputs: tuple[ArrayTree, ArrayTree, Report] = over_chains(
        one, keys, broadcasts, states, weights, active
    )
    return outputs


def _typed(words: ArrayTree, generator: Any) -> ArrayTree:
    """Return typed keys from words, ``()`` from ``()``."""
    return jax.tree.map(lambda leaf: jax.random.wrap_key_data(leaf, impl=generator), words)


@jax.jit
def select(counted: Array, new: ArrayTree, old: ArrayTree) -> ArrayTree:
    """Return the chains of `new` that were counted, and the others of `old`."""
    return jax.vmap(trees.select)(counted, new, old)


# At the server


class Moved(NamedTuple):
    """What a server has after a phase of a round.

    Attributes
    ----------
    broadcast, server, info
        As of `rounds.server_step`.
    draw, finite
        One draw of every chain, and which chains are finite; ``()`` before the last phase.
    """

    broadcast: Broadcast
    server: ArrayTree
    info: ArrayTree
    draw: ArrayTree
    finite: ArrayTree


class Taken(NamedTuple):
    """What of single messages the server keeps, besides their sum.

    Attributes
    ----------
    memories
        Its copies of the clients' memories.
    taken
        ``[cohort_size, num_chains]`` bool, which messages are in the sum.
    """

    memories: ArrayTree
    taken: Array


@partial(jax.jit, static_argnames="study")
def first(
    kernel: FederatedKernel,
    study: Study,
    init_keys: Array,
    positions: ArrayTree,
    totals: tuple[ArrayTree, ...],
) -> tuple[Broadcast, ArrayTree, tuple[ArrayTree, ...]]:
    """Return the first broadcast, the server's first state, and its copies of memories."""
    federation = study.federation

    def one(
        key: Array, position: ArrayTree, totals: tuple[ArrayTree, ...]
    ) -> tuple[Broadcast, ArrayTree, tuple[ArrayTree, ...]]:
        broadcast, server = kernel.server_init(key, position, federation, totals)
        numbers = range(len(kernel.phases))
        num = federation.num_clients
        memories = tuple(first_memories(kernel, n, broadcast, num) for n in numbers)
        return broadcast, server, memories

    firsts: tuple[Broadcast, ArrayTree, tuple[ArrayTree, ...]] = over_chains(
        one, init_keys, positions, totals
    )
    return firsts


@jax.jit
def shared_words(keys: Array, number: Any) -> Array:
    """Return the keys of what all clients draw alike in a round, as words ``[num_chains, ...]``."""
    return jax.random.key_data(jax.vmap(lambda key: shared_key(key, number))(keys))


@partial(jax.jit, static_argnames="num_clients")
def cohorts(kernel: FederatedKernel, keys: Array, number: Any, num_clients: int) -> Cohort:
    """Return the cohort of a round, entries ``[cohort_size, num_chains]``."""
    found: Cohort = jax.vmap(lambda key: cohort_of(kernel, key, number, num_clients), out_axes=1)(
        keys
    )
    return found


def total_of(
    kernel: FederatedKernel,
    broadcasts: Broadcast,
    memories: ArrayTree,
    codes: tuple[ArrayTree, ...],
    cohort: Cohort,
    *,
    number: int,
    setup: bool,
    waits: bool,
) -> tuple[Received, Array]:
    """Return the server's total after all messages of a phase, and which of them are in it.

    All that the server computes of single messages goes through here. There is one code per site,
    leaves ``[num_chains, ...]``; entries of the cohort are ``[cohort_size, num_chains]``.
    """
    phase = kernel.setup[number] if setup else kernel.phases[number]
    own = jax.tree.map(lambda *leaves: jnp.stack(leaves), *codes)
    if setup or kernel.participation.cohort_size is None:
        pass  # all clients, in their order
    else:
        own = jax.tree.map(lambda leaf: leaf[cohort.ids, jnp.arange(cohort.ids.shape[1])], own)
    own, slots = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), (own, cohort))

    def one(
        broadcast: Broadcast, memory: ArrayTree, codes: ArrayTree, slots: Cohort
    ) -> tuple[Received, Array]:
        def take(received: Received, entry: tuple[ArrayTree, Cohort]) -> tuple[Received, Array]:
            code, slot = entry
            if not trees.is_empty(slot.garbage):
                code = jax.tree.map(partial(_broken, slot.garbage), code)
            late = {"late": slot.late} if waits else {}
            new = receive(kernel, phase, received, code, slot.ids, slot.weight, **late)
            taken = slot.active & (new.num_excluded == received.num_excluded)
            return trees.select(slot.active, new, received), taken

        nothing = nothing_received(kernel, phase, broadcast, memory, waits=waits)
        received, taken = jax.lax.scan(take, nothing, (codes, slots))
        return received, taken

    received, taken = over_chains(one, broadcasts, memories, own, slots)
    return received, jnp.swapaxes(taken, 0, 1)


@partial(jax.jit, static_argnames="number")
def summed(
    kernel: FederatedKernel,
    broadcasts: Broadcast,
    codes: tuple[ArrayTree, ...],
    cohort: Cohort,
    *,
    number: int,
) -> ArrayTree:
    """Return a sum of all clients' messages before the first round."""
    received, _ = total_of(
        kernel, broadcasts, (), codes, cohort, number=number, setup=True, waits=False
    )
    return received.total


@partial(jax.jit, static_argnames=("number", "waits"))
def taken_in(
    kernel: FederatedKernel,
    keys: Array,
    broadcasts: Broadcast,
    servers: ArrayTree,
    memories: ArrayTree,
    codes: tuple[ArrayTree, ...],
    cohort: Cohort,
    *,
    number: int,
    waits: bool,
) -> tuple[Moved, Taken]:
    """Return what the server has after a phase, from the codes of all sites."""
    received, taken = total_of(
        kernel, broadcasts, memories, codes, cohort, number=number, setup=False, waits=waits
    )
    found = _moved(kernel, keys, broadcasts, servers, received, number)
    return found, Taken(received.memories, taken)


@partial(jax.jit, static_argnames="number")
def moved(
    kernel: FederatedKernel,
    keys: Array,
    broadcasts: Broadcast,
    servers: ArrayTree,
    received: Received,
    *,
    number: int,
) -> Moved:
    """Return what the server has after a phase, from a total."""
    return _moved(kernel, keys, broadcasts, servers, received, number)


def _moved(
    kernel: FederatedKernel,
    keys: Array,
    broadcasts: Broadcast,
    servers: ArrayTree,
    received: Received,
    number: int,
) -> Moved:
    broadcasts, round_ = one_round(broadcasts)

    def one(key: Array, broadcast: Broadcast, server: ArrayTree, received: Received) -> Moved:
        broadcast = broadcast._replace(round=round_)
        broadcast, server, info = server_step(kernel, number, key, broadcast, server, received)
        if number < len(kernel.phases) - 1:
            return Moved(broadcast, server, info, (), ())
        draw = kernel.draw(draw_key(key, round_), FederatedState(broadcast, server, ()))
        draw = user_position(kernel, draw)
        return Moved(broadcast, server, info, draw, trees.all_finite(broadcast))

    found: Moved = over_chains(one, keys, broadcasts, servers, received)
    return found


def _broken(garbage: Array, leaf: Array) -> Array:
    """Return numbers as they arrive from a simulated fault; integers of a code cannot be broken."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return jnp.where(garbage == 0, leaf, trees.cast(garbage, leaf))
