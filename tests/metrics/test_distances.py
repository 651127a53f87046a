"""Distances of marginals and of Gaussians, and summaries of runs."""

import jax
import numpy as np
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


@given(samples, samples, st.sampled_from([1, 4]))
@properties
def test_marginal_error_counts_draws_in_bins(x, y, num_bins):
    y = y[:7]
    if num_bins == 4:  # of width 1 on the range [-2, 2], with values between the edges
        x, y = x + 0.5, np.clip(np.concatenate([y + 0.5, [[-2, -2], [2, 2]]]), -2, 2)
    expected = reference_marginal_error(x.astype(float), y.astype(float), num_bins)
    result = metrics.marginal_error(x.astype(float), y.astype(float), num_bins)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_outliers_and_constant_references_have_bins():
    rng = generator()
    x, y = rng.normal(3, 1, 2000), rng.normal(0, 1, 2000)
    error = float(metrics.marginal_error(x, y))
    assert error > 0.8 and metrics.marginal_error(x, x) == 0
    np.testing.assert_allclose(metrics.marginal_error(np.r_[x[1:], 1e9], y), error, atol=1e-3)
    assert metrics.marginal_error(np.zeros(4), np.zeros(3)) == 0
    np.testing.assert_allclose(metrics.marginal_error(np.array([0, 0, 1, -1.0]), np.zeros(3)), 0.5)


def test_marginal_error_approaches_the_total_variation():
    # By the triangle inequality off by at most each histogram's distance from its distribution.
    num, rng = 100_000, generator(3)
    x, y = rng.normal(0.8, 1.2, num), rng.normal(0, 1, num)
    edges = np.r_[-np.inf, np.linspace(y.min(), y.max(), 51), np.inf]
    p, q = (np.diff(stats.norm(*normal).cdf(edges)) for normal in ((0.8, 1.2), (0, 1)))
    noise = sum(np.sqrt(2 / np.pi * cell * (1 - cell) / num).sum() / 2 for cell in (p, q))
    result = float(metrics.marginal_error(x, y))
    assert abs(result - np.abs(p - q).sum() / 2) < 1.5 * noise


def test_leaves_of_draws_count_by_their_coordinates():
    rng = generator()
    draws = {"a": rng.normal(size=(30, 2, 2)), "b": rng.normal(size=30)}
    reference = {"a": rng.normal(size=(40, 2, 2)), "b": rng.normal(size=40)}
    flat = [np.column_stack([t["a"].reshape(len(t["b"]), 4), t["b"]]) for t in (draws, reference)]
    np.testing.assert_allclose(
        metrics.marginal_error(draws, reference), metrics.marginal_error(*flat), rtol=1e-6
    )


def test_the_floor_is_the_error_of_exact_samplers():
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


def covariances(num, dim):
    roots = generator().normal(size=(num, dim, dim))
    return roots @ roots.transpose(0, 2, 1) + 0.1 * np.eye(dim)


def test_w2_equals_formulas_with_matrix_square_roots():
    m, s = generator().normal(size=(6, 5)), covariances(6, 5)
    for i in range(3):
        expected = reference_w2(m[i], s[i], m[i + 3], s[i + 3])
        result = metrics.gaussian_w2(m[i], s[i], m[i + 3], s[i + 3])
        np.testing.assert_allclose(result, expected, rtol=1e-5)
    # Point masses, and mass on orthogonal lines: the transport has no correlation.
    zero, line = np.zeros(2), [np.diag([4.0, 0.0]), np.diag([0.0, 9.0])]
    for arguments, expected in (
        ((zero, 0 * line[0], zero + 1, 0 * line[0]), np.sqrt(2)),
        ((zero, line[0], zero, line[1]), np.sqrt(13)),
    ):
        np.testing.assert_allclose(metrics.gaussian_w2(*arguments), expected, rtol=1e-6)


def test_w2_has_closed_forms_in_one_dimension_and_for_diagonals():
    m, v = generator().normal(size=(2, 3)), generator(1).uniform(0, 3, size=(2, 3))
    exact = np.sqrt((m[0] - m[1]) ** 2 + (np.sqrt(v[0]) - np.sqrt(v[1])) ** 2)
    result = metrics.gaussian_w2(m[0][:, None], v[0][:, None], m[1][:, None], v[1][:, None, None])
    np.testing.assert_allclose(result, exact, rtol=1e-5)
    total = np.sqrt((exact**2).sum())
    matrices = [np.diag(row) for row in v]
    for first, second in ((v[0], v[1]), (v[0], matrices[1]), (matrices[0], v[1]), matrices):
        np.testing.assert_allclose(metrics.gaussian_w2(m[0], first, m[1], second), total, rtol=1e-5)


def test_w2_loses_no_digits_to_cancellation():
    # The trace formula in single precision would return about 1e-2 in place of 1e-4.
    scale = np.diag([1e2, 1.0, 1e-2])
    s = scale @ covariances(1, 3)[0] @ scale
    shift = 1e-3 * np.eye(3)[0]
    np.testing.assert_allclose(metrics.gaussian_w2(shift, s, 0 * shift, s), 1e-3, rtol=1e-2)


# Runs


def test_estimation_error_is_bias_and_variance():
    rng = generator()
    estimates, truth = rng.normal(2, 1, size=(4, 30, 5)), rng.normal(size=(4, 5))
    result = metrics.estimation_error(estimates, truth)
    gaps = ((estimates - truth[:, None]) ** 2).sum(-1)
    np.testing.assert_allclose(result.mse, gaps.mean(1), rtol=1e-5)
    squared_bias = ((estimates.mean(1) - truth) ** 2).sum(-1)
    np.testing.assert_allclose(result.squared_bias, squared_bias, rtol=1e-5)
    np.testing.assert_allclose(result.variance, estimates.var(axis=1).sum(-1), rtol=1e-5)
    common = metrics.estimation_error(estimates, truth[0])
    np.testing.assert_allclose(common.mse[0], result.mse[0], rtol=1e-6)


@given(arrays(np.int64, 30, elements=st.integers(0, 8)), st.integers(0, 8))
@properties
def test_running_means_have_full_windows(curve, threshold):
    means = [curve[r - 4 : r].mean() for r in range(4, 31)]
    assert metrics.best_running_mean(curve, window=4) == max(means)
    first = next((r for r, mean in enumerate(means, start=4) if mean >= threshold), np.inf)
    assert metrics.rounds_to_threshold(curve, threshold, window=4) == first


def test_rounds_count_from_one_and_a_window_has_ten_rounds():
    curve = np.r_[np.zeros(5), np.ones(20)]
    levels = metrics.rounds_to_threshold(curve, np.array([0.1, 0.5, 1.0, 1.5]))
    assert levels.tolist() == [10, 10, 15, np.inf]


def test_relative_efficiency_counts_bits_of_float32():
    np.testing.assert_allclose(
        metrics.relative_efficiency(np.array([32 * 784, 100.0]), 784), [1, 250.88], rtol=1e-6
    )
