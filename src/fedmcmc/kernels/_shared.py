"""What several kernel families do in the same way."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from fedmcmc import trees
from fedmcmc._types import ArrayTree, Broadcast, GradientEstimator, Posterior
from fedmcmc.data import FederatedData

__all__ = ["bits_down", "first_estimator_states", "positive_integer"]


def positive_integer(x: Any, name: str) -> int:
    """Return `x` as an int.

    Raises
    ------
    ValueError
        If it is not a positive integer.
    """
    try:
        is_integer = int(x) == x
    except (TypeError, ValueError, OverflowError):
        is_integer = False
    if not is_integer or x < 1:
        raise ValueError(f"{name} must be a positive integer, got {x!r}.")
    return int(x)


def first_estimator_states(
    posterior: Posterior, estimator: GradientEstimator, position: ArrayTree, data: FederatedData
) -> ArrayTree:
    """Return what the clients' estimators keep at the start, leaves ``[num_clients, ...]``."""
    init = Partial(estimator.init, posterior.loglikelihood_fn, position)
    everyone = data.client(jnp.arange(data.num_clients))
    return jax.vmap(init, in_axes=(data.client_axes(),))(everyone)


def bits_down(estimator: GradientEstimator, broadcast: Broadcast, client_state: ArrayTree) -> Array:
    """Return the bits sent to a client: the position, and the reference where it lacks that."""
    down = jnp.asarray(trees.num_bits(broadcast.position), jnp.int32)
    if estimator.reference is None:
        return down
    missing = estimator.reference.missing(broadcast, client_state)
    return (down + jnp.where(missing, trees.num_bits(broadcast.extra), 0)).astype(jnp.int32)
