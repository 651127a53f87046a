"""Tests of the rounding errors of log likelihoods near a position."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import gammaln
from scipy.special import gammaln as exact_gammaln

import fedmcmc
from fedmcmc import FederatedData
from fedmcmc.fitting._precision import check_precision
from fedmcmc.runs import as_consortium

FLAT = lambda position: 0.0 * jnp.sum(position)  # noqa: E731


def poisson(log_rate, y):
    return y * log_rate[0] - jnp.exp(log_rate[0]) - gammaln(y + 1)


def check(loglikelihood_fn, clients, centre, sd):
    posterior = fedmcmc.Posterior(FLAT, loglikelihood_fn)
    consortium = as_consortium(FederatedData.from_clients(clients))
    return check_precision(posterior, consortium, jnp.array([centre]), np.array([[sd**2]]))


@pytest.mark.parametrize(("size", "num", "ok"), [(1e3, 400, True), (1e6, 400, False)])
def test_the_error_for_counts_equals_the_error_against_double_precision(size, num, ok):
    y = np.random.default_rng(0).poisson(size, num).astype(np.float32)
    centre, sd = np.log(y.mean()), 1 / np.sqrt(y.sum())
    result = check(poisson, [y[: num // 2], y[num // 2 :]], centre, sd)
    # Errors of the rows' terms at draws of the posterior, in the arithmetic of the model.
    draws = np.float32(centre + sd * np.random.default_rng(1).normal(size=100))
    exact = y * np.float64(draws[:, None]) - np.exp(np.float64(draws[:, None]))
    exact = exact - exact_gammaln(np.float64(y) + 1)
    rounded = np.stack([poisson(jnp.array([draw]), jnp.asarray(y)) for draw in draws])
    error = (rounded - exact).sum(1, dtype=np.float64).std()
    assert error / 3 < result.noise_nats < 3 * error
    assert result.ok == ok and result.rounds == (1 if ok else 3)
    assert ("jax_enable_x64" in result.message) != ok


def test_kinks_are_no_rounding_errors_but_a_large_constant_is():
    y = np.random.default_rng(0).laplace(size=400).astype(np.float32)
    kinks = check(lambda x, y: -jnp.abs(y - x[0]), [y[:300], y[300:]], 0.0, 1.0)
    assert kinks.ok and kinks.rounds == 3 and kinks.noise_nats < 1e-3

    def shifted(x, y):
        return 1e9 - 0.5 * (y - x[0]) ** 2

    normal = y / 10
    lost = check(shifted, [normal[:300], normal[300:]], normal.mean(), 0.05)
    assert not lost.ok and lost.noise_nats > 0.3
    exact = check(lambda x, y: -0.5 * (y - x[0]) ** 2, [normal], normal.mean(), 0.05)
    assert exact.ok and exact.noise_nats < 1e-4 and exact.rounds == 1


def test_a_coarse_floating_point_grid_is_reported():
    y = 1e6 + np.arange(64.0)
    result = check(lambda x, y: -50.0 * (y - x[0]) ** 2, [y], 1e6 + 31.5, 0.0125)
    assert not result.ok and "neighboring numbers of float32 are 0.062 apart" in result.message
