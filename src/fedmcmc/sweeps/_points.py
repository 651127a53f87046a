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

from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState
from fedmcmc.data import FederatedData
from fedmcmc.pytrees import schedules
from fedmcmc.rounds import Arrangement, Collect, Plan, Segment, prepare_round, run_segment

__all__ = ["Points", "points_of", "prepares_alike", "run_points", "start_points", "structure"]


class Points(NamedTuple):
    """How the leaves of several trees (kernels, or what they run on), some stacked, make one."""

    treedef: Hashable
    differs: tuple[bool, ...]  # whether the trees differ in a leaf, which is stacked then

    def stack(self, trees: Sequence[ArrayTree]) -> list[Array]:
        """Return the leaves of all `trees`; those that differ have a leading axis of trees."""
        columns = zip(*map(jax.tree.leaves, trees), strict=True)
        return [
            jnp.stack([jnp.asarray(leaf) for leaf in column]) if differs else column[0]
            for column, differs in zip(columns, self.differs, strict=True)
        ]

    def own(self, leaves: list[Array]) -> list[Array]:
        """Return the stacked ones of the `leaves`."""
        return [leaf for leaf, differs in zip(leaves, self.differs, strict=True) if differs]

    def one(self, leaves: list[Array], own: list[Array]) -> ArrayTree:
        """Return one tree, whose entries of the stacked leaves are `own`."""
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


def points_of(trees: Sequence[ArrayTree]) -> Points:
    """Return how trees of equal structure differ; of kernels, those with tabulated schedules."""
    columns = zip(*map(jax.tree.leaves, trees), strict=True)
    differs = tuple(not all(_same(column[0], leaf) for leaf in column[1:]) for column in columns)
    return Points(jax.tree.structure(trees[0]), differs)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if jnp.issubdtype(jnp.result_type(a), jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return np.array_equal(np.asarray(a), np.asarray(b))


@partial(
    jax.jit,
    static_argnames=("points", "rest", "num_points", "block", "capacity", "collect", "canonical"),
)
def run_points(
    leaves: list[Array],
    rest_leaves: list[Array],
    state: FederatedState,
    plan: Plan,
    *,
    arrangement: Arrangement,
    points: Points,
    rest: Points,
    num_points: int,
    block: int,
    capacity: int,
    collect: Collect | None,
    canonical: bool,
) -> Segment:
    """Run the rounds of `plan` for all chains of all kernels, as `run_segment` does for one's.

    `rest` are a kernel's rows and the keys of its chains. `state` and the result have one leading
    axis: the chains of the first kernel, then those of the second, and so on.
    """
    state = jax.tree.map(lambda leaf: leaf.reshape(num_points, -1, *leaf.shape[1:]), state)

    def point(own: list[Array], own_rest: list[Array], start: FederatedState) -> Segment:
        data, keys = rest.one(rest_leaves, own_rest)
        return run_segment(
            points.one(leaves, own),
            data,
            keys,
            start,
            plan,
            {},
            {},
            arrangement,
            block=block,
            capacity=capacity,
            collect=collect,
            canonical=canonical,
        )

    mapped = points.own(leaves), rest.own(rest_leaves), state
    if canonical:
        # As clients and chains do then: a batched convolution is a slow one.
        result = jax.lax.map(lambda each: point(*each), mapped)
    else:
        result = jax.vmap(point)(*mapped)
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
        init = points.one(leaves, own).init
        return jax.vmap(init, in_axes=(0, 0, None))(keys, positions, data)

    state = jax.vmap(start, axis_size=num_kernels)(points.own(leaves))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), state)


def prepares_alike(
    points: Points,
    leaves: list[Array],
    rest: Points,
    rest_leaves: list[Array],
    state: FederatedState,
    num_points: int,
) -> bool:
    """Return whether what is random in a round is the same for all of the kernels."""
    broadcast = jax.tree.map(lambda leaf: leaf[0], state.broadcast)

    def prepare(
        leaves_: tuple[list[Array], list[Array]], own: list[Array], own_rest: list[Array]
    ) -> ArrayTree:
        kernel = points.one(leaves_[0], own)
        data, keys = rest.one(leaves_[1], own_rest)
        return prepare_round(kernel, data, keys[0], broadcast, broadcast.round)

    alike = jax.vmap(prepare, in_axes=(None, 0, 0), out_axes=None, axis_size=num_points)
    own = points.own(leaves), rest.own(rest_leaves)
    try:
        jax.eval_shape(alike, (leaves, rest_leaves), *own)
    except ValueError:  # what does depend on them has an axis of kernels
        return False
    return True
