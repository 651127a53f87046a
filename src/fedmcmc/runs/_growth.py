"""Whether a run went far away without a number that is not finite."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc._types import ArrayTree, Broadcast, FederatedKernel, constrain_fn_of, user_position
from fedmcmc.pytrees import named_leaves

FAR = 1e6
"""Values that many times larger than where they began (or than one) make a run suspicious."""


class Start(NamedTuple):
    """Where a run began, to tell how far it went.

    `largest` is the largest absolute coordinate; `position` that of every chain, in the user's
    coordinates, where the model has constrained values (``None`` elsewhere).
    """

    largest: float
    position: ArrayTree


def start_of(kernel: FederatedKernel, broadcast: Broadcast) -> Start:
    """Return where a run begins."""
    position = None if constrain_fn_of(kernel) is None else _users(kernel, broadcast.position)
    return Start(_largest(broadcast.position), position)


def _users(kernel: FederatedKernel, position: ArrayTree) -> ArrayTree:
    """Return all chains' positions in the user's coordinates, on the host."""
    users = jax.vmap(partial(user_position, kernel))(position)
    return jax.tree.map(np.asarray, users)


def _largest(tree: ArrayTree) -> float:
    return max((float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(tree) if x.size), default=0.0)


def growth(kernel: FederatedKernel, start: Start, end: Broadcast) -> str | None:
    """Return what went how far, if anything: the position, or a constrained value.

    A value is far where it is a million times larger than at the start (or than one), and a
    constrained one also where it is a million times smaller: its logarithm moved by 14.
    """
    after = _largest(end.position)
    if after > FAR * max(start.largest, 1.0):
        return f"The position grew to {after:.3g} from {start.largest:.3g}"
    constrain_fn = constrain_fn_of(kernel)
    if constrain_fn is None:
        return None
    return _constrained(constrain_fn, start.position, _users(kernel, end.position))


def _constrained(
    constrain_fn: Callable[[ArrayTree], ArrayTree], start: ArrayTree, end: ArrayTree
) -> str | None:
    """Return which latent value went far and where; ``None`` where none did."""
    moved = jax.tree.map(lambda a, b: np.abs(b - a).max(initial=0), start, end)
    if not max(jax.tree.leaves(moved), default=0) > np.log(FAR):
        return None  # no exponential of it is far, and the map need not be compiled
    constrain = jax.jit(jax.vmap(constrain_fn))
    first, last = constrain(start), constrain(end)
    if isinstance(first, dict) and isinstance(start, dict):  # without what follows from latents
        first, last = ({name: x[name] for name in x.keys() & start.keys()} for x in (first, last))
    for name, before in named_leaves(first).items():
        after = np.abs(named_leaves(last)[name])
        if after.max(initial=0) > FAR * max(np.abs(before).max(initial=0), 1.0):
            return f"{name} grew to {after.max():.3g} from {np.abs(before).max():.3g}"
        free = named_leaves(start).get(name)
        if free is not None and np.array_equal(free, before):
            continue  # not constrained: near zero is nothing special
        if before.min(initial=np.inf) > FAR * after.min(initial=np.inf):
            return f"{name} fell to {after.min():.3g} from {before.min():.3g}"
    return None
