"""Gaussians of each structure, single and one per client."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fedmcmc
from fedmcmc import Gaussian

RNG = np.random.default_rng(0)
TREE = {"a": jnp.array([0.5, -1.0]), "b": jnp.array(2.0)}
PLACE = {"a": jnp.array([0.3, 0.2]), "b": jnp.array(-0.1)}


def draw_covariance(*shape):
    root = RNG.normal(size=shape)
    return jnp.asarray(root @ np.swapaxes(root, -1, -2) + np.eye(shape[-1]), jnp.float32)


GAUSSIANS = {
    "dense": Gaussian.from_moments(TREE, draw_covariance(3, 3)),
    "diagonal": Gaussian.from_moments(
        TREE, variance={"a": jnp.array([0.5, 2.0]), "b": jnp.array(3.0)}
    ),
    "scaled_identity": Gaussian.from_moments(TREE, variance=0.7),
}


def flat(tree):
    return ravel_pytree(tree)[0]


@pytest.mark.parametrize("structure", fedmcmc.gaussian.STRUCTURES)
def test_moments_gradients_and_draws_agree(structure):
    q, num = GAUSSIANS[structure], 20_000
    assert q.structure == structure
    mean, covariance = np.asarray(flat(TREE)), np.asarray(q.covariance(), np.float64)
    np.testing.assert_allclose(flat(q.mean()), mean, rtol=1e-5)
    gradient = -np.linalg.solve(covariance, np.asarray(flat(PLACE)) - mean)
    np.testing.assert_allclose(flat(q.grad_log(PLACE)), gradient, rtol=2e-4, atol=2e-5)
    keys = jax.random.split(jax.random.key(1), num)
    draws = jax.vmap(lambda key: flat(q.draw(key)))(keys)
    variances = np.diag(covariance)
    assert np.abs((draws.mean(0) - mean) / np.sqrt(variances / num)).max() < 5.5
    spread = np.sqrt((np.outer(variances, variances) + covariance**2) / num)
    assert np.abs((np.cov(draws.T) - covariance) / spread).max() < 5.5


@pytest.mark.parametrize("structure", fedmcmc.gaussian.STRUCTURES)
def test_products_quotients_and_powers_scale_gradients(structure):
    q = GAUSSIANS[structure]
    gradient = flat(q.grad_log(PLACE))
    for combined, factor in ((q * q, 2.0), (q**0.3, 0.3), (q * q * q / q, 2.0)):
        assert combined.structure == structure
        scaled = flat(combined.grad_log(PLACE))
        np.testing.assert_allclose(scaled, factor * gradient, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(flat((q / q).grad_log(PLACE)), 0)
    uniform = Gaussian.uniform(TREE, structure)
    np.testing.assert_array_equal(flat((q * uniform).grad_log(PLACE)), gradient)


def test_the_product_over_clients_adds_gradients():
    means = jnp.asarray(RNG.normal(size=(4, 2)), jnp.float32)
    covariances, place = draw_covariance(4, 2, 2), jnp.array([1.0, -2.0])
    q = Gaussian.from_moments(means, covariances)
    separate = [Gaussian.from_moments(*moments) for moments in zip(means, covariances, strict=True)]
    total = sum(factor.grad_log(place) for factor in separate)
    np.testing.assert_allclose(q.sum().grad_log(place), total, rtol=1e-4)
    q.check_clients(place, 4)
    total = (means - place).sum(0)
    for variance in (jnp.ones(4), jnp.ones((4, 2))):
        diagonal = Gaussian.from_moments(means, variance=variance)
        np.testing.assert_allclose(diagonal.sum().grad_log(place), total, rtol=1e-4)


def test_shapes_distinguish_covariances_and_variances():
    means = jnp.zeros((3, 3))
    assert Gaussian.from_moments(means, jnp.ones((3, 3))).structure == "diagonal"
    assert Gaussian.from_moments(means, jnp.stack([jnp.eye(3)] * 3)).structure == "dense"
    assert Gaussian.from_moments(jnp.zeros(3), jnp.eye(3)).structure == "dense"
    assert Gaussian.from_moments(means, variance=jnp.ones(3)).structure == "scaled_identity"


def test_invalid_structures_raise():
    with pytest.raises(ValueError, match="dense and diagonal"):
        GAUSSIANS["dense"] * GAUSSIANS["diagonal"]
    with pytest.raises(ValueError, match="structure must be one of"):
        Gaussian.uniform(TREE, "low rank")
