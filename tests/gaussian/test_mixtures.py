"""Draws and densities of mixtures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedmcmc.gaussian import Mixture
from tests.oracles.federations import LIMIT, z_scores
from tests.support.lanes import fast_and_slow

SCALE = np.array([[1.0, 0.4], [0.4, 0.5]])
MIXTURES = {
    "dense": Mixture.of(
        [
            (0.6, np.inf, [0.0, 1.0], SCALE),
            (0.3, 5.0, [2.0, 0.0], 2 * SCALE),
            (0.1, 9.0, [-3, -3], SCALE),
        ]
    ),
    "diagonal": Mixture.of([(0.5, np.inf, [0.0, 1.0], [1.0, 2.0]), (0.5, 6.0, [1, -1], [0.5, 1])]),
}
POINTS = np.random.default_rng(0).normal(scale=3, size=(50, 2))


@pytest.mark.parametrize("name", MIXTURES)
def test_the_density_in_a_program_equals_the_density_on_the_host(name):
    with jax.enable_x64(True):
        mixture = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), MIXTURES[name])
        log_density = jax.jit(jax.vmap(mixture.log_density_of))(POINTS)
    np.testing.assert_allclose(log_density, mixture.log_density(POINTS), rtol=1e-10)


def test_the_density_equals_the_density_of_scipy():
    expected = (
        0.6 * stats.multivariate_normal([0, 1], SCALE).pdf(POINTS)
        + 0.3 * stats.multivariate_t([2, 0], 2 * SCALE, 5).pdf(POINTS)
        + 0.1 * stats.multivariate_t([-3, -3], SCALE, 9).pdf(POINTS)
    )
    np.testing.assert_allclose(np.exp(MIXTURES["dense"].log_density(POINTS)), expected, rtol=1e-5)


@pytest.mark.parametrize("name", fast_and_slow(MIXTURES, ["diagonal"]))
def test_independent_draws_have_the_moments_of_the_mixture(name):
    mixture = MIXTURES[name]
    draws = mixture.standard_draws(jax.random.key(0), 200_000)
    points = np.asarray(mixture.placed(draws), float)
    shares = np.bincount(draws.part, minlength=len(mixture.weights)) / len(points)
    np.testing.assert_allclose(shares, mixture.weights, atol=0.01)
    means, factors = np.asarray(mixture.means, float), np.asarray(mixture.factors, float)
    mean, second = np.array(mixture.weights) @ means, np.zeros((2, 2))
    for weight, degrees, m, f in zip(mixture.weights, mixture.degrees, means, factors, strict=True):
        scale = f @ f.T if f.ndim == 2 else np.diag(f**2)
        covariance = scale if np.isinf(degrees) else scale * degrees / (degrees - 2)
        second += weight * (covariance + np.outer(m, m))
    assert np.abs(z_scores(points, mean)).max() < LIMIT
    products = points[:, :, None] * points[:, None, :]
    assert np.abs(z_scores(products, second)).max() < LIMIT
