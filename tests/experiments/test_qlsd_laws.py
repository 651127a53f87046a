"""Stationary variances of QLSD and its data, against loops and the notebooks' calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from tests.oracles import laws_quantised

pytest.importorskip("hydra")

from experiments import claims, comparisons, loaders, models, tidy
from experiments.special import fsgld_gaussian, qlsd_gaussian

RNG = np.random.default_rng(8)


def test_errors_of_averages_are_sums_of_covariances():
    vectors = RNG.normal(size=(7, 4))
    expected = laws_quantised.variance(vectors, 2).sum(axis=1)
    np.testing.assert_allclose(qlsd_gaussian.quantizer_variance(vectors, 2), expected, rtol=1e-10)
    for num, found in enumerate(fsgld_gaussian.average_variances(1.7 * 0.6 ** np.arange(50)), 1):
        lags = np.abs(np.subtract.outer(range(num), range(num)))
        assert found == pytest.approx(1.7 * (0.6**lags).mean())


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_variances_are_those_that_the_recorded_chains_have(bits):
    data, _ = loaders.gaussian()
    law = qlsd_gaussian.Law(1 / data.num_rows, 2**bits)
    ratio = qlsd_gaussian.centered_variance(data.sizes, 50, law) * data.num_rows
    record = tidy.read("qlsd/gaussian")
    measured = claims.value(record, "variance_over_posterior", method="QLSD*", bits=bits)
    assert abs(measured.value - ratio) < 4 * measured.error


def test_the_variance_with_minibatches_is_that_of_chains():
    y = RNG.normal(size=(3, 10, 2)).astype(np.float32)
    data = fedmcmc.FederatedData.from_clients([{"y": own} for own in y])
    law = qlsd_gaussian.Law(0.2 / 30, 4)
    kernel = fedmcmc.qlsd(
        models.gaussian(data, 0.0),
        step_size=law.step_size,
        batch_size=1,
        compressor=fedmcmc.quantize(law.num_levels),
    )
    counts = dict(num_rounds=300, num_burnin=60, thinning=20, num_chains=300, progress=False)
    samples = fedmcmc.sample(jax.random.key(0), kernel, data, jnp.zeros(2), **counts)
    variance = ((samples.draws - y.mean(axis=(0, 1))) ** 2).mean()
    expected = qlsd_gaussian.stationary_variance(data, 1, law)
    assert variance == pytest.approx(expected, rel=0.06)


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
