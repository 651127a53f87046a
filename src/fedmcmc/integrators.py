"""Dynamics: one step of a discretised stochastic differential equation."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc import trees
from fedmcmc._types import ArrayTree

__all__ = ["overdamped_langevin"]


def overdamped_langevin(
    position: ArrayTree,
    gradient: ArrayTree,
    noise: ArrayTree,
    step_size: Any,
    temperature: Any = 1.0,
) -> ArrayTree:
    """One Euler step of overdamped Langevin dynamics.

    ``position + step_size * gradient + sqrt(2 * step_size * temperature) * noise``.

    Parameters
    ----------
    position
        A pytree.
    gradient
        Of the log density (ascending), shaped as `position`.
    noise
        Standard normals, shaped as `position`.
    step_size, temperature
        ``[]``. The step size ``h`` of Welling and Teh (2011) and of FSGLD is ``2 * step_size``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> one = jnp.ones(1)
    >>> overdamped_langevin(one, -one, one, 0.5).tolist()
    [1.5]
    """
    spread: Array = jnp.sqrt(2 * jnp.asarray(step_size) * jnp.asarray(temperature))
    return jax.tree.map(
        lambda x, g, z: x + trees.cast(step_size, x) * g + trees.cast(spread, x) * z,
        position,
        gradient,
        noise,
    )
