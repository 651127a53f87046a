"""Predictions for kernels that move latents, compared with the distribution of all latents."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.hierarchy import conjugate, hmc, independence, ula
from fedmcmc.runs import as_consortium
from tests.oracles import laws_joint
from tests.oracles.federations_gibbs import POSTERIOR as NORMAL
from tests.oracles.federations_joint import DATA, MODEL, POSTERIOR, PROBABILITIES, START, D

STEP = 0.1
METRIC = np.array([[0.8, 0.3], [0.3, 1.2]])
MODE = jnp.asarray(MODEL.posterior.mean[:D], jnp.float32)


@pytest.fixture(scope="module")
def surrogates():
    return fedmcmc.surrogates.taylor(fedmcmc.marginal(POSTERIOR), DATA, MODE)


def exact_moments(refresh, probabilities=(1, 1, 1), order="refresh_first", **settings):
    settings = dict(step_size=STEP, order=order) | settings
    rounds = [
        (chance, laws_joint.langevin_round(MODEL, refresh, weights, **settings))
        for chance, weights in laws_joint.cohorts(np.asarray(probabilities, float))
    ]
    law = laws_joint.stationary(rounds, MODEL.at_modes(START))
    return law.mean[:D], law.covariance[:D, :D]


CASES = {
    "draws": (conjugate(), {}, {}),
    "some clients": (
        independence(),
        dict(probabilities=PROBABILITIES),
        dict(participation=fedmcmc.bernoulli(PROBABILITIES)),
    ),
    "many draws, a metric": (hmc(3), *2 * [dict(num_draws=3, metric=METRIC)]),
}
"""Refreshes, settings of the exact moments, and settings of the kernel."""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_prediction_for_exact_draws_of_latents_is_exact(case, surrogates):
    refresh, settings, kernel_settings = CASES[case]
    kernel = fedmcmc.lsd(POSTERIOR, step_size=STEP, refresh=refresh, **kernel_settings)
    prediction = fedmcmc.predict_bias(kernel, DATA, surrogates)
    mean, covariance = exact_moments(laws_joint.exact, **settings)
    assert not prediction.simulated and "new latents in every move" in str(prediction)
    np.testing.assert_allclose(prediction.mean, mean, atol=3e-5)
    np.testing.assert_allclose(prediction.covariance, covariance, rtol=1e-3, atol=1e-5)
    target = MODEL.posterior.covariance[:D, :D]
    np.testing.assert_allclose(prediction.target_covariance, target, rtol=1e-3)


LANGEVIN = {
    "refresh first": (0.6, 1, {}),
    "gradient first": (0.3, 3, dict(order="gradient_first")),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LANGEVIN)
def test_the_prediction_for_langevin_steps_of_latents_is_simulated(case, surrogates):
    size, num_steps, settings = LANGEVIN[case]
    refresh = ula(size, num_steps=num_steps)
    kernel = fedmcmc.lsd(POSTERIOR, step_size=STEP, refresh=refresh, **settings)
    prediction = fedmcmc.predict_bias(kernel, DATA, surrogates)
    mean, covariance = exact_moments(
        lambda group: laws_joint.ula(group, size, num_steps), **settings
    )
    assert "new latents depend on the previous" in prediction.simulated
    assert (np.abs(prediction.mean - mean) < 5.5 * prediction.mean_error).all()
    predicted_sd = np.sqrt(np.diag(prediction.covariance))
    sd_gap = np.abs(predicted_sd - np.sqrt(np.diag(covariance)))
    assert (sd_gap < 5.5 * prediction.sd_error).all()
    # The standard errors are small enough to exclude exact draws.
    plain_sd = np.sqrt(np.diag(exact_moments(laws_joint.exact)[1]))
    gap = np.abs(plain_sd - np.sqrt(np.diag(covariance)))
    assert (gap > 10 * prediction.sd_error).any()


@pytest.mark.slow
def test_unsupported_kernels_and_data_raise(surrogates):
    gibbs = fedmcmc.fed_gibbs(NORMAL, refresh=conjugate())
    with pytest.raises(ValueError, match="fed_gibbs is exact"):
        fedmcmc.predict_bias(gibbs, DATA, surrogates)
    kernel = fedmcmc.lsd(POSTERIOR, step_size=STEP, refresh=conjugate())
    with pytest.raises(ValueError, match="in one place"):
        fedmcmc.predict_bias(kernel, as_consortium(DATA), surrogates)
