"""Log densities, samplers and checks of families, against scipy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from fedmcmc.models._distributions import (
    HurdlePoisson,
    LogGamma,
    LogitBeta,
    LogNegativeBinomial,
    LogPoisson,
    OrderedCumulative,
    log1mexp_exp,
    log_gamma_correction,
)
from fedmcmc.models._families import FAMILIES, Family, find_family

ETA = np.array([-3.0, -1.2, -0.3, 0.0, 0.4, 1.1, 2.5])
CUTPOINTS = np.array([-1.0, 0.3, 2.0])
TRIALS = 9
INVERSE_LINKS = {
    "logit": special.expit,
    "probit": stats.norm.cdf,
    "cloglog": lambda x: -np.expm1(-np.exp(x)),
}
PARAMETERS = {
    "sigma": 1.7,
    "nu": 4.5,
    "shape": 2.3,
    "precision": 5.5,
    "cutpoints": CUTPOINTS,
    "zero_inflation": 0.25,
    "hurdle": 0.35,
}
CASES = [(name, link) for name in FAMILIES for link in find_family(name).links]


def negative_binomial(eta):
    return stats.nbinom(2.3, 2.3 / (2.3 + np.exp(eta)))


def mixed_with_zero(counts, y):
    return np.log(0.25 * (y == 0) + 0.75 * counts.pmf(y))


def expected(name, link, eta, y):
    """Return the log density of scipy, or of a formula in double precision."""
    mean = np.exp(eta) if link == "log" else eta
    if name == "gaussian":
        return stats.norm.logpdf(y, mean, 1.7)
    if name == "student":
        return stats.t.logpdf(y, 4.5, mean, 1.7)
    if name == "bernoulli":
        return stats.bernoulli.logpmf(y, INVERSE_LINKS[link](eta))
    if name == "binomial":
        return stats.binom.logpmf(y, TRIALS, INVERSE_LINKS[link](eta))
    if name == "poisson":
        return stats.poisson.logpmf(y, mean)
    if name == "negative_binomial":
        return negative_binomial(eta).logpmf(y)
    if name == "gamma":
        return stats.gamma.logpdf(y, 2.3, scale=mean / 2.3)
    if name == "beta":
        share = special.expit(eta)
        return stats.beta.logpdf(y, 5.5 * share, 5.5 * (1 - share))
    if name == "ordinal":
        edges = np.concatenate([[-np.inf], CUTPOINTS, [np.inf]])
        cumulative = INVERSE_LINKS[link](edges[:, None] - eta)
        y = np.broadcast_to(y, eta.shape).astype(int)
        return np.log(cumulative[y + 1, np.arange(len(eta))] - cumulative[y, np.arange(len(eta))])
    if name == "zero_inflated_poisson":
        return mixed_with_zero(stats.poisson(mean), y)
    if name == "zero_inflated_negative_binomial":
        return mixed_with_zero(negative_binomial(eta), y)
    truncated = 0.65 * stats.poisson.pmf(y, mean) / -np.expm1(-mean)
    return np.log(np.where(y == 0, 0.35, truncated))


def outcomes(name):
    kind = name.removeprefix("zero_inflated_").removeprefix("hurdle_")
    return {
        "gaussian": [-2.0, 0.3, 5.0],
        "student": [-2.0, 0.3, 5.0],
        "bernoulli": [0, 1],
        "binomial": [0, 4, 9],
        "gamma": [0.1, 1.0, 7.0],
        "beta": [0.02, 0.5, 0.9],
        "ordinal": [0, 1, 2, 3],
    }.get(kind, [0, 1, 2, 15])


def distribution(name, link, eta):
    trials = jnp.full(eta.shape, float(TRIALS)) if name == "binomial" else None
    return Family(name, link).distribution(jnp.asarray(eta), PARAMETERS, trials)


@pytest.mark.parametrize(("name", "link"), CASES)
def test_log_densities_are_scipys(name, link):
    with jax.enable_x64(True):
        for y in outcomes(name):
            log_prob = distribution(name, link, ETA).log_prob(jnp.full(ETA.shape, y))
            np.testing.assert_allclose(log_prob, expected(name, link, ETA, y), rtol=1e-9)


@pytest.mark.parametrize(("name", "link"), CASES)
def test_draws_have_their_density(name, link):
    eta = np.array([-0.7, 0.8])
    draws = np.asarray(distribution(name, link, eta).sample(jax.random.key(3), (4000,)), float)
    for i in range(2):
        if name in ("gaussian", "student", "gamma", "beta"):
            grid = np.sort(draws[:, i])
            with jax.enable_x64(True):
                log_prob = distribution(name, link, np.full(4000, eta[i])).log_prob(grid)
            # The probability between neighboring draws is density times distance, on average 1/n.
            cdf = np.concatenate([[0], np.cumsum(np.diff(grid) * np.exp(log_prob)[1:])])
            np.testing.assert_allclose(cdf, np.arange(4000) / 4000, atol=0.035)
        else:
            values, counts = np.unique(draws[:, i], return_counts=True)
            p = np.exp([expected(name, link, eta[i : i + 1], y)[0] for y in values])
            assert np.all(np.abs(counts - 4000 * p) < 5 * np.sqrt(4000 * p) + 5)
            assert p.sum() > 0.995


@pytest.mark.parametrize(("name", "link"), CASES)
def test_the_mean_is_the_mean_of_draws(name, link):
    fn = distribution(name, link, np.array([-0.7, 0.8]))
    draws = np.asarray(fn.sample(jax.random.key(4), (4000,)), float)
    error = draws.std(0) / 4000**0.5
    assert np.all(np.abs(draws.mean(0) - fn.mean) < 4 * error)


@pytest.mark.parametrize(("name", "link"), CASES)
@pytest.mark.parametrize("eta", [-60.0, -12.0, 12.0, 60.0])
def test_log_densities_and_gradients_are_finite_far_out(name, link, eta):
    if link == "probit" or name == "gaussian":
        eta = np.clip(eta, -15, 15)  # where single precision represents the square
    for y in outcomes(name):

        def log_prob(eta, y=y):
            return distribution(name, link, eta[None]).log_prob(jnp.full(1, y))[0]

        value, slope = jax.value_and_grad(log_prob)(jnp.float32(eta))
        assert np.isfinite(value) and np.isfinite(slope), (y, value, slope)


@pytest.mark.parametrize(
    ("make", "y"),
    [
        (lambda eta, k: LogNegativeBinomial(eta, k), 3),
        (lambda eta, k: LogNegativeBinomial(eta, k), 400),
        (lambda eta, k: LogGamma(eta, k), 7.0),
        (lambda eta, k: LogitBeta(eta, k), 0.3),
    ],
)
@pytest.mark.parametrize("k", [1e-3, 0.5, 30.0, 1e4, 1e7])
def test_single_precision_suffices_for_all_shapes(make, y, k):
    eta = np.array([0.95 * np.log(y / (1 - y) if y < 1 else y)])
    with jax.enable_x64(True):
        exact = make(jnp.asarray(eta), k).log_prob(y)
    log_prob = make(jnp.asarray(eta, jnp.float32), jnp.float32(k)).log_prob(jnp.float32(y))
    np.testing.assert_allclose(log_prob, exact, rtol=3e-5, atol=3e-5)


def test_a_large_count_keeps_its_digits_in_single_precision():
    eta = np.log(50_000) + np.array([-0.01, 0.0, 0.01])
    exact = stats.poisson.logpmf(50_000, np.exp(eta))
    log_prob = LogPoisson(jnp.asarray(eta, jnp.float32)).log_prob(50_000)
    np.testing.assert_allclose(log_prob, exact, atol=0.02)


def test_a_large_shape_is_a_poisson_distribution():
    counts = jnp.arange(20)
    poisson = LogPoisson(jnp.full(20, 1.2)).log_prob(counts)
    negative_binomial = LogNegativeBinomial(jnp.full(20, 1.2), 1e9).log_prob(counts)
    np.testing.assert_allclose(negative_binomial, poisson, atol=1e-5)


@pytest.mark.parametrize("link", ["logit", "probit"])
def test_categories_in_the_tails_have_exact_log_probabilities(link):
    cutpoints = jnp.array([5.0, 5.5, 6.0])
    fn = OrderedCumulative(jnp.zeros(4), cutpoints, link)
    scipy = stats.logistic if link == "logit" else stats.norm
    edges = np.array([-np.inf, 5.0, 5.5, 6.0, np.inf])
    exact = np.log(scipy.sf(edges[:-1]) - scipy.sf(edges[1:]))
    np.testing.assert_allclose(fn.log_prob(jnp.arange(4)), exact, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(fn.probs.sum(-1), 1, rtol=1e-6)


def test_special_functions_are_accurate():
    x = np.concatenate([np.linspace(-30, 5, 200), [-8.0, -0.4]])
    exact = np.select(
        [x < -8, x < 0],
        [x - np.exp(x) / 2, np.log(-np.expm1(-np.exp(x)))],
        np.log1p(-np.exp(-np.exp(x))),
    )
    with jax.enable_x64(True):
        np.testing.assert_allclose(log1mexp_exp(x), exact, rtol=1e-8, atol=1e-300)
        z = np.geomspace(1e-8, 1e5, 300)
        direct = special.gammaln(z) - ((z - 0.5) * np.log(z) - z + 0.5 * np.log(2 * np.pi))
        np.testing.assert_allclose(log_gamma_correction(z), direct, atol=1e-9)
        slopes = jax.vmap(jax.grad(log1mexp_exp))(jnp.asarray(x))
    np.testing.assert_allclose(slopes, np.exp(x) / np.expm1(np.exp(x)), rtol=1e-3)


def test_a_hurdle_of_tiny_rates_is_one_for_positive_counts():
    fn = HurdlePoisson(jnp.float32(-70.0), 0.5)
    np.testing.assert_allclose(fn.log_prob(1), np.log(0.5), rtol=1e-5)


def test_bad_families_links_and_outcomes_are_named():
    with pytest.raises(ValueError, match=r"family must be one of 'gaussian'.*got 'normal'"):
        find_family("normal")
    with pytest.raises(ValueError, match="'poisson' has the links 'log', got 'logit'"):
        find_family("poisson", "logit")
    with pytest.raises(ValueError, match=r"outcome 'y' of client 'Bern' .* at least 0.*row 2 has"):
        find_family("poisson").check(np.array([0, 3, -1]), where=" 'y' of client 'Bern'")
    with pytest.raises(ValueError, match="row 1 has 5 of 4 trials"):
        find_family("binomial").check(np.array([1, 5]), np.array([4, 4]))
    with pytest.raises(ValueError, match=r"strictly between 0 and 1.*row 0 has 1"):
        find_family("beta").check(np.array([1.0]))
    with pytest.raises(ValueError, match=r"0 or 1.*row 1 has 2"):
        find_family("bernoulli").check(np.array([0, 2]))
    find_family("ordinal").check(np.array([0, 1, 2]))
