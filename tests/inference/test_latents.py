"""Fits of clients with latents: moments of the tilted distribution of position and latents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import Gaussian
from fedmcmc.inference import importance, mcmc_local
from fedmcmc.types import Local, Shapes
from tests.oracles.federations import LIMIT

OUTCOMES = np.array([1, 1, 1, 0, 1, 1])
GROUP = np.array([0, 0, 0, 1, 1, 1])
CENTER, SPREAD = 0.5, 3.0  # of the cavity
CAVITY = Gaussian.from_moments(jnp.array([CENTER]), jnp.array([[SPREAD**2]]))
NUM_CHAINS = 128


def of_latent(phi, theta):
    return -0.5 * theta**2


def of_rows(phi, thetas, rows):
    """Return log chances of outcomes that are logistic in the position and the group's latent."""
    return jax.nn.log_sigmoid((2 * rows - 1) * (phi[0] + 1.5 * thetas))


LOCAL = Local(of_latent, of_rows, Shapes(jnp.zeros((), jnp.result_type(float))))
POSTERIOR = fedmcmc.Posterior(lambda phi: -0.5 * jnp.sum(phi**2), None, local=LOCAL)
DATA = fedmcmc.FederatedData.from_clients([OUTCOMES], groups=[GROUP])


def tilted_moments():
    """Return mean and variance of likelihood times cavity, by sums over a grid in float64."""
    phi, theta = np.linspace(-8, 25, 1651), np.linspace(-8, 8, 801)
    log_density = -((phi - CENTER) ** 2) / (2 * SPREAD**2)
    for group in (0, 1):
        sign = 2 * OUTCOMES[group == GROUP] - 1
        logits = sign[:, None, None] * (phi[:, None] + 1.5 * theta)
        inner = -np.logaddexp(0, -logits).sum(0) - 0.5 * theta**2
        log_density += np.log(np.exp(inner).sum(1))
    weight = np.exp(log_density - log_density.max())
    weight /= weight.sum()
    mean = weight @ phi
    return mean, weight @ (phi - mean) ** 2


@pytest.mark.slow
def test_moments_are_those_of_the_tilted_distribution():
    """The distribution is far from a Gaussian, so that a wrong acceptance shows."""
    inference, client, position = mcmc_local(num_samples=400), DATA.client(0), jnp.zeros(1)

    @jax.jit
    @jax.vmap
    def fit(key):
        latents = inference.initial_latent_state(POSTERIOR, position, client)
        draws = inference.prepare(key, position, client)
        (tilted, _), _ = inference.fit_latents(
            POSTERIOR, draws, position, CAVITY, client, jnp.int32(0), latents
        )
        return tilted.mean()[0], 1 / tilted.precision[0, 0]

    moments = fit(jax.random.split(jax.random.key(3), NUM_CHAINS))
    for name, values, exact in zip(("mean", "variance"), moments, tilted_moments(), strict=True):
        z = abs(values.mean() - exact) / (values.std() / NUM_CHAINS**0.5)
        assert z < LIMIT, name


def test_unsupported_settings_raise():
    fed_ep, integrated = fedmcmc.fed_ep, fedmcmc.marginal(POSTERIOR)
    few = fed_ep(POSTERIOR, inference=mcmc_local(num_samples=9))
    record = fedmcmc.Record(local=True)
    start = (jax.random.key(0), fed_ep(POSTERIOR), DATA, jnp.zeros(1))
    for function, message in (
        (lambda: fed_ep(POSTERIOR, inference=importance()), "Importance does not move"),
        (lambda: fed_ep(integrated, inference=mcmc_local()), "this posterior has none"),
        (
            lambda: fedmcmc.fed_sep(POSTERIOR, inference=mcmc_local()),
            "Clients without sites keep no latents",
        ),
        (lambda: mcmc_local(num_samples=0), "num_samples must be"),
        (lambda: few.init(jax.random.key(0), jnp.zeros(1), DATA), "10 samples per dimension"),
        (lambda: fedmcmc.sample(*start, num_rounds=1, record=record), "local_draws"),
    ):
        with pytest.raises(ValueError, match=message):
            function()
    with pytest.raises(TypeError, match="refresh must be a"):
        mcmc_local(importance())
