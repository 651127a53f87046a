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


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    "num, sd, r_eff",
    [
        (100, 1.0, 1.0),
        (1000, 0.5, 1.0),
        (1000, 5.0, 1.0),
        (1000, 2.0, 0.4),
        (4000, 1.0, 0.7),
    ],
)
def test_weights_and_khat_are_arvizs(num, sd, r_eff, x64):
    with jax.enable_x64(x64):
        log_ratios = jnp.asarray(ratios(num, sd))
        result, k_hat = jax.jit(psis, static_argnums=1)(log_ratios, tail_length(num, r_eff))
        # ArviZ takes minus the log ratios.
        expected, wanted_khat = array_stats.psislw(-np.asarray(log_ratios, float), r_eff=r_eff)
        assert result.dtype == (jnp.float64 if x64 else jnp.float32)
        np.testing.assert_allclose(result, expected, atol=1e-10 if x64 else 3e-5)
        np.testing.assert_allclose(k_hat, wanted_khat, atol=1e-10 if x64 else 1e-4)


@pytest.mark.slow
def test_a_tail_of_another_length_is_another_fit():
    log_ratios = jnp.asarray(ratios(1000, 2.0))
    _, one = psis(log_ratios, tail_length(1000, 1.0))
    _, other = psis(log_ratios, tail_length(1000, 0.4))
    assert abs(float(one - other)) > 0.01


def test_a_server_and_a_client_smooth_alike():
    log_ratios = ratios(1000, 1.5)
    expected, wanted_khat = psis_of_server(log_ratios)
    result, k_hat = psis(jnp.asarray(log_ratios), tail_length(1000))
    np.testing.assert_allclose(result, expected, atol=2e-5)
    np.testing.assert_allclose(k_hat, wanted_khat, atol=1e-4)


@pytest.mark.slow
def test_rows_may_be_mapped_over():
    table = np.stack([ratios(400, sd, seed) for seed, sd in enumerate((0.1, 1.0, 3.0))])
    result, k_hat = jax.vmap(partial(psis, num_tail=tail_length(400)))(jnp.asarray(table))
    for i, row in enumerate(table):
        expected, wanted_khat = psis_of_server(row)
        np.testing.assert_allclose(result[i], expected, atol=2e-5)
        np.testing.assert_allclose(k_hat[i], wanted_khat, atol=1e-4)


@pytest.mark.parametrize("level", [0.0, -700.0])
def test_equal_ratios_are_left_alone(level):
    result, k_hat = psis(jnp.full(200, level), tail_length(200))
    np.testing.assert_allclose(result, -np.log(200), atol=1e-5)
    assert k_hat == -jnp.inf
    # Rounding of a large log likelihood is no tail.
    noise = np.random.default_rng(0).integers(-1, 2, 200) * np.spacing(np.float32(abs(level) + 1))
    assert psis(jnp.float32(level) + jnp.asarray(noise, jnp.float32), tail_length(200))[1] < 0


def test_ratios_of_minus_infinity_have_no_weight():
    log_ratios = ratios(300, 1.0)
    log_ratios[::2] = -np.inf
    result, k_hat = psis(jnp.asarray(log_ratios), tail_length(300))
    expected, wanted_khat = psis_of_server(log_ratios)
    assert np.isneginf(np.asarray(result)[::2]).all()
    np.testing.assert_allclose(result[1::2], expected[1::2], atol=2e-5)
    np.testing.assert_allclose(k_hat, wanted_khat, atol=1e-4)
    few = np.full(300, -np.inf)
    few[:20] = ratios(20, 1.0)  # fewer than the tail
    result, k_hat = psis(jnp.asarray(few), tail_length(300))
    np.testing.assert_allclose(logsumexp(np.asarray(result, float)), 0, atol=1e-5)
    assert np.isneginf(np.asarray(result)[20:]).all() and not np.isnan(k_hat)


def test_weights_that_no_tail_fits_are_not_trusted():
    for sd in (5.0, 10.0, 20.0, 60.0, 500.0):  # ever further than float32 reaches
        result, k_hat = psis(jnp.asarray(ratios(1000, sd)), tail_length(1000))
        assert k_hat > 1 and not np.isnan(result).any(), sd
        np.testing.assert_allclose(logsumexp(np.asarray(result, float)), 0, atol=1e-5)
