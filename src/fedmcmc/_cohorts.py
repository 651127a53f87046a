"""The clients' part of a round: who is computed together, and the sum of what they send."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from fedmcmc import streams, trees
from fedmcmc._types import (
    ArrayTree,
    Arrivals,
    Broadcast,
    Cached,
    Cohort,
    Exchange,
    Participation,
    StepInfo,
)
from fedmcmc.data import FederatedData

__all__ = ["Group", "Said", "all_states", "groups_of", "own_states", "prepare_group", "run_groups"]


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


def groups_of(participation: Participation, data: FederatedData, cohort: Cohort) -> list[Group]:
    """Return the parts of the cohort that are computed together, each with a bound on sizes."""
    if participation.cohort_size is not None or data.buckets is None:
        return [Group(cohort, data.max_size)]
    return [
        Group(jax.tree.map(lambda leaf, ids=ids: leaf[ids], cohort), bound)
        for ids, bound in data.buckets.groups()
    ]


def prepare_group(
    exchange: Exchange,
    index: int | None,
    data: FederatedData,
    group: Group,
    rng_key: Array,
    round_: Array,
    shapes: Broadcast,
) -> ArrayTree:
    """Draw all that is random in the steps of a group; `index` is ``None`` in a kernel's own."""
    if group.cohort.ids.shape[0] == 1:
        only = group.cohort.ids[0]
        client = data.client(only, group.cohort.weight[0], group.bound)
        return exchange.prepare(_client_key(rng_key, round_, only, index), shapes, client)

    def prepare(mapped: tuple[Array, Array], fixed: tuple[Any, ...]) -> ArrayTree:
        (ids, weight), (exchange_, data_, key, round__) = mapped, fixed
        keys = jax.vmap(lambda i: _client_key(key, round__, i, index))(ids)
        axes = (0, None, data_.client_axes(group.bound))
        clients = data_.client(ids, weight, group.bound)
        return jax.vmap(exchange_.prepare, in_axes=axes)(keys, shapes, clients)

    fixed = (exchange, data, rng_key, round_)
    return _spread(prepare, data.mesh, (group.cohort.ids, group.cohort.weight), fixed)


def _client_key(rng_key: Array, round_: Array, client_id: Array, index: int | None) -> Array:
    key = streams.client_key(rng_key, round_, client_id)
    return key if index is None else streams.exchange_key(key, index)


def _spread(
    fn: Callable[[Any, Any], ArrayTree], mesh: Mesh | None, mapped: ArrayTree, fixed: ArrayTree
) -> ArrayTree:
    """Return ``fn(mapped, fixed)``, the first axis of `mapped` and of the result over devices."""
    if mesh is None:
        return fn(mapped, fixed)
    num = jax.tree.leaves(mapped)[0].shape[0]
    # Devices compute equally many; the copies at the end are dropped.
    places = np.arange(num + -num % mesh.shape["clients"]) % num
    everyone, clients = PartitionSpec(), PartitionSpec("clients")
    parallel = jax.shard_map(
        fn, mesh=mesh, in_specs=(clients, everyone), out_specs=clients, check_vma=False
    )
    result = parallel(jax.tree.map(lambda leaf: leaf[places], mapped), fixed)
    return jax.tree.map(lambda leaf: leaf[:num], result)


def own_states(
    participation: Participation, data: FederatedData, groups: list[Group], states: ArrayTree
) -> list[ArrayTree]:
    """Return the states of each group's clients, leaves ``[size, ...]``."""
    if len(groups) == 1 and participation.cohort_size is None:
        return [states]
    slots = [data.slot(group.cohort.ids) for group in groups]
    return [jax.tree.map(lambda leaf, at=at: leaf[at], states) for at in slots]


def all_states(
    participation: Participation,
    data: FederatedData,
    groups: list[Group],
    before: ArrayTree,
    states: list[ArrayTree],
) -> ArrayTree:
    """Return the states of all clients after a round, from those of the groups."""
    if len(groups) > 1:
        return _in_order(data, states)
    if participation.cohort_size is None:
        return states[0]
    at = data.slot(groups[0].cohort.ids)
    return jax.tree.map(lambda all_, own: all_.at[at].set(own), before, states[0])


def run_groups(
    exchange: Exchange,
    participation: Participation,
    data: FederatedData,
    groups: list[Group],
    broadcast: Broadcast,
    states: list[ArrayTree],
    draws: list[ArrayTree],
    *,
    last: bool,
) -> Said:
    """Run the steps of all groups and sum their messages.

    Only messages of the round's `last` exchange may be late: later ones wait for the sums of those
    before.
    """
    totals, kept, infos, actives, bits = [], [], [], [], 0
    for group, old, drawn in zip(groups, states, draws, strict=True):
        message, new, info = _run_group(exchange, data, group, broadcast, drawn, old)
        cohort = group.cohort
        if participation.guards:
            message, cohort = _guarded(message, cohort)
        if participation.drops or participation.guards:
            new = _kept_by_all(cohort.active, new, old)
        if last and not trees.is_empty(cohort.late):
            now, late = (_only(mask, message) for mask in (~cohort.late, cohort.late))
            sums = [_sum_active(part, cohort, participation) for part in (now, late)]
            totals.append(Arrivals(*sums))
        else:
            totals.append(_sum_active(message, cohort, participation))
        kept.append(new)
        infos.append(info)
        actives.append(cohort.active)
        bits += trees.num_bits(message)
    total = functools.reduce(trees.add, totals)
    if len(groups) == 1:
        return Said(total, kept, infos[0], bits, actives[0])
    return Said(total, kept, _in_order(data, infos), bits, _in_order(data, actives))


def _in_order(data: FederatedData, parts: list[ArrayTree]) -> ArrayTree:
    assert data.buckets is not None
    place = data.buckets.place
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[place], *parts)


def _run_group(
    exchange: Exchange,
    data: FederatedData,
    group: Group,
    broadcast: Broadcast,
    draws: ArrayTree,
    old: ArrayTree,
) -> tuple[ArrayTree, ArrayTree, StepInfo]:
    ids, weight = group.cohort.ids, group.cohort.weight
    if ids.shape[0] == 1:
        client = data.client(ids[0], weight[0], group.bound)
        own = jax.tree.map(lambda leaf: leaf[0], old)
        outputs = exchange.take_part(draws, broadcast, own, client)
        return jax.tree.map(lambda leaf: leaf[None], outputs)

    def run(mapped: ArrayTree, fixed: tuple[Exchange, FederatedData, Broadcast]) -> ArrayTree:
        return _run_together(mapped, *fixed, group.bound)

    result: tuple[ArrayTree, ArrayTree, StepInfo]
    result = _spread(run, data.mesh, (draws, old, ids, weight), (exchange, data, broadcast))
    return result


def _run_together(
    mapped: tuple[ArrayTree, ArrayTree, Array, Array],
    exchange: Exchange,
    data: FederatedData,
    broadcast: Broadcast,
    bound: int,
) -> ArrayTree:
    """Run the steps of some clients: all at once, or so many at a time as the data says."""
    draws, old, ids, weight = mapped
    at_a_time = data.at_a_time
    if at_a_time is None or at_a_time >= ids.shape[0]:
        step = jax.vmap(exchange.take_part, in_axes=(0, None, 0, data.client_axes(bound)))
        return step(draws, broadcast, old, data.client(ids, weight, bound))

    def one(given: tuple[ArrayTree, ArrayTree, Array, Array]) -> ArrayTree:
        drawn, own, index, weight_ = given
        return exchange.take_part(drawn, broadcast, own, data.client(index, weight_, bound))

    return jax.lax.map(one, mapped, batch_size=None if at_a_time == 1 else at_a_time)


def _kept_by_all(active: Array, new: ArrayTree, old: ArrayTree) -> ArrayTree:
    """Return the new states of active clients, and of the others the old ones but for caches."""

    def choose(a: Any, b: Any) -> Any:
        return a if isinstance(a, Cached) else jnp.where(_column(active, a), a, b)

    return jax.tree.map(choose, new, old, is_leaf=lambda leaf: isinstance(leaf, Cached))


def _guarded(message: ArrayTree, cohort: Cohort) -> tuple[ArrayTree, Cohort]:
    """Return the messages as the server takes them, and the cohort without those it leaves out."""
    if not trees.is_empty(cohort.garbage):
        crosses = cohort.garbage == 0
        message = jax.tree.map(
            lambda x: jnp.where(_column(crosses, x), x, trees.cast(_column(cohort.garbage, x), x)),
            message,
        )
    active = cohort.active & jax.vmap(trees.all_finite)(message)
    # Zeros before the weights, so that a cohort of finite messages is summed as without a guard.
    return _only(active, message), cohort._replace(active=active)


def _only(mask: Array, message: ArrayTree) -> ArrayTree:
    """Return `message` with zeros for the clients outside `mask`."""
    return jax.tree.map(lambda leaf: jnp.where(_column(mask, leaf), leaf, 0), message)


def _sum_active(message: ArrayTree, cohort: Cohort, participation: Participation) -> ArrayTree:
    def reduce(leaf: Array) -> Array:
        if participation.weighted:
            leaf = leaf * trees.cast(_column(cohort.weight, leaf), leaf)
        if participation.drops:
            leaf = jnp.where(_column(cohort.active, leaf), leaf, 0)
        return jnp.sum(leaf, axis=0)

    return jax.tree.map(reduce, message)


def _column(vector: Array, leaf: Array) -> Array:
    return vector.reshape(vector.shape + (1,) * (leaf.ndim - 1))
