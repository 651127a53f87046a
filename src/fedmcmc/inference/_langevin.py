"""Moments of tilted distributions from a client's own Langevin chain."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._types import ArrayTree, Broadcast, Client, Number, Posterior
from fedmcmc.dynamics import local_steps, training
from fedmcmc.gaussian import Gaussian
from fedmcmc.inference._samples import SampleMean
from fedmcmc.inference._types import Found, Mean
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import normals, realize_normals

__all__ = ["langevin_mean"]

_PLAIN_STEPS = optax.sgd(1.0)


class _Draws(NamedTuple):
    gradient: ArrayTree
    noise: ArrayTree


def langevin_mean(
    step_size: Number,
    *,
    num_samples: int,
    num_burnin: int = 0,
    thinning: int = 1,
    batch_size: int | None = None,
) -> Mean:
    """Take the moments of a Langevin chain on the tilted distribution itself.

    ``theta + step_size * grad log tilted(theta) + sqrt(2 * step_size) * normal``, from the server's
    mean on: samples of likelihood times cavity, up to the step size, where the iterates of
    `sgd_mean` scatter by the noise of minibatches alone. With `fedmcmc.inference.mcmc` the sites
    are those of expectation propagation by sampling.

    Parameters
    ----------
    step_size
        A number, or a schedule of the round.
    num_samples, num_burnin
        Samples, and the number of them that are thrown away before.
    thinning
        Steps from sample to sample.
    batch_size
        Rows per step, drawn with replacement; ``None`` for all of a client's.

    References
    ----------
    Welling and Teh (2011), Bayesian learning via stochastic gradient Langevin dynamics; Xu et al.
    (2014), Distributed Bayesian posterior sampling via moment sharing, for the combination.
    """
    length, estimator = local_steps(None, thinning, batch_size, num_samples, num_burnin)
    number = schedules.number(step_size, "step_size", minimum=0.0, strict=True)
    return LangevinMean(estimator, training(_PLAIN_STEPS, length, step_size), number)


@register_dataclass
@dataclass(frozen=True, eq=False)
class LangevinMean(SampleMean):
    """Samples of a Langevin chain; see `langevin_mean`."""

    step_size: Any

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> _Draws:
        """Draw minibatches and noise."""
        gradient_key, noise_key = jax.random.split(rng_key)
        num = self.num_calls(client)
        gradient = self.estimator.prepare(gradient_key, like, client, num)
        return _Draws(gradient, normals(noise_key, like, num))

    def find(
        self,
        posterior: Posterior,
        draws: _Draws,
        position: ArrayTree,
        cavity: Gaussian,
        client: Client,
        round_: Array,
        second: str | None,
    ) -> Found:
        """Run the chain from the server's mean."""
        estimator, loglikelihood_fn = self.estimator, posterior.loglikelihood_fn
        context = estimator.start(loglikelihood_fn, Broadcast(round_, position), (), client)[0]
        # A step of size h along minus the gradient and sqrt(2 / h) normals moves by sqrt(2 h)
        # normals.
        scale = jnp.sqrt(2 / schedules.value(self.step_size, round_))

        def gradient_fn(drawn: _Draws, at: ArrayTree) -> ArrayTree:
            estimate = estimator.estimate(loglikelihood_fn, drawn.gradient, at, context, client)
            ascent = trees.add(estimate, cavity.grad_log(at))
            noise = realize_normals(drawn.noise, at)
            return trees.scale(-1, trees.add_scaled(ascent, scale, noise))

        return self.moments(gradient_fn, draws, position, client, round_, second)
