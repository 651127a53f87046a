"""Compiled programs of sites and server: steps of one client, and sums of all clients' codes.

All chains of a run are computed together; their axis is the first one of all leaves.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.deploy._shapes import StepReport
from fedmcmc.pytrees import trees
from fedmcmc.random import CHACHA, draw_key, shared_key
from fedmcmc.rounds import (
    ClientKeys,
    Received,
    client_step,
    cohort_of,
    first_memories,
    initialize_received,
    receive,
    server_step,
)
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Client,
    Cohort,
    FederatedKernel,
    FederatedState,
    FederationArgument,
    user_position,
)

Result = TypeVar("Result")


def take_chain(tree: ArrayTree, chain: int) -> ArrayTree:
    """Return one chain of a tree, as NumPy arrays."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[chain], tree)


def stack_chains(parts: list[ArrayTree]) -> ArrayTree:
    """Return NumPy arrays with a leading chain axis; a single chain is not copied.

    Compiled functions accept NumPy arrays faster than new JAX arrays.
    """
    if len(parts) == 1:
        return jax.tree.map(lambda leaf: leaf[None], parts[0])
    return jax.tree.map(lambda *leaves: np.stack(leaves), *parts)


def map_chains(fn: Callable[..., Result], *trees_: ArrayTree) -> Result:
    """Apply `fn` to every chain, which the first axis of all leaves counts.

    A single chain is computed without that axis, as in a simulated run.
    """
    if jax.tree.leaves(trees_)[0].shape[0] == 1:
        chain = jax.tree.map(lambda leaf: leaf[0], trees_)
        result: Result = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], fn(*chain))
        return result
    return jax.vmap(fn)(*trees_)


def split_round(broadcasts: Broadcast) -> tuple[Broadcast, Array]:
    """Return broadcasts with their rounds set to zero, and the round, which all chains share.

    A condition on the round then stays a branch for all chains.
    """
    return broadcasts._replace(round=jnp.zeros_like(broadcasts.round)), broadcasts.round[0]


# Programs of a site


@jax.jit
def init_client_states(kernel: FederatedKernel, client: Client, broadcasts: Broadcast) -> ArrayTree:
    """Return a client's states before the first round."""
    return map_chains(lambda broadcast: kernel.client_init(broadcast, client), broadcasts)


@partial(jax.jit, static_argnames=("number", "setup", "generator"))
def run_client(
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
    generator: object = None,
) -> tuple[ArrayTree, ArrayTree, StepReport]:
    """Return codes, states and reports of all chains; inactive chains keep their state.

    `keys` are keys of the chains, or words of the client's keys in this phase of this round.
    Private keys are for this package's generator, and shared keys for the server's `generator`.
    """
    if isinstance(keys, ClientKeys):
        keys = ClientKeys(_wrap_keys(keys.private, CHACHA), _wrap_keys(keys.shared, generator))
    phase = kernel.setup[number] if setup else kernel.phases[number]
    broadcasts, round_ = split_round(broadcasts)

    def run_chain(
        key: Array | ClientKeys,
        broadcast: Broadcast,
        state: ArrayTree,
        weight: Array,
        on: Array,
    ) -> tuple[ArrayTree, ArrayTree, StepReport]:
        broadcast = broadcast._replace(round=round_)
        weighted = replace(client, weight=weight)
        code, new, info = client_step(kernel, phase, key, broadcast, state, weighted)
        return code, trees.select(on, new, state), StepReport.of(info)

    return map_chains(run_chain, keys, broadcasts, states, weights, active)


def _wrap_keys(words: ArrayTree, generator: object) -> ArrayTree:
    """Return typed keys from words, ``()`` from ``()``."""
    return jax.tree.map(lambda leaf: jax.random.wrap_key_data(leaf, impl=generator), words)


@jax.jit
def select_chains(counted: Array, new: ArrayTree, old: ArrayTree) -> ArrayTree:
    """Return `new` in the counted chains and `old` in all other chains."""
    return jax.vmap(trees.select)(counted, new, old)


# Programs of the server


class Stepped(NamedTuple):
    """Results of the server's step after a phase.

    Attributes
    ----------
    broadcast, server, info
        Results of `rounds.server_step`.
    draw, finite
        One draw of every chain, and which chains are finite; ``()`` before the last phase.
    """

    broadcast: Broadcast
    server: ArrayTree
    info: ArrayTree
    draw: ArrayTree
    finite: ArrayTree


@jax.jit
def init_server(
    kernel: FederatedKernel,
    federation: FederationArgument,
    init_keys: Array,
    positions: ArrayTree,
    totals: tuple[ArrayTree, ...],
) -> tuple[Broadcast, ArrayTree, tuple[ArrayTree, ...]]:
    """Return the first broadcast, the server's first state, and its copies of memories."""

    def init_chain(
        key: Array, position: ArrayTree, totals: tuple[ArrayTree, ...]
    ) -> tuple[Broadcast, ArrayTree, tuple[ArrayTree, ...]]:
        broadcast, server = kernel.server_init(key, position, federation.federation, totals)
        numbers = range(len(kernel.phases))
        num = federation.num_clients
        memories = tuple(first_memories(kernel, n, broadcast, num) for n in numbers)
        return broadcast, server, memories

    return map_chains(init_chain, init_keys, positions, totals)


@jax.jit
def shared_words(keys: Array, number: Any) -> Array:
    """Return words ``[num_chains, ...]`` of the keys that all clients share in a round."""
    return jax.random.key_data(jax.vmap(lambda key: shared_key(key, number))(keys))


@partial(jax.jit, static_argnames="num_clients")
def draw_cohort(kernel: FederatedKernel, keys: Array, number: Any, num_clients: int) -> Cohort:
    """Return the cohort of a round, entries ``[cohort_size, num_chains]``."""
    cohort: Cohort = jax.vmap(lambda key: cohort_of(kernel, key, number, num_clients), out_axes=1)(
        keys
    )
    return cohort


def add_codes(
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
    """Return the server's total of a phase, and flags ``[cohort_size, num_chains]`` of its codes.

    All computations of the server with single messages are here. `codes` has one entry per site,
    leaves ``[num_chains, ...]``; entries of the cohort are ``[cohort_size, num_chains]``.
    """
    phase = kernel.setup[number] if setup else kernel.phases[number]
    slot_codes = jax.tree.map(lambda *leaves: jnp.stack(leaves), *codes)
    if not setup and kernel.participation.cohort_size is not None:
        chains = jnp.arange(cohort.ids.shape[1])
        slot_codes = jax.tree.map(lambda leaf: leaf[cohort.ids, chains], slot_codes)
    slot_codes, slots = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), (slot_codes, cohort))

    def add_chain(
        broadcast: Broadcast, memory: ArrayTree, codes: ArrayTree, slots: Cohort
    ) -> tuple[Received, Array]:
        def add_code(received: Received, entry: tuple[ArrayTree, Cohort]) -> tuple[Received, Array]:
            code, slot = entry
            if not trees.is_empty(slot.garbage):
                code = jax.tree.map(partial(_corrupt, slot.garbage), code)
            late = {"late": slot.late} if waits else {}
            new = receive(kernel, phase, received, code, slot.ids, slot.weight, **late)
            is_added = slot.active & (new.num_excluded == received.num_excluded)
            return trees.select(slot.active, new, received), is_added

        nothing = initialize_received(kernel, phase, broadcast, memory, waits=waits)
        received, is_added = jax.lax.scan(add_code, nothing, (codes, slots))
        return received, is_added

    received, is_added = map_chains(add_chain, broadcasts, memories, slot_codes, slots)
    return received, jnp.swapaxes(is_added, 0, 1)


@partial(jax.jit, static_argnames="number")
def sum_setup(
    kernel: FederatedKernel,
    broadcasts: Broadcast,
    codes: tuple[ArrayTree, ...],
    cohort: Cohort,
    *,
    number: int,
) -> ArrayTree:
    """Return a sum of all clients' messages before the first round."""
    received, _ = add_codes(
        kernel, broadcasts, (), codes, cohort, number=number, setup=True, waits=False
    )
    return received.total


@partial(jax.jit, static_argnames=("number", "waits"))
def receive_codes(
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
) -> tuple[Stepped, ArrayTree, Array]:
    """Add the codes of all sites and run the server's step.

    Return also the server's copies of the clients' memories, and flags ``[cohort_size,
    num_chains]`` of messages in the sum.
    """
    received, is_added = add_codes(
        kernel, broadcasts, memories, codes, cohort, number=number, setup=False, waits=waits
    )
    stepped = _step_server(kernel, keys, broadcasts, servers, received, number)
    return stepped, received.memories, is_added


def _step_server(
    kernel: FederatedKernel,
    keys: Array,
    broadcasts: Broadcast,
    servers: ArrayTree,
    received: Received,
    number: int,
) -> Stepped:
    """Run the server's step with the total of a phase."""
    broadcasts, round_ = split_round(broadcasts)

    def step_chain(
        key: Array, broadcast: Broadcast, server: ArrayTree, received: Received
    ) -> Stepped:
        broadcast = broadcast._replace(round=round_)
        broadcast, server, info = server_step(kernel, number, key, broadcast, server, received)
        if number < len(kernel.phases) - 1:
            return Stepped(broadcast, server, info, (), ())
        draw = kernel.draw(draw_key(key, round_), FederatedState(broadcast, server, ()))
        draw = user_position(kernel, draw)
        return Stepped(broadcast, server, info, draw, trees.all_finite(broadcast))

    return map_chains(step_chain, keys, broadcasts, servers, received)


step_server = jax.jit(_step_server, static_argnames="number")


def _corrupt(garbage: Array, leaf: Array) -> Array:
    """Return numbers as they arrive from a simulated fault; integers of a code do not change."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return jnp.where(garbage == 0, leaf, trees.cast(garbage, leaf))
