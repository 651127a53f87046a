"""Log density of likelihood times cavity at one client, over raveled positions."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.gaussian import Gaussian, as_dense
from fedmcmc.gradients import ClientDensity
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Client, Posterior


class TiltedDensity(NamedTuple):
    """Log likelihood of a client plus the log density of its cavity, at positions ``[d]``.

    `linear` ``[d]`` and `precision` ``[d, d]`` are the cavity's natural parameters.
    """

    likelihood: ClientDensity
    linear: Array
    precision: Array
    client: Client

    @classmethod
    def of(
        cls,
        posterior: Posterior,
        cavity: Gaussian,
        client: Client,
        unravel: Callable[[Array], ArrayTree],
    ) -> "TiltedDensity":
        """Return the density of a client with this cavity."""
        dense, target = as_dense(cavity), ClientDensity(posterior, None, unravel)
        return cls(target, trees.ravel(dense.precision_mean), dense.precision, client)

    def expand(self, flat: Array) -> tuple[Array, Array]:
        """Return the gradient ``[d]`` and minus the Hessian ``[d, d]``."""
        gradient, curvature = self.likelihood.expand(self.client, flat, dense=True)
        return gradient + self.linear - self.precision @ flat, curvature + self.precision

    def change(self, flat: Array, shift: Array) -> Array:
        """Return the change of the log density from `flat` to ``flat + shift``."""
        cavity_change = shift @ (self.linear - self.precision @ (flat + shift / 2))
        return self.likelihood.change(self.client, flat, shift) + cavity_change

    def climb(self, flat: Array, num_steps: int) -> Array:
        """Return the position after Newton steps from `flat`, usually the mode."""

        def newton(_: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            # Levenberg and Marquardt: if a plain step does not ascend, steps get shorter.
            x, damping = carry
            gradient, curvature = self.expand(x)
            diagonal = jnp.diag(jnp.abs(jnp.diagonal(curvature)))
            step = jnp.linalg.solve(curvature + damping * diagonal, gradient)
            gain = self.change(x, step)
            accepted = jnp.isfinite(gain) & (gain >= -1e-3)  # rounding at the mode
            weaker = jnp.where(damping < 1e-2, 0.0, damping / 10)
            stronger = jnp.maximum(10 * damping, 1e-1)
            return jnp.where(accepted, x + step, x), jnp.where(accepted, weaker, stronger)

        start = (flat, jnp.zeros((), flat.dtype))
        return jax.lax.fori_loop(0, num_steps, newton, start)[0]
