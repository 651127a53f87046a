"""Moments of tilted distributions from a client's own Langevin chain."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.tree_util import Partial

from fedmcmc._types import ArrayTree, Broadcast, Client, GradientEstimator, Number, Posterior
from fedmcmc.dynamics import Training, local_steps, train, training
from fedmcmc.gaussian import Gaussian
from fedmcmc.inference._means import check_samples, found, moments
from fedmcmc.inference._types import Found, Mean
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import normals, realise_normals

__all__ = ["langevin_mean"]

_PLAIN_STEPS = optax.sgd(1.0)


class _Langevin(NamedTuple):
    estimator: GradientEstimator
    training: Training
    step_size: Any


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
        Rows a step, drawn with replacement; ``None`` for all of a client's.

    References
    ----------
    Welling and Teh (2011), Bayesian learning via stochastic gradient Langevin dynamics; Xu et al.
    (2014), Distributed Bayesian posterior sampling via moment sharing, for the combination.
    """
    length, estimator = local_steps(None, thinning, batch_size, num_samples, num_burnin)
    number = schedules.number(step_size, "step_size", minimum=0.0, strict=True)
    settings = _Langevin(estimator, training(_PLAIN_STEPS, length, step_size), number)
    return Mean(
        prepare=Partial(_prepare, settings),
        find=Partial(_find, settings),
        check=Partial(check_samples, settings.training),
        weight_decay=jnp.zeros((), jnp.result_type(float)),
    )


def _prepare(settings: _Langevin, rng_key: Array, like: ArrayTree, client: Client) -> _Draws:
    gradient_key, noise_key = jax.random.split(rng_key)
    num = settings.training.length.most(client)
    return _Draws(
        settings.estimator.prepare(gradient_key, like, client, num), normals(noise_key, like, num)
    )


def _find(
    settings: _Langevin,
    posterior: Posterior,
    draws: _Draws,
    position: ArrayTree,
    cavity: Gaussian,
    client: Client,
    round_: Array,
    second: str | None,
) -> Found:
    estimator, loglikelihood_fn = settings.estimator, posterior.loglikelihood_fn
    context = estimator.start(loglikelihood_fn, Broadcast(round_, position), (), client)[0]
    # A step of size h along minus the gradient and sqrt(2 / h) normals moves by sqrt(2 h) normals.
    scale = jnp.sqrt(2 / schedules.value(settings.step_size, round_))

    def gradient_fn(drawn: _Draws, at: ArrayTree) -> ArrayTree:
        estimate = estimator.estimate(loglikelihood_fn, drawn.gradient, at, context, client)
        ascent = trees.add(estimate, cavity.grad_log(at))
        return trees.scale(-1, trees.add_scaled(ascent, scale, realise_normals(drawn.noise, at)))

    trained = train(
        settings.training, gradient_fn, draws, position, client, round_, moments(second)
    )
    return found(trained, settings.training)
