"""Chains whose data is drawn anew from the model in turns with a kernel: they keep the prior.

The model is not Gaussian, nor is its prior (Geweke, 2004; the successive conditional simulator).
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from tests.oracles.federations import LIMIT, z_scores


def bernoulli_terms(theta, rows):
    logits = theta[0] + theta[1] * rows["x"]
    return rows["y"] * logits - jnp.logaddexp(0.0, logits)


def resample(rng_key, theta, rows):
    p = jax.nn.sigmoid(theta[0] + theta[1] * rows["x"])
    return rows | {"y": jax.random.bernoulli(rng_key, p).astype(p.dtype)}


# The prior's density is that of the hyperbolic secant, of variance pi^2 / 4.
SECANT = fedmcmc.Posterior(
    lambda theta: -jnp.sum(jnp.log(jnp.cosh(theta))), bernoulli_terms, resample_fn=resample
)


def assert_the_prior_is_kept(kernel, num_rounds, *, num_chains=8192, num_times=6):
    """Check the moments after data and, by some rounds of the kernel, position were renewed."""
    sizes = (3, 1, 4)
    xs = [np.linspace(-1, 1, n, dtype=np.float32) for n in sizes]
    data = fedmcmc.FederatedData.from_clients([{"x": x, "y": 0 * x} for x in xs])

    @jax.jit
    @jax.vmap
    def chain(key):
        uniform_key, key = jax.random.split(key)
        theta = jnp.log(jnp.tan(jnp.pi * jax.random.uniform(uniform_key, (2,)) / 2))

        def renew(theta, key):
            data_key, key = jax.random.split(key)
            own = replace(data, rows=resample(data_key, theta, data.rows))
            init, step = fedmcmc.simulate(kernel, own)
            state = init(theta)
            for _ in range(num_rounds):
                state, _ = step(key, state)
            return state.broadcast.position, jnp.any(state.broadcast.position != theta)

        return jax.lax.scan(renew, theta, jax.random.split(key, num_times))

    theta, moved = chain(jax.random.split(jax.random.key(5), num_chains))
    assert 0.3 < moved.mean() < 0.99
    theta = np.asarray(theta, float)
    assert np.abs(z_scores(theta, 0.0)).max() < LIMIT
    assert np.abs(z_scores(theta**2, np.pi**2 / 4)).max() < LIMIT
    assert abs(z_scores(theta[:, 0] * theta[:, 1], 0.0)) < LIMIT
