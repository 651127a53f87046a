"""Errors of metrics for wrong arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import metrics
from tests.metrics.test_contract import KEY, RNG, P, Y, apply_fn

POSTERIOR = fedmcmc.Posterior(lambda theta: jnp.zeros(()), lambda theta, rows: rows * theta)
DATA = fedmcmc.FederatedData.from_clients([np.ones(2)])
ONES, EYE, ZERO = np.ones(4), np.eye(2), np.zeros(2)
RAGGED = {"a": ONES, "b": np.ones(3)}
ASYMMETRIC = np.array([[1, 0.5], [0, 1]])

# Messages, and calls that raise them: a metric, its arguments, its settings.
BAD = [
    ("and a sum of 0.9", metrics.accuracy, (P[0] * 0.9, Y[0]), {}),
    ("Logits need", metrics.predictive_entropy, (np.array([[2.0, -1.0]]),), {}),
    ("must be probabilities", metrics.agreement, (P[0] * np.nan, P[0]), {}),
    ("for two classes give both", metrics.brier_score, (np.full(4, 0.5), Y[0]), {}),
    ("none of them 0", metrics.accuracy, (P[0][:0], Y[0][:0]), {}),
    (r"labels must lie in \[0, 4\)", metrics.brier_score, (P[0], Y[0] + 4), {}),
    (r"labels must lie in \[0, 4\)", metrics.accuracy, (P[0], Y[0] - 9), {}),
    ("labels must be integers", metrics.accuracy, (P[0], Y[0] * 1.0), {}),
    ("got dtype bool", metrics.accuracy, (P[0], Y[0] > 1), {}),
    ("one per row", metrics.accuracy, (P[0], Y[0][1:]), {}),
    ("Leading axes must broadcast", metrics.accuracy, (P, Y[:2]), {}),
    ("same rows and classes", metrics.agreement, (P[0], P[0][:6]), {}),
    ("num_bins must be", metrics.expected_calibration_error, (P, Y, 0), {}),
    ("num_bins must be", metrics.reliability, (P, Y, 1.5), {}),
    ("at least 2", metrics.credibility_accuracy_curve, (P, Y, 1), {}),
    ("scores_in must be finite", metrics.ood_auc, (np.array([np.nan, 1.0]), ONES), {}),
    ("scores_out must have shape", metrics.ood_auc, (ONES, np.ones(0)), {}),
    (r"alpha must lie in \(0, 1\)", metrics.hpd_error, (ONES, ONES, 0.0), {}),
    ("alpha must lie", metrics.hpd_threshold, (ONES, np.array([0.5, 1.0])), {}),
    ("alpha must lie", metrics.hpd_threshold, (ONES, np.nan), {}),
    ("potentials must be finite, got 4", metrics.hpd_error, (ONES * np.inf, ONES), {}),
    ("potentials must have shape", metrics.hpd_error, (1.0, ONES), {}),
    ("same 1 leading axes", metrics.potential, (POSTERIOR, DATA, RAGGED), {}),
    ("same 2 leading axes", metrics.predictive, (apply_fn, ONES, ONES), {"sample_axes": 2}),
    ("none of them 0", metrics.predictive, (apply_fn, np.ones((0, 2)), ONES), {}),
    ("batch_size must be", metrics.predictive, (apply_fn, EYE, ONES), {"batch_size": 0}),
    ("must agree beyond their first axis", metrics.marginal_error, (EYE, np.ones((5, 3))), {}),
    ("same structure", metrics.marginal_error, ({"a": ONES}, ONES), {}),
    ("same number of draws", metrics.marginal_error_floor, (KEY, RAGGED, 2), {}),
    ("draws must be finite", metrics.marginal_error, (ONES * np.nan, ONES), {}),
    ("num_repeats must be", metrics.marginal_error_floor, (KEY, ONES, 2), {"num_repeats": 0}),
    ("same dimension", metrics.gaussian_w2, (ZERO, EYE, np.zeros(3), np.eye(3)), {}),
    ("covariance must be matrices", metrics.gaussian_w2, (ZERO, np.eye(3), ZERO, EYE), {}),
    (
        "other_covariance must be positive semidefinite, got a smallest eigenvalue of -1",
        metrics.gaussian_w2,
        (ZERO, EYE, ZERO, EYE - 2 * np.diag([1.0, 0])),
        {},
    ),
    ("covariance must be symmetric", metrics.gaussian_w2, (ZERO, ASYMMETRIC, ZERO, EYE), {}),
    (
        "covariance must not be negative, got a variance of -1",
        metrics.gaussian_w2,
        (ZERO, -np.ones(2), ZERO, np.ones(2)),
        {},
    ),
    ("covariance must be finite", metrics.gaussian_w2, (ZERO, EYE * np.nan, ZERO, EYE), {}),
    ("same last axis", metrics.estimation_error, (EYE, np.ones(3)), {}),
    ("at most the 4 rounds", metrics.best_running_mean, (ONES,), {"window": 5}),
    ("bits must be positive", metrics.relative_efficiency, (0, 5), {}),
    # Shapes and constants are checked while a program is traced.
    ("one per row", jax.jit(metrics.accuracy), (P[0], Y[0][1:]), {}),
    ("labels must lie", jax.jit(lambda p: metrics.accuracy(p, Y[0] + 4)), (P[0],), {}),
    (
        r"num_bins must be a positive integer, got JitTracer",
        jax.jit(metrics.expected_calibration_error),
        (P[0], Y[0], 4),
        {},
    ),
    ("alpha must lie", jax.jit(lambda u: metrics.hpd_threshold(u, 1.0)), (ONES,), {}),
]


@pytest.mark.parametrize(("message", "metric", "arguments", "settings"), BAD)
def test_wrong_arguments_raise(message, metric, arguments, settings):
    with pytest.raises(ValueError, match=message):
        metric(*arguments, **settings)


def test_rounding_of_a_covariance_passes_and_a_negative_eigenvalue_raises():
    column = RNG.normal(size=(30, 1)).astype(np.float32)
    rank_one = column @ column.T
    zero = np.zeros(30, np.float32)
    assert metrics.gaussian_w2(zero, rank_one, zero, rank_one) < 1e-2
    bad = rank_one - np.diag(np.full(30, 1e-3, np.float32))
    with pytest.raises(ValueError, match="positive semidefinite"):
        metrics.gaussian_w2(zero, bad, zero, rank_one)
