"""Inference whose covariance is given, or is that of samples."""

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect
from fedmcmc._types import Number, register_dataclass
from fedmcmc.gaussian import flat_precision, plus_precision
from fedmcmc.inference._types import Fit, Inference, Mean, MeanFirst
from fedmcmc.pytrees import schedules, trees


def scaled_identity(
    mean: Mean,
    *,
    variance: Number | None = None,
    precision: Number | None = None,
    precision_per_row: Number | None = None,
) -> Inference:
    """Take a scaled identity for the covariance that the likelihood brings (variant I).

    Parameters
    ----------
    mean
        How the tilted mean is found: `sgd_mean`, `langevin_mean` or `exact_mean`.
    variance
        The tilted covariance is this times the identity, whatever the cavity: the paper's
        ``alpha_cov``.
    precision
        The tilted precision is the cavity's plus this: the authors' toy problem, with one.
    precision_per_row
        The tilted precision is the cavity's plus this times the client's number of rows: the
        authors' released code for networks (their ``alpha_cov`` is this number).

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
    named = {name: number for name, number in arguments.items() if number is not None}
    if len(named) != 1:
        raise ValueError(
            "scaled_identity takes one of variance=, precision= and precision_per_row=, got "
            f"{sorted(named) or 'none'}."
        )
    ((kind, number),) = named.items()
    value = schedules.number(number, kind, minimum=0.0, strict=True)
    return ScaledIdentity(mean, value, kind)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class ScaledIdentity(MeanFirst):
    """A mean, and a given covariance; see `scaled_identity`."""

    mean: Mean
    number: Any
    kind: str = field(metadata={"static": True})  # what the number is

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
    """Take mean and covariance of the tilted samples (variant M).

    The covariance is ``shrinkage * I + (1 - shrinkage) * S`` with the sample variances ``S``
    (divisor one less than the number of samples), or their covariance matrix where sites are
    dense, or their mean for a scaled identity.

    Parameters
    ----------
    mean
        How the samples are drawn: `sgd_mean` or `langevin_mean`, or `exact_mean` for their exact
        moments.
    shrinkage
        Between zero and one.
    clip
        Clip precisions to their mean plus and minus so many standard deviations over coordinates;
        2 in the released code, no clipping in the paper.
    match_precision_per_row
        Rescale precisions to the Euclidean norm of those of
        ``scaled_identity(precision_per_row=...)`` with this number, as the released code does: then
        samples give the shape of the covariance alone.

    References
    ----------
    Guo et al. (2023), section 2.2.2.
    """
    expect(mean, Mean, "mean")
    rate = schedules.number(shrinkage, "shrinkage", minimum=0.0, maximum=1.0)
    match: Any = ()
    if match_precision_per_row is not None:
        match = schedules.number(
            match_precision_per_row, "match_precision_per_row", minimum=0.0, strict=True
        )
    return Mcmc(mean, rate, match, checked_clip(clip))


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Mcmc(MeanFirst):
    """Moments of samples; see `mcmc`."""

    mean: Mean
    shrinkage: Any
    match: Any  # () for none
    clip: float | None = field(metadata={"static": True})

    def second(self, structure: str) -> str:
        return "dense" if structure == "dense" else "diagonal"

    def precision(self, fit: Fit) -> Array:
        structure, variance = fit.cavity.structure, fit.moments.variance
        variance = variance if structure == "dense" else trees.ravel(variance)
        variance = in_structure(variance, structure)
        rate = trees.cast(schedules.value(self.shrinkage, fit.round), variance)
        one = jnp.eye(variance.shape[0], dtype=variance.dtype) if variance.ndim == 2 else 1.0
        variance = rate * one + (1 - rate) * variance
        precision = jnp.linalg.inv(variance) if variance.ndim == 2 else 1 / variance
        precision = clipped(precision, self.clip)
        if trees.is_empty(self.match):
            return precision
        client = fit.client
        per_row = schedules.value(self.match, fit.round) * client.size.astype(client.share.dtype)
        like = jnp.ravel(flat_precision(plus_precision(fit.cavity, per_row)))
        return precision * jnp.linalg.norm(like) / jnp.linalg.norm(jnp.ravel(precision))


def in_structure(information: Array, structure: str) -> Array:
    """Return an information ``[d]`` or ``[d, d]`` as the precision of a structure.

    A scaled identity has the mean of the diagonal.
    """
    if structure == "scaled_identity":
        return jnp.mean(information)
    return information


def clipped(values: Array, num_sds: float | None) -> Array:
    """Return `values` clipped to their mean plus and minus so many standard deviations.

    Of a matrix ``[d, d]`` the diagonal is clipped. ``None`` leaves everything as it is.
    """
    if num_sds is None or values.ndim == 0:
        return values
    diagonal = jnp.diagonal(values) if values.ndim == 2 else values
    center, spread = jnp.mean(diagonal), num_sds * jnp.std(diagonal)
    new = jnp.clip(diagonal, center - spread, center + spread)
    if values.ndim == 2:
        return values + jnp.diag(new - diagonal)
    return new


def checked_clip(clip: float | None) -> float | None:
    """Return a number of standard deviations for `clipped`, which must be positive."""
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise ValueError(f"clip must be a positive number of standard deviations, got {clip!r}.")
    return None if clip is None else float(clip)
