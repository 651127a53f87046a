"""Posteriors and data that several tests of `fit` share."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import fedmcmc
from tests.exact.test_correct import EXACT, FEDERATION, log_evidence

__all__ = ["EXACT", "FEDERATION", "bimodal", "count_data", "counts", "log_evidence", "poisson"]


def poisson(x, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.deterministic("rate", jnp.exp(b[0]))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Poisson(jnp.exp(b[0] + b[1] * x)), obs=y)


def counts():
    x = np.linspace(-1, 1, 12).astype(np.float32)
    return x, np.random.default_rng(3).poisson(np.exp(0.3 + 0.8 * x))


def count_data():
    x, y = counts()
    parts = (slice(0, 7), slice(7, 11), slice(11, 12))
    return fedmcmc.FederatedData.from_clients([{"x": x[p], "y": y[p]} for p in parts])


def bimodal(distance=6.0):
    """Return a posterior of two clients with modes of masses 0.7 and 0.3, and its data."""

    def loglikelihood(x, rows):
        # Client 0 holds both modes with equal mass; client 1 changes the masses.
        places = jnp.array([-distance / 2, distance / 2])
        both = jax.scipy.special.logsumexp(-0.5 * (x[0] - places) ** 2) - 0.5 * x[1] ** 2
        weighted = jnp.log(0.3 + 0.4 / (1 + jnp.exp(distance * x[0])))
        return jnp.where(rows == 0, both, weighted - jnp.log(2 * jnp.pi * 0.5))

    posterior = fedmcmc.Posterior(lambda x: jnp.zeros(()), loglikelihood)
    return posterior, fedmcmc.FederatedData.from_clients([jnp.zeros(1), jnp.ones(1)])
