"""Stationary variances of QLSD and its data, against loops and the notebooks' calls."""

import numpy as np
import pytest

from tests.oracles import laws_quantised

pytest.importorskip("hydra")

from experiments import comparisons, loaders
from experiments.special import qlsd_gaussian

RNG = np.random.default_rng(8)


def test_errors_of_averages_are_sums_of_covariances():
    vectors = RNG.normal(size=(7, 4))
    expected = laws_quantised.variance(vectors, 2).sum(axis=1)
    np.testing.assert_allclose(qlsd_gaussian.quantizer_variance(vectors, 2), expected, rtol=1e-10)
    for num in (1, 2, 50):
        lags = np.abs(np.subtract.outer(range(num), range(num)))
        assert qlsd_gaussian.average_error(1.7, 0.6, num) == pytest.approx(1.7 * (0.6**lags).mean())


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


def test_clients_are_those_of_the_notebooks():
    data, _ = loaders.gaussian()
    assert data.sizes.tolist()[:4] == [192, 109, 44, 90] and data.num_rows == 2042
    data, test = loaders.synthetic(shared_seed=True)
    assert data.num_rows == 555 and len(test["label"]) == 72


def test_a_gap_is_that_of_quantiles_of_all_chains():
    own, other = RNG.gamma(20, size=(3, 50)), RNG.gamma(25, size=(3, 70))
    eta, right = (np.quantile(x, 0.7) for x in (own, other))
    assert comparisons.gap(own, other, 0.3).value == pytest.approx((eta - right) / right, rel=1e-4)
