"""Tests of `fit` for models with too many effects per group to integrate out."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import fedmcmc

SPREAD = 0.7
LIMIT = 1.01  # R-hat below which chains agree


def model(x, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    effect = numpyro.sample("effect", dist.Normal(mu, SPREAD).to_event(1), infer={"local": True})
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(x @ effect, 1.0), obs=y)


def clients(size=4):
    rng = np.random.default_rng(2)
    mean, tables = rng.normal(size=size), []
    for num in (3, 9, 6, 12, 5, 8):
        x = rng.normal(size=(num, size)).astype(np.float32)
        effect = mean + SPREAD * rng.normal(size=size)
        tables.append({"x": x, "y": (x @ effect + rng.normal(size=num)).astype(np.float32)})
    return tables


def law(size):
    """Return mean and covariance of `mu`, the clients' coefficients integrated out by hand."""
    precision, shift = np.eye(size) / 4, np.zeros(size)
    for rows in clients(size):
        x, y = rows["x"].astype(float), rows["y"].astype(float)
        inverse = np.linalg.inv(np.eye(len(x)) + SPREAD**2 * x @ x.T)
        precision += x.T @ inverse @ x
        shift += x.T @ inverse @ y
    covariance = np.linalg.inv(precision)
    return covariance @ shift, covariance


def fit(posterior, size=4, **settings):
    data = fedmcmc.FederatedData.from_clients(clients(size))
    return fedmcmc.fit(posterior, data, rng_key=jax.random.key(3), progress=False, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 9])
def test_clients_sample_effects_that_are_too_many_to_integrate_out(size):
    """Up to eight effects use proposals around their mode, more effects use trajectories."""
    fitted = fit(model, size)
    assert fitted.verdict.startswith("passed (MCMC): Monte Carlo errors")
    assert "8 chains of Gibbs sampling" in fitted.verdict
    mean, covariance = law(size)
    sd = np.sqrt(np.diag(covariance))
    draws = np.asarray(fitted.samples.draws["mu"], np.float64).reshape(-1, size)
    (stage,) = fitted.report.stages
    assert stage.verdict == "agree" and stage.ess >= 400 and stage.rhat < 1.01
    assert np.abs((draws.mean(0) - mean) / sd).max() < 5.5 / np.sqrt(stage.ess)
    np.testing.assert_allclose(draws.std(0) / sd, 1, atol=5.5 / np.sqrt(2 * stage.ess))
    assert np.isnan(fitted.log_evidence) and fitted.gaussian is None
    assert fitted.report.to_dict()["about"]["parameters"] == size
    effects = fedmcmc.local_draws(
        fitted.posterior,
        fedmcmc.FederatedData.from_clients(clients(size)),
        jax.tree.map(lambda leaf: leaf[:, :10], fitted.samples.draws),
        rng_key=jax.random.key(4),
    )
    assert effects.draws["effect"].shape == (8, 10, 6, 1, size)


def test_unsupported_models_and_settings_of_gibbs_sampling_raise():
    data = fedmcmc.FederatedData.from_clients(clients())
    standard = fedmcmc.from_numpyro(model, example=data)
    with pytest.raises(ValueError, match="4 effects per group, too many"):
        fit(standard)
    with pytest.raises(ValueError, match="no Gaussian approximation"):
        fit(model, effort="approximate")
    with pytest.raises(ValueError, match="max_rounds must be above 400"):
        fit(model, max_rounds=100)


@pytest.mark.slow
def test_chains_that_are_too_short_do_not_pass():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = fit(model, max_rounds=401, position={"mu": jnp.zeros(4)})
    (stage,) = fitted.report.stages
    if fitted.verdict.startswith("passed"):
        assert stage.rhat < LIMIT
    assert stage.verdict == "disagree" and "raise max_rounds" in fitted.verdict
    assert any(str(each.message).startswith("fit: failed: chains do not agree") for each in caught)
