"""Moments of the tilted distribution from weighted points around its mode."""

from dataclasses import dataclass, field
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._checks import positive_integer
from fedmcmc.gaussian import Gaussian, from_flat, project
from fedmcmc.inference._tilted import TiltedDensity
from fedmcmc.inference._types import Inference, Tilted
from fedmcmc.pytrees import in_single_precision, trees
from fedmcmc.types import ArrayTree, Client, Federation, Posterior, register_dataclass

MAX_DIMENSIONS = 64
_POINTS_PER_BATCH = 64


def importance(num_points: int = 512, *, num_steps: int = 6) -> Inference:
    """Fit the moments of weighted points around the tilted mode.

    Newton steps from the server's mean find the mode. Points from the Gaussian there, the same in
    all rounds, are weighted by the tilted density over that Gaussian. Nothing is random, so a run
    of `fedmcmc.fed_ep` converges to a fixed point. For a Gaussian likelihood the fit is exact. A
    round takes `num_points` values of the client's log likelihood and ``num_steps + 1`` Hessians.

    Parameters
    ----------
    num_points
        Number of points: a power of two, at least four per dimension.
    num_steps
        Number of Newton steps. Later rounds start at the approximation, so a few suffice.

    Raises
    ------
    ValueError
        If a number is out of range; from `init` if there are more than 64 dimensions.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> kernel = fedmcmc.fed_ep(posterior, inference=importance(64))
    """
    num_points = positive_integer(num_points, "num_points")
    if num_points & (num_points - 1) or num_points < 4:
        raise ValueError(f"num_points must be a power of two, at least 4, got {num_points}.")
    return Importance(num_points, positive_integer(num_steps, "num_steps"))


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Importance(Inference):
    """Weighted points around the tilted mode; see `importance`."""

    num_points: int = field(metadata={"static": True})
    num_steps: int = field(metadata={"static": True})

    @in_single_precision
    def fit(
        self,
        posterior: Posterior,
        draws: ArrayTree,
        position: ArrayTree,
        cavity: Gaussian,
        client: Client,
        round_: Array,
    ) -> Tilted:
        flat, unravel = ravel_pytree(position)
        density = TiltedDensity.of(posterior, cavity, client, unravel)
        mode = density.climb(flat, self.num_steps)
        _, curvature = density.expand(mode)
        root = jnp.linalg.inv(jnp.linalg.cholesky(curvature)).T  # root @ root.T is the inverse
        points = jnp.asarray(standard_points(self.num_points, flat.size), flat.dtype)
        shifts = jnp.matmul(points, root.T, precision="highest")
        gains = jax.lax.map(
            lambda shift: density.change(mode, shift), shifts, batch_size=_POINTS_PER_BATCH
        )
        log_weights = gains + jnp.sum(points**2, axis=1) / 2
        weights = jax.nn.softmax(jnp.where(jnp.isfinite(log_weights), log_weights, -jnp.inf))
        # In units of the points, where the covariance is well conditioned.
        center = weights @ points
        centered = points - center[None]
        covariance = jnp.matmul(weights[None] * centered.T, centered, precision="highest")
        inverse = jnp.linalg.inv(jnp.linalg.cholesky(covariance))
        # factor.T @ factor is the inverse of root @ covariance @ root.T.
        factor = inverse @ jnp.linalg.cholesky(curvature).T
        mean = unravel(mode + root @ center)
        tilted = from_flat(mean, jnp.matmul(factor.T, factor, precision="highest"), "dense")
        gradient, _ = density.expand(flat)
        return Tilted(project(tilted, cavity.structure), jnp.linalg.norm(gradient))

    def check(
        self, posterior: Posterior, position: ArrayTree, federation: Federation, structure: str
    ) -> None:
        size = trees.num_elements(position)
        if size > MAX_DIMENSIONS or self.num_points < 4 * size:
            raise ValueError(
                f"inference.importance takes up to {MAX_DIMENSIONS} dimensions and at least four "
                f"points per dimension, got {size} dimensions and num_points={self.num_points}: "
                f"give more points, or another inference= (see docs/guides/fed_ep.md)."
            )


@lru_cache
def standard_points(num: int, dimension: int) -> np.ndarray:
    """Return points ``[num, dimension]`` with exactly zero mean and unit covariance.

    They are normals from a scrambled Sobol sequence and their mirror images, scaled linearly.
    """
    from scipy.stats import norm, qmc

    half = norm.ppf(qmc.Sobol(dimension, seed=0).random(num // 2))
    points = np.concatenate([half, -half])
    factor = np.linalg.cholesky(points.T @ points / num)
    return np.linalg.solve(factor, points.T).T
