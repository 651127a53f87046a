"""Quantities that kernels need before their first round, computed from posterior and data.

Configs name these functions with ``_partial_: true``; `experiments.wiring.Supplies` passes the
arguments.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax

import fedmcmc

__all__ = ["approximation", "leapfrog_step", "local_states", "mode", "step_size"]


def mode(centre: Any) -> Any:
    """Return the posterior's mode."""
    return centre


def step_size(
    posterior: fedmcmc.Posterior,
    data: fedmcmc.FederatedData,
    rng_key: Any,
    reference: Any,
    fraction: float = 0.1,
) -> float:
    """Return a Langevin step: a fraction of one over the largest curvature of any client.

    The curvature of a client's rows is scaled to all rows.
    """
    return fraction / _curvature(posterior, data, rng_key, reference)


def leapfrog_step(
    posterior: fedmcmc.Posterior,
    data: fedmcmc.FederatedData,
    rng_key: Any,
    reference: Any,
    fraction: float = 0.2,
) -> float:
    """Return a leapfrog step: a fraction of one over the root of the largest curvature."""
    return fraction / math.sqrt(_curvature(posterior, data, rng_key, reference))


def _curvature(posterior: Any, data: Any, rng_key: Any, position: Any) -> float:
    return fedmcmc.estimate_smoothness(rng_key, posterior, data, position).largest


def approximation(
    posterior: fedmcmc.Posterior, data: fedmcmc.FederatedData, position: Any
) -> fedmcmc.Gaussian:
    """Return the Gaussian at the posterior's mode, with the curvature there."""
    white = fedmcmc.whiten(posterior, data, position, surrogates=False)
    mean = white.posterior.position_fn(white.position)
    return fedmcmc.Gaussian.from_moments(mean, white.metric)


@functools.cache
def local_states(every: int) -> Callable[..., Any]:
    """Return a `collect` that keeps local states a distance `every` apart of a round, in relays."""

    def collect(state: Any, info: Any) -> Any:
        states = fedmcmc.local_positions(state, info)
        return jax.tree.map(lambda leaf: leaf[every - 1 :: every], states)

    return collect
