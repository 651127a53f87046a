"""Tests of draws and densities of mixtures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedmcmc.gaussian import Mixture
from tests.oracles.federations import LIMIT, z_scores
from tests.support.lanes import fast_and_slow

SCALE = np.array([[1.0, 0.4], [0.4, 0.5]])
PARTS = {
    "dense": Mixture.of(
        [
            (0.6, np.inf, [0.0, 1.0], SCALE),
            (0.3, 5.0, [2.0, 0.0], 2 * SCALE),
            (0.1, 9.0, [-3, -3], SCALE),
        ]
    ),
    "diagonal": Mixture.of([(0.5, np.inf, [0.0, 1.0], [1.0, 2.0]), (0.5, 6.0, [1, -1], [0.5, 1])]),
}


@pytest.mark.parametrize("name", PARTS)
def test_the_density_in_a_program_equals_the_density_on_the_host(name):
    points = np.random.default_rng(0).normal(scale=3, size=(50, 2))
    with jax.enable_x64(True):
        mixture = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), PARTS[name])
        found = jax.jit(jax.vmap(mixture.log_density_of))(points)
    np.testing.assert_allclose(found, mixture.log_density(points), rtol=1e-10)


def test_the_density_equals_that_of_scipy():
    mixture, points = PARTS["dense"], np.random.default_rng(0).normal(size=(9, 2))
    expected = (
        0.6 * stats.multivariate_normal([0, 1], SCALE).pdf(points)
        + 0.3 * stats.multivariate_t([2, 0], 2 * SCALE, 5).pdf(points)
        + 0.1 * stats.multivariate_t([-3, -3], SCALE, 9).pdf(points)
    )
    np.testing.assert_allclose(np.exp(mixture.log_density(points)), expected, rtol=1e-5)


@pytest.mark.parametrize("name", fast_and_slow(PARTS, ["diagonal"]))
def test_independent_draws_have_the_mixtures_moments(name):
    mixture = PARTS[name]
    drawn = mixture.standard_draws(jax.random.key(0), 200_000)
    points = np.asarray(mixture.placed(drawn), float)
    shares = np.bincount(drawn.part, minlength=len(mixture.weights)) / len(points)
    np.testing.assert_allclose(shares, mixture.weights, atol=0.01)
    means = np.asarray(mixture.means, float)
    factors = np.asarray(mixture.factors, float)
    mean = np.array(mixture.weights) @ means
    second = np.zeros((2, 2))
    for weight, degrees, m, f in zip(mixture.weights, mixture.degrees, means, factors, strict=True):
        scale = f @ f.T if f.ndim == 2 else np.diag(f**2)
        widened = scale if np.isinf(degrees) else scale * degrees / (degrees - 2)
        second += weight * (widened + np.outer(m, m))
    assert np.abs(z_scores(points, mean)).max() < LIMIT
    products = points[:, :, None] * points[:, None, :]
    assert np.abs(z_scores(products, second)).max() < LIMIT
