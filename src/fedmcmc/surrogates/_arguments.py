"""Checks of what users pass, and the forms in which fits take it."""

from typing import Any

import jax
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, Posterior, as_functions
from fedmcmc.pytrees import trees

__all__ = ["check_choices", "densities", "fraction", "integer", "start_position"]

_CHOICES = {"check": ("error", "warn", "ignore"), "structure": ("dense", "diagonal")}


def check_choices(check: str, structure: str = "dense") -> None:
    """Raise `ValueError` unless the two arguments are what all fits take."""
    for name, value in {"check": check, "structure": structure}.items():
        if value not in _CHOICES[name]:
            raise ValueError(f"{name} must be one of {_CHOICES[name]}, got {value!r}.")


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
