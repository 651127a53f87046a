"""Checks of the arguments of fits, and of their results in any units of the coordinates."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import in_quotes
from fedmcmc.data import labels_of
from fedmcmc.gradients import blockwise, refuse_latents
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Posterior, as_functions

CHOICES = {"check": ("error", "warn", "ignore"), "structure": ("dense", "diagonal")}

REMEDIES = (
    "Pass prior_fraction= (for example 1 / num_clients) to fit the likelihood times that power of "
    "the prior, which is divided out again; or use surrogates.taylor(posterior, data, centre), "
    "which needs no proper likelihood; or accept the fit with check='ignore' (for networks, whose "
    "likelihoods are flat in some directions, with structure='diagonal')."
)

PROBE_SDS = 2.0
"""Distance from the maximum, in fitted sds, at which the log density is evaluated again."""
MIN_DROP = 0.1 * PROBE_SDS**2 / 2
"""Smallest drop of the log density at that distance, in nats: a tenth of a Gaussian's."""
MAX_DISTANCE = 0.1
"""Largest distance of an optimizer's result from the maximum, in fitted sds."""
MAX_DENSE_CHECK = 256
"""Number of dimensions up to which checks of a diagonal fit use a dense matrix per client."""
MIN_RELAXATION_TIMES = 20.0
"""Smallest length of a chain in relaxation times of its slowest direction.

In a flat direction a chain shows about 5, and above 20 in one percent of chains (Brownian motion);
the samples of the FSGLD paper's first experiment last 30.
"""


def check_choices(check: str, structure: str = "dense") -> None:
    """Raise `ValueError` if one of these arguments of all fits is not allowed."""
    for name, value in {"check": check, "structure": structure}.items():
        if value not in CHOICES[name]:
            raise ValueError(f"{name} must be one of {CHOICES[name]}, got {value!r}.")


def densities_of(posterior: Posterior) -> Posterior:
    """Return the densities alone, so that other functions of a posterior cause no compilation."""
    refuse_latents(posterior)
    return as_functions(Posterior(posterior.logprior_fn, posterior.loglikelihood_fn))


def start_position(rng_key: Array, posterior: Posterior, position: ArrayTree) -> ArrayTree:
    """Return `position`, or if it is ``None`` a draw of the posterior's `init_fn`."""
    if position is None:
        if posterior.init_fn is None:
            raise ValueError(
                "This posterior has no init_fn to draw a start from: pass position=, a start."
            )
        position = posterior.init_fn(rng_key)
    return trees.as_floats(position, "position")


def positive_or_none(prior_fraction: Any) -> Any:
    """Return a fraction of the prior, or ``None`` for zero."""
    if isinstance(prior_fraction, jax.core.Tracer):
        return prior_fraction
    if not np.isfinite(prior_fraction) or prior_fraction < 0:
        raise ValueError(f"prior_fraction must be zero or positive, got {prior_fraction!r}.")
    return float(prior_fraction) if prior_fraction else None


def integer_from(minimum: int, value: Any, name: str) -> int:
    """Return an argument as an integer of at least `minimum`."""
    if int(value) != value or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}.")
    return int(value)


class ScaledEigen(NamedTuple):
    """Eigendecomposition of a matrix scaled to a unit diagonal.

    ``matrix = S vectors diag(values) vectors' S`` with ``S = diag(scale)``.

    Attributes
    ----------
    scale
        Square root of the diagonal, ``[d]``; one where the diagonal is not positive.
    values, vectors
        Eigenvalues in ascending order, ``[d]``, and eigenvectors, ``[d, d]``. For a diagonal
        matrix, signs of the diagonal and ``None``.
    """

    scale: Array
    values: Array
    vectors: Array | None

    def direction(self, i: Array) -> Array:
        """Return the step along eigenvector `i` with quadratic form one, ``[d]``.

        It is zero if the eigenvalue is not positive.
        """
        length = jnp.where(self.values[i] > 0, jax.lax.rsqrt(jnp.abs(self.values[i])), 0)
        if self.vectors is None:
            return jnp.zeros_like(self.scale).at[i].set(length / self.scale[i])
        return length * self.vectors[:, i] / self.scale


def scaled_eigen(matrix: Array) -> ScaledEigen:
    """Decompose ``[d, d]``, or the diagonal ``[d]`` of a diagonal matrix."""
    diagonal = jnp.diagonal(matrix) if matrix.ndim == 2 else matrix
    scale = jnp.sqrt(jnp.where(diagonal > 0, diagonal, 1))
    if matrix.ndim == 1:
        return ScaledEigen(scale, jnp.sign(diagonal), None)
    return ScaledEigen(scale, *jnp.linalg.eigh(matrix / jnp.outer(scale, scale)))


def singular_below(values: Array) -> Array:
    """Return the eigenvalue at or below which a matrix counts as singular up to rounding."""
    return 20 * jnp.finfo(values.dtype).eps * jnp.max(values)


class MaximumCheck(NamedTuple):
    """Measurements at a client's fitted maximum, leaves ``[]``.

    Attributes
    ----------
    smallest, singular
        Smallest eigenvalue of the precision scaled to a unit diagonal; true if it is zero or
        negative up to rounding.
    drop
        Smallest drop of the log density two fitted sds from the maximum, in nats.
    distance
        Distance to the maximum of the quadratic expansion, in fitted sds.
    finite
        True if all numbers are finite.
    """

    smallest: Array
    singular: Array
    drop: Array
    distance: Array
    finite: Array


def check_maximum(
    change: Callable[[Array], Array], gradient: Array, precision: Array, block: int
) -> MaximumCheck:
    """Measure a fit with this gradient ``[d]`` and precision ``[d, d]`` or its diagonal ``[d]``.

    `change` returns the change of the log density for a shift; `block` shifts are computed at a
    time. On a likelihood without maximum (separable classes, counts that are all zero) an optimizer
    runs until gradient and curvature vanish together. The fitted sd is then so long that the
    density does not drop on one side.
    """
    finite = jnp.all(jnp.isfinite(gradient)) & jnp.all(jnp.isfinite(precision))
    eigen = scaled_eigen(jnp.where(finite, precision, 0))
    positive = eigen.values > 0
    whitened = gradient / eigen.scale
    if eigen.vectors is not None:
        whitened = eigen.vectors.T @ whitened
    distance = jnp.where(positive, jnp.square(whitened) / jnp.where(positive, eigen.values, 1), 0)

    def drop(i: Array) -> Array:
        shift = PROBE_SDS * eigen.direction(i)
        sides = jnp.stack([change(shift), change(-shift)])
        # A density that overflows to not-a-number is steep, not flat.
        return jnp.min(jnp.where(jnp.isnan(sides), jnp.inf, -sides))

    return MaximumCheck(
        eigen.values.min(),
        eigen.values.min() <= singular_below(eigen.values),
        blockwise(drop, gradient.shape[0], block).min(),
        jnp.sqrt(jnp.sum(distance)),
        finite,
    )


def describe_maximum(
    smallest: float, singular: bool, drop: float, distance: float, finite: bool
) -> str | None:
    """Return the problem with a client's fit, ``None`` without one; see `MaximumCheck`."""
    if not finite:
        return "the log likelihood, its gradient or curvature is not finite"
    if singular:
        return (
            f"the smallest eigenvalue of the precision, in units of its diagonal, is "
            f"{smallest:.2g} where the optimizer stopped: the likelihood is flat or convex"
        )
    if distance > MAX_DISTANCE:
        return (
            f"the optimizer stopped about {distance:.2g} standard deviations from the maximum "
            f"(not converged: raise max_steps, or scale the coordinates)"
        )
    if drop < MIN_DROP:
        return (
            f"the log likelihood falls by only {drop:.2g} at {PROBE_SDS:g} fitted standard "
            f"deviations on one side (a Gaussian's by {PROBE_SDS**2 / 2:g}): the likelihood has no "
            f"maximum in this direction"
        )
    return None


def describe_chain(finite: bool, moved: bool, relaxations: float) -> str | None:
    """Return the problem with a client's samples, ``None`` without one.

    `relaxations` is the simulated time of the samples divided by their largest variance. The
    relaxation time of a Gaussian likelihood of variance ``v`` is ``v``, so this ratio counts
    relaxation times of the slowest direction. A random walk has about five, whatever its length.
    """
    if not finite:
        return "the samples are not finite: lower step_size"
    if not moved:
        return "the samples do not move in some coordinate"
    if relaxations < MIN_RELAXATION_TIMES:
        return (
            f"the samples are not stationary: the chain lasted {relaxations:.2g} relaxation times "
            f"of its slowest direction (needed are {MIN_RELAXATION_TIMES:g}, a random walk has "
            f"about 5): the likelihood is flat in this direction, or step_size or num_samples is "
            f"too small"
        )
    return None


def report_bad_clients(
    check: str,
    name: str,
    describe: Callable[..., str | None],
    measurements: tuple[Array, ...],
    data: Any,
    remedies: str = REMEDIES,
) -> None:
    """Raise or warn if `describe` returns a problem of a client.

    `measurements` holds the arguments of `describe`, each ``[num_clients]``.
    """
    if check == "ignore":
        return
    problems = [describe(*x) for x in zip(*map(np.asarray, measurements), strict=True)]
    bad = [i for i, problem in enumerate(problems) if problem is not None]
    if not bad:
        return
    sizes, labels = np.asarray(data.federation.sizes), labels_of(data)
    examples = "; ".join(
        f"client {in_quotes(labels[i])} ({sizes[i]} rows): {problems[i]}" for i in bad[:3]
    )
    more = f"; and {len(bad) - 3} more" if len(bad) > 3 else ""
    message = (
        f"{name}: no trustworthy Gaussian for the likelihood of {len(bad)} of {len(problems)} "
        f"clients. {examples}{more}. {remedies}"
    )
    if check == "error":
        raise ValueError(message)
    warnings.warn(message, stacklevel=3)


def warn_of_shrinkage(amount: Array, data: object) -> None:
    """Warn if a singular sample covariance was shrunk; `amount` is ``[num_clients]``."""
    bad = np.flatnonzero(amount > 0)
    if bad.size:
        warnings.warn(
            f"sampled: the sample covariance of {bad.size} of {amount.size} clients is singular, "
            f"of client {in_quotes(labels_of(data)[bad[0]])} for example; before inversion "
            f"{amount[bad[0]]:.2g} of it was replaced by its diagonal. Take more samples than "
            f"dimensions, pass shrinkage=, or use structure='diagonal'.",
            stacklevel=3,
        )
