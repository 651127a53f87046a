"""The clients of a round on the devices of a mesh: each device computes its own."""

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree, Broadcast, Cohort, FederatedKernel
from fedmcmc.data import FederatedData
from fedmcmc.pytrees import trees
from fedmcmc.rounds._arrangement import AXIS, Arrangement, Layout, Part
from fedmcmc.rounds._groups import Group, Said, one_by_one, run_group
from fedmcmc.rounds._messages import guarded, kept_by_all, sum_of

__all__ = ["run_laid_out"]


def run_laid_out(
    kernel: FederatedKernel,
    number: int,
    data: FederatedData,
    arrangement: Arrangement,
    cohort: Cohort,
    index: int,
    group: Group,
    broadcast: Broadcast,
    old: ArrayTree,
    draws: ArrayTree,
) -> Said:
    """Run the steps of this device's clients of a group, and sum the messages of all devices.

    With the totals ``"gather"`` every device gets all messages and sums them in the order of the
    cohort, as one device would; with ``"psum"`` it sums its own, and the devices' sums are added.
    """
    layout = arrangement.layout
    assert layout is not None
    participation = kernel.participation
    everyone, part = participation.cohort_size is None, layout.parts[index]
    if len(layout.parts) > 1 and everyone:
        cohort = jax.tree.map(lambda leaf: leaf[part.members], cohort)
    if everyone:
        message, new, info = run_group(
            kernel, number, data, arrangement, group, broadcast, draws, old
        )
    else:
        here = layout.owned(group.cohort.ids)
        given = (kernel, number, data, group, broadcast, draws, old, here)
        message, new, info = one_by_one(*given)

    def collected(tree: ArrayTree) -> ArrayTree:
        """Return the entries of all clients, in the order of the cohort."""
        if not everyone:
            return jax.tree.map(_over_devices, tree)
        return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, AXIS, tiled=True)[part.at], tree)

    bits, last = trees.num_bits(message), number == len(kernel.phases) - 1
    drops = participation.drops or participation.guards
    if layout.totals == "gather":
        message = collected(message)
        if participation.guards:
            message, cohort = guarded(message, cohort)
        total = sum_of(message, cohort, participation, late=last, drops=participation.drops)
    else:
        here = layout.own(part)[1] if everyone else layout.owned(cohort.ids)
        own = group.cohort._replace(active=group.cohort.active & here)
        if participation.guards:
            message, own = guarded(message, own)
        cohort = cohort._replace(active=collected(own.active))
        total = jax.lax.psum(sum_of(message, own, participation, late=last, drops=True), AXIS)
    if drops:
        new = kept_by_all(_of_group(cohort.active, layout, part, everyone), new, old)
    return Said(total, [new], collected(info), bits, cohort.active)


def _of_group(active: Array, layout: Layout, part: Part, everyone: bool) -> Array:
    """Return which of this device's clients are active, from those of a part or of a cohort."""
    if not everyone:
        return active
    here = jax.lax.axis_index(AXIS) * part.count + jnp.arange(part.count)
    return jnp.zeros(layout.num_devices * part.count, bool).at[part.at].set(active)[here]


def _over_devices(leaf: Array) -> Array:
    """Return the sum of entries that all devices but one have left at zero: that one's, exactly."""
    if leaf.dtype == jnp.bool_:
        return jax.lax.psum(leaf.astype(jnp.int32), AXIS) > 0
    return jax.lax.psum(leaf, AXIS)
