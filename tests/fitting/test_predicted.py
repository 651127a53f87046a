"""Tests of the predicted tail index of weights against exact values."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.diagnostics import Verdict
from fedmcmc.fitting import find_modes
from fedmcmc.fitting._predicted import predict_tail, tail_index
from fedmcmc.gaussian import moments_of
from fedmcmc.runs import SimulatedConsortium
from tests.fitting.models import FEDERATION

SHARES = fedmcmc.FederatedData.from_clients(
    [np.full(3, 0.1, np.float32), np.full(5, 0.1, np.float32), np.full(1, 0.2, np.float32)]
)


def ids_of(data):
    return np.repeat(np.arange(data.num_clients), np.asarray(data.sizes))


def equicorrelated(size, correlation):
    return np.linalg.inv((1 - correlation) * np.eye(size) + correlation)


def of_precision(precision):
    """Return a Gaussian posterior whose log density is split into shares of the rows."""
    precision = jnp.asarray(precision, jnp.float32)

    def loglikelihood_fn(position, shares):
        return -0.5 * shares * (position @ precision @ position)

    return fedmcmc.Posterior(lambda position: jnp.zeros(()), loglikelihood_fn)


@pytest.fixture
def diagonal(monkeypatch):
    """Above two parameters the curvature at a mode is its diagonal, as above a thousand."""
    monkeypatch.setattr("fedmcmc.fitting._modes.NEWTON_DIMENSIONS", 2)
    monkeypatch.setattr("fedmcmc.fitting._modes.DENSE_DIMENSIONS", 2)


def predicted(precision):
    posterior, consortium = of_precision(precision), SimulatedConsortium(SHARES)
    search = find_modes(
        jax.random.key(0), posterior, consortium, position=jnp.zeros(len(precision))
    )
    return predict_tail(jax.random.key(1), posterior, consortium, search), search


def test_variances_without_correlations_are_too_narrow(diagonal):
    """One minus the smallest eigenvalue of precision over its diagonal, by two products."""
    precision = equicorrelated(6, 0.6)
    tail, search = predicted(precision)
    assert search.modes[0].covariance.shape == (6,)
    exact = 1 - (1 / 4) / precision[0, 0]  # the precision along the ones is 1 / (1 + 5 * 0.6)
    np.testing.assert_allclose(exact, 0.8824, atol=1e-4)
    np.testing.assert_allclose(tail.k_hat, exact, atol=2e-3)
    np.testing.assert_allclose(tail_index(np.diag(1 / np.diag(precision)), precision), exact)
    assert tail.products == tail.rounds == 2  # there are two eigenvalues
    assert tail.bits_down > 0 and tail.bits_up > 0


@pytest.mark.slow
def test_the_prediction_stops_early_and_is_a_lower_bound(diagonal):
    rng = np.random.default_rng(0)
    factor = rng.normal(size=(30, 45))
    precision = factor @ factor.T / 45
    exact = tail_index(np.diag(1 / np.diag(precision)), precision)
    tail, _ = predicted(precision)
    assert 0.9 < tail.k_hat < exact + 5e-3
    assert tail.products == tail.rounds < 20
    marginal = np.diag(np.diag(np.linalg.inv(precision)))
    assert tail_index(marginal, precision) < exact  # wider than the conditional ones
    assert tail_index(2 * np.linalg.inv(precision), precision) == 0  # wider in all directions


def test_no_draw_is_weighted_if_the_predicted_khat_is_too_large(diagonal):
    posterior = of_precision(equicorrelated(6, 0.75))
    settings = dict(rng_key=jax.random.key(3), position=jnp.zeros(6), progress=False)
    with pytest.warns(fedmcmc.SamplingWarning, match=r"a k-hat of at least 0\.9\d is predicted"):
        fitted = fedmcmc.fit(posterior, SHARES, latency=9.0, **settings)
    assert fitted.verdict.startswith("approximate: Gaussian at 1 mode, not weighted")
    assert [stage.stage for stage in fitted.report.stages] == ["modes", "prediction"]
    stage = fitted.report.stages[1]
    exact = 1 - (1 / 4.75) / equicorrelated(6, 0.75)[0, 0]
    np.testing.assert_allclose(stage.k_hat, exact, atol=2e-3)
    assert stage.verdict == "k-hat above 0.9" and stage.rounds == 2
    assert f"{fitted.report.rounds} rounds" in fitted.verdict


@pytest.mark.slow
def test_khat_of_the_gaussian_of_fed_ep_is_predicted(monkeypatch):
    """With half of the variance by curvature, the tail index is a half."""
    real, calls = fedmcmc.fitting._stages.correct, []

    def failing_first(*args, **settings):
        calls.append(args)
        corrected = real(*args, **settings)
        is_first = len(calls) == 1
        return replace(corrected, verdict=Verdict("failed")) if is_first else corrected

    def narrow(approximation):
        mean, covariance = moments_of(approximation)
        return mean, covariance / 2

    monkeypatch.setattr("fedmcmc.fitting._stages.correct", failing_first)
    monkeypatch.setattr("fedmcmc.fitting._stages.moments_of", narrow)
    fitted = fedmcmc.fit(
        FEDERATION.posterior,
        fedmcmc.FederatedData.from_arrays(
            jax.tree.map(lambda x: np.repeat(x, 8, axis=0), FEDERATION.data.rows),
            np.repeat(ids_of(FEDERATION.data), 8),
        ),
        rng_key=jax.random.key(5),
        position=jnp.zeros(3),
        progress=False,
    )
    stages = [stage.stage for stage in fitted.report.stages]
    assert stages == ["modes", "prediction", "correction", "approximation", *stages[1:3]]
    stage = fitted.report.stages[4]
    assert stage.method == "FedEP's Gaussian"
    np.testing.assert_allclose(stage.k_hat, 0.5, atol=5e-3)
    assert fitted.verdict.startswith("passed (importance)")
