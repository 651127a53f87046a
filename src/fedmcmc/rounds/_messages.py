"""What a server does with the messages of a cohort: which it takes, and their sum."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree, Arrivals, Cached, Cohort, Participation
from fedmcmc.pytrees import trees


def kept_by_all(active: Array, new: ArrayTree, old: ArrayTree) -> ArrayTree:
    """Return the new states of active clients and the old ones of the rest.

    `Cached` parts are always new.
    """

    def choose(a: Any, b: Any) -> Any:
        return a if isinstance(a, Cached) else jnp.where(_column(active, a), a, b)

    return jax.tree.map(choose, new, old, is_leaf=lambda leaf: isinstance(leaf, Cached))


def guarded(message: ArrayTree, cohort: Cohort) -> tuple[ArrayTree, Cohort]:
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


def sum_of(
    message: ArrayTree, cohort: Cohort, participation: Participation, *, late: bool, drops: bool
) -> ArrayTree:
    """Return the weighted sum of the messages; with `late` those now and later, as `Arrivals`.

    With `drops` some of the cohort may be not active.
    """

    def total(part: ArrayTree) -> ArrayTree:
        return _sum_active(part, cohort, participation, drops)

    if not late or trees.is_empty(cohort.late):
        return total(message)
    return Arrivals(*(total(_only(mask, message)) for mask in (~cohort.late, cohort.late)))


def _sum_active(
    message: ArrayTree, cohort: Cohort, participation: Participation, drops: bool
) -> ArrayTree:
    def reduce(leaf: Array) -> Array:
        if participation.weighted:
            leaf = leaf * trees.cast(_column(cohort.weight, leaf), leaf)
        if drops:
            leaf = jnp.where(_column(cohort.active, leaf), leaf, 0)
        return jnp.sum(leaf, axis=0, dtype=leaf.dtype)  # also of words in double precision

    return jax.tree.map(reduce, message)


def _column(vector: Array, leaf: Array) -> Array:
    return vector.reshape(vector.shape + (1,) * (leaf.ndim - 1))
