"""The clients' part of a round: who is computed together, and the sum of what they send."""

import functools

import jax
import jax.numpy as jnp

from fedmcmc._types import ArrayTree, Broadcast, Cohort, FederatedKernel, Participation
from fedmcmc.data import FederatedData
from fedmcmc.pytrees import trees
from fedmcmc.rounds._arrangement import Arrangement, Layout, Part
from fedmcmc.rounds._devices import run_laid_out
from fedmcmc.rounds._groups import Group, Said, prepare_group, run_group
from fedmcmc.rounds._messages import guarded, kept_by_all, sum_of

__all__ = ["Group", "Said", "all_states", "groups_of", "own_states", "prepare_group", "run_groups"]


def groups_of(
    participation: Participation, data: FederatedData, arrangement: Arrangement, cohort: Cohort
) -> list[Group]:
    """Return the parts of the cohort that are computed together, each with a bound on sizes.

    With a layout, those that this device computes if all take part, and else the whole cohort, out
    of which it computes its own clients.
    """
    if participation.cohort_size is not None:
        return [Group(cohort, data.max_size)]
    layout, buckets = arrangement.layout, arrangement.buckets
    if layout is not None:
        return [_own_part(layout, part, cohort) for part in layout.parts]
    if buckets is None or len(buckets.bounds) == 1:
        return [Group(cohort, data.max_size)]
    return [
        Group(jax.tree.map(lambda leaf, ids=ids: leaf[ids], cohort), bound)
        for ids, bound in buckets.groups()
    ]


def _own_part(layout: Layout, part: Part, cohort: Cohort) -> Group:
    ids, used = layout.own(part)
    own = jax.tree.map(lambda leaf: leaf[ids], cohort)
    return Group(own._replace(active=own.active & used), part.bound)


def own_states(
    participation: Participation,
    arrangement: Arrangement,
    groups: list[Group],
    states: ArrayTree,
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
    return jax.tree.map(lambda all_, own: all_.at[at].set(own), before, states[0])


def run_groups(
    kernel: FederatedKernel,
    number: int,
    data: FederatedData,
    arrangement: Arrangement,
    cohort: Cohort,
    groups: list[Group],
    broadcast: Broadcast,
    states: list[ArrayTree],
    draws: list[ArrayTree],
) -> Said:
    """Run the steps of all groups in phase `number` and sum their messages.

    Only messages of a round's last phase may be late: later phases wait for the sums of those
    before.
    """
    said = [
        _run_one(kernel, number, data, arrangement, cohort, index, *given)
        for index, given in enumerate(
            zip(groups, [broadcast] * len(groups), states, draws, strict=True)
        )
    ]
    if len(said) == 1:
        return said[0]
    return Said(
        functools.reduce(trees.add, [part.total for part in said]),
        [part.states[0] for part in said],
        _in_order(arrangement, [part.info for part in said]),
        sum(part.bits for part in said),
        _in_order(arrangement, [part.active for part in said]),
    )


def _run_one(
    kernel: FederatedKernel,
    number: int,
    data: FederatedData,
    arrangement: Arrangement,
    cohort: Cohort,
    index: int,
    group: Group,
    broadcast: Broadcast,
    old: ArrayTree,
    drawn: ArrayTree,
) -> Said:
    """Run the steps of one group of a cohort, the `index`-th, and sum its messages."""
    if arrangement.layout is not None:
        given = (cohort, index, group, broadcast, old, drawn)
        return run_laid_out(kernel, number, data, arrangement, *given)
    participation, own = kernel.participation, group.cohort
    message, new, info = run_group(kernel, number, data, arrangement, group, broadcast, drawn, old)
    bits = trees.num_bits(message)
    if participation.guards:
        message, own = guarded(message, own)
    if participation.drops or participation.guards:
        new = kept_by_all(own.active, new, old)
    last = number == len(kernel.phases) - 1
    total = sum_of(message, own, participation, late=last, drops=participation.drops)
    return Said(total, [new], info, bits, own.active)


def _in_order(arrangement: Arrangement, parts: list[ArrayTree]) -> ArrayTree:
    assert arrangement.buckets is not None
    place = arrangement.buckets.place
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[place], *parts)
