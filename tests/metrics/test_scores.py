"""Scores of predictions: identities, independent references, properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import log_loss, roc_auc_score

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
scores = arrays(np.int64, 25, elements=st.integers(-4, 4))


def normalise(counts):
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


def reference_ece(probs, truth, num_bins):
    gaps = [
        abs(np.mean(hit) - np.mean(confidence)) * len(hit)
        for confidence, hit in reference_bins(probs, truth, num_bins)
        if hit
    ]
    return sum(gaps) / len(truth)


def test_identities():
    p = PROBABILITIES
    assert metrics.total_variation(p, p) == 0
    assert metrics.agreement(p, p) == 1
    assert metrics.brier_score(ONE_HOT, LABELS) == 0
    np.testing.assert_allclose(metrics.brier_score(UNIFORM, LABELS), 1 - 1 / 5, rtol=1e-6)
    np.testing.assert_allclose(metrics.brier_score(ONE_HOT, (LABELS + 1) % 5), 2, rtol=1e-6)
    assert metrics.negative_log_likelihood(ONE_HOT, LABELS) == 0
    np.testing.assert_allclose(
        metrics.negative_log_likelihood(UNIFORM, LABELS), np.log(5), rtol=1e-6
    )
    assert metrics.accuracy(ONE_HOT, LABELS) == 1
    assert metrics.expected_calibration_error(ONE_HOT, LABELS) == 0
    assert metrics.expected_calibration_error(ONE_HOT, (LABELS + 1) % 5) == 1
    np.testing.assert_array_equal(metrics.predictive_entropy(ONE_HOT), np.zeros(300))
    np.testing.assert_allclose(metrics.predictive_entropy(UNIFORM), np.log(5), rtol=1e-6)


def test_perfectly_calibrated_bins_have_no_error():
    # In the bin of confidence k / 8 exactly k of 8 rows are right; dyadic, so without rounding.
    probs = np.array([[k / 8, 1 - k / 8] for k in (5, 6, 7) for _ in range(8)])
    truth = np.array([int(i >= k) for k in (5, 6, 7) for i in range(8)])
    for num_bins in (8, 20):
        assert metrics.expected_calibration_error(probs, truth, num_bins) == 0
    # Coarser bins that mix them are calibrated as well.
    assert metrics.expected_calibration_error(probs, truth, 1) == 0


def test_against_references_in_double_precision():
    p, y = PROBABILITIES, LABELS
    close = {"rtol": 2e-6}
    np.testing.assert_allclose(metrics.negative_log_likelihood(p, y), log_loss(y, p), **close)
    np.testing.assert_allclose(
        metrics.brier_score(p, y), np.mean(np.sum((p - ONE_HOT) ** 2, axis=1)), **close
    )
    np.testing.assert_allclose(metrics.accuracy(p, y), np.mean(p.argmax(1) == y), **close)
    entropies = [-sum(v * np.log(v) for v in row) for row in p]
    np.testing.assert_allclose(metrics.predictive_entropy(p), entropies, rtol=1e-5)
    q = RNG.dirichlet(np.ones(5), 300)
    np.testing.assert_allclose(
        metrics.agreement(p, q), np.mean(p.argmax(1) == q.argmax(1)), **close
    )
    np.testing.assert_allclose(
        metrics.total_variation(p, q),
        np.mean([np.maximum(a - b, 0).sum() for a, b in zip(p, q, strict=True)]),
        **close,
    )


def test_one_bin_is_accuracy_minus_mean_confidence():
    p, y = PROBABILITIES, LABELS
    gap = abs(np.mean(p.argmax(1) == y) - p.max(1).mean())
    np.testing.assert_allclose(metrics.expected_calibration_error(p, y, 1), gap, rtol=1e-5)


@given(weights, labels, st.sampled_from([3, 20]))
@properties
def test_calibration_by_bins(counts, truth, num_bins):
    probs = normalise(counts)
    found = metrics.reliability(probs, truth, num_bins)
    for m, (confidence, hits) in enumerate(reference_bins(probs, truth, num_bins)):
        assert found.num_rows[m] == len(hits)
        if hits:
            np.testing.assert_allclose(found.accuracy[m], np.mean(hits), rtol=1e-6)
            np.testing.assert_allclose(found.confidence[m], np.mean(confidence), rtol=1e-6)
            gap = np.mean(hits) - np.mean(confidence)
            np.testing.assert_allclose(found.gap[m], gap, rtol=1e-5, atol=1e-6)
        else:
            assert np.isnan([found.accuracy[m], found.confidence[m], found.gap[m]]).all()
    np.testing.assert_allclose(
        metrics.expected_calibration_error(probs, truth, num_bins),
        reference_ece(probs, truth, num_bins),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("num_bins", [7, 15, 20, 100])
def test_bins_are_closed_above(num_bins):
    # One row of confidence m / M for each m that two classes can have, in single precision.
    ends = np.array([m / num_bins for m in range((num_bins + 1) // 2, num_bins + 1)], np.float32)
    probs = np.stack([ends, 1 - ends], axis=1)
    count = metrics.reliability(probs, np.zeros(len(ends), int), num_bins).num_rows
    assert count[-len(ends) :].tolist() == [1] * len(ends) and count.sum() == len(ends)


def test_every_confidence_has_a_bin():
    # 0 and what rounding leaves above 1: compiled, because the check of values forbids the former.
    count = jax.jit(lambda p: metrics.reliability(p, jnp.zeros(2, int), 4).num_rows)
    assert count(jnp.array([[0.0, 0.0], [1.0000001, 0.0]])).tolist() == [1, 0, 0, 1]


@given(weights, labels)
@properties
def test_curve_of_confident_rows(counts, truth):
    probs = normalise(counts)
    curve = metrics.credibility_accuracy_curve(probs, truth)
    assert curve.threshold.shape == (100,)
    for tau, accuracy, share in zip(*map(np.asarray, curve), strict=True):
        kept = probs.max(axis=1) >= tau
        np.testing.assert_allclose(share, kept.mean(), rtol=1e-6)
        hits = (probs.argmax(axis=1) == truth)[kept]
        np.testing.assert_allclose(accuracy, hits.mean() if kept.any() else np.nan, rtol=1e-6)


def test_curve_starts_at_the_accuracy_and_ends_where_rows_are_certain():
    curve = metrics.credibility_accuracy_curve(PROBABILITIES, LABELS, num_thresholds=11)
    np.testing.assert_array_equal(curve.accuracy[0], metrics.accuracy(PROBABILITIES, LABELS))
    assert curve.share[0] == 1 and curve.share[-1] == 0 and np.isnan(curve.accuracy[-1])
    certain = metrics.credibility_accuracy_curve(ONE_HOT, LABELS, num_thresholds=2)
    assert certain.accuracy.tolist() == [1, 1] and certain.share.tolist() == [1, 1]


@given(weights, weights)
@properties
def test_comparisons_are_distances_on_their_scale(a, b):
    p, q = normalise(a), normalise(b)
    distance = float(metrics.total_variation(p, q))
    assert 0 <= distance <= 1 + 1e-6
    assert distance == metrics.total_variation(q, p)
    np.testing.assert_allclose(distance, np.abs(p - q).sum(1).mean() / 2, rtol=1e-5, atol=1e-7)
    assert metrics.agreement(p, q) == metrics.agreement(q, p)
    np.testing.assert_allclose(metrics.agreement(p, q), (p.argmax(1) == q.argmax(1)).mean(), 1e-6)


@given(weights, labels)
@properties
def test_scores_do_not_depend_on_the_order_of_rows_and_classes(counts, truth):
    probs = normalise(counts)
    rows, classes = np.random.default_rng(1).permutation(ROWS), np.array([2, 0, 1])
    moved, renamed = probs[rows][:, classes], np.argsort(classes)[truth[rows]]
    for score in (metrics.brier_score, metrics.negative_log_likelihood):
        np.testing.assert_allclose(score(probs, truth), score(moved, renamed), rtol=1e-5)
    entropy = metrics.predictive_entropy(probs)
    np.testing.assert_allclose(metrics.predictive_entropy(moved), entropy[rows], atol=1e-6)
    assert ((entropy >= 0) & (entropy <= np.log(CLASSES) + 1e-6)).all()


def test_brier_score_is_proper():
    # Expected under the truth q, the score of q is the least: by the noise of p, exactly.
    q, p = RNG.dirichlet(np.ones(4)), RNG.dirichlet(np.ones(4), 50)
    each = [metrics.brier_score(p[:, None], np.full((1,), y)) for y in range(4)]
    expected = np.einsum("y,yn->n", q, np.array(each))
    np.testing.assert_allclose(expected, 1 - (q**2).sum() + ((p - q) ** 2).sum(axis=1), rtol=1e-5)


def test_a_label_of_probability_zero_costs_infinity():
    assert metrics.negative_log_likelihood(ONE_HOT, (LABELS + 1) % 5) == np.inf


def test_probabilities_that_rounding_moved_out_of_their_interval():
    rounded, certain = np.array([[1 + 1e-7, -1e-9]]), np.array([[1.0, 0.0]])
    assert metrics.negative_log_likelihood(rounded, np.array([1])) == np.inf
    assert metrics.predictive_entropy(rounded) == metrics.predictive_entropy(certain) == 0


@given(scores, scores)
@properties
def test_auc_counts_all_pairs_and_half_of_the_ties(a, b):
    pairs = np.sign(b[None] - a[:, None])
    found = float(metrics.ood_auc(a, b))
    np.testing.assert_allclose(found, (pairs + 1).mean() / 2, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found + metrics.ood_auc(b, a), 1, rtol=1e-6)


def test_auc_is_that_of_the_roc_curve():
    a, b = RNG.normal(0, 1, 400).round(1), RNG.normal(1, 2, 700).round(1)
    truth = np.r_[np.zeros(400), np.ones(700)]
    np.testing.assert_allclose(metrics.ood_auc(a, b), roc_auc_score(truth, np.r_[a, b]), rtol=1e-6)
    np.testing.assert_allclose(metrics.ood_auc(a - 100, b), 1, rtol=1e-6)
    assert metrics.ood_auc(b + 100, a) == 0
    assert metrics.ood_auc(np.zeros(3), np.zeros(4)) == 0.5


def test_auc_does_not_hold_all_pairs():
    like = jax.ShapeDtypeStruct((20_000,), jnp.float32)
    compiled = jax.jit(metrics.ood_auc).lower(like, like).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 100 * 20_000
