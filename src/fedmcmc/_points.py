"""Kernels that differ by numbers alone, run in one program.

What is random in a round is prepared once for all of them wherever it does not depend on the
numbers in which they differ: kernels of different step sizes share their noise and minibatches.
"""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc import schedules
from fedmcmc._segments import Collect, Plan, Segment, run_segment
from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState
from fedmcmc.data import FederatedData
from fedmcmc.simulate import prepare_round

__all__ = ["Points", "points_of", "prepares_alike", "run_points", "start_points", "structure"]


class Points(NamedTuple):
    """How the leaves of several kernels, some of them stacked, make one kernel."""

    treedef: Hashable
    differs: tuple[bool, ...]  # whether kernels differ in a leaf, which is stacked then

    def stack(self, kernels: Sequence[FederatedKernel]) -> list[Array]:
        """Return the leaves of all `kernels`; those that differ have a leading axis of kernels."""
        columns = zip(*map(jax.tree.leaves, kernels), strict=True)
        return [
            jnp.stack([jnp.asarray(leaf) for leaf in column]) if differs else column[0]
            for column, differs in zip(columns, self.differs, strict=True)
        ]

    def own(self, leaves: list[Array]) -> list[Array]:
        """Return the stacked ones of the `leaves`."""
        return [leaf for leaf, differs in zip(leaves, self.differs, strict=True) if differs]

    def kernel(self, leaves: list[Array], own: list[Array]) -> FederatedKernel:
        """Return one kernel, whose entries of the stacked leaves are `own`."""
        entries = iter(own)
        whole = [
            next(entries) if differs else leaf
            for leaf, differs in zip(leaves, self.differs, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, whole)


def structure(kernel: FederatedKernel) -> Hashable:
    """Return what two kernels must have in common to run in one program.

    Schedules are left out: a program takes their values.
    """
    leaves, treedef = jax.tree.flatten(schedules.tabulate(kernel, 0, 1, 0))
    return treedef, tuple(jax.typeof(leaf) for leaf in leaves)


def points_of(kernels: Sequence[FederatedKernel], num_rounds: int) -> Points:
    """Return how kernels of equal structure differ over `num_rounds` rounds."""
    tabulated = [schedules.tabulate(kernel, 0, num_rounds) for kernel in kernels]
    columns = zip(*map(jax.tree.leaves, tabulated), strict=True)
    differs = tuple(not all(_same(column[0], leaf) for leaf in column[1:]) for column in columns)
    return Points(jax.tree.structure(tabulated[0]), differs)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if jnp.issubdtype(jnp.result_type(a), jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return np.array_equal(np.asarray(a), np.asarray(b))


@partial(jax.jit, static_argnames=("points", "block", "capacity", "collect", "canonical"))
def run_points(
    leaves: list[Array],
    data: FederatedData,
    keys: Array,
    state: FederatedState,
    plan: Plan,
    *,
    points: Points,
    block: int,
    capacity: int,
    collect: Collect | None,
    canonical: bool,
) -> Segment:
    """Run the rounds of `plan` for all chains of all kernels, as `run_segment` does for one's.

    `keys` are those of one kernel's chains, and the same for each. `state` and the result have one
    leading axis: the chains of the first kernel, then those of the second, and so on.
    """
    num_kernels = jax.tree.leaves(state)[0].shape[0] // keys.shape[0]
    state = jax.tree.map(lambda leaf: leaf.reshape(num_kernels, -1, *leaf.shape[1:]), state)

    def point(own: list[Array], start: FederatedState) -> Segment:
        return run_segment(
            points.kernel(leaves, own),
            data,
            keys,
            start,
            plan,
            {},
            {},
            block=block,
            capacity=capacity,
            collect=collect,
            canonical=canonical,
        )

    own = points.own(leaves)
    if canonical:
        # As clients and chains do then: a batched convolution is a slow one.
        result = jax.lax.map(lambda pair: point(*pair), (own, state))
    else:
        result = jax.vmap(point)(own, state)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), result)


@partial(jax.jit, static_argnames=("points", "num_kernels"))
def start_points(
    leaves: list[Array],
    data: FederatedData,
    keys: Array,
    positions: ArrayTree,
    *,
    points: Points,
    num_kernels: int,
) -> FederatedState:
    """Return where all chains of all kernels start, on one leading axis as in `run_points`.

    `keys` and `positions` are those of one kernel's chains.
    """

    def start(own: list[Array]) -> FederatedState:
        init = points.kernel(leaves, own).init
        return jax.vmap(init, in_axes=(0, 0, None))(keys, positions, data)

    state = jax.vmap(start, axis_size=num_kernels)(points.own(leaves))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), state)


def prepares_alike(
    points: Points,
    leaves: list[Array],
    data: FederatedData,
    keys: Array,
    state: FederatedState,
    num_kernels: int,
) -> bool:
    """Return whether what is random in a round is the same for all of the kernels."""
    broadcast = jax.tree.map(lambda leaf: leaf[0], state.broadcast)

    def prepare(leaves_: list[Array], own: list[Array], key: Array) -> ArrayTree:
        kernel = points.kernel(leaves_, own)
        return prepare_round(kernel, data, key, broadcast, broadcast.round)

    alike = jax.vmap(prepare, in_axes=(None, 0, None), out_axes=None, axis_size=num_kernels)
    try:
        jax.eval_shape(alike, leaves, points.own(leaves), keys[0])
    except ValueError:  # what does depend on them has an axis of kernels
        return False
    return True
