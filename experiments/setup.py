"""Quantities that kernels need before their first round; `experiments.wiring` passes arguments."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial

import fedmcmc
from experiments import models
from fedmcmc import FederatedData, Gaussian, Posterior
from fedmcmc.data import fold
from fedmcmc.pytrees import convolutions


def mode(centre: Any) -> Any:
    """Return the posterior's mode."""
    return centre


def step_size(
    posterior: Posterior, data: FederatedData, rng_key: Any, reference: Any, fraction: float = 0.1
) -> float:
    """Return a fraction of one over the largest curvature of any client, scaled to all rows."""
    return fraction / fedmcmc.estimate_smoothness(rng_key, posterior, data, reference).largest


def leapfrog_step(
    posterior: Posterior, data: FederatedData, rng_key: Any, reference: Any, fraction: float = 0.2
) -> float:
    """Return a leapfrog step: a fraction of one over the root of the largest curvature."""
    return math.sqrt(step_size(posterior, data, rng_key, reference, fraction**2))


def approximation(posterior: Posterior, data: FederatedData, position: Any) -> Gaussian:
    """Return the Gaussian at the posterior's mode, with the curvature there."""
    white = fedmcmc.whiten(posterior, data, position, surrogates=False)
    mean = white.posterior.position_fn(white.position)
    return Gaussian.from_moments(mean, white.metric)


@functools.cache
def local_states(every: int) -> Callable[..., Any]:
    """Return a `collect` that keeps local states a distance `every` apart of a round, in relays."""

    def collect(state: Any, info: Any) -> Any:
        states = fedmcmc.runs.local_positions(state, info)
        return jax.tree.map(lambda leaf: leaf[every - 1 :: every], states)

    return collect


def potential(posterior: Posterior, rows: Any, position: Any) -> Array:
    """Return minus the log density of the posterior at `position`, up to a constant."""
    return -posterior.logprior_fn(position) - jnp.sum(posterior.loglikelihood_fn(position, rows))


def laplace_start(centre: Any, laplace_scale: Array) -> Callable[[Array], Any]:
    """Return the function that draws a start from the Gaussian at the mode."""
    mean, unravel = ravel_pytree(centre)
    return Partial(_draw_at_mode, Partial(unravel), mean, laplace_scale)


def _draw_at_mode(unravel: Any, mean: Array, scale: Array, rng_key: Array) -> Any:
    return unravel(mean + scale @ jax.random.normal(rng_key, mean.shape))


def gaussian_start(centre: Any, scale: float) -> Callable[[Array], Any]:
    """Return the function that draws a start around the mode, with one standard deviation."""
    return Partial(_draw_around, centre, scale)


def _draw_around(centre: Any, scale: float, rng_key: Array) -> Any:
    return optax.tree.add_scale(centre, scale, optax.tree.random_like(rng_key, centre))


def smoothness(features: np.ndarray, prior_precision: float) -> float:
    """Return ``lambda_max(X'X) / 4 + prior_precision``, a bound on a logistic model's curvature.

    The notebooks of Vono et al. (2022) use it for multinomial regression too, where 1/4 should be
    1/2 (Bohning 1992), so that a step of one over it may be twice too long.
    """
    x = np.asarray(features, np.float64)
    return float(np.linalg.eigvalsh(x.T @ x)[-1] / 4 + prior_precision)


def linear_step(data: FederatedData, prior_precision: float, fraction: float) -> float:
    """Return a fraction of one over the `smoothness` of all rows."""
    return fraction / smoothness(data.rows["features"], prior_precision)


def consensus_tolerance(data: FederatedData, prior_precision: float, fraction: float) -> Array:
    """Return tolerances of DG-SGLD: fractions of one over the clients' `smoothness`."""
    precisions = prior_precision * np.asarray(data.share, np.float64)
    features = [data.client_rows(i)["features"] for i in range(data.num_clients)]
    bounds = np.array([*map(smoothness, features, precisions)])
    return jnp.asarray(fraction / bounds, jnp.float32)


def consensus_step(data: FederatedData, prior_precision: float, fraction: float) -> Array:
    """Return steps of DG-SGLD for `consensus_tolerance` (Plassier et al. 2021)."""
    return consensus_tolerance(data, prior_precision, fraction) / (2 * (fraction + 1))


_STARTS: dict[Any, Any] = {}
"""The last result of `adam_start`, with its arguments."""


def adam_start(
    posterior: Posterior,
    data: FederatedData,
    rng_key: Array,
    num_steps: int,
    batch_size: int = 64,
    learning_rate: float = 1e-3,
) -> Any:
    """Return an approximate maximum of the log posterior of all rows, from a draw of ``init_fn``.

    Jobs with the same arguments share the result.
    """
    seed = jax.random.key_data(rng_key).tobytes()
    key = (id(posterior), id(data), seed, num_steps, batch_size, learning_rate)
    if key not in _STARTS:
        init_key, run_key = jax.random.split(rng_key)
        position = posterior.init_fn(init_key)
        if num_steps:
            train = jax.jit(convolutions.canonical(functools.partial(adam, num_steps, batch_size)))
            rows = data.pooled().rows
            position = train(run_key, posterior, rows, position, jnp.float32(learning_rate))
        _STARTS.clear()
        _STARTS[key] = (posterior, data, position)  # keeps both, and so their ids
    return _STARTS[key][-1]


def adam(
    num_steps: int,
    batch_size: int,
    rng_key: Array,
    posterior: Posterior,
    rows: Any,
    position: Any,
    learning_rate: Array,
) -> Any:
    """Return an approximate maximum of the log posterior of `rows`, by Adam from `position`."""
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, num_steps))

    def loss(position: Any, batch: Any) -> Array:
        mean = jnp.mean(posterior.loglikelihood_fn(position, batch))
        return -mean - posterior.logprior_fn(position) / num_rows

    def step(carry: tuple[Any, Any], key: Array) -> tuple[tuple[Any, Any], None]:
        position, state = carry
        chosen = jax.random.randint(key, (batch_size,), 0, num_rows)
        gradient = jax.grad(loss)(position, jax.tree.map(lambda leaf: leaf[chosen], rows))
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(position, updates), state), None

    keys = jax.random.split(rng_key, num_steps)
    return jax.lax.scan(step, (position, optimizer.init(position)), keys)[0][0]


def fisher_surrogates(posterior: Posterior, data: FederatedData, start: Any) -> Gaussian:
    """Return surrogates with each client's gradient and diagonal empirical Fisher information."""
    position, unravel = ravel_pytree(start)

    def term(position: Array, row: Any) -> Array:
        one_row = jax.tree.map(lambda leaf: leaf[None], row)
        return posterior.loglikelihood_fn(unravel(position), one_row)[0]

    def all_clients(data: FederatedData, position: Array) -> Gaussian:
        def add(total: Array, row: tuple[Any, Array]) -> tuple[Array, None]:
            gradient = row[1] * jax.grad(term)(position, row[0])
            return total + jnp.stack([gradient, gradient**2]), None

        def chunk(rows: Any, mask: Array) -> Array:
            return jax.lax.scan(add, jnp.zeros((2, position.size)), (rows, mask))[0]

        def fit(index: Array) -> Gaussian:
            gradient, fisher = fold(chunk, data.client(index))
            shift = gradient + fisher * position
            return Gaussian(unravel(shift), unravel(fisher), "diagonal")

        return jax.lax.map(fit, jnp.arange(data.num_clients))

    return jax.jit(convolutions.canonical(all_clients))(data, position)


def flat_prior(posterior: Posterior) -> Posterior:
    """Return the posterior with a flat prior, for methods that have none."""
    return posterior._replace(logprior_fn=Partial(models.flat_logprior))
