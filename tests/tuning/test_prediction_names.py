"""Names and notes of predictions."""

import jax.numpy as jnp
import pytest

import fedmcmc
from fedmcmc.tuning import proposition_step_size


def test_a_prediction_names_coordinates_and_states_its_limits():
    data = fedmcmc.FederatedData.from_clients([jnp.ones((3, 2)), jnp.zeros((2, 2))])
    posterior = fedmcmc.Posterior(
        lambda theta: -0.5 * (theta["a"] ** 2 + jnp.sum(theta["b"] ** 2)),
        lambda theta, x: -0.5 * (x[:, 0] - theta["a"] - theta["b"][1]) ** 2,
    )
    kernel = fedmcmc.fa_ld(posterior, step_size=0.01, num_local_steps=4)
    mean = {"a": jnp.zeros(2), "b": jnp.array([[0.0, 1.0], [0.0, -1.0]])}
    variance = {"a": jnp.array([1.0, 0.2]), "b": jnp.array([[1.0, 0.1], [1.0, 0.7]])}
    q = fedmcmc.Gaussian.from_moments(mean, variance=variance)
    prediction = fedmcmc.predict_bias(kernel, data, q)
    assert prediction.names == ("a", "b[0]", "b[1]")
    assert "(b[1])" in str(prediction) and "exact gradients" in str(prediction)
    with pytest.raises(TypeError, match="takes a FederatedKernel, a FederatedData"):
        fedmcmc.predict_bias(data, kernel, q)


def test_a_step_size_follows_from_an_estimated_smoothness():
    settings = dict(dimension=4, num_integration_steps=3, num_local_steps=2)
    estimate = fedmcmc.tuning.Smoothness(3.0, 0.5)
    assert proposition_step_size(estimate, **settings) == proposition_step_size(3.0, **settings)
