"""The model, the data and the positions on which contracts are tested."""

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import fedmcmc

NUM_CLIENTS = 3
SIZES = (5, 1, 4)
P = jnp.array([0.5, 0.2, 0.3])
LEVELS = jnp.array([3, 7, 5])
RATES = jnp.array([0.3, 0.1, 0.2])
KEY = jax.random.key(3)
POSITIONS = {
    "scalar": jnp.array(0.3),
    "vector": jnp.array([0.3, -0.2, 0.5]),
    "nested": {"a": jnp.array(0.3), "b": {"c": jnp.array([-0.2, 0.5])}},
}


def logprior(position):
    return -0.5 * jnp.sum(ravel_pytree(position)[0] ** 2)


def loglikelihood(position, rows):
    """Not quadratic, so that a minibatch's gradients at two places differ by something random."""
    flat = ravel_pytree(position)[0]
    return -jnp.sum(jnp.sqrt(1 + (rows["x"][:, : flat.size] - flat) ** 2), axis=-1)


POSTERIOR = fedmcmc.Posterior(logprior, loglikelihood)


def jittered(rng_key, rows):
    """Return rows with noise, as images are shifted."""
    return {"x": rows["x"] + 0.1 * jax.random.normal(rng_key, rows["x"].shape)}


def reordered(rng_key, rows):
    """Return a minibatch's rows in another order, of which no sum knows."""
    order = jax.random.permutation(rng_key, rows["x"].shape[0])
    return {"x": rows["x"][order]}


def make_data(sizes=SIZES, spoilt=(), shifted=(), order=None):
    """Return ragged clients; rows of those in `spoilt` are NaN, of those in `shifted` others."""
    clients = []
    for i, n in enumerate(sizes):
        x = np.random.default_rng(i).normal(i, 1.0, size=(n, 3)).astype(np.float32)
        x = x * np.float32(np.nan) if i in spoilt else x
        clients.append({"x": x - 4.0 if i in shifted else x})
    order = range(len(sizes)) if order is None else order
    return fedmcmc.FederatedData.from_clients([clients[i] for i in order], allow_nonfinite=True)


DATA = make_data()


class Given(NamedTuple):
    """What a row of the table is built with, besides the position."""

    posterior: fedmcmc.Posterior = POSTERIOR
    scale: float = 1  # 1 or 2, multiplies the kernel's numbers
    order: tuple = (0, 1, 2)  # of the clients

    def table(self, values: Any) -> Any:
        """Return one entry per client, in this order."""
        return jax.tree.map(lambda leaf: leaf[jnp.array(self.order)], values)

    @property
    def step_size(self):
        return 0.01 * self.scale

    @property
    def levels(self):
        return 4 * self.scale


def surrogates(position):
    mean = jax.tree.map(lambda x: jnp.stack([x, x + 1, x - 1]), position)
    return fedmcmc.Gaussian.from_moments(
        mean, variance=jax.tree.map(lambda x: jnp.full_like(x, 0.4), mean)
    )


def shapes(tree):
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)


def arguments(function):
    return list(inspect.signature(function).parameters)
