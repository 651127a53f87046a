"""Predicted laws against the oracle, which composes elementary maps by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from tests.oracles import laws
from tests.oracles.federations_averaging import FEDERATION, law

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


def build(settings):
    names = dict(inverse_mass="inverse_mass_matrix")
    public = {names.get(key, key): x for key, x in settings.items()}
    num_steps = public.pop("num_steps")
    if num_steps == 0:
        return fedmcmc.fa_ld(FEDERATION.posterior, step_size=ETA**2, **public)
    return fedmcmc.fa_hmc(
        FEDERATION.posterior, step_size=ETA, num_integration_steps=num_steps, **public
    )


def check(prediction, expected):
    np.testing.assert_allclose(prediction.mean, expected.mean, atol=3e-5)
    np.testing.assert_allclose(prediction.covariance, expected.covariance, rtol=1e-3, atol=3e-6)
    np.testing.assert_allclose(prediction.target_mean, TARGET.mean, atol=1e-5)
    np.testing.assert_allclose(prediction.target_covariance, TARGET.covariance, atol=1e-6)


SLOW = ("shared", "reuse", "langevin", "half-noise")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow if c in SLOW else ()) for c in CASES]
)
def test_the_stationary_law_of_averaging_kernels(case):
    settings = CASES[case]
    step_size = ETA**2 if settings["num_steps"] == 0 else ETA
    prediction = fedmcmc.predict_bias(build(settings), FEDERATION.data, EXACT)
    expected = law(step_size=step_size, **settings).stationary()
    check(prediction, expected)
    sd = np.sqrt(np.diag(TARGET.covariance))
    np.testing.assert_allclose(prediction.bias, (expected.mean - TARGET.mean) / sd, atol=1e-3)
    np.testing.assert_allclose(
        prediction.spread, np.sqrt(np.diag(expected.covariance)) / sd, rtol=1e-3
    )


def test_the_stationary_law_of_conducive_and_of_langevin_kernels():
    surrogates, parameters = FEDERATION.surrogates("dense")
    kernel = fedmcmc.averaging(
        FEDERATION.posterior,
        fedmcmc.conducive(fedmcmc.full_gradient(), surrogates, 0.7),
        integrator=fedmcmc.dynamics.leapfrog(4),
        step_size=ETA,
        num_local_steps=3,
    )
    expected = law(**HMC, step_size=ETA, surrogates=parameters, alpha=0.7).stationary()
    check(fedmcmc.predict_bias(kernel, FEDERATION.data, EXACT), expected)

    precision, mean = np.linalg.inv(TARGET.covariance), TARGET.mean
    kernel = fedmcmc.lsd(FEDERATION.posterior, step_size=0.006)
    expected = laws.single(precision, mean, step_size=0.006).stationary()
    check(fedmcmc.predict_bias(kernel, FEDERATION.data, EXACT), expected)


def test_schedules_count_at_the_round_that_is_asked_for():
    kernel = fedmcmc.fa_hmc(
        FEDERATION.posterior,
        step_size=lambda r: ETA / (1 + r),
        num_integration_steps=4,
        num_local_steps=3,
    )
    prediction = fedmcmc.predict_bias(kernel, FEDERATION.data, EXACT, round_=1)
    check(prediction, law(**HMC, step_size=ETA / 2).stationary())


def test_nested_positions_and_priors_that_are_not_gaussian():
    """The prior is expanded at the mode; structures of surrogates are all taken."""
    posterior = fedmcmc.Posterior(
        lambda p: -jnp.cosh(p["a"]) - 0.5 * jnp.sum(p["b"] ** 2),
        lambda p, x: -0.5 * jnp.sum((x[:, 1:] - p["b"]) ** 2, -1) - 0.5 * (x[:, 0] - p["a"]) ** 2,
    )
    data = fedmcmc.FederatedData.from_clients([np.ones((3, 3)), np.zeros((2, 3))])
    mean = {"a": jnp.array([1.0, 0.0]), "b": jnp.array([[1.0, 1.0], [0.0, 0.0]])}
    q = fedmcmc.Gaussian.from_moments(mean, variance=jnp.array([1 / 3, 1 / 2]))
    kernel = fedmcmc.fa_ld(posterior, step_size=1e-4, num_local_steps=1)
    prediction = fedmcmc.predict_bias(kernel, data, q)
    a = prediction.target_mean[0]
    np.testing.assert_allclose(np.sinh(a) + 5 * a, 3.0, atol=1e-5)
    np.testing.assert_allclose(prediction.target_covariance[0, 0], 1 / (5 + np.cosh(a)), rtol=1e-4)
    np.testing.assert_allclose(prediction.target_mean[1:], 0.5, atol=1e-5)
    assert np.abs(prediction.bias).max() < 1e-2


def test_a_run_warns_of_a_prediction_that_is_off():
    kernel = build(CASES["shared"])
    settings = dict(num_rounds=1, progress=False, surrogates=EXACT)
    told = fedmcmc.predict_bias(kernel, FEDERATION.data, EXACT)
    bias = np.abs(told.bias).max()
    assert told.is_biased and bias > 0.1
    with pytest.warns(fedmcmc.SamplingWarning, match=f"off by up to {bias:.3g} posterior sd") as w:
        fedmcmc.sample(jax.random.key(0), kernel, FEDERATION.data, jnp.zeros(3), **settings)
    assert w[0].filename == __file__


def test_a_kernel_that_diverges_is_told_before_it_runs():
    kernel = fedmcmc.fa_hmc(
        FEDERATION.posterior, step_size=0.5, num_integration_steps=4, num_local_steps=1
    )
    prediction = fedmcmc.predict_bias(kernel, FEDERATION.data, EXACT)
    assert prediction.spectral_radius > 1 and np.isnan(prediction.mean).all()
    assert "diverges" in str(prediction) and "smaller step size" in str(prediction)


VISITS = np.array([0.1, 0.4, 0.2, 0.3])


@pytest.mark.parametrize("probabilities", [None, VISITS])
@pytest.mark.parametrize("alpha", [None, 0.7])
def test_the_stationary_law_of_relays(alpha, probabilities):
    """A mixture over visits, whose covariance has what visits take the chain to and fro."""
    settings = dict(step_size=0.002, num_local_steps=3)
    if alpha is None:
        kernel = fedmcmc.dsgld(FEDERATION.posterior, probabilities=probabilities, **settings)
        given = {}
    else:
        surrogates, parameters = FEDERATION.surrogates("dense")
        kernel = fedmcmc.fsgld(
            FEDERATION.posterior, surrogates, alpha=alpha, probabilities=probabilities, **settings
        )
        names = ("surrogate_precisions", "surrogate_means")
        given = dict(zip(names, parameters, strict=True), alpha=alpha)
    expected = laws.relay(
        *PARAMETERS,
        prior_precision=FEDERATION.prior_precision,
        prior_mean=FEDERATION.prior_mean,
        probabilities=np.full(4, 0.25) if probabilities is None else probabilities,
        **settings,
        **given,
    ).stationary()
    check(fedmcmc.predict_bias(kernel, FEDERATION.data, EXACT), expected)


def test_a_relay_whose_covariance_grows_diverges():
    """Its mean would be stable; with one visit in ten to a steep client its spread is not."""
    q = fedmcmc.Gaussian.from_moments(np.zeros((2, 1)), np.array([[[1.0]], [[0.002]]]))
    posterior = fedmcmc.Posterior(lambda t: -0.5 * jnp.sum(t**2), lambda t, x: 0.0 * x[:, 0])
    data = fedmcmc.FederatedData.from_clients([np.zeros((1, 1)), np.zeros((1, 1))])
    kernel = fedmcmc.dsgld(
        posterior, step_size=0.0012, num_local_steps=1, probabilities=np.array([0.9, 0.1])
    )
    told = fedmcmc.predict_bias(kernel, data, q)
    assert told.spectral_radius == np.inf and "diverges" in str(told)


def test_kernels_on_pooled_rows_cannot_be_predicted():
    kernel = fedmcmc.sgld(FEDERATION.posterior, step_size=0.01)
    with pytest.raises(ValueError, match="not one on pooled rows"):
        fedmcmc.predict_bias(kernel, FEDERATION.data, EXACT)


def test_surrogates_that_do_not_fit_say_so():
    improper = fedmcmc.Gaussian(-3 * EXACT.precision_mean, -3 * EXACT.precision, "dense")
    with pytest.raises(ValueError, match="is no proper Gaussian"):
        fedmcmc.predict_bias(build(CASES["shared"]), FEDERATION.data, improper)
    kernel = build(CASES["shared"])
    three = fedmcmc.Gaussian.from_moments(np.zeros((3, 3)), np.stack([np.eye(3)] * 3))
    with pytest.raises(ValueError, match="4 clients"):
        fedmcmc.predict_bias(kernel, FEDERATION.data, three)
    wide = fedmcmc.Gaussian.from_moments(np.zeros((4, 600)), variance=np.ones((4, 600)))
    with pytest.raises(ValueError, match="at most 512 dimensions, got 600"):
        fedmcmc.predict_bias(kernel, FEDERATION.data, wide)
