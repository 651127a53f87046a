"""Clients that are computed together: draws and steps of a part of a cohort."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    Cohort,
    FederatedKernel,
    Sender,
    StepInfo,
)
from fedmcmc.data import FederatedData
from fedmcmc.pytrees import largest_of_batch, trees
from fedmcmc.rounds._arrangement import Arrangement
from fedmcmc.rounds._phases import Prepared, client_step, prepare_client

__all__ = ["Group", "Said", "one_by_one", "prepare_group", "run_group"]


class Group(NamedTuple):
    """Clients of a cohort that are computed together."""

    cohort: Cohort
    bound: int  # static, on the sizes of these clients


class Said(NamedTuple):
    """What the clients of a cohort said in one exchange."""

    total: ArrayTree
    states: list[ArrayTree]  # the clients' new states, one entry a group
    info: StepInfo  # of the cohort, in its own order
    bits: int  # of all messages, uncompressed
    active: Array  # [cohort_size] bool, whose messages the server took


def prepare_group(
    kernel: FederatedKernel,
    number: int,
    data: FederatedData,
    group: Group,
    rng_key: Array,
    round_: Array,
    shapes: Broadcast,
) -> ArrayTree:
    """Draw all that is random in the steps of a group in phase `number`."""
    if group.cohort.ids.shape[0] == 1:
        client = data.client(group.cohort.ids[0], group.cohort.weight[0], group.bound)
        return prepare_client(kernel, number, rng_key, round_, shapes, client)

    def one(client: Client) -> ArrayTree:
        return prepare_client(kernel, number, rng_key, round_, shapes, client)

    clients = data.client(group.cohort.ids, group.cohort.weight, group.bound)
    return jax.vmap(one, in_axes=(data.client_axes(group.bound),))(clients)


def step_and_decode(
    kernel: FederatedKernel,
    number: int,
    randomness: ArrayTree,
    broadcast: Broadcast,
    client_state: ArrayTree,
    client: Client,
) -> tuple[ArrayTree, ArrayTree, StepInfo]:
    """Return a client's message as the server reads it, its new state and its report.

    Codes are decoded where they are made, in the loop over clients: a program that sums messages
    rounds alike on one device and on many.
    """
    phase = kernel.phases[number]
    code, new, info = client_step(
        kernel, number, Prepared(randomness), broadcast, client_state, client
    )
    like = phase.message_like(trees.shapes_of(broadcast))
    sender = Sender(client.index, client.weight)
    return phase.decode(code, sender, phase.memory(client_state), like), new, info


def run_group(
    kernel: FederatedKernel,
    number: int,
    data: FederatedData,
    arrangement: Arrangement,
    group: Group,
    broadcast: Broadcast,
    draws: ArrayTree,
    old: ArrayTree,
) -> tuple[ArrayTree, ArrayTree, StepInfo]:
    """Return messages, new states and reports of a group's clients, leaves ``[size, ...]``."""
    ids, weight = group.cohort.ids, group.cohort.weight
    at_a_time = arrangement.clients_at_a_time
    if at_a_time == 1:
        return one_by_one(kernel, number, data, group, broadcast, draws, old)
    if ids.shape[0] == 1:
        client = data.client(ids[0], weight[0], group.bound)
        own = jax.tree.map(lambda leaf: leaf[0], old)
        outputs = step_and_decode(kernel, number, draws, broadcast, own, client)
        return jax.tree.map(lambda leaf: leaf[None], outputs)

    def step(drawn: ArrayTree, own: ArrayTree, client: Client) -> ArrayTree:
        return step_and_decode(kernel, number, drawn, broadcast, own, client)

    result: tuple[ArrayTree, ArrayTree, StepInfo]
    if at_a_time is None or at_a_time >= ids.shape[0]:
        every = jax.vmap(step, in_axes=(0, 0, data.client_axes(group.bound)))
        result = every(draws, old, data.client(ids, weight, group.bound))
        return result

    def one(given: tuple[ArrayTree, ArrayTree, Array, Array]) -> ArrayTree:
        drawn, own, index, weight_ = given
        return step(drawn, own, data.client(index, weight_, group.bound))

    result = jax.lax.map(one, (draws, old, ids, weight), batch_size=at_a_time)
    return result


def one_by_one(
    kernel: FederatedKernel,
    number: int,
    data: FederatedData,
    group: Group,
    broadcast: Broadcast,
    draws: ArrayTree,
    old: ArrayTree,
    here: Array | None = None,
) -> tuple[ArrayTree, ArrayTree, StepInfo]:
    """Return what `run_group` does, computed client by client; zeros for those not `here`.

    A loop whose length a compiler does not know, in which what is not `here` is masked, on one
    device as on many: a compiler fuses, and rounds, the same program the same way. Of a loop over
    one client it would make none, and chains that share a loop would each mask all that it carries.
    """
    cohort = group.cohort
    size = cohort.ids.shape[0]

    def one(entry: Array) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        drawn = draws if size == 1 else jax.tree.map(lambda leaf: leaf[entry], draws)
        own = jax.tree.map(lambda leaf: leaf[entry], old)
        client = data.client(cohort.ids[entry], cohort.weight[entry], group.bound)
        return step_and_decode(kernel, number, drawn, broadcast, own, client)

    shapes = jax.eval_shape(one, jnp.int32(0))
    zeros = jax.tree.map(lambda s: jnp.zeros((size, *s.shape), s.dtype), shapes)
    here = cohort.ids >= 0 if here is None else here
    num_here = jnp.sum(here, dtype=jnp.int32)
    order = jnp.argsort(~here, stable=True)  # those to compute, then the others

    def body(i: Array, outputs: Any) -> Any:
        entry, counts = order[i], i < num_here

        def put(table: Array, leaf: Array) -> Array:
            return table.at[entry].set(jnp.where(counts, leaf, table[entry]))

        return jax.tree.map(put, outputs, one(entry))

    result: tuple[ArrayTree, ArrayTree, StepInfo] = jax.lax.fori_loop(
        0, largest_of_batch(num_here), body, zeros
    )
    return result
