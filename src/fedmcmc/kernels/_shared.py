"""What several kernel families do in the same way."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from fedmcmc import trees
from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    FederatedState,
    GradientEstimator,
    Posterior,
    Static,
)
from fedmcmc.data import FederatedData
from fedmcmc.streams import normals, realise_normals

__all__ = [
    "LocalDraws",
    "bits_down",
    "chain_position",
    "first_estimator_states",
    "positive_integer",
    "prepare_local_steps",
    "prepare_server_noise",
]


class LocalDraws(NamedTuple):
    """All that is random in a client's local Langevin steps."""

    noise: ArrayTree  # leaves [num_local_steps, *event], or keys [num_local_steps]
    gradient: ArrayTree  # leaves [num_local_steps, ...]


def prepare_local_steps(
    estimator: GradientEstimator,
    num_local_steps: Static[int],
    rng_key: Array,
    like: Broadcast,
    client: Client,
) -> LocalDraws:
    """Draw the noise and the minibatches of a round's local Langevin steps."""
    noise_key, gradient_key = jax.random.split(rng_key)
    num = num_local_steps.value
    return LocalDraws(
        normals(noise_key, like.position, num),
        estimator.prepare(gradient_key, like.position, client, num),
    )


def prepare_server_noise(rng_key: Array, like: Broadcast) -> ArrayTree:
    """Draw one standard normal, shaped as the position, for the server."""
    return realise_normals(rng_key, like.position)


def chain_position(rng_key: Array, state: FederatedState) -> ArrayTree:
    """Return the chain's position: the draw of every kernel that moves one."""
    del rng_key
    return state.broadcast.position


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
