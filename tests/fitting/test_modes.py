"""Tests of modes from several starts."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import fedmcmc
from fedmcmc.fitting import find_modes
from fedmcmc.runs import SimulatedConsortium, as_consortium
from tests.fitting.models import EXACT, FEDERATION

KEY = jax.random.key(2)


@pytest.mark.check
def test_the_mode_and_the_curvature_of_a_gaussian_are_exact():
    consortium = SimulatedConsortium(FEDERATION.data)
    search = find_modes(KEY, FEDERATION.posterior, consortium, position=jnp.zeros(3))
    (mode,) = search.modes
    assert search.has_mode and search.num_starts == 8
    sds = np.sqrt(np.diag(EXACT.covariance))
    assert (np.abs(mode.flat - EXACT.mean) / sds).max() < 1e-3
    np.testing.assert_allclose(mode.covariance, EXACT.covariance, rtol=1e-4, atol=1e-6)
    # Values of candidates, expansions at the starts, Newton's steps, and images of the mode.
    assert search.rounds <= 6
    values_up = 32 * (32 + 3 + 1 + 1) * 4
    assert search.bits_up == 2 * values_up + (search.rounds - 2) * 32 * (8 * (1 + 3 + 6) + 1) * 4
    # Faults repeat exchanges without other effects.
    faulty = SimulatedConsortium(
        FEDERATION.data, transform=lambda k: fedmcmc.faults(k, drop=0.3, rescale=False)
    )
    again = find_modes(KEY, FEDERATION.posterior, faulty, position=jnp.zeros(3))
    np.testing.assert_allclose(again.modes[0].flat, mode.flat, atol=1e-5)
    assert again.rounds > search.rounds


@pytest.mark.slow
def test_a_ridge_is_no_mode_or_its_weights_fail():
    """Along a ridge Newton's steps gain less and less, as at a mode; draws show the difference."""

    def logistic(b, rows):
        return jax.nn.log_sigmoid(rows["s"] * (b[0] + b[1] * rows["x"]))

    flat = fedmcmc.Posterior(lambda b: jnp.zeros(()), logistic)
    separated = [{"x": np.array([-2.0, -1.0]), "s": np.array([-1.0, -1.0])}]
    separated.append({"x": np.array([1.0, 2.0]), "s": np.array([1.0, 1.0])})
    data = fedmcmc.FederatedData.from_clients(separated)
    search = find_modes(KEY, flat, as_consortium(data), position=jnp.zeros(2))
    if search.has_mode:
        with pytest.warns(fedmcmc.SamplingWarning):
            corrected = fedmcmc.correct(KEY, flat, data, search.mixture(), centre=search.centre)
        assert corrected.verdict.kind != "passed" and corrected.rounds[0].k_hat > 0.7
    saddle = fedmcmc.Posterior(
        lambda x: jnp.zeros(()), lambda x, rows: 0 * rows["x"] + x[0] ** 2 / 8 - x[1] ** 2 / 8
    )
    assert not find_modes(KEY, saddle, as_consortium(data), position=jnp.zeros(2)).has_mode


def test_starts_without_density_are_excluded():
    def half(x, rows):
        return jnp.where(x[0] > 0.5, -0.5 * (rows - x[0]) ** 2, -jnp.inf)

    posterior = fedmcmc.Posterior(lambda x: -0.5 * jnp.sum(x**2), half)
    data = fedmcmc.FederatedData.from_clients([jnp.full(3, 4.0), jnp.full(5, 4.0)])
    search = find_modes(KEY, posterior, as_consortium(data), position=jnp.zeros(1))
    assert search.has_mode and abs(search.modes[0].flat[0] - 32 / 9) < 1e-3
    nowhere = posterior._replace(loglikelihood_fn=lambda x, rows: jnp.full(len(rows), -jnp.inf))
    with pytest.raises(ValueError, match="finite at none of 32 starts"):
        find_modes(KEY, nowhere, as_consortium(data), position=jnp.zeros(1))
    with pytest.raises(ValueError, match="has no init_fn to draw starts from: pass position="):
        find_modes(KEY, posterior, as_consortium(data))


@pytest.mark.slow
def test_a_start_near_the_origin_has_a_gradient():
    """At zero NumPyro's Bernoulli(logits) has a wrong gradient that no line search survives."""

    def model(x, y=None):
        b = numpyro.sample("b", dist.Normal(0, 2.5).expand([3]).to_event(1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)

    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3)).astype(np.float32)
    y = (rng.random(300) < 1 / (1 + np.exp(-x[:, 0]))).astype(np.int32)
    data = fedmcmc.FederatedData.from_clients(
        [{"x": x[:200], "y": y[:200]}, {"x": x[200:], "y": y[200:]}]
    )
    posterior = fedmcmc.from_numpyro(model, example=data)
    search = find_modes(KEY, posterior, as_consortium(data))
    assert search.has_mode and search.rounds < 20
    expected = fedmcmc.surrogates.mode(posterior, data, search.centre).position["b"]
    np.testing.assert_allclose(search.centre["b"], expected, atol=2e-3)


@pytest.mark.slow
def test_many_dimensions_use_gradients_only():
    rows = jax.random.normal(KEY, (40, 300))
    posterior = fedmcmc.Posterior(
        lambda x: -0.5 * jnp.sum(x**2), lambda x, rows: -0.5 * jnp.sum((rows - x) ** 2, -1)
    )
    data = fedmcmc.FederatedData.from_clients([rows[:30], rows[30:]])
    search = find_modes(KEY, posterior, as_consortium(data), position=jnp.zeros(300))
    assert search.has_mode
    np.testing.assert_allclose(search.modes[0].flat, np.asarray(rows.sum(0)) / 41, atol=1e-3)
    np.testing.assert_allclose(np.diag(search.modes[0].covariance), 1 / 41, rtol=1e-4)


def test_a_mode_far_from_zero_is_reached():
    """The largest step grows until the search reaches a parameter such as 100,000."""
    posterior = fedmcmc.Posterior(
        lambda m: -0.5 * ((m - 1e5) / 1e3) ** 2, lambda m, y: -0.5 * (y - m) ** 2
    )
    y = np.float32(1e5 + np.random.default_rng(0).normal(size=20))
    data = fedmcmc.FederatedData.from_clients([y[:10], y[10:]])
    search = find_modes(KEY, posterior, SimulatedConsortium(data), position=jnp.zeros(()))
    assert search.has_mode
    np.testing.assert_allclose(search.modes[0].flat, y.mean(dtype=float), atol=0.02)
    np.testing.assert_allclose(search.modes[0].covariance, 1 / 20, rtol=1e-3)
