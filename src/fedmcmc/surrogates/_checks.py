"""Checks of what goes into a fit, and of whether what comes out of it is a proper density.

What is measured beside a fit is free of scale: a curvature is judged against the other curvatures
after each coordinate is put in units of its own, a change of the log density in nats, a chain in
relaxation times.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import in_quotes
from fedmcmc._types import ArrayTree, Posterior, as_functions
from fedmcmc.data import labels_of
from fedmcmc.gradients import blockwise, refuse_latents
from fedmcmc.pytrees import trees

_CHOICES = {"check": ("error", "warn", "ignore"), "structure": ("dense", "diagonal")}

REMEDIES = (
    "Pass prior_fraction= (for example 1 / num_clients) to fit the likelihood times that power of "
    "the prior, which is divided out again; or use surrogates.taylor(posterior, data, centre), "
    "which needs no proper likelihood; or keep the fit as it is with check='ignore' (networks, "
    "whose likelihoods are flat somewhere, with structure='diagonal')."
)

_RADIUS = 2.0  # standard deviations of the fit at which the log density is looked at again
_MIN_DROP = 0.1 * _RADIUS**2 / 2  # nats; a Gaussian loses _RADIUS**2 / 2
_MAX_DISTANCE = 0.1  # standard deviations between where an optimizer stopped and the maximum
# In a flat direction a chain shows about 5 whatever its length (Brownian motion: above 20 in one
# percent of chains), while 3000 samples at the settings of the FSGLD paper's first experiment, a
# proper Gaussian, last 30 relaxation times.
_MIN_RELAXATIONS = 20.0


def choices(check: str, structure: str = "dense") -> None:
    """Raise `ValueError` unless the two arguments are what all fits take."""
    for name, value in {"check": check, "structure": structure}.items():
        if value not in _CHOICES[name]:
            raise ValueError(f"{name} must be one of {_CHOICES[name]}, got {value!r}.")


def densities(posterior: Posterior) -> Posterior:
    """Return what fits use of a posterior, so that the rest cannot ask for another compilation."""
    refuse_latents(posterior)
    return as_functions(Posterior(posterior.logprior_fn, posterior.loglikelihood_fn))


def start_position(rng_key: Array, posterior: Posterior, position: ArrayTree) -> ArrayTree:
    """Return `position`, or where the posterior says to start."""
    if position is None:
        if posterior.init_fn is None:
            raise ValueError(
                "This posterior has no init_fn that would say where to start: pass position=."
            )
        position = posterior.init_fn(rng_key)
    return trees.as_floats(position, "position")


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


class Scaled(NamedTuple):
    """A symmetric matrix in units of its diagonal: ``matrix = S vectors diag(values) vectors' S``.

    `scale` ``[d]`` is the root of the diagonal (one where that is not positive), `values` ``[d]``
    ascend, `vectors` is ``[d, d]``. For a diagonal matrix `values` are the signs and `vectors` is
    ``None``.
    """

    scale: Array
    values: Array
    vectors: Array | None

    def direction(self, i: Array) -> Array:
        """Return where quadratic form ``i`` is one, ``[d]``; zero where that is nowhere."""
        length = jnp.where(self.values[i] > 0, jax.lax.rsqrt(jnp.abs(self.values[i])), 0)
        if self.vectors is None:
            return jnp.zeros_like(self.scale).at[i].set(length / self.scale[i])
        return length * self.vectors[:, i] / self.scale


def scaled_eigen(matrix: Array) -> Scaled:
    """Decompose ``[d, d]``, or the diagonal ``[d]`` of a diagonal matrix."""
    diagonal = jnp.diagonal(matrix) if matrix.ndim == 2 else matrix
    scale = jnp.sqrt(jnp.where(diagonal > 0, diagonal, 1))
    if matrix.ndim == 1:
        return Scaled(scale, jnp.sign(diagonal), None)
    return Scaled(scale, *jnp.linalg.eigh(matrix / jnp.outer(scale, scale)))


def singular_below(values: Array) -> Array:
    """Return the eigenvalue at or below which a matrix counts as singular up to rounding."""
    return 20 * jnp.finfo(values.dtype).eps * jnp.max(values)


class AtMaximum(NamedTuple):
    """Measured at a client's fitted maximum, leaves ``[]``.

    `smallest` is the smallest eigenvalue of the precision in units of its diagonal, `singular`
    whether it is zero or less to rounding; `drop` the least that the log density loses two fitted
    standard deviations away; `distance` how many of these the quadratic expansion puts its maximum
    away; `finite` whether all numbers are.
    """

    smallest: Array
    singular: Array
    drop: Array
    distance: Array
    finite: Array


def at_maximum(
    change: Callable[[Array], Array], gradient: Array, precision: Array, num_at_a_time: int
) -> AtMaximum:
    """Measure a fit with `gradient` ``[d]`` and `precision` ``[d, d]`` (or its diagonal) there.

    `change` returns what the log density changes by a shift. A likelihood without maximum
    (separable classes, counts that are all zero) lets the optimizer run until gradient and
    curvature vanish together; there the fitted standard deviation is so long that on one side
    nothing is lost.
    """
    finite = jnp.all(jnp.isfinite(gradient)) & jnp.all(jnp.isfinite(precision))
    eigen = scaled_eigen(jnp.where(finite, precision, 0))
    positive = eigen.values > 0
    whitened = gradient / eigen.scale
    if eigen.vectors is not None:
        whitened = eigen.vectors.T @ whitened
    distance = jnp.where(positive, jnp.square(whitened) / jnp.where(positive, eigen.values, 1), 0)

    def drop(i: Array) -> Array:
        shift = _RADIUS * eigen.direction(i)
        sides = jnp.stack([change(shift), change(-shift)])
        # A side so steep that it is not a number (an overflow) is not a flat one.
        return jnp.min(jnp.where(jnp.isnan(sides), jnp.inf, -sides))

    return AtMaximum(
        eigen.values.min(),
        eigen.values.min() <= singular_below(eigen.values),
        blockwise(drop, gradient.shape[0], num_at_a_time).min(),
        jnp.sqrt(jnp.sum(distance)),
        finite,
    )


def describe_maximum(
    smallest: float, singular: bool, drop: float, distance: float, finite: bool
) -> str | None:
    """Return what is wrong with a client's fit, ``None`` if nothing is; see `AtMaximum`."""
    if not finite:
        return "the log likelihood, its gradient or curvature is not finite"
    if singular:
        return (
            f"the smallest eigenvalue of the precision, in units of its diagonal, is "
            f"{smallest:.2g} where the optimizer stopped: the likelihood is flat or convex"
        )
    if distance > _MAX_DISTANCE:
        return (
            f"the optimizer stopped about {distance:.2g} standard deviations from the maximum "
            f"(not converged: raise max_steps, or bring the coordinates to one scale)"
        )
    if drop < _MIN_DROP:
        return (
            f"the log likelihood falls by only {drop:.2g} at {_RADIUS:g} fitted standard "
            f"deviations on one side (a Gaussian's by {_RADIUS**2 / 2:g}): the optimizer ran "
            f"off along a likelihood without maximum"
        )
    return None


def describe_chain(finite: bool, moved: bool, relaxations: float) -> str | None:
    """Return what is wrong with a client's samples, ``None`` if nothing is.

    `relaxations` is the simulated time of the samples over their largest variance. A Gaussian
    likelihood of variance ``v`` forgets in a time of ``v``, so this counts the independent pieces
    of the chain in its slowest direction; a random walk has about five whatever its length.
    """
    if not finite:
        return "the samples are not finite: lower step_size"
    if not moved:
        return "the samples do not move in some coordinate"
    if relaxations < _MIN_RELAXATIONS:
        return (
            f"the samples are not stationary: the chain lasted {relaxations:.2g} relaxation times "
            f"of its slowest direction (a random walk shows about 5, needed are "
            f"{_MIN_RELAXATIONS:g}): flat there, or step_size or num_samples is too small"
        )
    return None


def complain(
    check: str,
    name: str,
    describe: Callable[..., str | None],
    measured: tuple[Array, ...],
    data: Any,
    remedies: str = REMEDIES,
) -> None:
    """Raise or warn where `describe` says what is wrong with a client.

    `measured` holds its arguments, each ``[num_clients]``; `data` are the clients.
    """
    if check == "ignore":
        return
    complaints = [describe(*numbers) for numbers in zip(*map(np.asarray, measured), strict=True)]
    bad = [i for i, text in enumerate(complaints) if text is not None]
    if not bad:
        return
    sizes, labels = np.asarray(data.federation.sizes), labels_of(data)
    first = "; ".join(
        f"client {in_quotes(labels[i])} ({sizes[i]} rows): {complaints[i]}" for i in bad[:3]
    )
    more = f"; and {len(bad) - 3} more" if len(bad) > 3 else ""
    message = (
        f"{name}: no trustworthy Gaussian for the likelihood of {len(bad)} of {len(complaints)} "
        f"clients. {first}{more}. {remedies}"
    )
    if check == "error":
        raise ValueError(message)
    warnings.warn(message, stacklevel=3)


def warn_shrinkage(amount: Array, data: Any) -> None:
    """Warn where a singular sample covariance was regularized."""
    bad = np.flatnonzero(amount > 0)
    if bad.size:
        warnings.warn(
            f"sampled: the sample covariance of {bad.size} of {amount.size} clients is singular "
            f"(first client {in_quotes(labels_of(data)[bad[0]])}); before inversion "
            f"{amount[bad[0]]:.2g} of it was replaced by its diagonal. Take more samples than "
            f"dimensions, pass shrinkage=, or use structure='diagonal'.",
            stacklevel=3,
        )
