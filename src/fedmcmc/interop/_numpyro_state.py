"""The state of a chain under `numpyro.infer.MCMC`, and what goes into it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree, FederatedState
from fedmcmc.data import FederatedData

__all__ = ["FederatedMCMCState", "checked_position", "federated_data"]


class FederatedMCMCState(NamedTuple):
    """State of one chain; with vectorized chains every leaf has a leading chain axis.

    Attributes
    ----------
    i
        ``[]`` int32, rounds so far.
    z
        The draw, a dict of unconstrained latent sites.
    federated
        `FederatedState` of the kernel.
    num_active, bits_up, bits_down, gradient_norm
        ``[]``, of the last round, as in `fedmcmc.RoundInfo`.
    diverging
        ``[]`` bool, whether the draw is not finite, and so no draw after it: the step size is too
        large (`fedmcmc.sample` stops there).
    rng_key
        The key of the chain. It stays as it is, since a round's numbers are a function of the key
        and of the round.
    """

    i: Array
    z: ArrayTree
    federated: FederatedState
    num_active: Array
    bits_up: Array
    bits_down: Array
    gradient_norm: Array
    diverging: Array
    rng_key: Array


def federated_data(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> FederatedData:
    """Return the one argument of ``MCMC.run``, or raise `ValueError`."""
    if len(args) != 1 or kwargs or not isinstance(args[0], FederatedData):
        arguments = [type(arg).__name__ for arg in args] + [f"{name}=" for name in kwargs or {}]
        raise ValueError(
            f"run(rng_key, data) takes one FederatedData and nothing else, got {arguments}. "
            f"Bind other arguments of the model with functools.partial."
        )
    return args[0]


def checked_position(init_params: ArrayTree, like: ArrayTree) -> ArrayTree:
    """Return `init_params` in the dtypes of `like`, or raise `ValueError` if shapes differ."""
    shapes, expected = (jax.tree.map(jnp.shape, tree) for tree in (init_params, like))
    if shapes != expected:
        raise ValueError(
            f"init_params holds the unconstrained latent sites of a chain, with shapes {expected}; "
            f"got {shapes}."
        )
    return jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), init_params, like)
