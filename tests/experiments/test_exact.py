"""Exact distributions, intervals and scores of the studies against other computations."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from sklearn import metrics

import fedmcmc
from experiments import claims, comparisons, loaders, models, shards, tags, tidy
from experiments.special import (
    fa_hmc_images,
    fed_ep_runs,
    fed_ep_toy,
    fsgld_gaussian,
    fsgld_repetitions,
    hierarchy,
    qlsd_gaussian,
)
from experiments.special.fa_hmc_gaussian import Clients, moments, stationary
from experiments.special.fa_hmc_logistic import Histograms, error_curve
from fedmcmc.metrics import marginal_error
from tests.oracles import laws_quantised

RNG = np.random.default_rng(8)


def test_exact_averages_match_a_simulated_relay():
    settings = dict(step_size=2e-3, batch_size=5, num_local_steps=4, alpha=0.5)
    law = fsgld_gaussian.relay_law(shards.gaussian(0, 2.0, 3, 20), **settings)
    num, theta, kept = 50_000, np.zeros((50_000, 2)), []
    for round_ in range(25):
        shift, states = law.shift[RNG.integers(0, 3, num)], []
        for _ in range(4):
            theta = law.factor * theta + shift + law.noise**0.5 * RNG.standard_normal((num, 2))
            states.append(theta)
        if round_ in (20, 22, 24):
            kept.append((states[1] + states[3]) / 2)
    for length, exact in zip((1, 2, 3), law.average((2, 4), 2, 3), strict=True):
        average = np.mean(kept[:length], axis=0)
        mean_z = (average.mean(axis=0) - law.mean) / average.std(axis=0) * np.sqrt(num)
        variance_z = (average.var(axis=0).mean() / exact - 1) / np.sqrt(2 / num)
        assert np.abs([*mean_z, variance_z]).max() < 5


@pytest.mark.parametrize("num_local_steps", [1, 10, 100, 1000])
@pytest.mark.parametrize("method", ["DSGLD", "FSGLD"])
def test_exact_variances_are_those_that_the_recorded_chains_have(method, num_local_steps):
    settings = dict(step_size=5e-5, batch_size=10, num_local_steps=num_local_steps)
    rows = shards.gaussian(0, 6.0, 10, 200)
    law = fsgld_gaussian.relay_law(rows, alpha=float(method == "FSGLD"), **settings)
    times = range(100, 1001, 100) if num_local_steps == 1000 else [num_local_steps]
    record = tidy.read("fsgld/gaussian")
    measured = claims.value(record, "variance", method=method, num_local_steps=num_local_steps)
    assert abs(measured - law.variance(times)) < 4 * measured.error


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_variances_are_those_that_the_recorded_chains_have(bits):
    data, _ = loaders.gaussian()
    law = qlsd_gaussian.Law(1 / data.num_rows, 2**bits)
    ratio = qlsd_gaussian.centered_variance(data.sizes, 50, law) * data.num_rows
    record = tidy.read("qlsd/gaussian")
    measured = claims.value(record, "variance_over_posterior", method="QLSD*", bits=bits)
    assert abs(measured - ratio) < 4 * measured.error


def test_errors_of_averages_are_sums_of_covariances():
    vectors = RNG.normal(size=(7, 4))
    expected = laws_quantised.variance(vectors, 2).sum(axis=1)
    np.testing.assert_allclose(qlsd_gaussian.quantizer_variance(vectors, 2), expected, rtol=1e-10)
    for num, found in enumerate(fsgld_gaussian.average_variances(1.7 * 0.6 ** np.arange(50)), 1):
        lags = np.abs(np.subtract.outer(range(num), range(num)))
        assert found == pytest.approx(1.7 * (0.6**lags).mean())


def test_the_variance_with_minibatches_is_that_of_chains():
    y = RNG.normal(size=(3, 10, 2)).astype(np.float32)
    data = fedmcmc.FederatedData.from_clients([{"y": own} for own in y])
    law = qlsd_gaussian.Law(0.2 / 30, 4)
    settings = dict(step_size=law.step_size, compressor=fedmcmc.quantize(law.num_levels))
    kernel = fedmcmc.qlsd(models.gaussian(data, 0.0), batch_size=1, **settings)
    counts = dict(num_rounds=300, num_burnin=60, thinning=20, num_chains=300, progress=False)
    samples = fedmcmc.sample(jax.random.key(0), kernel, data, jnp.zeros(2), **counts)
    variance = ((samples.draws - y.mean(axis=(0, 1))) ** 2).mean()
    expected = qlsd_gaussian.stationary_variance(data, 1, law)
    assert variance == pytest.approx(expected, rel=0.06)


def test_the_variance_with_memories_and_absent_clients_is_that_of_a_loop():
    levels, sizes, step, share, num = 2, np.array([3.0, 8.0, 5.0]), 0.3 / 16, 0.5, 4000
    x, memories = 1e-3 * RNG.standard_normal((num, 4)), np.zeros((3, 4))
    rate, squares = 1 / (1 + min(4 / levels**2, 2 / levels)), []
    for number in range(400):
        away = sizes[:, None] * x[:, None] - memories
        norm = np.linalg.norm(away, axis=-1, keepdims=True)
        scaled = levels * np.abs(away) / norm
        whole = np.floor(scaled) + (RNG.random(scaled.shape) < scaled % 1)
        code = np.sign(away) * norm * whole / levels * (RNG.random((num, 3, 1)) < share)
        noise = (2 * step) ** 0.5 * RNG.standard_normal(x.shape)
        x = x - step * (memories + code / share).sum(axis=1) + noise
        memories = memories + rate * code
        squares += [(x**2).mean()] if number >= 100 else []
    found = qlsd_gaussian.memory_variance(sizes, 4, qlsd_gaussian.Law(step, levels, share))
    assert found == pytest.approx(np.mean(squares), rel=0.02)


@pytest.mark.parametrize(
    ("num_local_steps", "length", "rho", "noise"), [(1, 3, 1.0, 2.0), (3, 2, 0.3, 0.0)]
)
def test_rounds_have_the_distribution_that_predict_bias_has(num_local_steps, length, rho, noise):
    """Off by sqrt(2) in the noise, or with the prior twice, it would fail."""
    data, _ = loaders.spherical(num_clients=4, num_rows=60, dim=6, num_test=0)
    posterior = models.logistic(data, 0.5)
    mode = fedmcmc.surrogates.mode(posterior, data, jnp.zeros(6)).position
    expansions = fedmcmc.surrogates.taylor(posterior, data, mode)
    curvatures, axes = np.linalg.eigh(4 * np.asarray(expansions.precision, float))
    slopes = 4 * np.asarray(expansions.precision_mean, float)
    means = np.einsum("bij,bi->bj", axes, slopes) / (curvatures + 0.5)
    clients = Clients(curvatures + 0.5, means, axes, np.full(4, 0.25))
    (one,) = clients.rounds([num_local_steps], 0.2, length, rho=rho, noise=noise)
    settings = dict(num_local_steps=num_local_steps, num_integration_steps=length, rho=rho)
    settings |= dict(step_size=0.2, gradient_noise=noise, gradients="reuse")
    expected = fedmcmc.predict_bias(fedmcmc.fa_hmc(posterior, **settings), data, expansions)
    assert not expected.simulated
    late = next(itertools.islice(moments(itertools.repeat(one), np.zeros(6)), 300, None))
    for mean, variance in (stationary(one), late):
        np.testing.assert_allclose(mean, expected.mean, atol=1e-5)
        np.testing.assert_allclose(variance, np.diag(expected.covariance), atol=1e-5)
    np.testing.assert_allclose(clients.target()[0], mode, atol=1e-5)


@pytest.mark.parametrize("method", ["FedEP", "FedEP, scaled identity"])
def test_expectation_propagation_of_two_gaussians(method):
    pairs = fed_ep_toy.draw_pairs(0, 3, degrees=7, scale=0.2)
    precisions = np.linalg.inv(pairs.covariances)
    eta = np.einsum("nkij,nkj->nki", precisions, pairs.means)
    site_eta, site = np.zeros_like(pairs.means), np.zeros_like(pairs.means)
    expected = []
    for _ in range(4):
        cavity, cavity_eta = site[:, ::-1], site_eta[:, ::-1]  # the other client's site
        tilted = precisions + cavity[..., None] * np.eye(2)
        mean = np.linalg.solve(tilted, (eta + cavity_eta)[..., None])[..., 0]
        variances = np.diagonal(np.linalg.inv(tilted), axis1=-2, axis2=-1)
        product = 1 / variances if method == "FedEP" else cavity + 1.0
        site_eta, site = product * mean - cavity_eta, product - cavity
        expected.append(site_eta.sum(axis=1) / site.sum(axis=1))
    means = fed_ep_toy.means_by_round(fed_ep_toy.kernels()[method], pairs, 4)
    np.testing.assert_allclose(means, np.stack(expected, axis=1), rtol=1e-4, atol=1e-5)


def test_the_grid_of_the_funnel_is_bayes_rule():
    """Many rows of hospitals that differ much: `mu` and `tau` are those of the effects."""
    effects = np.random.default_rng(0).normal(0.4, 0.5, 200)
    mean, sd = hierarchy.exact([np.full(400, effect) for effect in effects])
    np.testing.assert_allclose(mean, [effects.mean(), np.log(effects.std())], atol=0.01)
    np.testing.assert_allclose(sd, [effects.std() / 200**0.5, 1 / 400**0.5], rtol=0.03)


@pytest.mark.slow
def test_mala_has_the_moments_of_a_gaussian():
    y = RNG.normal(size=(40, 2)).astype(np.float32)
    data = fedmcmc.FederatedData.from_clients([{"y": y[:25]}, {"y": y[25:]}])
    posterior, mean = models.gaussian(data, 1.0), y.sum(axis=0) / 41
    scale = jnp.eye(2) / 41**0.5
    exact = comparisons.mala(posterior, data, jnp.asarray(mean), scale, num_chains=4)
    draws = np.asarray(exact.draws, float).reshape(-1, 2)
    np.testing.assert_allclose(draws.mean(axis=0), mean, atol=0.02)
    np.testing.assert_allclose(draws.var(axis=0) * 41, 1, rtol=0.08)


def test_a_gap_is_that_of_quantiles_of_all_chains():
    own, other = RNG.gamma(20, size=(3, 50)), RNG.gamma(25, size=(3, 70))
    eta, right = (np.quantile(x, 0.7) for x in (own, other))
    assert comparisons.gap(own, other, 0.3).value == pytest.approx((eta - right) / right, rel=1e-4)


def test_errors_of_the_draws_so_far_are_marginal_errors():
    reference = RNG.normal(size=(500, 3)).astype(np.float32)
    draws = (0.3 + 1.2 * RNG.normal(size=(2, 30, 3))).astype(np.float32)
    draws[:, 3, 0], draws[:, 5, 1] = reference[:, 0].max(), 40
    parts = (draws[:, start : start + 10] for start in range(0, 30, 10))
    marks, errors = error_curve(parts, Histograms(reference), 25, 0.0)
    assert marks[0] == 2 and marks[-1] == 25
    for mark, found in zip(marks, errors, strict=True):
        chains = draws[:, mark // 2 : mark]
        for part, error in zip((chains, chains[1:], chains[:1]), found, strict=True):
            assert error == pytest.approx(float(marginal_error(part.reshape(-1, 3), reference)))


def test_a_gain_is_judged_by_welchs_test():
    score, compare = fa_hmc_images.Score, fa_hmc_images.compare
    better, worse = (score(1.0, False, -np.array([[a], [a + 0.1]])) for a in (0.1, 0.9))
    gain = compare(better, worse)
    assert gain.rank == 2 and gain.share.value == pytest.approx(0.8 / 0.95)
    assert 2 * gain.share.error == pytest.approx(4.302653 * 0.005**0.5 / 0.95)
    assert compare(worse, better).rank == -2
    assert np.isnan(compare(better._replace(at_end=True), worse).rank)


def test_an_interval_of_ratios_inverts_the_test_of_pitman_and_morgan():
    x, y = RNG.multivariate_normal([0, 0], [[1, 1], [1, 2]], 10).T
    for row in fsgld_repetitions.sd_ratio("ratio", {}, x, y)[1:]:
        assert stats.pearsonr(x + row.value * y, x - row.value * y)[1] == pytest.approx(0.05)


def test_rates_of_tags_are_those_of_scikit_learn():
    data, test = tags.synthetic(num_clients=9, num_words=9, num_tags=4, num_test=200)
    kernel = np.sin(np.arange(36, dtype=np.float32)).reshape(9, 4)
    position = {"kernel": 3 * kernel, "bias": np.float32([-1, 0, 1, -9])}
    bag = np.stack([np.bincount(words, minlength=9) / 10 for words in test["words"]])
    logits, true = position["bias"] + bag @ position["kernel"], np.asarray(tags.unpack(test, 4))
    terms = (true * logits - np.logaddexp(0, logits)).sum(axis=1)
    found = tags.regressions(data, 9, 4).loglikelihood_fn(position, test)
    np.testing.assert_allclose(found, terms, rtol=1e-4)
    counts = fed_ep_runs.count_outcomes(jax.random.key(0), test, 999, position, 0)["counts"]
    rates = fed_ep_runs.rates(np.asarray(counts))
    for average in ("micro", "macro"):
        expected = metrics.f1_score(true, logits > 0, average=average, zero_division=0.0)
        assert rates[f"{average}_f1"] == pytest.approx(100 * expected)
