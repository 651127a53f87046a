"""Mathematics of the FSGLD studies: exact distributions, shards, expansions and statistics."""

import jax
import numpy as np
import pytest
from jax.tree_util import Partial
from scipy import stats

import fedmcmc
from experiments import claims, shards, tidy
from experiments.special import fsgld_gaussian, fsgld_mlp, fsgld_repetitions

RNG = np.random.default_rng(0)


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
    assert abs(measured.value - law.variance(times)) < 4 * measured.error


def test_shards_share_no_letter_and_no_row():
    key, labels = jax.random.key(2), np.repeat(np.arange(26), 20)
    codes = np.stack([labels, np.arange(520) / 1e6], axis=1).astype(float)
    sizes = dict(num_clients=10, pairs_per_client=40, num_test=60)
    data, test = shards.letter_pairs(key, codes, labels, **sizes)
    for pairs in (data.rows, test):
        np.testing.assert_array_equal(pairs["features"][:, 0] == 0, pairs["sign"] == 1)
    sizes = dict(num_clients=10, rows_per_client=20, num_test=30, concentration=0.5)
    data, test = shards.skewed_labels(key, labels % 2, **sizes)
    assert len({*np.asarray(data.rows), *test}) == 230 and (labels[test] % 2).mean() == 0.5


def test_expansions_have_the_fisher_information():
    x = RNG.normal(size=(2, 6)).astype(np.float32)
    terms = Partial(lambda t, rows: jax.nn.log_sigmoid(rows * t))
    posterior = fedmcmc.Posterior(terms, terms)
    data = fedmcmc.FederatedData.from_clients(list(x))
    found = fsgld_mlp.fisher(posterior, data, np.float32([0.7]), structure="diagonal")
    p = 1 / (1 + np.exp(-0.7 * x))
    np.testing.assert_allclose(found.precision[:, 0], (p * (1 - p) * x**2).sum(1), rtol=1e-4)


def test_an_interval_of_ratios_inverts_the_test_of_pitman_and_morgan():
    x, y = RNG.multivariate_normal([0, 0], [[1, 1], [1, 2]], 10).T
    for row in fsgld_repetitions.sd_ratio("ratio", {}, x, y)[1:]:
        assert stats.pearsonr(x + row.value * y, x - row.value * y)[1] == pytest.approx(0.05)
