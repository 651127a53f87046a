"""Second-order expansion of the prior."""

import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import ClientDensity, as_gaussian
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Posterior


def expanded_prior(posterior: Posterior, position: ArrayTree) -> Gaussian:
    """Return the dense Gaussian with the prior's gradient and curvature at `position`.

    Raises
    ------
    ValueError
        If the gradient or curvature is not finite.
    """
    flat, unravel = ravel_pytree(trees.as_floats(position, "position"))
    gradient, precision = ClientDensity(posterior, jnp.ones(()), unravel).expand_prior(flat, True)
    if not bool(jnp.isfinite(gradient).all() & jnp.isfinite(precision).all()):
        raise ValueError(
            "The log prior has no finite gradient and curvature at the center of the posterior, so "
            "no Gaussian approximates the prior: pass prior=."
        )
    return as_gaussian(gradient, precision, flat, unravel)
