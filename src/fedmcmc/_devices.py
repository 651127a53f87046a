"""The clients of a round on the devices of a mesh: each device computes its own."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc import trees
from fedmcmc._groups import Group, Said, one_step, run_group
from fedmcmc._messages import guarded, kept_by_all, sum_of
from fedmcmc._types import ArrayTree, Broadcast, Cohort, Exchange, Participation, StepInfo
from fedmcmc.data import FederatedData
from fedmcmc.layouts import AXIS, Layout

__all__ = ["run_laid_out"]


def run_laid_out(
    exchange: Exchange,
    participation: Participation,
    data: FederatedData,
    cohort: Cohort,
    group: Group,
    broadcast: Broadcast,
    old: ArrayTree,
    draws: ArrayTree,
    *,
    last: bool,
) -> Said:
    """Run the steps of this device's clients, and sum the messages of all devices.

    With the totals ``"gather"`` every device gets all messages and sums them in the order of the
    cohort, as one device would; with ``"psum"`` it sums its own, and the devices' sums are added.
    """
    layout = data.layout
    assert layout is not None
    everyone = participation.cohort_size is None
    if everyone:
        message, new, info = run_group(exchange, data, group, broadcast, draws, old)
    else:
        message, new, info = _run_own(exchange, data, group, broadcast, draws, old)

    def collected(tree: ArrayTree) -> ArrayTree:
        """Return the entries of all clients, in the order of the cohort."""
        if not everyone:
            return jax.tree.map(_over_devices, tree)
        return jax.tree.map(
            lambda leaf: jax.lax.all_gather(leaf, AXIS, tiled=True)[layout.slots], tree
        )

    bits = trees.num_bits(message)
    drops = participation.drops or participation.guards
    if layout.totals == "gather":
        message = collected(message)
        if participation.guards:
            message, cohort = guarded(message, cohort)
        total = sum_of(message, cohort, participation, late=last, drops=participation.drops)
    else:
        here = layout.own()[1] if everyone else layout.owned(cohort.ids)
        own = group.cohort._replace(active=group.cohort.active & here)
        if participation.guards:
            message, own = guarded(message, own)
        cohort = cohort._replace(active=collected(own.active))
        total = jax.lax.psum(sum_of(message, own, participation, late=last, drops=True), AXIS)
    if drops:
        new = kept_by_all(_of_group(cohort.active, layout, everyone), new, old)
    return Said(total, [new], collected(info), bits, cohort.active)


def _of_group(active: Array, layout: Layout, everyone: bool) -> Array:
    if not everyone:
        return active
    ids, used = layout.own()
    return active[ids] & used


def _over_devices(leaf: Array) -> Array:
    """Return the sum of entries that all devices but one have left at zero: that one's, exactly."""
    if leaf.dtype == jnp.bool_:
        return jax.lax.psum(leaf.astype(jnp.int32), AXIS) > 0
    return jax.lax.psum(leaf, AXIS)


def _run_own(
    exchange: Exchange,
    data: FederatedData,
    group: Group,
    broadcast: Broadcast,
    draws: ArrayTree,
    old: ArrayTree,
) -> tuple[ArrayTree, ArrayTree, StepInfo]:
    """Run the steps of those of a cohort that are this device's, one by one; zeros for others."""
    assert data.layout is not None
    cohort, layout = group.cohort, data.layout
    size = cohort.ids.shape[0]

    def one(entry: Array) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        drawn = draws if size == 1 else jax.tree.map(lambda leaf: leaf[entry], draws)
        own = jax.tree.map(lambda leaf: leaf[entry], old)
        client = data.client(cohort.ids[entry], cohort.weight[entry], group.bound)
        return one_step(exchange, data, drawn, broadcast, own, client)

    shapes = jax.eval_shape(one, jnp.int32(0))
    zeros = jax.tree.map(lambda s: jnp.zeros((size, *s.shape), s.dtype), shapes)
    owned = layout.owned(cohort.ids)
    first = jnp.argsort(~owned, stable=True)  # this device's entries, then the others

    def body(i: Array, outputs: Any) -> Any:
        entry = first[i]
        return jax.tree.map(lambda table, leaf: table.at[entry].set(leaf), outputs, one(entry))

    result: tuple[ArrayTree, ArrayTree, StepInfo]
    result = jax.lax.fori_loop(0, jnp.sum(owned, dtype=jnp.int32), body, zeros)
    return result
