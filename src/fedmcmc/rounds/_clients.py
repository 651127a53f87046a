"""The clients' side of a phase: groups of clients, their steps, and the sum of their messages.

All clients lie on one device, which computes them in groups, or are spread over the devices of a
mesh, each of which computes its own clients.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.data import FederatedData
from fedmcmc.pytrees import largest_of_batch, trees
from fedmcmc.rounds._layout import CLIENT_AXIS, Layout, MeshLayout, MeshPart
from fedmcmc.rounds._messages import exclude_non_finite, sum_messages, where_active
from fedmcmc.rounds._phases import Prepared, client_step, prepare_client
from fedmcmc.types import (
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


class Group(NamedTuple):
    """Clients of a cohort that are computed together."""

    cohort: Cohort
    bound: int  # static upper bound on the sizes of these clients


class PhaseTask(NamedTuple):
    """Computation of a cohort's clients in one phase."""

    kernel: FederatedKernel
    number: int  # index of the phase
    data: FederatedData
    layout: Layout
    broadcast: Broadcast  # shapes are sufficient for `prepare_group`

    def run_client(
        self, randomness: ArrayTree, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        """Return one client's decoded message, its new state and its report.

        Codes are decoded in the loop over clients, so that the sum of the messages is rounded in
        the same way on one device and on many.
        """
        phase, shapes = self.kernel.phases[self.number], trees.shapes_of(self.broadcast)
        code, new, info = client_step(
            self.kernel, self.number, Prepared(randomness), self.broadcast, client_state, client
        )
        sender, memory = Sender(client.index, client.weight), memory_of(phase, client_state)
        return phase.decode(code, sender, memory, phase.message_like(shapes)), new, info

    @property
    def is_last(self) -> bool:
        """True for the last phase of a round, the only one with late messages."""
        return self.number == len(self.kernel.phases) - 1


class Outputs(NamedTuple):
    """Results of a cohort's clients in one phase."""

    total: ArrayTree
    states: list[ArrayTree]  # new states of the clients, one entry per group
    info: StepInfo  # in cohort order
    bits: int  # size of all decoded messages
    active: Array  # [cohort_size] bool, clients whose messages the server accepted


def split_cohort(
    participation: Participation, data: FederatedData, layout: Layout, cohort: Cohort
) -> list[Group]:
    """Return the groups of the cohort that are computed together, each with a bound on sizes.

    If all clients take part and there is a mesh, the groups hold this device's clients. A sampled
    cohort is one group.
    """
    mesh_layout, buckets = layout.mesh_layout, layout.buckets
    if participation.cohort_size is None and mesh_layout is not None:
        return [_local_group(mesh_layout, part, cohort) for part in mesh_layout.parts]
    if participation.cohort_size is None and buckets is not None and len(buckets.bounds) > 1:
        return [
            Group(jax.tree.map(lambda leaf, ids=ids: leaf[ids], cohort), bound)
            for ids, bound in buckets.groups()
        ]
    return [Group(cohort, data.max_size)]


def _local_group(mesh_layout: MeshLayout, part: MeshPart, cohort: Cohort) -> Group:
    ids, used = mesh_layout.local_clients(part)
    local = jax.tree.map(lambda leaf: leaf[ids], cohort)
    return Group(local._replace(active=local.active & used), part.bound)


def split_states(
    participation: Participation, layout: Layout, groups: list[Group], states: ArrayTree
) -> list[ArrayTree]:
    """Return the states of each group's clients, leaves ``[size, ...]``."""
    if len(groups) == 1 and participation.cohort_size is None:
        return [states]
    if layout.mesh_layout is not None and participation.cohort_size is None:
        return [
            jax.tree.map(lambda leaf, p=part: leaf[p.start : p.start + p.count], states)
            for part in layout.mesh_layout.parts
        ]
    slots = [layout.slot(group.cohort.ids) for group in groups]
    return [jax.tree.map(lambda leaf, slot=slot: leaf[slot], states) for slot in slots]


def merge_states(
    participation: Participation,
    layout: Layout,
    groups: list[Group],
    before: ArrayTree,
    states: list[ArrayTree],
) -> ArrayTree:
    """Return the states of all clients after a round, given the states of the groups."""
    if len(groups) > 1 and layout.mesh_layout is not None:
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *states)
    if len(groups) > 1:
        return _in_client_order(layout, states)
    if participation.cohort_size is None:
        return states[0]
    slots = layout.slot(groups[0].cohort.ids)
    return jax.tree.map(lambda table, new: table.at[slots].set(new), before, states[0])


def prepare_group(task: PhaseTask, group: Group, rng_key: Array, round_: Array) -> ArrayTree:
    """Draw all random numbers of a group's steps.

    If a sampled cohort is spread over devices, each device draws for its own clients; the entries
    of remote clients are zero.
    """

    def prepare(client: Client) -> ArrayTree:
        return prepare_client(task.kernel, task.number, rng_key, round_, task.broadcast, client)

    data, mesh_layout = task.data, task.layout.mesh_layout
    ids, weight = group.cohort.ids, group.cohort.weight
    if ids.shape[0] == 1:
        return prepare(data.client(ids[0], weight[0], group.bound))
    if mesh_layout is not None and task.kernel.participation.cohort_size is not None:
        return _map_selected(
            lambda i: prepare(data.client(ids[i], weight[i], group.bound)),
            mesh_layout.is_local(ids),
        )
    clients = data.client(ids, weight, group.bound)
    return jax.vmap(prepare, in_axes=(data.client_axes(group.bound),))(clients)


def run_task(
    task: PhaseTask,
    cohort: Cohort,
    groups: list[Group],
    states: list[ArrayTree],
    randomness: list[ArrayTree],
) -> Outputs:
    """Run the steps of all groups of a cohort and sum their messages."""
    layout = task.layout
    entries = zip(groups, states, randomness, strict=True)
    if layout.mesh_layout is None:
        parts = [_run_on_one_device(task, *entry) for entry in entries]
    else:
        parts = [_run_on_devices(task, cohort, i, *entry) for i, entry in enumerate(entries)]
    if len(parts) == 1:
        return parts[0]
    return Outputs(
        functools.reduce(trees.add, [part.total for part in parts]),
        [part.states[0] for part in parts],
        _in_client_order(layout, [part.info for part in parts]),
        sum(part.bits for part in parts),
        _in_client_order(layout, [part.active for part in parts]),
    )


def _in_client_order(layout: Layout, parts: list[ArrayTree]) -> ArrayTree:
    assert layout.buckets is not None
    rank = layout.buckets.rank
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[rank], *parts)


def _run_on_one_device(
    task: PhaseTask, group: Group, old: ArrayTree, randomness: ArrayTree
) -> Outputs:
    """Run the steps of one group of a cohort and sum its messages."""
    participation, members = task.kernel.participation, group.cohort
    message, new, info = _run_group(task, group, randomness, old)
    bits = 8 * trees.num_bytes(message)
    if participation.excludes_broken_messages:
        message, members = exclude_non_finite(message, members)
    may_drop = participation.may_drop
    if may_drop or participation.excludes_broken_messages:
        new = where_active(members.active, new, old)
    total = sum_messages(message, members, participation, late=task.is_last, may_drop=may_drop)
    return Outputs(total, [new], info, bits, members.active)


def _run_on_devices(
    task: PhaseTask, cohort: Cohort, index: int, group: Group, old: ArrayTree, randomness: ArrayTree
) -> Outputs:
    """Run the steps of this device's clients of a group, and sum the messages of all devices.

    With the totals ``"gather"`` every device receives all messages and sums them in cohort order,
    as one device does. With ``"psum"`` each device sums its own messages, and these sums are added.
    """
    participation, mesh_layout = task.kernel.participation, task.layout.mesh_layout
    assert mesh_layout is not None
    all_take_part, part = participation.cohort_size is None, mesh_layout.parts[index]
    if len(mesh_layout.parts) > 1 and all_take_part:
        cohort = jax.tree.map(lambda leaf: leaf[part.members], cohort)
    if all_take_part:
        message, new, info = _run_group(task, group, randomness, old)
    else:
        is_local = mesh_layout.is_local(group.cohort.ids)
        message, new, info = _run_one_by_one(task, group, randomness, old, is_local)

    def collect(tree: ArrayTree) -> ArrayTree:
        """Return the entries of all clients, in cohort order."""
        if not all_take_part:
            return jax.tree.map(_sum_over_devices, tree)
        return jax.tree.map(
            lambda leaf: jax.lax.all_gather(leaf, CLIENT_AXIS, tiled=True)[part.gathered], tree
        )

    bits, may_drop = (
        8 * trees.num_bytes(message),
        participation.may_drop or participation.excludes_broken_messages,
    )
    if mesh_layout.totals == "gather":
        message = collect(message)
        if participation.excludes_broken_messages:
            message, cohort = exclude_non_finite(message, cohort)
        total = sum_messages(message, cohort, participation, late=task.is_last, may_drop=may_drop)
    else:
        is_local = (
            mesh_layout.local_clients(part)[1]
            if all_take_part
            else mesh_layout.is_local(cohort.ids)
        )
        members = group.cohort._replace(active=group.cohort.active & is_local)
        if participation.excludes_broken_messages:
            message, members = exclude_non_finite(message, members)
        cohort = cohort._replace(active=collect(members.active))
        total = sum_messages(message, members, participation, late=task.is_last, may_drop=True)
        total = jax.lax.psum(total, CLIENT_AXIS)
    if may_drop:
        active = _local_active(cohort.active, mesh_layout, part) if all_take_part else cohort.active
        new = where_active(active, new, old)
    return Outputs(total, [new], collect(info), bits, cohort.active)


def _local_active(active: Array, mesh_layout: MeshLayout, part: MeshPart) -> Array:
    """Return the activity mask of this device's clients, from the mask of a whole part."""
    slots = jax.lax.axis_index(CLIENT_AXIS) * part.count + jnp.arange(part.count)
    return (
        jnp.zeros(mesh_layout.num_devices * part.count, bool).at[part.gathered].set(active)[slots]
    )


def _sum_over_devices(leaf: Array) -> Array:
    """Return entries that are zero on all devices but one; this sum is exact."""
    if leaf.dtype == jnp.bool_:
        return jax.lax.psum(leaf.astype(jnp.int32), CLIENT_AXIS) > 0
    return jax.lax.psum(leaf, CLIENT_AXIS)


def _run_group(
    task: PhaseTask, group: Group, randomness: ArrayTree, old: ArrayTree
) -> tuple[ArrayTree, ArrayTree, StepInfo]:
    """Return messages, new states and reports of a group's clients, leaves ``[size, ...]``."""
    data, ids, weight = task.data, group.cohort.ids, group.cohort.weight
    at_a_time = task.layout.clients_at_a_time
    if at_a_time == 1:
        return _run_one_by_one(task, group, randomness, old, ids >= 0)
    if ids.shape[0] == 1:
        client = data.client(ids[0], weight[0], group.bound)
        outputs = task.run_client(randomness, jax.tree.map(lambda leaf: leaf[0], old), client)
        return jax.tree.map(lambda leaf: leaf[None], outputs)

    result: tuple[ArrayTree, ArrayTree, StepInfo]
    if at_a_time is None or at_a_time >= ids.shape[0]:
        run_all = jax.vmap(task.run_client, in_axes=(0, 0, data.client_axes(group.bound)))
        result = run_all(randomness, old, data.client(ids, weight, group.bound))
        return result

    def run(entry: tuple[ArrayTree, ArrayTree, Array, Array]) -> ArrayTree:
        draws, state, index, weight_ = entry
        return task.run_client(draws, state, data.client(index, weight_, group.bound))

    result = trees.map_in_batches(run, (randomness, old, ids, weight), at_a_time)
    return result


def _run_one_by_one(
    task: PhaseTask, group: Group, randomness: ArrayTree, old: ArrayTree, selected: Array
) -> tuple[ArrayTree, ArrayTree, StepInfo]:
    """Return the results of `_run_group`, computed client by client; zeros if not `selected`."""
    ids, weight = group.cohort.ids, group.cohort.weight

    def run(entry: Array) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        is_single = ids.shape[0] == 1
        draws = randomness if is_single else jax.tree.map(lambda leaf: leaf[entry], randomness)
        state = jax.tree.map(lambda leaf: leaf[entry], old)
        client = task.data.client(ids[entry], weight[entry], group.bound)
        return task.run_client(draws, state, client)

    result: tuple[ArrayTree, ArrayTree, StepInfo] = _map_selected(run, selected)
    return result


def _map_selected(fn: Callable[[Array], ArrayTree], selected: Array) -> ArrayTree:
    """Return ``fn(entry)`` for each `selected` entry, computed in a loop; zeros elsewhere.

    The loop is the same on one device and on many, so a compiler fuses and rounds it in the same
    way. Its length is traced, because a compiler would unroll a loop of static length one. All
    chains use the largest length: with different lengths, `vmap` would mask all arrays that the
    loop carries instead of single entries.
    """
    shapes = jax.eval_shape(fn, jnp.int32(0))
    zeros = jax.tree.map(lambda s: jnp.zeros((selected.shape[0], *s.shape), s.dtype), shapes)
    num_selected = jnp.sum(selected, dtype=jnp.int32)
    order = jnp.argsort(~selected, stable=True)

    def body(i: Array, outputs: ArrayTree) -> Any:
        entry, counts = order[i], i < num_selected

        def put(table: Array, leaf: Array) -> Array:
            return table.at[entry].set(jnp.where(counts, leaf, table[entry]))

        return jax.tree.map(put, outputs, fn(entry))

    return jax.lax.fori_loop(0, largest_of_batch(num_selected), body, zeros)
