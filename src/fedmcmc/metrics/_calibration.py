"""Whether confidence, the probability of the predicted class, is the accuracy."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.metrics._arguments import over_leading, positive_integer
from fedmcmc.metrics._classification import correct, rows


class Reliability(NamedTuple):
    """A reliability diagram.

    `upper` is ``[num_bins]``, the bins' closed upper ends ``m / num_bins``; all others are
    ``[..., num_bins]``: `num_rows` in a bin (int32), `accuracy` and `confidence` their means,
    fractions, and `gap` accuracy minus confidence (positive: underconfident). The last three are
    NaN where a bin is empty.
    """

    upper: Array
    num_rows: Array
    accuracy: Array
    confidence: Array
    gap: Array


class CredibilityAccuracy(NamedTuple):
    """Accuracy of the rows whose confidence reaches a threshold.

    `threshold` is ``[num_thresholds]``; `accuracy` (of the rows kept, NaN where none is) and
    `share` (of all rows that are kept) are ``[..., num_thresholds]``, fractions.
    """

    threshold: Array
    accuracy: Array
    share: Array


def expected_calibration_error(probabilities: Any, labels: Any, num_bins: int = 20) -> Array:
    """Return the expected calibration error of the predicted class.

    ``sum_m (|B_m| / n) |acc(B_m) - conf(B_m)|`` over bins ``((m - 1) / M, m / M]`` of confidence,
    the probability of the predicted class (Guo et al. 2017, eq. 3). A confidence of exactly 0 would
    belong to the first bin.

    Parameters
    ----------
    probabilities
        ``[..., num_rows, num_classes]``, each row summing to one.
    labels
        ``[..., num_rows]``, integers in ``[0, num_classes)``.
    num_bins
        ``M``, static. Vono et al. (2022) used 20, others 15; 1 gives ``|accuracy - mean
        confidence|``. The value depends on it.

    Returns
    -------
    Array
        ``[...]``, a fraction in ``[0, 1]``. Table S2 of Vono et al. (2022) prints hundredths.

    Raises
    ------
    ValueError
        As `accuracy`, and if `num_bins` is no positive integer.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> probabilities = jnp.array([[0.75, 0.25]] * 4)
    >>> float(expected_calibration_error(probabilities, jnp.array([0, 0, 0, 1])))
    0.0
    >>> float(expected_calibration_error(probabilities, jnp.array([0, 0, 0, 0])))
    0.25
    """
    num_bins = positive_integer("num_bins", num_bins)
    probs, labels_ = rows(probabilities, labels)
    return _expected_calibration_error(probs, labels_, num_bins=num_bins)


def reliability(probabilities: Any, labels: Any, num_bins: int = 20) -> Reliability:
    """Return accuracy and mean confidence of the rows in each bin of confidence.

    Bins are those of `expected_calibration_error`, which is the mean of ``|gap|`` weighted by
    ``num_rows``.

    Parameters
    ----------
    probabilities
        ``[..., num_rows, num_classes]``, each row summing to one.
    labels
        ``[..., num_rows]``, integers in ``[0, num_classes)``.
    num_bins
        Bins of equal width on ``[0, 1]``, static.

    Returns
    -------
    Reliability
        Counts and fractions ``[..., num_bins]``.

    Raises
    ------
    ValueError
        As `expected_calibration_error`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> found = reliability(jnp.array([[0.75, 0.25]] * 4), jnp.array([0, 0, 0, 0]), num_bins=2)
    >>> found.num_rows.tolist(), found.gap.tolist()
    ([0, 4], [nan, 0.25])
    """
    num_bins = positive_integer("num_bins", num_bins)
    probs, labels_ = rows(probabilities, labels)
    return _reliability(probs, labels_, num_bins=num_bins)


def credibility_accuracy_curve(
    probabilities: Any, labels: Any, num_thresholds: int = 100
) -> CredibilityAccuracy:
    """Return the accuracy on rows whose confidence is at least a threshold.

    Thresholds are equally spaced on ``[0, 1]``, both ends included; at 0 all rows are kept (the
    "accuracy versus confidence" curve of Lakshminarayanan et al. 2017).

    Parameters
    ----------
    probabilities
        ``[..., num_rows, num_classes]``, each row summing to one.
    labels
        ``[..., num_rows]``, integers in ``[0, num_classes)``.
    num_thresholds
        At least 2, static.

    Returns
    -------
    CredibilityAccuracy
        Thresholds, and for each the accuracy (NaN where no row is kept) and the share of rows
        kept.

    Raises
    ------
    ValueError
        As `accuracy`, and if `num_thresholds` is not an integer of at least 2.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> probabilities = jnp.array([[0.9, 0.1], [0.6, 0.4]])
    >>> curve = credibility_accuracy_curve(probabilities, jnp.array([0, 1]), num_thresholds=5)
    >>> curve.threshold.tolist()
    [0.0, 0.25, 0.5, 0.75, 1.0]
    >>> curve.accuracy.tolist(), curve.share.tolist()
    ([0.5, 0.5, 0.5, 1.0, nan], [1.0, 1.0, 1.0, 0.5, 0.0])
    """
    num_thresholds = positive_integer("num_thresholds", num_thresholds)
    if num_thresholds == 1:
        raise ValueError("num_thresholds must be at least 2, for both ends of [0, 1], got 1.")
    probs, labels_ = rows(probabilities, labels)
    return _curve(probs, labels_, num_thresholds=num_thresholds)


def _upper_ends(num_bins: int, dtype: Any) -> Array:
    # Each end rounded to the dtype once, so that a confidence of m / M lies in bin m exactly.
    return jnp.asarray(np.arange(1, num_bins + 1) / num_bins, dtype)


def _bin_sums(confidence: Array, hits: Array, num_bins: int) -> tuple[Array, Array, Array]:
    """Return count, sum of hits and sum of confidence of every bin, from ``[num_rows]``."""
    # Compared with all ends but the last, 1: rounding may put a confidence above it.
    inner = _upper_ends(num_bins, confidence.dtype)[:-1]
    place = jnp.searchsorted(inner, confidence, side="left", method="compare_all")
    member = place[:, None] == jnp.arange(num_bins, dtype=place.dtype)[None]
    zero = jnp.zeros((), confidence.dtype)
    return (
        jnp.sum(member, axis=0, dtype=jnp.int32),
        jnp.sum(jnp.where(member, hits[:, None], zero), axis=0),
        jnp.sum(jnp.where(member, confidence[:, None], zero), axis=0),
    )


def _bins(probabilities: Array, labels: Array, num_bins: int) -> tuple[Array, Array, Array]:
    confidence, hits = jnp.max(probabilities, axis=-1), correct(probabilities, labels)
    sums = over_leading(partial(_bin_sums, num_bins=num_bins), labels.ndim - 1)
    return sums(confidence, hits)


@partial(jax.jit, static_argnames="num_bins")
def _expected_calibration_error(probabilities: Array, labels: Array, *, num_bins: int) -> Array:
    _, hits, confidence = _bins(probabilities, labels, num_bins)
    return jnp.sum(jnp.abs(hits - confidence), axis=-1) / labels.shape[-1]


@partial(jax.jit, static_argnames="num_bins")
def _reliability(probabilities: Array, labels: Array, *, num_bins: int) -> Reliability:
    count, hits, confidence = _bins(probabilities, labels, num_bins)
    number = count.astype(hits.dtype)
    # Zero by zero is the NaN of an empty bin.
    return Reliability(
        _upper_ends(num_bins, hits.dtype),
        count,
        hits / number,
        confidence / number,
        (hits - confidence) / number,
    )


@partial(jax.jit, static_argnames="num_thresholds")
def _curve(probabilities: Array, labels: Array, *, num_thresholds: int) -> CredibilityAccuracy:
    dtype = probabilities.dtype
    threshold = jnp.asarray(np.linspace(0, 1, num_thresholds), dtype)

    def one(confidence: Array, hits: Array) -> tuple[Array, Array]:
        # A row is kept by the thresholds up to its confidence: count from the top.
        last = jnp.searchsorted(threshold, confidence, side="right") - 1
        each = jnp.zeros(num_thresholds, jnp.int32).at[last].add(1)
        right = jnp.zeros(num_thresholds, dtype).at[last].add(hits)
        num_kept = jnp.cumsum(each[::-1])[::-1].astype(dtype)
        return jnp.cumsum(right[::-1])[::-1] / num_kept, num_kept / hits.shape[0]

    confidence, hits = jnp.max(probabilities, axis=-1), correct(probabilities, labels)
    accuracy, share = over_leading(one, labels.ndim - 1)(confidence, hits)
    return CredibilityAccuracy(threshold, accuracy, share)
