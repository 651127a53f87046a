"""Runs that once gave users wrong numbers without a warning: each warns, or is right."""

import warnings

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import fedmcmc

KEY = jax.random.key(0)


def logistic(x, y=None):
    b = numpyro.sample("b", dist.Normal(0, 2.5).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)


def schools():
    """Return pupils of eight schools; nothing is scaled."""
    rng = np.random.default_rng(1)
    clients = []
    for size in (150, 90, 60, 40, 25, 12, 6, 3):
        age, income = rng.normal(12, 1.5, size), rng.lognormal(1, 0.5, size) + rng.normal()
        eta = -2.6 + 0.15 * age + 0.3 * (income - 3)
        x = np.stack([np.ones(size), age - 12, income], 1).astype(np.float32)
        y = (rng.random(size) < 1 / (1 + np.exp(-eta))).astype(np.int32)
        clients.append({"x": x, "y": y})
    return fedmcmc.FederatedData.from_clients(clients)


@pytest.fixture(scope="module")
def data():
    return schools()


@pytest.fixture(scope="module")
def posterior(data):
    return fedmcmc.from_numpyro(logistic, example=data)


@pytest.fixture(scope="module")
def white(posterior, data):
    return fedmcmc.whiten(posterior, data)


def run(kernel, data, position, num_rounds=2_500, **settings):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        samples = fedmcmc.sample(
            KEY,
            kernel,
            data,
            position,
            num_rounds=num_rounds,
            num_burnin=100,
            num_chains=4,
            progress=False,
            **settings,
        )
    return samples, " ".join(str(w.message) for w in caught)


@pytest.mark.slow
def test_local_trajectories_that_pull_apart_warn(posterior, data, white):
    mode = white.posterior.position_fn(white.position)
    kernel = fedmcmc.fa_hmc(
        posterior,
        step_size=0.12,
        num_integration_steps=5,
        num_local_steps=20,
        inverse_mass_matrix=white.metric,
    )
    samples, words = run(kernel, data, mode, num_rounds=1_100)
    assert samples.diagnosis.rhat < 1.02 and "not the posterior's" in words
    assert np.abs(samples.diagnosis.moments.bias).max() > 0.3
    surrogates = fedmcmc.surrogates.taylor(posterior, data, mode)
    before = run(kernel, data, mode, num_rounds=1_100, surrogates=surrogates)
    assert "Predicted from Gaussian approximations" in before[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fa_hmc", "qlsd_pp"])
def test_steps_far_too_large_for_logistic_data_warn(name, white, data):
    """The chain leaves, and where the likelihood is flat it comes back: no number is infinite."""
    kernel = {
        "fa_hmc": lambda: fedmcmc.fa_hmc(
            white.posterior, step_size=4.0, num_integration_steps=3, num_local_steps=1
        ),
        "qlsd_pp": lambda: fedmcmc.qlsd_pp(
            white.posterior,
            step_size=8.0,
            batch_size=None,
            refresh_every=50,
            compressor=fedmcmc.quantize(16),
        ),
    }[name]()
    try:
        samples, words = run(kernel, data, white.position)
    except fedmcmc.NonFiniteError:
        return  # an error is as good as a warning
    assert "not the posterior's" in words or "too short" in words
    assert np.abs(np.asarray(samples.draws["b"])).std() > 3


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["fsgld", "qlsd_pp", "fa_hmc", "fed_ep"])
def test_the_advice_of_the_page_is_right(kernel, white, data):
    model = white.posterior
    build, settings = {
        "fsgld": (
            lambda: fedmcmc.fsgld(model, white.surrogates, step_size=0.02, num_local_steps=10),
            {},
        ),
        "qlsd_pp": (
            lambda: fedmcmc.qlsd_pp(
                model,
                step_size=0.1,
                batch_size=0.2,
                refresh_every=100,
                compressor=fedmcmc.quantize(16),
            ),
            dict(num_rounds=5_000),
        ),
        "fa_hmc": (
            lambda: fedmcmc.fa_hmc(
                model,
                step_size=0.2,
                num_integration_steps=5,
                num_local_steps=1,
                control_variate=True,
            ),
            {},
        ),
        "fed_ep": (lambda: fedmcmc.fed_ep(model), dict(num_rounds=120)),
    }[kernel]
    samples, words = run(build(), data, white.position, **settings)
    assert words == "" and samples.diagnosis.findings == ()
    assert np.abs(samples.diagnosis.moments.bias).max() < 0.1
    assert samples.diagnosis.moments.spread.min() > 0.95
    assert samples.diagnosis.moments.spread.max() < 1.1
