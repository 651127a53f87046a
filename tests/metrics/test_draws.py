"""Metrics of draws: potentials, high-density regions, predictions averaged over draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fedmcmc
from fedmcmc import metrics
from fedmcmc.data import CHUNK_ROWS

LIMIT = 5.5
KEY = jax.random.key(0)


def generator(seed=0):
    return np.random.default_rng(seed)


# Potentials and high-density regions


def logprior(position):
    return -0.5 * jnp.sum(position["w"] ** 2) - 2.0 * position["b"] ** 2


def loglikelihood(position, rows):
    logits = rows["x"] @ position["w"] + position["b"]
    return rows["y"] * logits - jnp.logaddexp(0.0, logits)


POSTERIOR = fedmcmc.Posterior(logprior, loglikelihood)


def federation(sizes, seed=0):
    rng = generator(seed)
    return fedmcmc.FederatedData.from_clients(
        [
            {"x": rng.normal(size=(n, 3)), "y": rng.integers(0, 2, n).astype(np.float32)}
            for n in sizes
        ]
    )


def exact_potential(data, draws):
    """Return potentials of ``[num_draws]`` draws in double precision, row by row of all clients."""
    x, y = (np.asarray(data.rows[name], np.float64) for name in "xy")
    w, b = (np.asarray(draws[name], np.float64) for name in "wb")
    logits = w @ x.T + b[:, None]
    terms = y * logits - np.logaddexp(0, logits)
    return -terms.sum(1) + 0.5 * (w**2).sum(1) + 2 * b**2


@pytest.mark.parametrize("sizes", [(5, 1, 9), (CHUNK_ROWS + 700, 3, 2 * CHUNK_ROWS)])
def test_potential_is_that_of_all_rows(sizes):
    data, rng = federation(sizes), generator(1)
    draws = {"w": rng.normal(size=(2, 5, 3)), "b": rng.normal(size=(2, 5))}
    flat = {"w": draws["w"].reshape(10, 3), "b": draws["b"].reshape(10)}
    exact = exact_potential(data, flat)
    for batch_size in (1, 4):
        found = metrics.potential(POSTERIOR, data, draws, sample_axes=2, batch_size=batch_size)
        assert found.shape == (2, 5)
        np.testing.assert_allclose(np.ravel(found), exact, rtol=2e-6)
    np.testing.assert_allclose(metrics.potential(POSTERIOR, data, flat), exact, rtol=2e-6)


def test_potential_can_be_compiled_with_its_data():
    data, rng = federation((4, 7)), generator(2)
    draws = {"w": rng.normal(size=(3, 3)), "b": rng.normal(size=3)}
    compiled = jax.jit(lambda d, t: metrics.potential(POSTERIOR, d, t))
    np.testing.assert_allclose(compiled(data, draws), exact_potential(data, draws), rtol=2e-6)


def test_threshold_of_a_gaussian_is_a_chi_square_quantile():
    num, dim = 40_000, 5
    potentials = 0.5 * (generator().normal(size=(num, dim)) ** 2).sum(1)
    law, alpha = stats.chi2(dim), np.array([0.01, 0.1, 0.5025, 0.9])
    exact = law.ppf(1 - alpha) / 2
    spread = np.sqrt(alpha * (1 - alpha) / num) / (2 * law.pdf(2 * exact))
    found = metrics.hpd_threshold(potentials, alpha)
    assert np.abs((found - exact) / spread).max() < LIMIT
    np.testing.assert_allclose(found, np.quantile(potentials, 1 - alpha), rtol=1e-5)


def test_hpd_error_is_the_relative_gap_of_quantiles():
    rng = generator()
    own, ref = rng.gamma(5, size=(3, 901)) - 2, rng.gamma(5, size=(3, 700)) - 2
    for alpha in (0.01, 0.25, 0.5025):
        a, b = (np.quantile(u, 1 - alpha, axis=1) for u in (own, ref))
        np.testing.assert_allclose(
            metrics.hpd_error(own, ref, alpha), np.abs(a - b) / np.abs(b), rtol=1e-4
        )
    levels = np.array([[0.01, 0.25], [0.5025, 0.9]])
    found = metrics.hpd_error(own, ref, levels)
    assert found.shape == (3, 2, 2)
    for index in np.ndindex(2, 2):
        one = metrics.hpd_error(own, ref, levels[index])
        # Thresholds in single precision: absolute errors of the ratio, of a few 1e-7.
        np.testing.assert_allclose(found[:, *index], one, rtol=0, atol=1e-6)
    assert metrics.hpd_error(own, own, levels).max() == 0


def test_the_default_level_is_99_per_cent_and_not_the_published_one():
    potentials = np.arange(1.0, 1002.0)
    assert metrics.hpd_threshold(potentials) == 991
    assert np.isclose(np.linspace(0.01, 0.99, 200)[99], 1 - 0.5025, atol=5e-5)


def test_hpd_error_knows_zero_and_negative_thresholds():
    zero, one = np.zeros(3), np.ones(3)
    assert metrics.hpd_error(zero, zero) == 0
    assert metrics.hpd_error(one, zero) == np.inf
    assert metrics.hpd_error(-one, -2 * one) == 0.5


# Averages over draws


def apply_fn(position, x, temperature):
    return jax.nn.softmax((x @ position["w"] + position["b"]) / temperature, axis=-1)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 12, 50])
def test_predictive_is_the_mean_over_draws(batch_size):
    rng = generator()
    draws = {"w": rng.normal(size=(3, 4, 2, 5)), "b": rng.normal(size=(3, 4, 5))}
    x = rng.normal(size=(6, 2)).astype(np.float32)
    logits = (np.einsum("ni,cdik->cdnk", x, draws["w"]) + draws["b"][:, :, None]) / 2
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    each = shifted / shifted.sum(-1, keepdims=True)
    found = metrics.predictive(apply_fn, draws, x, 2.0, sample_axes=2, batch_size=batch_size)
    np.testing.assert_allclose(found, each.mean((0, 1)), rtol=1e-5)
    chains = jax.vmap(lambda d: metrics.predictive(apply_fn, d, x, 2.0, batch_size=batch_size))(
        draws
    )
    np.testing.assert_allclose(chains, each.mean(1), rtol=1e-5)


def test_predictive_averages_trees_in_single_precision():
    def halves(position, x):
        return {"p": (x * position).astype(jnp.bfloat16), "square": position**2}

    found = metrics.predictive(halves, jnp.arange(1000.0), jnp.ones(2))
    assert found["p"].dtype == jnp.float32
    exact = np.arange(1000.0).astype(jnp.bfloat16).astype(np.float32).mean()
    np.testing.assert_allclose(found["p"], [exact, exact], rtol=1e-5)
    np.testing.assert_allclose(found["square"], np.mean(np.arange(1000.0) ** 2), rtol=1e-5)


def test_predictive_does_not_hold_the_predictions_of_all_draws():
    def temporary(num_draws):
        draws = {"w": jnp.zeros((num_draws, 2, 50)), "b": jnp.zeros((num_draws, 50))}
        average = jax.jit(lambda d, x: metrics.predictive(apply_fn, d, x, 1.0, batch_size=2))
        compiled = average.lower(draws, jnp.zeros((400, 2))).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(400) < temporary(40) + 400 * 4 * 2 * 400
