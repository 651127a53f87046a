"""Fits of clients that keep latents: moments of the tilted distribution of position and latents."""

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
        at = sign[:, None, None] * (phi[:, None] + 1.5 * theta)
        inner = -np.logaddexp(0, -at).sum(0) - 0.5 * theta**2
        log_density += np.log(np.exp(inner).sum(1))
    weight = np.exp(log_density - log_density.max())
    weight /= weight.sum()
    mean = weight @ phi
    return mean, weight @ (phi - mean) ** 2


@pytest.mark.slow
def test_moments_are_those_of_the_tilted_distribution():
    """Of one that is far from a Gaussian, so that it matters what is accepted."""
    inference, client, position = mcmc_local(num_samples=400), DATA.client(0), jnp.zeros(1)

    @jax.jit
    @jax.vmap
    def moments(key):
        kept = inference.first_locals(POSTERIOR, position, client)
        draws = inference.prepare(key, position, client)
        given = (POSTERIOR, draws, position, CAVITY, client, jnp.int32(0))
        (tilted, _), _ = inference.fit_latents(*given, kept)
        return tilted.mean()[0], 1 / tilted.precision[0, 0]

    found = moments(jax.random.split(jax.random.key(3), NUM_CHAINS))
    for name, some, exact in zip(("mean", "variance"), found, tilted_moments(), strict=True):
        z = abs(some.mean() - exact) / (some.std() / NUM_CHAINS**0.5)
        assert z < LIMIT, name


def test_what_does_not_fit_is_refused():
    fed_ep = fedmcmc.fed_ep
    without = fedmcmc.marginal(POSTERIOR)
    with pytest.raises(ValueError, match="Importance does not move"):
        fed_ep(POSTERIOR, inference=importance())
    with pytest.raises(ValueError, match="this posterior has none"):
        fed_ep(without, inference=mcmc_local())
    with pytest.raises(ValueError, match="Clients without sites keep no latents"):
        fedmcmc.fed_sep(POSTERIOR, inference=mcmc_local())
    with pytest.raises(TypeError, match="refresh must be a"):
        mcmc_local(importance())
    with pytest.raises(ValueError, match="num_samples must be"):
        mcmc_local(num_samples=0)
    few = fed_ep(POSTERIOR, inference=mcmc_local(num_samples=9))
    with pytest.raises(ValueError, match="10 samples per dimension"):
        few.init(jax.random.key(0), jnp.zeros(1), DATA)
    with pytest.raises(ValueError, match="local_draws"):
        fedmcmc.sample(
            jax.random.key(0),
            fed_ep(POSTERIOR),
            DATA,
            jnp.zeros(1),
            num_rounds=1,
            record=fedmcmc.Record(local=True),
        )
