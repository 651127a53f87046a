"""Checks of what users pass, and the forms in which fits take it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, Posterior, as_functions
from fedmcmc.pytrees import trees

__all__ = [
    "STRUCTURES",
    "check_choice",
    "densities",
    "fraction",
    "integer",
    "start_position",
    "step_sizes",
    "typed_key",
]

STRUCTURES = ("dense", "diagonal")


def densities(posterior: Posterior) -> Posterior:
    """Return what fits use of a posterior, so that the rest cannot ask for another compilation."""
    return as_functions(Posterior(posterior.logprior_fn, posterior.loglikelihood_fn))


def start_position(rng_key: Array, posterior: Posterior, position: ArrayTree) -> ArrayTree:
    """Return `position`, or where the posterior says to start."""
    if position is None:
        if posterior.init_fn is None:
            raise ValueError(
                "This posterior has no init_fn that would say where to start: pass position=."
            )
        position = posterior.init_fn(rng_key)
    return jax.tree.map(trees.as_float, position)


def fraction(prior_fraction: Any) -> Any:
    """Return a fraction of the prior, ``None`` for zero."""
    if isinstance(prior_fraction, jax.core.Tracer):
        return prior_fraction
    if not np.isfinite(prior_fraction) or prior_fraction < 0:
        raise ValueError(f"prior_fraction must be zero or positive, got {prior_fraction!r}.")
    return float(prior_fraction) if prior_fraction else None


def integer(name: str, value: Any, least: int) -> int:
    """Return an integer argument that is at least `least`."""
    if int(value) != value or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")
    return int(value)


def step_sizes(step_size: Any, num_clients: int) -> Array:
    """Return one step size per client."""
    steps = trees.as_float(step_size)
    if steps.shape not in ((), (num_clients,)):
        raise ValueError(
            f"step_size must be a number or one per client, ({num_clients},), got {steps.shape}."
        )
    if not isinstance(steps, jax.core.Tracer) and not bool(jnp.all(steps > 0)):
        raise ValueError(f"step_size must be positive, got {step_size!r}.")
    return jnp.broadcast_to(steps, (num_clients,))


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}.")


def typed_key(rng_key: Any) -> Array:
    """Return a typed key, also from the raw words of `jax.random.PRNGKey`."""
    if jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key):
        return rng_key
    return jax.random.wrap_key_data(rng_key)
