"""Smoothed weights in JAX against ArviZ's, in float32 and float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arviz_stats.base import array_stats
from scipy.special import logsumexp

from fedmcmc.criticism._pareto import psis, tail_length
from fedmcmc.exact import psis as psis_of_server


def ratios(num, sd, seed=0):
    return np.random.default_rng(seed).normal(0, sd, num)


@pytest.mark.parametrize(
    "num, sd, r_eff, x64",
    [
        (100, 1.0, 1.0, True),
        (1000, 0.5, 1.0, True),
        (1000, 5.0, 1.0, True),
        (1000, 2.0, 0.4, True),
        (4000, 1.0, 0.7, True),
        (1000, 5.0, 1.0, False),
        (4000, 1.0, 0.7, False),
    ],
)
def test_weights_and_khat_equal_those_of_arviz(num, sd, r_eff, x64):
    with jax.enable_x64(x64):
        log_ratios = jnp.asarray(ratios(num, sd))
        weights, k_hat = jax.jit(psis, static_argnums=1)(log_ratios, tail_length(num, r_eff))
        # ArviZ takes minus the log ratios.
        expected, k_hat_of_arviz = array_stats.psislw(-np.asarray(log_ratios, float), r_eff=r_eff)
        assert weights.dtype == (jnp.float64 if x64 else jnp.float32)
        np.testing.assert_allclose(weights, expected, atol=1e-10 if x64 else 3e-5)
        np.testing.assert_allclose(k_hat, k_hat_of_arviz, atol=1e-10 if x64 else 1e-4)


def test_a_server_and_a_client_smooth_alike():
    """The clients' table of three rows is mapped over; the server takes one row at a time."""
    table = np.stack([ratios(400, sd, seed) for seed, sd in enumerate((0.1, 1.0, 3.0))])
    table[1, ::2] = -np.inf
    weights, k_hat = jax.vmap(partial(psis, num_tail=tail_length(400)))(jnp.asarray(table))
    assert np.isneginf(np.asarray(weights)[1, ::2]).all()
    for i, row in enumerate(table):
        expected, k_hat_of_server = psis_of_server(row)
        positive = np.isfinite(row)
        np.testing.assert_allclose(weights[i][positive], expected[positive], atol=2e-5)
        np.testing.assert_allclose(k_hat[i], k_hat_of_server, atol=1e-4)


@pytest.mark.parametrize("level", [0.0, -700.0])
def test_equal_ratios_get_equal_weights(level):
    weights, k_hat = psis(jnp.full(200, level), tail_length(200))
    np.testing.assert_allclose(weights, -np.log(200), atol=1e-5)
    assert k_hat == -jnp.inf
    # Rounding of a large log likelihood is no tail.
    noise = np.random.default_rng(0).integers(-1, 2, 200) * np.spacing(np.float32(abs(level) + 1))
    assert psis(jnp.float32(level) + jnp.asarray(noise, jnp.float32), tail_length(200))[1] < 0


def test_positive_ratios_may_be_fewer_than_the_tail():
    few = np.full(200, -np.inf)
    few[:20] = ratios(20, 1.0)
    weights, k_hat = psis(jnp.asarray(few), tail_length(200))
    np.testing.assert_allclose(logsumexp(np.asarray(weights, float)), 0, atol=1e-5)
    assert np.isneginf(np.asarray(weights)[20:]).all() and not np.isnan(k_hat)


def test_weights_without_a_fitting_tail_are_not_trusted():
    for sd in (5.0, 10.0, 20.0, 60.0, 500.0):  # farther and farther than float32 reaches
        weights, k_hat = psis(jnp.asarray(ratios(1000, sd)), tail_length(1000))
        assert k_hat > 1 and not np.isnan(weights).any(), sd
        np.testing.assert_allclose(logsumexp(np.asarray(weights, float)), 0, atol=1e-5)
