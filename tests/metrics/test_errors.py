"""Arguments that metrics refuse, with one clear error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import metrics

RNG = np.random.default_rng(0)
KEY = jax.random.key(0)
P = RNG.dirichlet(np.ones(4), (3, 12)).astype(np.float32)
Y = RNG.integers(0, 4, (3, 12)).astype(np.int32)
POSTERIOR = fedmcmc.Posterior(lambda theta: jnp.zeros(()), lambda theta, rows: rows * theta)
DATA = fedmcmc.FederatedData.from_clients([np.ones(2)])


def apply_fn(theta, x):
    return jax.nn.softmax(x[:, None] * theta[None], axis=-1)


ONES = np.ones(4)
EYE = np.eye(2)
BAD = {
    "rows do not sum to one": (lambda: metrics.accuracy(P[0] * 0.9, Y[0]), "and a sum of 0.9"),
    "logits": (lambda: metrics.predictive_entropy(np.array([[2.0, -1.0]])), "Logits need"),
    "nan": (lambda: metrics.agreement(P[0] * np.nan, P[0]), "must be probabilities"),
    "one class": (lambda: metrics.brier_score(np.full(4, 0.5), Y[0]), "for two classes give both"),
    "no rows": (lambda: metrics.accuracy(P[0][:0], Y[0][:0]), "none of them 0"),
    "label too large": (
        lambda: metrics.brier_score(P[0], Y[0] + 4),
        r"labels must lie in \[0, 4\)",
    ),
    "label negative": (lambda: metrics.accuracy(P[0], Y[0] - 9), r"labels must lie in \[0, 4\)"),
    "labels float": (lambda: metrics.accuracy(P[0], Y[0] * 1.0), "labels must be integers"),
    "labels bool": (lambda: metrics.accuracy(P[0], Y[0] > 1), "got dtype bool"),
    "number of labels": (lambda: metrics.accuracy(P[0], Y[0][1:]), "one per row"),
    "leading axes": (lambda: metrics.accuracy(P, Y[:2]), "Leading axes must broadcast"),
    "classes": (lambda: metrics.agreement(P[0], P[0][:6]), "same rows and classes"),
    "num_bins": (lambda: metrics.expected_calibration_error(P, Y, 0), "num_bins must be"),
    "num_bins 1.5": (lambda: metrics.reliability(P, Y, 1.5), "num_bins must be"),
    "thresholds": (lambda: metrics.credibility_accuracy_curve(P, Y, 1), "at least 2"),
    "scores": (lambda: metrics.ood_auc(np.array([np.nan, 1.0]), ONES), "scores_in must be finite"),
    "no scores": (lambda: metrics.ood_auc(ONES, np.ones(0)), "scores_out must have shape"),
    "alpha 0": (lambda: metrics.hpd_error(ONES, ONES, 0.0), r"alpha must lie in \(0, 1\)"),
    "alpha 1": (lambda: metrics.hpd_threshold(ONES, np.array([0.5, 1.0])), "alpha must lie"),
    "alpha nan": (lambda: metrics.hpd_threshold(ONES, np.nan), "alpha must lie"),
    "diverged": (lambda: metrics.hpd_error(ONES / 0, ONES), "potentials must be finite, got 4"),
    "potentials": (lambda: metrics.hpd_error(1.0, ONES), "potentials must have shape"),
    "draws": (
        lambda: metrics.potential(POSTERIOR, DATA, {"a": ONES, "b": np.ones(3)}),
        "same 1 leading axes",
    ),
    "draw axes": (
        lambda: metrics.predictive(apply_fn, ONES, ONES, sample_axes=2),
        "same 2 leading axes",
    ),
    "no draws": (lambda: metrics.predictive(apply_fn, np.ones((0, 2)), ONES), "none of them 0"),
    "batch_size": (
        lambda: metrics.predictive(apply_fn, np.ones((3, 2)), ONES, batch_size=0),
        "batch_size must be",
    ),
    "coordinates": (
        lambda: metrics.marginal_error(np.ones((5, 2)), np.ones((5, 3))),
        "must agree beyond their first axis",
    ),
    "structures": (lambda: metrics.marginal_error({"a": ONES}, ONES), "same structure"),
    "ragged": (
        lambda: metrics.marginal_error_floor(KEY, {"a": ONES, "b": np.ones(3)}, 2),
        "same number of draws",
    ),
    "draws nan": (lambda: metrics.marginal_error(ONES * np.nan, ONES), "draws must be finite"),
    "repeats": (
        lambda: metrics.marginal_error_floor(KEY, ONES, 2, num_repeats=0),
        "num_repeats must be",
    ),
    "dimension": (
        lambda: metrics.gaussian_w2(np.zeros(2), EYE, np.zeros(3), np.eye(3)),
        "same dimension",
    ),
    "covariance shape": (
        lambda: metrics.gaussian_w2(np.zeros(2), np.eye(3), np.zeros(2), EYE),
        "covariance must be matrices",
    ),
    "indefinite": (
        lambda: metrics.gaussian_w2(np.zeros(2), EYE, np.zeros(2), EYE - 2 * np.diag([1.0, 0])),
        "other_covariance must be positive semidefinite, got a smallest eigenvalue of -1",
    ),
    "asymmetric": (
        lambda: metrics.gaussian_w2(np.zeros(2), np.array([[1, 0.5], [0, 1]]), np.zeros(2), EYE),
        "covariance must be symmetric",
    ),
    "negative variance": (
        lambda: metrics.gaussian_w2(np.zeros(2), -np.ones(2), np.zeros(2), np.ones(2)),
        "covariance must not be negative, got a variance of -1",
    ),
    "infinite covariance": (
        lambda: metrics.gaussian_w2(np.zeros(2), EYE * np.nan, np.zeros(2), EYE),
        "covariance must be finite",
    ),
    "truth": (lambda: metrics.estimation_error(EYE, np.ones(3)), "same last axis"),
    "window": (lambda: metrics.best_running_mean(ONES, window=5), "at most the 4 rounds"),
    "bits": (lambda: metrics.relative_efficiency(0, 5), "bits must be positive"),
}


@pytest.mark.parametrize("case", BAD)
def test_clear_errors(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message), np.errstate(divide="ignore"):
        call()


def test_shapes_are_checked_while_tracing_and_so_are_constants():
    with pytest.raises(ValueError, match="one per row"):
        jax.jit(metrics.accuracy)(P[0], Y[0][1:])
    with pytest.raises(ValueError, match="labels must lie"):
        jax.jit(lambda p: metrics.accuracy(p, Y[0] + 4))(P[0])
    with pytest.raises(ValueError, match=r"num_bins must be a positive integer, got JitTracer"):
        jax.jit(metrics.expected_calibration_error)(P[0], Y[0], 4)
    with pytest.raises(ValueError, match="alpha must lie"):
        jax.jit(lambda u: metrics.hpd_threshold(u, 1.0))(ONES)


def test_an_invalid_covariance_is_not_let_through_for_being_nearly_valid():
    # Rounding of a float32 covariance of rank one is; an eigenvalue of -1e-3 is not.
    column = RNG.normal(size=(30, 1)).astype(np.float32)
    rank_one = column @ column.T
    zero = np.zeros(30, np.float32)
    assert metrics.gaussian_w2(zero, rank_one, zero, rank_one) < 1e-2
    bad = rank_one - np.diag(np.full(30, 1e-3, np.float32))
    with pytest.raises(ValueError, match="positive semidefinite"):
        metrics.gaussian_w2(zero, bad, zero, rank_one)
