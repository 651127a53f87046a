"""Inference by the Fisher information at the mean."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._checks import expect, positive_integer
from fedmcmc._types import ArrayTree, Client, Number, Posterior
from fedmcmc.gaussian import Gaussian
from fedmcmc.inference._fisher import FisherInference, fisher
from fedmcmc.inference._shapes import checked_clip, clipped, in_structure
from fedmcmc.inference._types import Inference, Mean, Tilted
from fedmcmc.pytrees import schedules

__all__ = ["laplace"]


def laplace(
    mean: Mean, *, num_passes: int = 1, clip: float | None = None, scale: Number = 1.0
) -> Inference:
    """Add the Fisher information at the tilted mean to the cavity's precision (variant L).

    The information is the sum over rows of squared gradients, or of products of gradients where
    sites are dense, with outcomes that the model draws once per row and pass. It estimates minus
    the expected second derivatives, needs no curvature and is never negative.

    Parameters
    ----------
    mean
        How the tilted mean is found: `sgd_mean`, `langevin_mean` or `exact_mean`.
    num_passes
        Passes over the rows, each with new outcomes; 5 or 10 in the paper.
    clip
        Clip the information to its mean plus and minus so many standard deviations over
        coordinates; 2 in the released code, no clipping in the paper.
    scale
        Multiplies all that is added to the cavity, the weight decay of `mean` included; one in the
        paper.

    Notes
    -----
    The posterior needs a ``resample_fn``, which draws outcomes (`fedmcmc.from_numpyro` and
    `fedmcmc.from_flax` make one).

    References
    ----------
    Guo et al. (2023), section 4.2.

    Examples
    --------
    >>> import optax
    >>> from fedmcmc.inference import sgd_mean
    >>> mean = sgd_mean(optax.sgd(0.01, momentum=0.9), num_samples=10, batch_size=20)
    >>> block = laplace(mean, num_passes=5)  # fedmcmc.fed_ep(posterior, inference=block, ...)
    """
    expect(mean, Mean, "mean")
    number = schedules.number(scale, "scale", minimum=0.0, strict=True)
    return Laplace(mean, number, checked_clip(clip), positive_integer(num_passes, "num_passes"))


@register_dataclass
@dataclass(frozen=True, eq=False)
class Laplace(FisherInference):
    """Information at the mean; see `laplace`."""

    num_passes: int = field(metadata={"static": True})

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> tuple[ArrayTree, Array]:
        """Draw what the search for the mean draws, and a key per pass."""
        mean_key, pass_key = jax.random.split(rng_key)
        keys = jax.random.split(pass_key, self.num_passes)
        return self.mean.prepare(mean_key, like, client), keys

    def fit(
        self,
        posterior: Posterior,
        draws: tuple[ArrayTree, Array],
        position: ArrayTree,
        cavity: Gaussian,
        client: Client,
        round_: Array,
    ) -> Tilted:
        """Find the mean, and add the information there."""
        (mean_draws, keys), structure = draws, cavity.structure
        target = self.mean.with_decay(cavity, client, round_)
        estimate = self.mean.find(posterior, mean_draws, position, target, client, round_, None)
        dense = structure == "dense"
        passes = jax.lax.map(
            lambda key: fisher(posterior, key, estimate.mean, client, dense=dense), keys
        )
        information = clipped(jnp.mean(passes, axis=0), self.clip)
        information = in_structure(client.size.astype(information.dtype) * information, structure)
        tilted = self.added_to(cavity, target, estimate.mean, information, round_)
        return Tilted(tilted, estimate.gradient_norm)
