"""Tests of Gaussians of each structure, single and one per client."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fedmcmc
from fedmcmc import Gaussian

RNG = np.random.default_rng(0)
TREE = {"a": jnp.array([0.5, -1.0]), "b": jnp.array(2.0)}


def covariance(dim, num=None):
    shape = (dim, dim) if num is None else (num, dim, dim)
    root = RNG.normal(size=shape)
    return jnp.asarray(root @ np.swapaxes(root, -1, -2) + np.eye(dim), jnp.float32)


def gaussians():
    variance = {"a": jnp.array([0.5, 2.0]), "b": jnp.array(3.0)}
    return {
        "dense": Gaussian.from_moments(TREE, covariance(3)),
        "diagonal": Gaussian.from_moments(TREE, variance=variance),
        "scaled_identity": Gaussian.from_moments(TREE, variance=0.7),
    }


@pytest.mark.parametrize("structure", fedmcmc.gaussian.STRUCTURES)
def test_moments_gradient_and_draws(structure):
    q = gaussians()[structure]
    assert q.structure == structure
    flat, unravel = ravel_pytree(TREE)
    np.testing.assert_allclose(ravel_pytree(q.mean())[0], flat, rtol=1e-5)
    cov = np.asarray(q.covariance(), np.float64)
    place = jnp.array([0.3, 0.2, -0.1])

    def log_density(x):
        return -0.5 * (x - flat) @ jnp.linalg.solve(jnp.asarray(cov, jnp.float32), x - flat)

    gradient = ravel_pytree(q.grad_log(unravel(place)))[0]
    np.testing.assert_allclose(gradient, jax.grad(log_density)(place), rtol=2e-4, atol=2e-5)

    num = 20_000
    draws = jax.vmap(lambda key: ravel_pytree(q.draw(key))[0])(
        jax.random.split(jax.random.key(1), num)
    )
    z = (draws.mean(0) - flat) / np.sqrt(np.diag(cov) / num)
    assert np.abs(z).max() < 5.5
    spread = np.sqrt((np.outer(np.diag(cov), np.diag(cov)) + cov**2) / num)
    assert np.abs((np.cov(draws.T) - cov) / spread).max() < 5.5


@pytest.mark.parametrize("structure", fedmcmc.gaussian.STRUCTURES)
def test_products_quotients_and_powers(structure):
    q = gaussians()[structure]
    place = {"a": jnp.array([0.1, 0.2]), "b": jnp.array(-0.4)}
    gradient = ravel_pytree(q.grad_log(place))[0]
    for combined, factor in ((q * q, 2.0), (q**0.3, 0.3), (q * q * q / q, 2.0)):
        assert combined.structure == structure
        np.testing.assert_allclose(
            ravel_pytree(combined.grad_log(place))[0], factor * gradient, rtol=1e-5, atol=1e-6
        )
    np.testing.assert_array_equal(ravel_pytree((q / q).grad_log(place))[0], 0)
    uniform = Gaussian.uniform(TREE, structure)
    np.testing.assert_array_equal(ravel_pytree((q * uniform).grad_log(place))[0], gradient)


def test_one_gaussian_per_client():
    means, covs = jnp.asarray(RNG.normal(size=(4, 2)), jnp.float32), covariance(2, 4)
    q = Gaussian.from_moments(means, covs)
    place = jnp.array([1.0, -2.0])
    separate = [Gaussian.from_moments(m, c) for m, c in zip(means, covs, strict=True)]
    total = sum(x.grad_log(place) for x in separate)
    np.testing.assert_allclose(q.sum().grad_log(place), total, rtol=1e-4)
    q.check_clients(place, 4)
    for variance in (jnp.ones(4), jnp.ones((4, 2))):
        diagonal = Gaussian.from_moments(means, variance=variance)
        np.testing.assert_allclose(
            diagonal.sum().grad_log(place), (means - place).sum(0), rtol=1e-4
        )


def test_covariances_and_variances_are_distinguished():
    means = jnp.zeros((3, 3))
    assert Gaussian.from_moments(means, jnp.ones((3, 3))).structure == "diagonal"
    assert Gaussian.from_moments(means, jnp.stack([jnp.eye(3)] * 3)).structure == "dense"
    assert Gaussian.from_moments(jnp.zeros(3), jnp.eye(3)).structure == "dense"
    assert Gaussian.from_moments(means, variance=jnp.ones(3)).structure == "scaled_identity"


def test_different_structures_do_not_combine():
    by_structure = gaussians()
    with pytest.raises(ValueError, match="dense and diagonal"):
        by_structure["dense"] * by_structure["diagonal"]
    with pytest.raises(ValueError, match="structure must be one of"):
        Gaussian.uniform(TREE, "low rank")
