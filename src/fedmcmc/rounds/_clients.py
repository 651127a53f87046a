"""The clients' part of a phase: who is computed together and where, and the sum of what they send.

Clients lie on one device, in groups that are computed one after the other, or on the devices of a
mesh, each of which computes its own.
"""

import functools
from collections.abc import Callable
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
    Participation,
    Sender,
    StepInfo,
    memory_of,
)
from fedmcmc.data import FederatedData
from fedmcmc.pytrees import largest_of_batch, trees
from fedmcmc.rounds._arrangement import AXIS, Arrangement, Layout, Part
from fedmcmc.rounds._messages import guarded, kept_by_all, sum_of
from fedmcmc.rounds._phases import Prepared, client_step, prepare_client


class Group(NamedTuple):
    """Clients of a cohort that are computed together."""

    cohort: Cohort
    bound: int  # static, on the sizes of these clients


class Task(NamedTuple):
    """What the clients of a cohort compute in a phase."""

    kernel: FederatedKernel
    number: int  # of the phase
    data: FederatedData
    arrangement: Arrangement
    broadcast: Broadcast

    def of(
        self, randomness: ArrayTree, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        """Return one client's message as the server reads it, its new state and its report.

        A code is decoded where it is made, in the loop over clients: what sums messages is then
        rounded alike on one device and on many.
        """
        phase, shapes = self.kernel.phases[self.number], trees.shapes_of(self.broadcast)
        code, new, info = client_step(
            self.kernel, self.number, Prepared(randomness), self.broadcast, client_state, client
        )
        sender, memory = Sender(client.index, client.weight), memory_of(phase, client_state)
        return phase.decode(code, sender, memory, phase.message_like(shapes)), new, info

    @property
    def is_last(self) -> bool:
        """Whether the phase is the round's last: only its messages may be late."""
        return self.number == len(self.kernel.phases) - 1


class Outputs(NamedTuple):
    """What the clients of a cohort computed in a phase."""

    total: ArrayTree
    states: list[ArrayTree]  # the clients' new states, one entry per group
    info: StepInfo  # of the cohort, in its own order
    bits: int  # of all messages, as they are summed
    active: Array  # [cohort_size] bool, whose messages the server took


def groups_of(
    participation: Participation, data: FederatedData, arrangement: Arrangement, cohort: Cohort
) -> list[Group]:
    """Return the parts of the cohort that are computed together, each with a bound on sizes.

    With a layout, those that this device computes if all take part, and else the whole cohort, out
    of which it computes its own clients.
    """
    layout, buckets = arrangement.layout, arrangement.buckets
    if participation.cohort_size is None and layout is not None:
        return [_own_part(layout, part, cohort) for part in layout.parts]
    if participation.cohort_size is None and buckets is not None and len(buckets.bounds) > 1:
        return [
            Group(jax.tree.map(lambda leaf, ids=ids: leaf[ids], cohort), bound)
            for ids, bound in buckets.groups()
        ]
    return [Group(cohort, data.max_size)]


def _own_part(layout: Layout, part: Part, cohort: Cohort) -> Group:
    ids, used = layout.own(part)
    own = jax.tree.map(lambda leaf: leaf[ids], cohort)
    return Group(own._replace(active=own.active & used), part.bound)


def own_states(
    participation: Participation, arrangement: Arrangement, groups: list[Group], states: ArrayTree
) -> list[ArrayTree]:
    """Return the states of each group's clients, leaves ``[size, ...]``."""
    if len(groups) == 1 and participation.cohort_size is None:
        return [states]
    if arrangement.layout is not None and participation.cohort_size is None:
        return [
            jax.tree.map(lambda leaf, p=part: leaf[p.first : p.first + p.count], states)
            for part in arrangement.layout.parts
        ]
    slots = [arrangement.slot(group.cohort.ids) for group in groups]
    return [jax.tree.map(lambda leaf, at=at: leaf[at], states) for at in slots]


def all_states(
    participation: Participation,
    arrangement: Arrangement,
    groups: list[Group],
    before: ArrayTree,
    states: list[ArrayTree],
) -> ArrayTree:
    """Return the states of all clients after a round, from those of the groups."""
    if len(groups) > 1 and arrangement.layout is not None:
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *states)
    if len(groups) > 1:
        return _in_order(arrangement, states)
    if participation.cohort_size is None:
        return states[0]
    at = arrangement.slot(groups[0].cohort.ids)
    return jax.tree.map(lambda every, own: every.at[at].set(own), before, states[0])


def prepare_group(
    kernel: FederatedKernel,
    number: int,
    data: FederatedData,
    arrangement: Arrangement,
    group: Group,
    rng_key: Array,
    round_: Array,
    shapes: Broadcast,
) -> ArrayTree:
    """Draw all that is random in the steps of a group in phase `number`.

    Where a device has some of a sampled cohort, it draws for these alone: zeros for the others.
    """

    def one(client: Client) -> ArrayTree:
        return prepare_client(kernel, number, rng_key, round_, shapes, client)

    ids, weight = group.cohort.ids, group.cohort.weight
    if ids.shape[0] == 1:
        return one(data.client(ids[0], weight[0], group.bound))
    if arrangement.layout is not None and kernel.participation.cohort_size is not None:
        here = arrangement.layout.owned(ids)
        return _each(lambda i: one(data.client(ids[i], weight[i], group.bound)), here)
    clients = data.client(ids, weight, group.bound)
    return jax.vmap(one, in_axes=(data.client_axes(group.bound),))(clients)


def run_task(
    task: Task,
    cohort: Cohort,
    groups: list[Group],
    states: list[ArrayTree],
    randomness: list[ArrayTree],
) -> Outputs:
    """Run the steps of all groups of a cohort and sum their messages."""
    arrangement = task.arrangement
    run_one = _run_one if arrangement.layout is None else _run_on_devices
    parts = [
        run_one(task, cohort, index, *entry)
        for index, entry in enumerate(zip(groups, states, randomness, strict=True))
    ]
    if len(parts) == 1:
        return parts[0]
    return Outputs(
        functools.reduce(trees.add, [part.total for part in parts]),
        [part.states[0] for part in parts],
        _in_order(arrangement, [part.info for part in parts]),
        sum(part.bits for part in parts),
        _in_order(arrangement, [part.active for part in parts]),
    )


def _in_order(arrangement: Arrangement, parts: list[ArrayTree]) -> ArrayTree:
    assert arrangement.buckets is not None
    place = arrangement.buckets.place
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[place], *parts)


def _run_one(
    task: Task, cohort: Cohort, index: int, group: Group, old: ArrayTree, randomness: ArrayTree
) -> Outputs:
    """Run the steps of one group of a cohort, the `index`-th, and sum its messages."""
    del cohort, index
    participation, own = task.kernel.participation, group.cohort
    message, new, info = _run_group(task, group, randomness, old)
    bits = 8 * trees.num_bytes(message)
    if participation.guards:
        message, own = guarded(message, own)
    if participation.drops or participation.guards:
        new = kept_by_all(own.active, new, old)
    total = sum_of(message, own, participation, late=task.is_last, drops=participation.drops)
    return Outputs(total, [new], info, bits, own.active)


def _run_on_devices(
    task: Task, cohort: Cohort, index: int, group: Group, old: ArrayTree, randomness: ArrayTree
) -> Outputs:
    """Run the steps of this device's clients of a group, and sum the messages of all devices.

    With the totals ``"gather"`` every device gets all messages and sums them in the order of the
    cohort, as one device would; with ``"psum"`` it sums its own, and the devices' sums are added.
    """
    participation, layout = task.kernel.participation, task.arrangement.layout
    assert layout is not None
    everyone, part = participation.cohort_size is None, layout.parts[index]
    if len(layout.parts) > 1 and everyone:
        cohort = jax.tree.map(lambda leaf: leaf[part.members], cohort)
    if everyone:
        message, new, info = _run_group(task, group, randomness, old)
    else:
        here = layout.owned(group.cohort.ids)
        message, new, info = _one_by_one(task, group, randomness, old, here)

    def collected(tree: ArrayTree) -> ArrayTree:
        """Return the entries of all clients, in the order of the cohort."""
        if not everyone:
            return jax.tree.map(_over_devices, tree)
        return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, AXIS, tiled=True)[part.at], tree)

    bits, drops = 8 * trees.num_bytes(message), participation.drops or participation.guards
    if layout.totals == "gather":
        message = collected(message)
        if participation.guards:
            message, cohort = guarded(message, cohort)
        total = sum_of(message, cohort, participation, late=task.is_last, drops=drops)
    else:
        here = layout.own(part)[1] if everyone else layout.owned(cohort.ids)
        own = group.cohort._replace(active=group.cohort.active & here)
        if participation.guards:
            message, own = guarded(message, own)
        cohort = cohort._replace(active=collected(own.active))
        total = sum_of(message, own, participation, late=task.is_last, drops=True)
        total = jax.lax.psum(total, AXIS)
    if drops:
        active = _of_group(cohort.active, layout, part) if everyone else cohort.active
        new = kept_by_all(active, new, old)
    return Outputs(total, [new], collected(info), bits, cohort.active)


def _of_group(active: Array, layout: Layout, part: Part) -> Array:
    """Return which of this device's clients are active, from all clients of a part."""
    here = jax.lax.axis_index(AXIS) * part.count + jnp.arange(part.count)
    return jnp.zeros(layout.num_devices * part.count, bool).at[part.at].set(active)[here]


def _over_devices(leaf: Array) -> Array:
    """Return the sum of entries that all devices but one have left at zero: that one's, exactly."""
    if leaf.dtype == jnp.bool_:
        return jax.lax.psum(leaf.astype(jnp.int32), AXIS) > 0
    return jax.lax.psum(leaf, AXIS)


def _run_group(
    task: Task, group: Group, randomness: ArrayTree, old: ArrayTree
) -> tuple[ArrayTree, ArrayTree, StepInfo]:
    """Return messages, new states and reports of a group's clients, leaves ``[size, ...]``."""
    data, ids, weight = task.data, group.cohort.ids, group.cohort.weight
    at_a_time = task.arrangement.clients_at_a_time
    if at_a_time == 1:
        return _one_by_one(task, group, randomness, old, ids >= 0)
    if ids.shape[0] == 1:
        client = data.client(ids[0], weight[0], group.bound)
        outputs = task.of(randomness, jax.tree.map(lambda leaf: leaf[0], old), client)
        return jax.tree.map(lambda leaf: leaf[None], outputs)

    result: tuple[ArrayTree, ArrayTree, StepInfo]
    if at_a_time is None or at_a_time >= ids.shape[0]:
        every = jax.vmap(task.of, in_axes=(0, 0, data.client_axes(group.bound)))
        result = every(randomness, old, data.client(ids, weight, group.bound))
        return result

    def one(entry: tuple[ArrayTree, ArrayTree, Array, Array]) -> ArrayTree:
        drawn, state, index, weight_ = entry
        return task.of(drawn, state, data.client(index, weight_, group.bound))

    result = jax.lax.map(one, (randomness, old, ids, weight), batch_size=at_a_time)
    return result


def _one_by_one(
    task: Task, group: Group, randomness: ArrayTree, old: ArrayTree, here: Array
) -> tuple[ArrayTree, ArrayTree, StepInfo]:
    """Return what `_run_group` does, computed client by client; zeros for those not `here`."""
    ids, weight = group.cohort.ids, group.cohort.weight

    def one(entry: Array) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        single = ids.shape[0] == 1
        drawn = randomness if single else jax.tree.map(lambda leaf: leaf[entry], randomness)
        state = jax.tree.map(lambda leaf: leaf[entry], old)
        return task.of(drawn, state, task.data.client(ids[entry], weight[entry], group.bound))

    result: tuple[ArrayTree, ArrayTree, StepInfo] = _each(one, here)
    return result


def _each(one: Callable[[Array], ArrayTree], here: Array) -> ArrayTree:
    """Return ``one(entry)`` of each entry that is `here`, one after the other; zeros elsewhere.

    The loop is the same on one device and on many, so a compiler fuses and rounds it the same way.
    Its length is traced: a loop of known length one would be compiled as no loop at all. All chains
    share the largest length; with lengths of their own each would mask all that the loop carries,
    where now only entries that are not `here` are masked.
    """
    shapes = jax.eval_shape(one, jnp.int32(0))
    zeros = jax.tree.map(lambda s: jnp.zeros((here.shape[0], *s.shape), s.dtype), shapes)
    num_here = jnp.sum(here, dtype=jnp.int32)
    order = jnp.argsort(~here, stable=True)  # those to compute, then the others

    def body(i: Array, outputs: Any) -> Any:
        entry, counts = order[i], i < num_here

        def put(table: Array, leaf: Array) -> Array:
            return table.at[entry].set(jnp.where(counts, leaf, table[entry]))

        return jax.tree.map(put, outputs, one(entry))

    return jax.lax.fori_loop(0, largest_of_batch(num_here), body, zeros)
