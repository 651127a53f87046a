"""Weights show the errors of an approximation, also where its draws do not reach."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import polygamma

import fedmcmc
from fedmcmc import diagnostics
from tests.oracles.federations import LIMIT

KEY = jax.random.key(0)
SHAPES = np.array([1.5, 3.0, 9.0])
NOTHING = fedmcmc.FederatedData.from_clients([np.zeros((1, 3), np.float32)])
MEANS, SDS = polygamma(0, SHAPES), np.sqrt(polygamma(1, SHAPES))


def gammas(theta):
    """Return the log density of logarithms of gamma variables, which are skewed to the left."""
    return jnp.sum(jnp.asarray(SHAPES, jnp.float32) * theta - jnp.exp(theta))


SKEWED = fedmcmc.Posterior(gammas, lambda theta, rows: jnp.zeros(rows.shape[0]))


def gaussian_draws(seed, mean, sd, num=16_000):
    z = np.random.default_rng(seed).normal(size=(4, num // 4, len(mean)))
    return (mean + sd * z).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [1.0, 0.85])
def test_standard_errors_of_weights_are_exact(narrow):
    """In units of their standard errors, over repetitions."""
    draws = gaussian_draws(0, MEANS + 0.1 * SDS, narrow * SDS, 160_000)
    z = []
    for seed in range(30):
        checked = diagnostics.check_by_weights(SKEWED, NOTHING, draws, rng_key=jax.random.key(seed))
        assert checked.trusted and checked.num_draws == 2**14
        bias = (draws.mean((0, 1)) - MEANS) / SDS
        stretch = np.log(draws.std((0, 1)) / SDS)
        z.append(
            [
                (checked.bias - bias) / checked.bias_error,
                (np.log(checked.spread) - stretch) / checked.spread_error,
            ]
        )
    z = np.array(z)
    assert np.abs(z).max() < LIMIT
    assert np.abs(z.mean(0)).max() < LIMIT / np.sqrt(30)
    # Standard errors include the error of the draws, which are the same in all repetitions; it is
    # smaller than the error of the points.
    assert 0.75 < z.std() < 1.25


def test_a_gaussian_posterior_has_no_error_of_points():
    normal = fedmcmc.Posterior(
        lambda t: -0.5 * jnp.sum(t**2), lambda t, rows: jnp.zeros(rows.shape[0])
    )
    draws = gaussian_draws(0, np.zeros(3), np.ones(3))
    draws = (draws - draws.mean((0, 1))) / draws.std((0, 1))
    checked = diagnostics.check_by_weights(normal, NOTHING, draws)
    assert np.abs(checked.bias).max() < 0.01 and np.abs(np.log(checked.spread)).max() < 0.01


@pytest.mark.slow
def test_gaussians_with_exact_moments_raise_no_alarm():
    """Its own moments: no local fit, and what expectation propagation aims at."""
    for seed in range(20):
        draws = gaussian_draws(seed, MEANS, SDS, 1000)
        checked = diagnostics.diagnose(draws, SKEWED, NOTHING, approximates=True)
        assert checked.findings == ()
    assert "by weights of 16,384 points (k-hat" in str(checked)


def test_weights_report_a_narrow_gaussian_and_gradients_do_not():
    """Laplace's: gradients at its draws see the curvature that it has."""
    draws = gaussian_draws(0, np.log(SHAPES), 1 / np.sqrt(SHAPES))
    local = diagnostics.check_moments(SKEWED, NOTHING, draws)
    checked = diagnostics.diagnose(draws, SKEWED, NOTHING, approximates=True)
    true = 1 / np.sqrt(SHAPES) / SDS
    assert true[0] < 0.85 < local.spread[0]
    np.testing.assert_allclose(checked.moments.spread, true, rtol=0.03)
    (finding,) = checked.findings
    assert "approximation's draws are not the posterior's: by weights" in finding
    assert "not suitable here: use fedmcmc.fit" in finding


def test_weights_of_heavy_tails_are_not_trusted():
    cauchy = fedmcmc.Posterior(
        lambda t: -jnp.sum(jnp.log1p(t**2)), lambda t, rows: jnp.zeros(rows.shape[0])
    )
    draws = gaussian_draws(0, np.zeros(3), np.ones(3), 4000)
    (finding,) = diagnostics.diagnose(draws, cauchy, NOTHING, approximates=True).findings
    assert finding.startswith("The approximation cannot be trusted: weights of the posterior")
    assert "use fedmcmc.fit, or fedmcmc.correct" in finding


@pytest.mark.slow
def test_bounded_weights_are_trusted():
    """Points' weights are about equal at their largest, to which no shape of a tail fits."""
    bounded = fedmcmc.Posterior(lambda t: 2 * t[0] - jnp.exp(t[0]), SKEWED.loglikelihood_fn)
    draws = gaussian_draws(0, np.array([0.53]), np.array([0.71]))
    checked = [
        diagnostics.check_by_weights(bounded, NOTHING, draws, rng_key=jax.random.key(seed))
        for seed in range(20)
    ]
    assert all(f.trusted for f in checked)


def test_a_density_that_is_zero_or_overflows_far_outside_has_no_weight_there():
    cut = SKEWED._replace(logprior_fn=lambda t: jnp.where(t[0] > 6, jnp.nan, gammas(t)))
    draws = gaussian_draws(0, MEANS, SDS)
    checked = diagnostics.check_by_weights(cut, NOTHING, draws)
    reference = diagnostics.check_by_weights(SKEWED, NOTHING, draws)
    np.testing.assert_allclose(checked.spread, reference.spread, rtol=1e-3)


@pytest.mark.slow
def test_gradients_judge_if_weights_cannot():
    few = gaussian_draws(0, MEANS, SDS, 28)
    assert diagnostics.check_by_weights(SKEWED, NOTHING, few) is None
    wide = np.random.default_rng(0).normal(size=(4, 500, 65)).astype(np.float32)
    normal = fedmcmc.Posterior(
        lambda t: -0.5 * jnp.sum(t**2), lambda t, rows: jnp.zeros(rows.shape[0])
    )
    assert diagnostics.check_by_weights(normal, NOTHING, wide) is None
    assert diagnostics.diagnose(wide, normal, NOTHING, approximates=True).moments.k_hat is None
    still = np.zeros((4, 500, 3), np.float32)
    assert diagnostics.check_by_weights(SKEWED, NOTHING, still) is None


# Two cases of users, in two dimensions, so that a grid has the exact moments.


def scale_of_nine(theta, y):
    """A normal's mean and the logarithm of its sd."""
    return -0.5 * ((y - theta[0]) * jnp.exp(-theta[1])) ** 2 - theta[1]


def overdispersed(theta, y):
    """Counts, negative binomial with mean ``exp(theta[0])`` and ``phi = exp(theta[1])``."""
    mean, phi = jnp.exp(theta[0]), jnp.exp(theta[1])
    total = jnp.log(mean + phi)
    density = jax.scipy.special.gammaln(y + phi) - jax.scipy.special.gammaln(phi)
    return density + phi * (theta[1] - total) + y * (theta[0] - total)


def of_scale(theta):
    """Normal with sd 10, and half normal with scale 10 for the sd, on its logarithm."""
    return -0.5 * (theta[0] / 10) ** 2 - 0.5 * jnp.exp(2 * theta[1]) / 100 + theta[1]


def of_counts(theta):
    return -0.5 * jnp.sum((theta / 2) ** 2)


def nine_rows():
    y = np.random.default_rng(0).normal(3, 2, 9).astype(np.float32)
    return [y[:4], y[4:7], y[7:]]


def counts():
    rng = np.random.default_rng(7)
    sizes = (6, 5, 4, 10, 5)
    return [rng.poisson(rng.gamma(2.0, 1.5, n)).astype(np.float32) for n in sizes]


CASES = {
    "scale": (of_scale, scale_of_nine, nine_rows),
    "counts": (of_counts, overdispersed, counts),
}


def of_a_grid(logprior, loglikelihood, clients, mean, sd):
    axes = [np.linspace(c - 9 * s, c + 9 * s, 241) for c, s in zip(mean, sd, strict=True)]
    points = jnp.asarray(np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2))
    rows = jnp.concatenate([jnp.asarray(rows) for rows in clients])
    logs = jax.vmap(lambda t: loglikelihood(t, rows).sum() + logprior(t))(points)
    weights = np.exp(np.asarray(logs, float) - float(logs.max()))
    weights /= weights.sum()
    points = np.asarray(points, float)
    middle = weights @ points
    return middle, np.sqrt(weights @ (points - middle) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_approximation_narrower_than_a_skewed_posterior_warns(case):
    logprior, loglikelihood, clients = *CASES[case][:2], CASES[case][2]()
    posterior = fedmcmc.Posterior(logprior, loglikelihood)
    data = fedmcmc.FederatedData.from_clients(clients)
    start = jnp.array([1.0, 0.5])
    mode = fedmcmc.surrogates.mode(posterior, data, start, tolerance=1e-3).position
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        samples = fedmcmc.sample(
            KEY, fedmcmc.fed_ep(posterior), data, mode, num_rounds=12, progress=False
        )
    q = jax.tree.map(lambda x: x[0], samples.state.server.approximation.gaussian)
    spread = np.sqrt(np.diag(np.asarray(q.covariance())))
    mean, sd = of_a_grid(logprior, loglikelihood, clients, np.asarray(q.mean()), spread)
    checked = samples.diagnosis.moments
    assert 0.85 < (spread / sd).min() < 0.89
    np.testing.assert_allclose(checked.spread, spread / sd, rtol=0.02)
    np.testing.assert_allclose(checked.bias, (q.mean() - mean) / sd, atol=0.03)
    print(
        case, spread / sd, checked.spread, checked.k_hat
    )  # the figures of docs/explanation/diagnostics.md
    (messages,) = [str(w.message) for w in caught]
    assert "draws are not the posterior's: by weights" in messages and "use fedmcmc.fit" in messages
