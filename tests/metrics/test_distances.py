"""Distances of marginals and of Gaussians, and summaries of runs."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import linalg, stats

from fedmcmc import metrics

LIMIT = 5.5
KEY = jax.random.key(0)
properties = settings(deadline=None, max_examples=25, derandomize=True)
samples = arrays(np.int64, (12, 2), elements=st.integers(-3, 3))


def generator(seed=0):
    return np.random.default_rng(seed)


# Marginals


def reference_marginal_error(draws, reference, num_bins):
    """Count bin by bin, in double precision; values lie on a grid that no rounding moves."""
    distances = []
    for x, y in zip(draws.T, reference.T, strict=True):
        low, high = y.min(), y.max()
        edges = low + (high - low) * np.arange(num_bins + 1) / num_bins
        shares = []
        for values in (x, y):
            inside = values[(values >= low) & (values <= high)]
            counts = np.histogram(inside, edges)[0] if high > low else [len(inside)]
            shares.append(np.r_[(values < low).sum(), counts, (values > high).sum()] / len(values))
        distances.append(np.abs(shares[0] - shares[1]).sum() / 2)
    return np.mean(distances)


def test_marginal_error_identities():
    x = generator().normal(size=(500, 3))
    assert metrics.marginal_error(x, x) == 0
    np.testing.assert_allclose(metrics.marginal_error(x + 100, x), 1, rtol=1e-6)
    np.testing.assert_allclose(metrics.marginal_error(x - 100, x), 1, rtol=1e-6)
    # Only one of three coordinates differs; each draw twice is the same histogram.
    np.testing.assert_allclose(
        metrics.marginal_error(x + np.array([100, 0, 0]), x), 1 / 3, rtol=1e-6
    )
    np.testing.assert_allclose(metrics.marginal_error(np.tile(x, (2, 1)), x), 0, atol=1e-7)


@pytest.mark.slow
@given(samples, samples, st.sampled_from([1, 4]))
@properties
def test_marginal_error_counts(x, y, num_bins):
    y = y[:7]
    if num_bins == 4:  # of width 1 on the range [-2, 2], with values between the edges
        x, y = x + 0.5, np.clip(np.concatenate([y + 0.5, [[-2, -2], [2, 2]]]), -2, 2)
    expected = reference_marginal_error(x.astype(float), y.astype(float), num_bins)
    found = metrics.marginal_error(x.astype(float), y.astype(float), num_bins)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_an_outlier_does_not_widen_the_bins():
    rng = generator()
    x, y = rng.normal(3, 1, 2000), rng.normal(0, 1, 2000)
    error = float(metrics.marginal_error(x, y))
    assert error > 0.8
    np.testing.assert_allclose(metrics.marginal_error(np.r_[x[1:], 1e9], y), error, atol=1e-3)


def test_a_constant_reference():
    assert metrics.marginal_error(np.zeros(4), np.zeros(3)) == 0
    np.testing.assert_allclose(metrics.marginal_error(np.array([0, 0, 1, -1.0]), np.zeros(3)), 0.5)


def test_marginal_error_approaches_the_total_variation():
    # By the triangle inequality off by at most each histogram's distance from its own law.
    num, rng = 100_000, generator(3)
    x, y = rng.normal(0.8, 1.2, num), rng.normal(0, 1, num)
    edges = np.r_[-np.inf, np.linspace(y.min(), y.max(), 51), np.inf]
    p, q = (np.diff(stats.norm(*law).cdf(edges)) for law in ((0.8, 1.2), (0, 1)))
    noise = sum(np.sqrt(2 / np.pi * law * (1 - law) / num).sum() / 2 for law in (p, q))
    found = float(metrics.marginal_error(x, y))
    assert abs(found - np.abs(p - q).sum() / 2) < 1.5 * noise


def test_draws_are_trees_and_coordinates_count_alike():
    rng = generator()
    own = {"a": rng.normal(size=(30, 2, 2)), "b": rng.normal(size=30)}
    ref = {"a": rng.normal(size=(40, 2, 2)), "b": rng.normal(size=40)}
    flat = [np.column_stack([t["a"].reshape(len(t["b"]), 4), t["b"]]) for t in (own, ref)]
    np.testing.assert_allclose(
        metrics.marginal_error(own, ref), metrics.marginal_error(*flat), rtol=1e-6
    )


def test_floor_is_what_perfect_samplers_have():
    rng, sizes = generator(), (300, 500)
    reference = rng.normal(size=(4000, 4))
    floor = np.asarray(
        metrics.marginal_error_floor(
            KEY, reference, sizes[0], num_reference=sizes[1], num_bins=20, num_repeats=60
        )
    )
    low, high = reference.min(0), reference.max(0)
    actual = []
    for _ in range(60):
        x, y = (rng.normal(size=(n, 4)) for n in sizes)
        # Two rows fix the bins at the reference's; they hold 2 of 502 rows.
        actual.append(metrics.marginal_error(x, np.vstack([np.clip(y, low, high), low, high]), 20))
    gap = floor.mean() - np.mean(actual)
    spread = np.sqrt((floor.var() + np.var(actual)) / 60)
    assert abs(gap) < LIMIT * spread
    p = np.diff(stats.norm.cdf(np.linspace(low, high, 21)), axis=0)
    expected = np.sqrt(2 / np.pi * p * (1 - p) * sum(1 / n for n in sizes)).sum(0).mean() / 2
    assert abs(floor.mean() / expected - 1) < 0.05
    assert floor.std() > 0


# Gaussians


def reference_w2(m1, s1, m2, s2):
    root = linalg.sqrtm(s2)
    cross = linalg.sqrtm(root @ s1 @ root)
    return np.sqrt(((m1 - m2) ** 2).sum() + np.trace(s1 + s2 - 2 * cross.real))


def covariances(num, dim, seed=0):
    roots = generator(seed).normal(size=(num, dim, dim))
    return roots @ roots.transpose(0, 2, 1) + 0.1 * np.eye(dim)


def test_w2_of_shifted_gaussians_is_the_shift():
    a, b, s = generator().normal(size=(3, 4)), generator(1).normal(size=(3, 4)), covariances(3, 4)
    shift = np.linalg.norm(a - b, axis=-1)
    np.testing.assert_allclose(metrics.gaussian_w2(a, s, b, s), shift, rtol=1e-5)
    np.testing.assert_allclose(
        metrics.gaussian_w2(a, np.ones((3, 4)), b, np.ones((3, 4))), shift, 1e-5
    )
    assert metrics.gaussian_w2(a, s, a, s).max() < 1e-5


def test_w2_against_matrix_square_roots():
    m, s = generator().normal(size=(6, 5)), covariances(6, 5)
    for i in range(3):
        found = metrics.gaussian_w2(m[i], s[i], m[i + 3], s[i + 3])
        np.testing.assert_allclose(found, reference_w2(m[i], s[i], m[i + 3], s[i + 3]), rtol=1e-5)


def test_w2_of_one_dimension_and_of_diagonals():
    m, v = generator().normal(size=(2, 3)), generator(1).uniform(0, 3, size=(2, 3))
    exact = np.sqrt((m[0] - m[1]) ** 2 + (np.sqrt(v[0]) - np.sqrt(v[1])) ** 2)
    found = metrics.gaussian_w2(m[0][:, None], v[0][:, None], m[1][:, None], v[1][:, None, None])
    np.testing.assert_allclose(found, exact, rtol=1e-5)
    whole = np.sqrt((exact**2).sum())
    matrices = [np.diag(row) for row in v]
    for own, other in ((v[0], v[1]), (v[0], matrices[1]), (matrices[0], v[1]), matrices):
        np.testing.assert_allclose(metrics.gaussian_w2(m[0], own, m[1], other), whole, rtol=1e-5)


def test_w2_loses_no_digits_to_cancellation():
    # The trace formula in single precision would return about 1e-2 here instead of 1e-4.
    scale = np.diag([1e2, 1.0, 1e-2])
    s = scale @ covariances(1, 3)[0] @ scale
    shift = 1e-3 * np.eye(3)[0]
    np.testing.assert_allclose(metrics.gaussian_w2(shift, s, 0 * shift, s), 1e-3, rtol=1e-2)


def test_w2_of_singular_covariances():
    # Point masses, and mass on orthogonal lines: nothing can be transported along.
    zero, line = np.zeros(2), [np.diag([4.0, 0.0]), np.diag([0.0, 9.0])]
    np.testing.assert_allclose(
        metrics.gaussian_w2(zero, 0 * line[0], zero + 1, 0 * line[0]), np.sqrt(2), rtol=1e-6
    )
    np.testing.assert_allclose(
        metrics.gaussian_w2(zero, *line[:1], zero, line[1]), np.sqrt(13), 1e-6
    )


@pytest.mark.slow
@given(st.integers(0, 10_000))
@properties
def test_w2_is_a_metric(seed):
    m, s = generator(seed).normal(size=(3, 3)), covariances(3, 3, seed)
    ab, bc, ac, ba = (
        float(metrics.gaussian_w2(m[i], s[i], m[j], s[j]))
        for i, j in ((0, 1), (1, 2), (0, 2), (1, 0))
    )
    np.testing.assert_allclose(ab, ba, rtol=1e-4)
    assert ac <= (ab + bc) * (1 + 1e-4)


# Runs


def test_estimation_error_is_bias_and_variance():
    rng = generator()
    estimates, truth = rng.normal(2, 1, size=(4, 30, 5)), rng.normal(size=(4, 5))
    found = metrics.estimation_error(estimates, truth)
    centre = estimates.mean(1)
    gaps = ((estimates - truth[:, None]) ** 2).sum(-1)
    np.testing.assert_allclose(found.mse, gaps.mean(1), rtol=1e-5)
    np.testing.assert_allclose(found.squared_bias, ((centre - truth) ** 2).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(found.variance, estimates.var(axis=1).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(found.squared_bias + found.variance, found.mse, rtol=1e-5)
    one = metrics.estimation_error(estimates, truth[0])
    np.testing.assert_allclose(one.mse[0], found.mse[0], rtol=1e-6)


@pytest.mark.slow
@given(arrays(np.int64, 30, elements=st.integers(0, 8)), st.integers(0, 8))
@properties
def test_running_means(curve, threshold):
    means = [curve[r - 4 : r].mean() for r in range(4, 31)]
    assert metrics.best_running_mean(curve, window=4) == max(means)
    first = next((r for r, mean in enumerate(means, start=4) if mean >= threshold), np.inf)
    assert metrics.rounds_to_threshold(curve, threshold, window=4) == first


def test_rounds_count_from_one_and_windows_are_full():
    curve = np.r_[np.zeros(5), np.ones(20)]
    assert metrics.rounds_to_threshold(curve, 1.0) == 15
    assert metrics.rounds_to_threshold(np.ones(12), 0.5) == 10
    assert metrics.rounds_to_threshold(np.ones(12), 1.5) == np.inf
    levels = metrics.rounds_to_threshold(curve, np.array([0.1, 0.5, 1.0]))
    assert levels.tolist() == [10, 10, 15]


@pytest.mark.slow
def test_relative_efficiency():
    np.testing.assert_allclose(
        metrics.relative_efficiency(np.array([32 * 784, 100.0]), 784), [1, 250.88], rtol=1e-6
    )
