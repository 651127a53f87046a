"""The prior as a Gaussian: its second-order expansion at a position."""

import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedmcmc._types import ArrayTree, Posterior
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import Target, as_gaussian
from fedmcmc.pytrees import trees


def expanded_prior(posterior: Posterior, position: ArrayTree) -> Gaussian:
    """Return the Gaussian, dense, with the prior's gradient and curvature at `position`.

    For a normal prior it is the prior itself, for a flat one the constant.

    Raises
    ------
    ValueError
        If the log prior has no finite gradient and curvature there.
    """
    flat, unravel = ravel_pytree(trees.as_floats(position, "position"))
    gradient, precision = Target(posterior, jnp.ones(()), unravel).expand_prior(flat, True)
    if not bool(jnp.isfinite(gradient).all() & jnp.isfinite(precision).all()):
        raise ValueError(
            "The log prior has no finite gradient and curvature at the center of the posterior, so "
            "that no Gaussian stands for the prior: pass prior=."
        )
    return as_gaussian(gradient, precision, flat, unravel)
