"""Inference whose covariance is an argument or comes from samples."""

from dataclasses import dataclass, field

import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect
from fedmcmc.gaussian import flat_precision, plus_precision
from fedmcmc.inference._types import Fit, Inference, Mean, MeanFirst
from fedmcmc.pytrees import schedules, trees
from fedmcmc.types import ArrayTree, Number, register_dataclass


def scaled_identity(
    mean: Mean,
    *,
    variance: Number | None = None,
    precision: Number | None = None,
    precision_per_row: Number | None = None,
) -> Inference:
    """Use a scaled identity as covariance (variant I), from exactly one of three numbers.

    Parameters
    ----------
    mean
        Method for the tilted mean: `sgd_mean`, `langevin_mean` or `exact_mean`.
    variance
        Factor of the identity in the tilted covariance, for any cavity: ``alpha_cov`` of the paper.
    precision
        Difference between the tilted precision and the cavity's: one in the authors' toy problem.
    precision_per_row
        The same difference, divided by the client's number of rows: ``alpha_cov`` of the authors'
        released code for networks.

    References
    ----------
    Guo et al. (2023), section 2.2.2.
    """
    expect(mean, Mean, "mean")
    arguments = {
        "variance": variance,
        "precision": precision,
        "precision_per_row": precision_per_row,
    }
    numbers = {name: number for name, number in arguments.items() if number is not None}
    if len(numbers) != 1:
        raise ValueError(
            "scaled_identity takes one of variance=, precision= and precision_per_row=, got "
            f"{sorted(numbers) or 'none'}."
        )
    ((kind, number),) = numbers.items()
    value = schedules.number(number, kind, minimum=0.0, strict=True)
    return ScaledIdentity(mean, value, kind)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class ScaledIdentity(MeanFirst):
    """Mean, and a scaled identity for the covariance; see `scaled_identity`."""

    mean: Mean
    number: ArrayTree
    kind: str = field(metadata={"static": True})  # name of the argument of `scaled_identity`

    def precision(self, fit: Fit) -> Array:
        cavity, number = fit.cavity, schedules.value(self.number, fit.round)
        if self.kind == "variance":
            cavity, number = trees.zeros_like(cavity), 1 / number
        elif self.kind == "precision_per_row":
            number = number * fit.client.size.astype(fit.client.share.dtype)
        return flat_precision(plus_precision(cavity, number))


def mcmc(
    mean: Mean,
    *,
    shrinkage: Number = 0.0,
    clip: float | None = None,
    match_precision_per_row: Number | None = None,
) -> Inference:
    """Use mean and covariance of samples from the tilted distribution (variant M).

    The covariance is ``shrinkage * I + (1 - shrinkage) * S``. For diagonal sites, ``S`` are the
    sample variances (divisor: number of samples minus one), for dense sites the sample covariance,
    for a scaled identity the mean variance.

    Parameters
    ----------
    mean
        Method for the samples: `sgd_mean` or `langevin_mean`, or `exact_mean` for exact moments.
    shrinkage
        Number between zero and one.
    clip
        Number of standard deviations over coordinates around their mean, to which precisions are
        clipped: 2 in the released code, no clipping in the paper.
    match_precision_per_row
        Number for ``scaled_identity(precision_per_row=...)``, to whose Euclidean norm precisions
        are rescaled, as in the released code. Samples then determine only the covariance's shape.

    References
    ----------
    Guo et al. (2023), section 2.2.2.
    """
    expect(mean, Mean, "mean")
    rate = schedules.number(shrinkage, "shrinkage", minimum=0.0, maximum=1.0)
    match: ArrayTree = ()
    if match_precision_per_row is not None:
        match = schedules.number(
            match_precision_per_row, "match_precision_per_row", minimum=0.0, strict=True
        )
    return Mcmc(mean, rate, match, checked_clip(clip))


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Mcmc(MeanFirst):
    """Mean and covariance of samples; see `mcmc`."""

    mean: Mean
    shrinkage: ArrayTree
    match: ArrayTree  # () for none
    clip: float | None = field(metadata={"static": True})

    def second(self, structure: str) -> str:
        return "dense" if structure == "dense" else "diagonal"

    def precision(self, fit: Fit) -> Array:
        structure, variance = fit.cavity.structure, fit.moments.variance
        variance = variance if structure == "dense" else trees.ravel(variance)
        variance = in_structure(variance, structure)
        rate = trees.cast(schedules.value(self.shrinkage, fit.round), variance)
        identity = jnp.eye(variance.shape[0], dtype=variance.dtype) if variance.ndim == 2 else 1.0
        variance = rate * identity + (1 - rate) * variance
        precision = jnp.linalg.inv(variance) if variance.ndim == 2 else 1 / variance
        precision = clipped(precision, self.clip)
        if trees.is_empty(self.match):
            return precision
        client = fit.client
        per_row = schedules.value(self.match, fit.round) * client.size.astype(client.share.dtype)
        like = jnp.ravel(flat_precision(plus_precision(fit.cavity, per_row)))
        return precision * jnp.linalg.norm(like) / jnp.linalg.norm(jnp.ravel(precision))


def in_structure(information: Array, structure: str) -> Array:
    """Return an information ``[d]`` or ``[d, d]`` as a precision; a scaled identity is its mean."""
    return jnp.mean(information) if structure == "scaled_identity" else information


def clipped(values: Array, num_sds: float | None) -> Array:
    """Return `values`, or the diagonal of a matrix, clipped to `num_sds` sds around their mean."""
    if num_sds is None or values.ndim == 0:
        return values
    diagonal = jnp.diagonal(values) if values.ndim == 2 else values
    center, spread = jnp.mean(diagonal), num_sds * jnp.std(diagonal)
    new = jnp.clip(diagonal, center - spread, center + spread)
    if values.ndim == 2:
        return values + jnp.diag(new - diagonal)
    return new


def checked_clip(clip: float | None) -> float | None:
    """Return the argument `num_sds` of `clipped`, checked."""
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise ValueError(f"clip must be a positive number of standard deviations, got {clip!r}.")
    return None if clip is None else float(clip)
