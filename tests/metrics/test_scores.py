"""Scores of predictions against independent references."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import log_loss

from fedmcmc import metrics

RNG = np.random.default_rng(0)
ROWS, CLASSES = 40, 3
PROBABILITIES = RNG.dirichlet(np.full(5, 0.7), 300)
LABELS = RNG.integers(0, 5, 300)
ONE_HOT = np.eye(5)[LABELS]
UNIFORM = np.full((300, 5), 0.2)

properties = settings(deadline=None, max_examples=25, derandomize=True)
# Small integers make ties, zeros and confidences on the edges of bins common.
weights = arrays(np.int64, (ROWS, CLASSES), elements=st.integers(0, 10)).filter(
    lambda w: (w.sum(axis=-1) > 0).all()
)
labels = arrays(np.int64, ROWS, elements=st.integers(0, CLASSES - 1))
small_integers = st.integers(-4, 4)


def normalize(counts):
    return (counts / counts.sum(axis=-1, keepdims=True)).astype(np.float32)


def reference_bins(probs, truth, num_bins):
    """Return lists of confidences and hits of each bin ``((m - 1) / M, m / M]``, row by row."""
    ends = np.array([m / num_bins for m in range(num_bins + 1)]).astype(probs.dtype)
    bins = [([], []) for _ in range(num_bins)]
    for row, label in zip(probs, truth, strict=True):
        confidence = row.max()
        m = next((m for m in range(1, num_bins) if confidence <= ends[m]), num_bins)
        bins[m - 1][0].append(float(confidence))
        bins[m - 1][1].append(float(list(row).index(confidence) == label))
    return bins


def test_certain_and_uniform_predictions_have_known_scores():
    wrong = (LABELS + 1) % 5
    assert metrics.brier_score(ONE_HOT, LABELS) == 0
    np.testing.assert_allclose(metrics.brier_score(UNIFORM, LABELS), 1 - 1 / 5, rtol=1e-6)
    np.testing.assert_allclose(metrics.brier_score(ONE_HOT, wrong), 2, rtol=1e-6)
    assert metrics.negative_log_likelihood(ONE_HOT, LABELS) == 0
    assert metrics.negative_log_likelihood(ONE_HOT, wrong) == np.inf
    np.testing.assert_allclose(
        metrics.negative_log_likelihood(UNIFORM, LABELS), np.log(5), rtol=1e-6
    )
    assert metrics.accuracy(ONE_HOT, LABELS) == 1
    assert metrics.expected_calibration_error(ONE_HOT, LABELS) == 0
    assert metrics.expected_calibration_error(ONE_HOT, wrong) == 1
    np.testing.assert_array_equal(metrics.predictive_entropy(ONE_HOT), np.zeros(300))
    np.testing.assert_allclose(metrics.predictive_entropy(UNIFORM), np.log(5), rtol=1e-6)
    # Rounding moves probabilities out of their interval.
    rounded, certain = np.array([[1 + 1e-7, -1e-9]]), np.array([[1.0, 0.0]])
    assert metrics.negative_log_likelihood(rounded, np.array([1])) == np.inf
    assert metrics.predictive_entropy(rounded) == metrics.predictive_entropy(certain) == 0


def test_scores_equal_references_in_double_precision():
    p, y = PROBABILITIES, LABELS
    for result, expected in (
        (metrics.negative_log_likelihood(p, y), log_loss(y, p)),
        (metrics.brier_score(p, y), np.mean(np.sum((p - ONE_HOT) ** 2, axis=1))),
        (metrics.accuracy(p, y), np.mean(p.argmax(1) == y)),
    ):
        np.testing.assert_allclose(result, expected, rtol=2e-6)
    entropies = [-sum(v * np.log(v) for v in row) for row in p]
    np.testing.assert_allclose(metrics.predictive_entropy(p), entropies, rtol=1e-5)


@given(weights, labels, st.sampled_from([1, 3, 20]))
@properties
def test_calibration_equals_a_reference_by_bins(counts, truth, num_bins):
    probs = normalize(counts)
    result = metrics.reliability(probs, truth, num_bins)
    error = 0.0
    for m, (confidence, hits) in enumerate(reference_bins(probs, truth, num_bins)):
        assert result.num_rows[m] == len(hits)
        if hits:
            gap = np.mean(hits) - np.mean(confidence)
            error += abs(gap) * len(hits) / ROWS
            np.testing.assert_allclose(result.accuracy[m], np.mean(hits), rtol=1e-6)
            np.testing.assert_allclose(result.confidence[m], np.mean(confidence), rtol=1e-6)
            np.testing.assert_allclose(result.gap[m], gap, rtol=1e-5, atol=1e-6)
        else:
            assert np.isnan([result.accuracy[m], result.confidence[m], result.gap[m]]).all()
    calibration = metrics.expected_calibration_error(probs, truth, num_bins)
    np.testing.assert_allclose(calibration, error, rtol=1e-5, atol=1e-6)


def test_bins_are_closed_above_and_cover_all_confidences():
    for num_bins in (7, 15, 20, 100):
        # One row of confidence m / M for each m that two classes can have, in single precision.
        first = (num_bins + 1) // 2
        ends = np.array([m / num_bins for m in range(first, num_bins + 1)], np.float32)
        probs = np.stack([ends, 1 - ends], axis=1)
        count = metrics.reliability(probs, np.zeros(len(ends), int), num_bins).num_rows
        assert count[-len(ends) :].tolist() == [1] * len(ends) and count.sum() == len(ends)
    # 0 and what rounding leaves above 1: compiled, because the check of values forbids the former.
    count = jax.jit(lambda p: metrics.reliability(p, jnp.zeros(2, int), 4).num_rows)
    assert count(jnp.array([[0.0, 0.0], [1.0000001, 0.0]])).tolist() == [1, 0, 0, 1]


@given(weights, labels, st.sampled_from([2, 100]))
@properties
def test_a_curve_has_the_accuracy_of_confident_rows(counts, truth, num_thresholds):
    probs = normalize(counts)
    curve = metrics.credibility_accuracy_curve(probs, truth, num_thresholds)
    np.testing.assert_allclose(curve.threshold, np.linspace(0, 1, num_thresholds), rtol=1e-6)
    for tau, accuracy, share in zip(*map(np.asarray, curve), strict=True):
        confident = probs.max(axis=1) >= tau
        np.testing.assert_allclose(share, confident.mean(), rtol=1e-6)
        hits = (probs.argmax(axis=1) == truth)[confident]
        np.testing.assert_allclose(accuracy, hits.mean() if confident.any() else np.nan, rtol=1e-6)


@given(weights, weights)
@properties
def test_total_variation_and_agreement_compare_predictions(a, b):
    p, q = normalize(a), normalize(b)
    distance = float(metrics.total_variation(p, q))
    assert distance == metrics.total_variation(q, p) and metrics.total_variation(p, p) == 0
    np.testing.assert_allclose(distance, np.abs(p - q).sum(1).mean() / 2, rtol=1e-5, atol=1e-7)
    assert metrics.agreement(p, q) == metrics.agreement(q, p)
    np.testing.assert_allclose(metrics.agreement(p, q), (p.argmax(1) == q.argmax(1)).mean(), 1e-6)


@given(arrays(np.int64, 25, elements=small_integers), arrays(np.int64, 9, elements=small_integers))
@properties
def test_auc_counts_all_pairs_and_half_of_the_ties(a, b):
    pairs = np.sign(b[None] - a[:, None])
    result = float(metrics.ood_auc(a, b))
    np.testing.assert_allclose(result, (pairs + 1).mean() / 2, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(result + metrics.ood_auc(b, a), 1, rtol=1e-6)


def test_auc_does_not_hold_all_pairs():
    like = jax.ShapeDtypeStruct((20_000,), jnp.float32)
    compiled = jax.jit(metrics.ood_auc).lower(like, like).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 100 * 20_000
