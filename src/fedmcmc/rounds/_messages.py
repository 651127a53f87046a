"""The server's treatment of a cohort's messages: which are accepted, and their sum."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Arrivals, Cohort, Participation, RecomputableState


def where_active(active: Array, new: ArrayTree, old: ArrayTree) -> ArrayTree:
    """Return the new states of active clients and the old states of inactive clients.

    `RecomputableState` parts are always new.
    """

    def choose(a: Array, b: Array) -> Any:
        return a if isinstance(a, RecomputableState) else jnp.where(_column(active, a), a, b)

    return jax.tree.map(choose, new, old, is_leaf=lambda leaf: isinstance(leaf, RecomputableState))


def exclude_non_finite(message: ArrayTree, cohort: Cohort) -> tuple[ArrayTree, Cohort]:
    """Return messages as the server receives them, and the cohort without non-finite messages."""
    if not trees.is_empty(cohort.garbage):
        is_intact = cohort.garbage == 0
        message = jax.tree.map(
            lambda x: jnp.where(
                _column(is_intact, x), x, trees.cast(_column(cohort.garbage, x), x)
            ),
            message,
        )
    active = cohort.active & jax.vmap(trees.all_finite)(message)
    # Zeros before weighting: a cohort of finite messages has the same sum as without a guard.
    return _zero_outside(active, message), cohort._replace(active=active)


def _zero_outside(mask: Array, message: ArrayTree) -> ArrayTree:
    return jax.tree.map(lambda leaf: jnp.where(_column(mask, leaf), leaf, 0), message)


def sum_messages(
    message: ArrayTree, cohort: Cohort, participation: Participation, *, late: bool, may_drop: bool
) -> ArrayTree:
    """Return the weighted sum of the messages.

    With `late`, return `Arrivals`: the sums of the messages of this round and of the next round.
    With `may_drop`, some clients of the cohort may be inactive.
    """

    def total(part: ArrayTree) -> ArrayTree:
        return _sum_active(part, cohort, participation, may_drop)

    if not late or trees.is_empty(cohort.late):
        return total(message)
    return Arrivals(*(total(_zero_outside(mask, message)) for mask in (~cohort.late, cohort.late)))


def _sum_active(
    message: ArrayTree, cohort: Cohort, participation: Participation, may_drop: bool
) -> ArrayTree:
    def reduce(leaf: Array) -> Array:
        if participation.weighted:
            leaf = leaf * trees.cast(_column(cohort.weight, leaf), leaf)
        if may_drop:
            leaf = jnp.where(_column(cohort.active, leaf), leaf, 0)
        # Without the dtype, jnp.sum widens integer words if x64 is enabled.
        return jnp.sum(leaf, axis=0, dtype=leaf.dtype)

    return jax.tree.map(reduce, message)


def _column(vector: Array, leaf: Array) -> Array:
    return vector.reshape(vector.shape + (1,) * (leaf.ndim - 1))
