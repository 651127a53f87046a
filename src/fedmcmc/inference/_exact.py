"""Exact inference, for log likelihoods that are quadratic in the position."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc.gaussian import Gaussian, as_dense, project
from fedmcmc.gradients import ClientDensity, as_gaussian
from fedmcmc.hierarchy import made_up_rows
from fedmcmc.inference._types import Inference, Mean, Tilted, TiltedMoments
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Client, Federation, Posterior, register_dataclass

_NUM_ROWS = 8  # artificial rows in the check of second derivatives


def exact_gaussian() -> Inference:
    """Multiply likelihood and cavity exactly, for quadratic log likelihoods.

    With dense sites there is no approximation, and one round of all clients gives the posterior.
    Diagonal sites get the mean and the variances of the tilted distribution; a scaled identity gets
    the mean variance. `init` checks the log likelihood as for `exact_mean`.

    References
    ----------
    Guo et al. (2023), section 3.1 and Figure 1.
    """
    return ExactGaussian()


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class ExactGaussian(Inference):
    """Exact product of likelihood and cavity; see `exact_gaussian`."""

    def fit(
        self,
        posterior: Posterior,
        draws: ArrayTree,
        position: ArrayTree,
        cavity: Gaussian,
        client: Client,
        round_: Array,
    ) -> Tilted:
        tilted, gradient_norm = _exact_tilted(posterior, position, cavity, client)
        return Tilted(project(tilted, cavity.structure), gradient_norm)

    def check(
        self, posterior: Posterior, position: ArrayTree, federation: Federation, structure: str
    ) -> None:
        _check_quadratic(posterior, position, federation)


def exact_mean() -> Mean:
    """Solve for the tilted mean, for log likelihoods that are quadratic in the position.

    Each client uses a matrix ``[d, d]``. `init` raises if the second derivatives of the log
    likelihood differ between two positions. The server has no rows, so it uses artificial rows of
    numbers between zero and one, and does not notice if other rows have other derivatives.
    """
    return ExactMean()


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class ExactMean(Mean):
    """Exact moments; see `exact_mean`."""

    def find(
        self,
        posterior: Posterior,
        draws: ArrayTree,
        position: ArrayTree,
        cavity: Gaussian,
        client: Client,
        round_: Array,
        second: str | None,
    ) -> TiltedMoments:
        tilted, gradient_norm = _exact_tilted(posterior, position, cavity, client)
        mean = tilted.mean()
        variance: ArrayTree = () if second is None else tilted.covariance()
        if second == "diagonal":
            variance = ravel_pytree(mean)[1](jnp.diagonal(variance))
        return TiltedMoments(mean, variance, gradient_norm)

    def check(
        self, posterior: Posterior, position: ArrayTree, federation: Federation, second: str | None
    ) -> None:
        _check_quadratic(posterior, position, federation)


def _exact_tilted(
    posterior: Posterior, position: ArrayTree, cavity: Gaussian, client: Client
) -> tuple[Gaussian, Array]:
    """Return the dense product of a quadratic likelihood and the cavity, and its gradient norm."""
    flat, unravel = ravel_pytree(position)
    gradient, precision = ClientDensity(posterior, None, unravel).expand(client, flat, dense=True)
    dense = as_dense(cavity)
    tilted = as_gaussian(gradient, precision, flat, unravel) * dense
    total = gradient + trees.ravel(dense.grad_log(position))
    return tilted, jnp.sqrt(trees.squared_norm(total))


def _check_quadratic(posterior: Posterior, position: ArrayTree, federation: Federation) -> None:
    """Raise `ValueError` unless the log likelihood has constant second derivatives.

    Compares second derivatives at two positions, for artificial rows. If they are not finite, the
    rows are impossible for the model, and the check passes.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(posterior)):
        return
    # `sample` maps `init` over chains. A traced position has a shape but no values.
    flat, unravel = ravel_pytree(position)
    center = np.zeros(flat.shape) if isinstance(flat, jax.core.Tracer) else np.asarray(flat)
    rng = np.random.default_rng(0)
    with jax.ensure_compile_time_eval():
        points = [jnp.asarray(center + rng.normal(size=flat.shape), flat.dtype) for _ in range(2)]
        rows = made_up_rows(federation.rows, _NUM_ROWS, rng)
        zero, unit_share = jnp.zeros((), jnp.int32), jnp.ones(())
        client = Client(rows, zero, zero + _NUM_ROWS, zero, unit_share, unit_share, _NUM_ROWS)
        target = ClientDensity(posterior, None, unravel)
        a, b = (np.asarray(target.expand(client, x, dense=True)[1]) for x in points)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return
    # Relative to the curvature of both coordinates, so that no large curvature hides a small one.
    gap, entries = np.abs(a - b), np.maximum(np.abs(a), np.abs(b))
    scale = np.sqrt(np.diagonal(entries))
    unit = np.maximum(np.outer(scale, scale), entries)
    differs = gap > 1e-3 * unit
    if differs.any():
        relative = np.where(differs, gap / np.where(differs, unit, 1), 0)
        worst = np.unravel_index(np.argmax(relative), gap.shape)
        raise ValueError(
            f"The log likelihood is not quadratic in the position: a second derivative of up to "
            f"{entries[worst]:.3g} differs by {gap[worst]:.3g} between two positions (for "
            f"artificial rows of numbers between zero and one). Use a mean of samples (sgd_mean)."
        )
