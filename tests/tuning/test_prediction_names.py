"""Names and notes of predictions."""

from dataclasses import dataclass

import jax
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


@fedmcmc.types.register_dataclass
@dataclass(frozen=True, eq=False)
class FirstRow(fedmcmc.types.GradientEstimator):
    """Gradient of one row, times the number of rows."""

    def estimate(self, loglikelihood_fn, draws, position, context, client):
        row = fedmcmc.data.gather(client, jnp.zeros(1, jnp.int32))
        gradient = jax.grad(lambda theta: loglikelihood_fn(theta, row)[0])(position)
        return fedmcmc.trees.scale(client.size.astype(float), gradient)


def scalar_model():
    posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    return posterior, data, fedmcmc.surrogates.taylor(posterior, data, jnp.zeros(()))


@pytest.mark.parametrize("estimator", [FirstRow(), fedmcmc.noisy(fedmcmc.svrg(FirstRow(), 5), 1.0)])
def test_noise_of_an_estimator_that_the_user_wrote_is_unknown(estimator):
    posterior, data, q = scalar_model()
    kernel = fedmcmc.langevin(posterior, estimator, step_size=0.01)
    with pytest.warns(fedmcmc.SamplingWarning, match="The noise of FirstRow, a gradient") as caught:
        prediction = fedmcmc.predict_bias(kernel, data, q, scores=jnp.ones((2, 1, 1)))
    assert len(caught) == 1 and caught[0].filename == __file__
    assert "estimates of FirstRow on one row per client (noise from the" in str(prediction)
    assert "exact gradients" not in str(prediction)


def test_tune_warns_once_of_unknown_noise():
    posterior, data, q = scalar_model()

    def kernel_fn(step_size):
        return fedmcmc.langevin(posterior, FirstRow(), step_size=step_size)

    with pytest.warns(fedmcmc.SamplingWarning, match="The noise of FirstRow") as caught:
        best = fedmcmc.tune(kernel_fn, posterior, data, q, step_size=(0.002, 0.004))
    assert len(caught) == 1 and caught[0].filename == __file__
    assert "left out" in str(best)
