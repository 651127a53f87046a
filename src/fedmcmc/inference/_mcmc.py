"""Inference by the moments of samples."""

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._checks import expect
from fedmcmc._types import ArrayTree, Client, Federation, Number, Posterior
from fedmcmc.gaussian import Gaussian
from fedmcmc.inference._shapes import (
    checked_clip,
    clipped,
    flat_precision,
    from_flat,
    in_structure,
)
from fedmcmc.inference._types import Inference, Mean, Tilted
from fedmcmc.pytrees import schedules, trees

__all__ = ["mcmc"]


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
        How the samples are drawn: `sgd_mean`, or `exact_mean` for their exact moments.
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
    Guo et al. (2023), section 4.2.
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
@dataclass(frozen=True, eq=False)
class Mcmc(Inference):
    """Moments of samples; see `mcmc`."""

    mean: Mean
    shrinkage: Any
    match: Any  # () for none
    clip: float | None = field(metadata={"static": True})

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
        """Draw what the sampling draws."""
        return self.mean.prepare(rng_key, like, client)

    def fit(
        self,
        posterior: Posterior,
        draws: ArrayTree,
        position: ArrayTree,
        cavity: Gaussian,
        client: Client,
        round_: Array,
    ) -> Tilted:
        """Sample, and take the moments."""
        structure = cavity.structure
        target = self.mean.with_decay(cavity, client, round_)
        estimate = self.mean.find(
            posterior, draws, position, target, client, round_, _second(structure)
        )
        variance = trees.ravel(estimate.variance) if structure != "dense" else estimate.variance
        variance = in_structure(variance, structure)
        rate = trees.cast(schedules.value(self.shrinkage, round_), variance)
        one = jnp.eye(variance.shape[0], dtype=variance.dtype) if variance.ndim == 2 else 1.0
        variance = rate * one + (1 - rate) * variance
        precision = jnp.linalg.inv(variance) if variance.ndim == 2 else 1 / variance
        precision = clipped(precision, self.clip)
        if not trees.is_empty(self.match):
            per_row = schedules.value(self.match, round_) * client.size.astype(client.share.dtype)
            like = flat_precision(cavity)
            eye = jnp.eye(like.shape[0], dtype=like.dtype) if like.ndim == 2 else 1.0
            wanted = jnp.linalg.norm(jnp.ravel(like + trees.cast(per_row, like) * eye))
            precision = precision * wanted / jnp.linalg.norm(jnp.ravel(precision))
        return Tilted(from_flat(estimate.mean, precision, structure), estimate.gradient_norm)

    def check(
        self, posterior: Posterior, position: ArrayTree, federation: Federation, structure: str
    ) -> None:
        """Check the sampling."""
        self.mean.check(posterior, position, federation, _second(structure))


def _second(structure: str) -> str:
    return "dense" if structure == "dense" else "diagonal"
