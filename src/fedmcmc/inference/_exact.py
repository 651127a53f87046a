"""Exact inference, for log likelihoods that are quadratic in the position."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._types import ArrayTree, Client, Federation, Posterior, register_dataclass
from fedmcmc.gaussian import Gaussian, as_dense, project
from fedmcmc.gradients import Target, as_gaussian
from fedmcmc.inference._types import Inference, Mean, Moments, Tilted
from fedmcmc.pytrees import trees

_MADE_UP = 8  # rows of which the second derivatives are compared


def exact_gaussian() -> Inference:
    """Multiply likelihood and cavity exactly, for quadratic log likelihoods; match the moments.

    With dense sites nothing is approximated, and one round of all clients gives the posterior. With
    diagonal sites or a scaled identity the tilted distribution is projected: its mean is kept, and
    its variances, or their mean. `init` checks log likelihoods as that of `exact_mean` does.

    References
    ----------
    Guo et al. (2023), section 3.1 and Figure 1.
    """
    return ExactGaussian()


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class ExactGaussian(Inference):
    """Likelihood times cavity; see `exact_gaussian`."""

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
    """Solve for the mean, for log likelihoods that are quadratic in the position.

    Takes a matrix ``[d, d]`` per client. `init` refuses a log likelihood whose second derivatives
    differ between two positions, for made-up rows of numbers between zero and one: a server sees no
    others. What is quadratic for such rows alone is not noticed.
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
    ) -> Moments:
        tilted, gradient_norm = _exact_tilted(posterior, position, cavity, client)
        mean = tilted.mean()
        variance: ArrayTree = () if second is None else tilted.covariance()
        if second == "diagonal":
            variance = ravel_pytree(mean)[1](jnp.diagonal(variance))
        return Moments(mean, variance, gradient_norm)

    def check(
        self, posterior: Posterior, position: ArrayTree, federation: Federation, second: str | None
    ) -> None:
        _check_quadratic(posterior, position, federation)


def _exact_tilted(
    posterior: Posterior, position: ArrayTree, cavity: Gaussian, client: Client
) -> tuple[Gaussian, Array]:
    """Return likelihood times cavity for a quadratic log likelihood, dense, and its gradient."""
    flat, unravel = ravel_pytree(position)
    gradient, precision = Target(posterior, None, unravel).expand(client, flat, dense=True)
    dense = as_dense(cavity)
    tilted = as_gaussian(gradient, precision, flat, unravel) * dense
    total = gradient + trees.ravel(dense.grad_log(position))
    return tilted, jnp.sqrt(trees.squared_norm(total))


def _check_quadratic(posterior: Posterior, position: ArrayTree, federation: Federation) -> None:
    """Raise `ValueError` unless the log likelihood has constant second derivatives.

    Compares those at two positions, of made-up rows: a server, which checks, has no others. Where
    they are not finite, as of rows that no data could hold, they tell nothing.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(posterior)):
        return
    # `sample` maps `init` over chains: of a position that is traced the shape suffices.
    flat, unravel = ravel_pytree(position)
    center = np.zeros(flat.shape) if isinstance(flat, jax.core.Tracer) else np.asarray(flat)
    rng = np.random.default_rng(0)

    def made_up(leaf: Any) -> Array:
        shape = (_MADE_UP, *leaf.shape[1:])
        # Outcomes of any kind, sizes and chances: most models take numbers between zero and one.
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        values = rng.uniform(size=shape) if is_float else rng.integers(0, 2, shape)
        return jnp.asarray(values, leaf.dtype)

    with jax.ensure_compile_time_eval():
        places = [jnp.asarray(center + rng.normal(size=flat.shape), flat.dtype) for _ in range(2)]
        rows = jax.tree.map(made_up, federation.rows)
        zero, one = jnp.zeros((), jnp.int32), jnp.ones(())
        client = Client(rows, zero, zero + _MADE_UP, zero, one, one, _MADE_UP)
        target = Target(posterior, None, unravel)
        first, other = (np.asarray(target.expand(client, at, dense=True)[1]) for at in places)
    if not (np.isfinite(first).all() and np.isfinite(other).all()):
        return
    # In units of both coordinates' own curvature: a large one must not hide another.
    gap, entries = np.abs(first - other), np.maximum(np.abs(first), np.abs(other))
    own = np.sqrt(np.diagonal(entries))
    unit = np.maximum(np.outer(own, own), entries)
    off = gap > 1e-3 * unit
    if off.any():
        at = np.unravel_index(np.argmax(np.where(off, gap / np.where(off, unit, 1), 0)), gap.shape)
        raise ValueError(
            f"The log likelihood is not quadratic in the position: a second derivative differs by "
            f"{gap[at]:.3g} between two positions, where it is up to {entries[at]:.3g} (of made-up "
            f"rows, of numbers between zero and one). Use means of samples (sgd_mean) instead."
        )
