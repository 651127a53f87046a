"""Detection of divergence in runs whose values stay finite."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc.pytrees import named_leaves
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    FederatedKernel,
    as_functions,
    constrain_fn_of,
    user_position,
    vmap_axes,
)

DIVERGENCE_FACTOR = 1e6
"""Factor by which a value grows or shrinks in a run that is reported as divergent."""


class InitialScale(NamedTuple):
    """Size of the values at the start of a run.

    `largest` is the largest absolute coordinate. `position` is the unconstrained position of every
    chain before whitening, or ``None`` for models without constrained values.
    """

    largest: float
    position: ArrayTree


def initial_scale(kernel: FederatedKernel, broadcast: Broadcast) -> InitialScale:
    """Return the size of the values at the start of a run."""
    is_constrained = constrain_fn_of(kernel) is not None
    position = _user_positions(kernel, broadcast.position) if is_constrained else None
    return InitialScale(_largest(broadcast.position), position)


def _user_positions(kernel: FederatedKernel, position: ArrayTree) -> ArrayTree:
    """Return all chains' positions in the user's coordinates, on the host."""
    return jax.tree.map(np.asarray, jax.vmap(partial(user_position, kernel))(position))


def _largest(tree: ArrayTree) -> float:
    return max((float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(tree) if x.size), default=0.0)


def describe_growth(kernel: FederatedKernel, start: InitialScale, end: Broadcast) -> str | None:
    """Return a description of divergence in the position or a constrained value, if any.

    A value diverged if it is a million times larger than at the start (or than one). A constrained
    value also diverged if it is a million times smaller: its logarithm moved by 14.
    """
    largest = _largest(end.position)
    if largest > DIVERGENCE_FACTOR * max(start.largest, 1.0):
        return f"The position grew to {largest:.3g} (initially {start.largest:.3g})"
    constrain_fn = constrain_fn_of(kernel)
    if constrain_fn is None:
        return None
    return _constrained_growth(constrain_fn, start.position, _user_positions(kernel, end.position))


def _constrained_growth(
    constrain_fn: Callable[[ArrayTree], ArrayTree], start: ArrayTree, end: ArrayTree
) -> str | None:
    """Return a description of divergence in a constrained value, if any."""
    moved = jax.tree.map(lambda a, b: np.abs(b - a).max(initial=0), start, end)
    if not max(jax.tree.leaves(moved), default=0) > np.log(DIVERGENCE_FACTOR):
        return None  # too little for an exponential to diverge, so do not compile the map
    values = [vmap_axes(as_functions(constrain_fn), x, num_axes=1) for x in (start, end)]
    if isinstance(values[0], dict) and isinstance(start, dict):  # without numpyro.deterministic
        values = [{name: x[name] for name in x.keys() & start.keys()} for x in values]
    values_before, values_after = map(named_leaves, values)
    for name, before in values_before.items():
        after = np.abs(values_after[name])
        if after.max(initial=0) > DIVERGENCE_FACTOR * max(np.abs(before).max(initial=0), 1.0):
            return f"{name} grew to {after.max():.3g} (initially {np.abs(before).max():.3g})"
        free = named_leaves(start).get(name)
        if free is not None and np.array_equal(free, before):
            continue  # an unconstrained value may be near zero
        if before.min(initial=np.inf) > DIVERGENCE_FACTOR * after.min(initial=np.inf):
            return f"{name} fell to {after.min():.3g} (initially {before.min():.3g})"
    return None
