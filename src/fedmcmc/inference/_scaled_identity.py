"""Inference whose covariance is a given scaled identity."""

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._checks import expect
from fedmcmc._types import ArrayTree, Client, Federation, Number, Posterior
from fedmcmc.gaussian import Gaussian
from fedmcmc.inference._shapes import flat_precision, from_flat
from fedmcmc.inference._types import Inference, Mean, Tilted
from fedmcmc.pytrees import schedules, trees

__all__ = ["scaled_identity"]


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
        How the tilted mean is found: `sgd_mean` or `exact_mean`.
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
    Guo et al. (2023), section 4.2.
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
@dataclass(frozen=True, eq=False)
class ScaledIdentity(Inference):
    """A mean, and a given covariance; see `scaled_identity`."""

    mean: Mean
    number: Any
    kind: str = field(metadata={"static": True})  # what the number is

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
        """Draw what the search for the mean draws."""
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
        """Find the mean, and add the given precision."""
        target = self.mean.with_decay(cavity, client, round_)
        estimate = self.mean.find(posterior, draws, position, target, client, round_, None)
        number, before = schedules.value(self.number, round_), flat_precision(cavity)
        if self.kind == "variance":
            before, number = jnp.zeros_like(before), 1 / number
        elif self.kind == "precision_per_row":
            number = number * client.size.astype(client.share.dtype)
        added = trees.cast(number, before)
        if before.ndim == 2:
            added = added * jnp.eye(before.shape[0], dtype=before.dtype)
        return Tilted(
            from_flat(estimate.mean, before + added, cavity.structure), estimate.gradient_norm
        )

    def check(
        self, posterior: Posterior, position: ArrayTree, federation: Federation, structure: str
    ) -> None:
        """Check the search for the mean."""
        self.mean.check(posterior, position, federation, None)
