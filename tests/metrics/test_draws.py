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


def generator(seed=0):
    return np.random.default_rng(seed)


# Potentials and high-density regions


def logprior(position):
    return -0.5 * jnp.sum(position["w"] ** 2) - 2.0 * position["b"] ** 2


def loglikelihood(position, rows):
    logits = rows["x"] @ position["w"] + position["b"]
    return rows["y"] * logits - jnp.logaddexp(0.0, logits)


POSTERIOR = fedmcmc.Posterior(logprior, loglikelihood)


def federation(sizes):
    rng = generator()
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
def test_a_potential_has_all_rows(sizes):
    data, rng = federation(sizes), generator(1)
    draws = {"w": rng.normal(size=(2, 5, 3)), "b": rng.normal(size=(2, 5))}
    flat = {"w": draws["w"].reshape(10, 3), "b": draws["b"].reshape(10)}
    exact = exact_potential(data, flat)
    for batch_size in (1, 4):
        result = metrics.potential(POSTERIOR, data, draws, sample_axes=2, batch_size=batch_size)
        assert result.shape == (2, 5)
        np.testing.assert_allclose(np.ravel(result), exact, rtol=2e-6)
    # The data are an argument of the compiled program.
    compiled = jax.jit(lambda d, t: metrics.potential(POSTERIOR, d, t))
    np.testing.assert_allclose(compiled(data, flat), exact, rtol=2e-6)


def test_the_threshold_of_a_gaussian_is_a_chi_square_quantile():
    num, dim = 40_000, 5
    potentials = 0.5 * (generator().normal(size=(num, dim)) ** 2).sum(1)
    chi2, alpha = stats.chi2(dim), np.array([0.01, 0.1, 0.5025, 0.9])
    exact = chi2.ppf(1 - alpha) / 2
    spread = np.sqrt(alpha * (1 - alpha) / num) / (2 * chi2.pdf(2 * exact))
    result = metrics.hpd_threshold(potentials, alpha)
    assert np.abs((result - exact) / spread).max() < LIMIT
    np.testing.assert_allclose(result, np.quantile(potentials, 1 - alpha), rtol=1e-5)
    # The default level is 99 per cent, and not the published one.
    assert metrics.hpd_threshold(np.arange(1.0, 1002.0)) == 991


def test_hpd_error_is_the_relative_gap_of_quantiles():
    rng = generator()
    draws, reference = rng.gamma(5, size=(3, 901)) - 2, rng.gamma(5, size=(3, 700)) - 2
    levels = np.array([[0.01, 0.25], [0.5025, 0.9]])
    result = metrics.hpd_error(draws, reference, levels)
    assert result.shape == (3, 2, 2)
    for index in np.ndindex(2, 2):
        alpha = levels[index]
        a, b = (np.quantile(u, 1 - alpha, axis=1) for u in (draws, reference))
        single = metrics.hpd_error(draws, reference, alpha)
        if alpha < 0.9:
            np.testing.assert_allclose(single, np.abs(a - b) / np.abs(b), rtol=1e-4)
        # Thresholds in single precision: absolute errors of the ratio, of a few 1e-7.
        np.testing.assert_allclose(result[:, *index], single, rtol=0, atol=1e-6)
    zero, ones = np.zeros(3), np.ones(3)
    assert metrics.hpd_error(draws, draws, levels).max() == metrics.hpd_error(zero, zero) == 0
    assert metrics.hpd_error(ones, zero) == np.inf
    assert metrics.hpd_error(-ones, -2 * ones) == 0.5


# Averages over draws


def apply_fn(position, x, temperature):
    return jax.nn.softmax((x @ position["w"] + position["b"]) / temperature, axis=-1)


def test_predictive_is_the_mean_over_draws():
    rng = generator()
    draws = {"w": rng.normal(size=(3, 4, 2, 5)), "b": rng.normal(size=(3, 4, 5))}
    x = rng.normal(size=(6, 2)).astype(np.float32)
    logits = (np.einsum("ni,cdik->cdnk", x, draws["w"]) + draws["b"][:, :, None]) / 2
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    each = shifted / shifted.sum(-1, keepdims=True)
    for batch_size in (1, 3, 5, 50):
        result = metrics.predictive(apply_fn, draws, x, 2.0, sample_axes=2, batch_size=batch_size)
        np.testing.assert_allclose(result, each.mean((0, 1)), rtol=1e-5)
    chains = jax.vmap(lambda d: metrics.predictive(apply_fn, d, x, 2.0, batch_size=3))(draws)
    np.testing.assert_allclose(chains, each.mean(1), rtol=1e-5)


def test_predictive_averages_trees_in_single_precision():
    def halve_precision(position, x):
        return {"p": (x * position).astype(jnp.bfloat16), "square": position**2}

    result = metrics.predictive(halve_precision, jnp.arange(1000.0), jnp.ones(2))
    assert result["p"].dtype == jnp.float32
    exact = np.arange(1000.0).astype(jnp.bfloat16).astype(np.float32).mean()
    np.testing.assert_allclose(result["p"], [exact, exact], rtol=1e-5)
    np.testing.assert_allclose(result["square"], np.mean(np.arange(1000.0) ** 2), rtol=1e-5)


def test_predictive_does_not_hold_the_predictions_of_all_draws():
    def temporary(num_draws):
        draws = {"w": jnp.zeros((num_draws, 2, 50)), "b": jnp.zeros((num_draws, 50))}
        average = jax.jit(lambda d, x: metrics.predictive(apply_fn, d, x, 1.0, batch_size=2))
        compiled = average.lower(draws, jnp.zeros((400, 2))).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(400) < temporary(40) + 400 * 4 * 2 * 400
