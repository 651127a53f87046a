"""Predicted moments against an oracle that composes elementary maps by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import predict_bias
from tests.oracles import laws
from tests.oracles.federations_averaging import FEDERATION, law
from tests.support.lanes import fast_and_slow

ETA = 0.05
INVERSE_MASS = np.array([[1.2, 0.3, 0.0], [0.3, 0.8, -0.2], [0.0, -0.2, 0.5]])
W = np.array([0.2, 0.35, 0.15, 0.3])
HMC = dict(num_steps=4, num_local_steps=3)
CASES = {
    "shared": dict(**HMC),
    "half-noise": dict(**HMC, rho=0.5, gradient_noise=20.0, weights=W),
    "reuse": dict(**HMC, rho=0.5, gradient_noise=20.0, gradients="reuse"),
    "control-variate": dict(**HMC, rho=0.5, control_variate=True, gradient_noise=3.0),
    "mass-cool": dict(**HMC, rho=0.4, inverse_mass=INVERSE_MASS, temperature=0.3),
    "langevin": dict(num_steps=0, num_local_steps=4, rho=0.5, weights=W),
}
EXACT, PARAMETERS = FEDERATION.surrogates("exact")
TARGET = laws.posterior(*PARAMETERS, FEDERATION.prior_precision, FEDERATION.prior_mean)


def build(num_steps, inverse_mass=None, **settings):
    if num_steps == 0:
        return fedmcmc.fa_ld(FEDERATION.posterior, step_size=ETA**2, **settings)
    if inverse_mass is not None:
        settings["inverse_mass_matrix"] = inverse_mass
    return fedmcmc.fa_hmc(
        FEDERATION.posterior, **dict(step_size=ETA, num_integration_steps=num_steps) | settings
    )


def predict(kernel, surrogates=EXACT, **settings):
    return predict_bias(kernel, FEDERATION.data, surrogates, **settings)


def check(prediction, expected):
    np.testing.assert_allclose(prediction.mean, expected.mean, atol=3e-5)
    np.testing.assert_allclose(prediction.covariance, expected.covariance, rtol=1e-3, atol=3e-6)
    np.testing.assert_allclose(prediction.target_mean, TARGET.mean, atol=1e-5)
    np.testing.assert_allclose(prediction.target_covariance, TARGET.covariance, atol=1e-6)


@pytest.mark.parametrize("case", fast_and_slow(CASES, ["control-variate", "mass-cool"]))
def test_averaging_kernels_have_the_predicted_moments(case):
    settings = CASES[case]
    step_size = ETA**2 if settings["num_steps"] == 0 else ETA
    prediction = predict(build(**settings))
    expected = law(step_size=step_size, **settings).stationary()
    check(prediction, expected)
    sd = np.sqrt(np.diag(TARGET.covariance))
    np.testing.assert_allclose(prediction.bias, (expected.mean - TARGET.mean) / sd, atol=1e-3)
    spread = np.sqrt(np.diag(expected.covariance)) / sd
    np.testing.assert_allclose(prediction.spread, spread, rtol=1e-3)


def test_conducive_and_langevin_kernels_have_the_predicted_moments():
    surrogates, parameters = FEDERATION.surrogates("dense")
    kernel = fedmcmc.averaging(
        FEDERATION.posterior,
        fedmcmc.conducive(fedmcmc.full_gradient(), surrogates, 0.7),
        integrator=fedmcmc.dynamics.leapfrog(4),
        step_size=ETA,
        num_local_steps=3,
    )
    expected = law(**HMC, step_size=ETA, surrogates=parameters, alpha=0.7).stationary()
    check(predict(kernel), expected)
    kernel = fedmcmc.lsd(FEDERATION.posterior, step_size=0.006)
    precision = np.linalg.inv(TARGET.covariance)
    check(predict(kernel), laws.single(precision, TARGET.mean, step_size=0.006).stationary())


VISITS = np.array([0.1, 0.4, 0.2, 0.3])


@pytest.mark.parametrize(("alpha", "probabilities"), [(None, None), (0.7, VISITS)])
def test_relays_have_the_predicted_moments(alpha, probabilities):
    """They are a mixture over visits, and the order of visits adds to the covariance."""
    settings = dict(step_size=0.002, num_local_steps=3)
    if alpha is None:
        kernel = fedmcmc.dsgld(FEDERATION.posterior, probabilities=probabilities, **settings)
    else:
        surrogates, (precisions, means) = FEDERATION.surrogates("dense")
        kernel = fedmcmc.fsgld(
            FEDERATION.posterior, surrogates, alpha=alpha, probabilities=probabilities, **settings
        )
        settings |= dict(surrogate_precisions=precisions, surrogate_means=means, alpha=alpha)
    expected = laws.relay(
        *PARAMETERS,
        prior_precision=FEDERATION.prior_precision,
        prior_mean=FEDERATION.prior_mean,
        probabilities=np.full(4, 0.25) if probabilities is None else probabilities,
        **settings,
    )
    check(predict(kernel), expected.stationary())


def test_schedules_have_their_value_in_the_predicted_round():
    kernel = build(**HMC, step_size=lambda round_: ETA / (1 + round_))
    check(predict(kernel, round_=1), law(**HMC, step_size=ETA / 2).stationary())


def test_positions_may_be_nested_and_priors_not_gaussian():
    """The prior is expanded at the mode; surrogates may be diagonal."""
    posterior = fedmcmc.Posterior(
        lambda p: -jnp.cosh(p["a"]) - 0.5 * jnp.sum(p["b"] ** 2),
        lambda p, x: -0.5 * jnp.sum((x[:, 1:] - p["b"]) ** 2, -1) - 0.5 * (x[:, 0] - p["a"]) ** 2,
    )
    data = fedmcmc.FederatedData.from_clients([np.ones((3, 3)), np.zeros((2, 3))])
    mean = {"a": jnp.array([1.0, 0.0]), "b": jnp.array([[1.0, 1.0], [0.0, 0.0]])}
    q = fedmcmc.Gaussian.from_moments(mean, variance=jnp.array([1 / 3, 1 / 2]))
    kernel = fedmcmc.fa_ld(posterior, step_size=1e-4, num_local_steps=1)
    prediction = predict_bias(kernel, data, q)
    a = prediction.target_mean[0]
    np.testing.assert_allclose(np.sinh(a) + 5 * a, 3.0, atol=1e-5)
    np.testing.assert_allclose(prediction.target_covariance[0, 0], 1 / (5 + np.cosh(a)), rtol=1e-4)
    np.testing.assert_allclose(prediction.target_mean[1:], 0.5, atol=1e-5)
    assert np.abs(prediction.bias).max() < 1e-2


def test_a_run_warns_if_its_prediction_is_biased():
    kernel, prediction = build(**HMC), predict(build(**HMC))
    bias = np.abs(prediction.bias).max()
    assert prediction.is_biased and bias > 0.1
    settings = dict(num_rounds=1, progress=False, surrogates=EXACT)
    message = f"off by up to {bias:.3g} posterior sd"
    with pytest.warns(fedmcmc.SamplingWarning, match=message) as caught:
        fedmcmc.sample(jax.random.key(0), kernel, FEDERATION.data, jnp.zeros(3), **settings)
    assert caught[0].filename == __file__


def test_the_prediction_for_a_kernel_that_diverges_recommends_a_smaller_step_size():
    prediction = predict(build(4, step_size=0.5, num_local_steps=1))
    assert prediction.spectral_radius > 1 and np.isnan(prediction.mean).all()
    assert "diverges" in str(prediction) and "smaller step size" in str(prediction)


def test_a_relay_diverges_if_its_covariance_grows():
    """Its mean is stable; with one visit in ten to a steep client its spread is not."""
    q = fedmcmc.Gaussian.from_moments(np.zeros((2, 1)), np.array([[[1.0]], [[0.002]]]))
    posterior = fedmcmc.Posterior(lambda t: -0.5 * jnp.sum(t**2), lambda t, x: 0.0 * x[:, 0])
    data = fedmcmc.FederatedData.from_clients([np.zeros((1, 1)), np.zeros((1, 1))])
    kernel = fedmcmc.dsgld(
        posterior, step_size=0.0012, num_local_steps=1, probabilities=np.array([0.9, 0.1])
    )
    prediction = predict_bias(kernel, data, q)
    assert prediction.spectral_radius == np.inf and "diverges" in str(prediction)


def test_unsupported_kernels_and_surrogates_raise():
    pooled, kernel = fedmcmc.sgld(FEDERATION.posterior, step_size=0.01), build(**HMC)
    improper = fedmcmc.Gaussian(-3 * EXACT.precision_mean, -3 * EXACT.precision, "dense")
    three = fedmcmc.Gaussian.from_moments(np.zeros((3, 3)), np.stack([np.eye(3)] * 3))
    wide = fedmcmc.Gaussian.from_moments(np.zeros((4, 600)), variance=np.ones((4, 600)))
    for kernel_, surrogates, message in (
        (pooled, EXACT, "not one on pooled rows"),
        (kernel, improper, "is no proper Gaussian"),
        (kernel, three, "4 clients"),
        (kernel, wide, "at most 512 dimensions, got 600"),
    ):
        with pytest.raises(ValueError, match=message):
            predict(kernel_, surrogates)
