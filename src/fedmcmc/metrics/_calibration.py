"""Calibration: comparison of confidence, the probability of the predicted class, with accuracy."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from fedmcmc._checks import positive_integer
from fedmcmc.metrics._arguments import map_leading
from fedmcmc.metrics._classification import check_predictions, score_hits


class Reliability(NamedTuple):
    """Reliability diagram.

    Attributes
    ----------
    upper
        ``[num_bins]``, closed upper ends ``m / num_bins`` of the bins.
    num_rows
        ``[..., num_bins]`` int32, number of rows per bin.
    accuracy, confidence
        ``[..., num_bins]``, means over the rows of a bin, fractions; NaN if the bin is empty.
    gap
        ``[..., num_bins]``, accuracy minus confidence; positive values show underconfidence.
    """

    upper: Array
    num_rows: Array
    accuracy: Array
    confidence: Array
    gap: Array


class CredibilityAccuracy(NamedTuple):
    """Accuracy of the rows whose confidence reaches a threshold.

    Attributes
    ----------
    threshold
        ``[num_thresholds]``, smallest confidence.
    accuracy
        ``[..., num_thresholds]``, fraction of the rows that reach it; NaN if none does.
    share
        ``[..., num_thresholds]``, fraction of all rows that reach it.
    """

    threshold: Array
    accuracy: Array
    share: Array


def expected_calibration_error(
    probabilities: ArrayLike, labels: ArrayLike, num_bins: int = 20
) -> Array:
    """Return the expected calibration error of the predicted class.

    ``sum_m (|B_m| / n) |acc(B_m) - conf(B_m)|`` over bins ``((m - 1) / M, m / M]`` of confidence
    (Guo et al. 2017, eq. 3). A confidence of exactly 0 would belong to the first bin.

    Parameters
    ----------
    probabilities, labels
        See `accuracy`, which raises the same errors.
    num_bins
        ``M``, static; the value depends on it. Vono et al. (2022) used 20, others 15; 1 gives
        ``|accuracy - mean confidence|``.

    Returns
    -------
    Array
        ``[...]``, a fraction in ``[0, 1]``. Table S2 of Vono et al. (2022) prints hundredths.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> probabilities = jnp.array([[0.75, 0.25]] * 4)
    >>> float(expected_calibration_error(probabilities, jnp.array([0, 0, 0, 1])))
    0.0
    >>> float(expected_calibration_error(probabilities, jnp.array([0, 0, 0, 0])))
    0.25
    """
    num_bins = positive_integer(num_bins, "num_bins")
    return _expected_calibration_error(*check_predictions(probabilities, labels), num_bins=num_bins)


def reliability(probabilities: ArrayLike, labels: ArrayLike, num_bins: int = 20) -> Reliability:
    """Return accuracy and mean confidence of the rows in each bin of confidence.

    `expected_calibration_error` is the mean of ``|gap|`` weighted by ``num_rows``.

    Parameters
    ----------
    probabilities, labels
        See `accuracy`, which raises the same errors.
    num_bins
        Number of bins of equal width on ``[0, 1]``, static.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> diagram = reliability(jnp.array([[0.75, 0.25]] * 4), jnp.array([0, 0, 0, 0]), num_bins=2)
    >>> diagram.num_rows.tolist(), diagram.gap.tolist()
    ([0, 4], [nan, 0.25])
    """
    num_bins = positive_integer(num_bins, "num_bins")
    return _reliability(*check_predictions(probabilities, labels), num_bins=num_bins)


def credibility_accuracy_curve(
    probabilities: ArrayLike, labels: ArrayLike, num_thresholds: int = 100
) -> CredibilityAccuracy:
    """Return the accuracy on rows whose confidence is at least a threshold.

    Thresholds are equally spaced on ``[0, 1]``, with both ends. This is the "accuracy versus
    confidence" curve of Lakshminarayanan et al. (2017).

    Parameters
    ----------
    probabilities, labels
        See `accuracy`, which raises the same errors.
    num_thresholds
        Number of thresholds, at least 2, static.

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
    num_thresholds = positive_integer(num_thresholds, "num_thresholds")
    if num_thresholds == 1:
        raise ValueError("num_thresholds must be at least 2, for both ends of [0, 1], got 1.")
    return _curve(*check_predictions(probabilities, labels), num_thresholds=num_thresholds)


def _upper_ends(num_bins: int, dtype: DTypeLike) -> Array:
    # Each end is rounded to the dtype once, so that a confidence of m / M lies exactly in bin m.
    return jnp.asarray(np.arange(1, num_bins + 1) / num_bins, dtype)


def _bin_sums(confidence: Array, hits: Array, num_bins: int) -> tuple[Array, Array, Array]:
    """Return count, sum of hits and sum of confidence of each bin, from ``[num_rows]``."""
    # The last end, 1, is left out: rounding may put a confidence above it.
    inner = _upper_ends(num_bins, confidence.dtype)[:-1]
    index = jnp.searchsorted(inner, confidence, side="left", method="compare_all")
    member = index[:, None] == jnp.arange(num_bins, dtype=index.dtype)[None]
    zero = jnp.zeros((), confidence.dtype)
    return (
        jnp.sum(member, axis=0, dtype=jnp.int32),
        jnp.sum(jnp.where(member, hits[:, None], zero), axis=0),
        jnp.sum(jnp.where(member, confidence[:, None], zero), axis=0),
    )


def _bins(probabilities: Array, labels: Array, num_bins: int) -> tuple[Array, Array, Array]:
    confidence, hits = (jnp.max(probabilities, axis=-1), score_hits(probabilities, labels))
    sums = map_leading(partial(_bin_sums, num_bins=num_bins), labels.ndim - 1)
    return sums(confidence, hits)


@partial(jax.jit, static_argnames="num_bins")
def _expected_calibration_error(probabilities: Array, labels: Array, *, num_bins: int) -> Array:
    _, hits, confidence = _bins(probabilities, labels, num_bins)
    return jnp.sum(jnp.abs(hits - confidence), axis=-1) / labels.shape[-1]


@partial(jax.jit, static_argnames="num_bins")
def _reliability(probabilities: Array, labels: Array, *, num_bins: int) -> Reliability:
    counts, hits, confidence = _bins(probabilities, labels, num_bins)
    num_rows = counts.astype(hits.dtype)
    # Zero by zero is the NaN of an empty bin.
    return Reliability(
        _upper_ends(num_bins, hits.dtype),
        counts,
        hits / num_rows,
        confidence / num_rows,
        (hits - confidence) / num_rows,
    )


@partial(jax.jit, static_argnames="num_thresholds")
def _curve(probabilities: Array, labels: Array, *, num_thresholds: int) -> CredibilityAccuracy:
    dtype = probabilities.dtype
    threshold = jnp.asarray(np.linspace(0, 1, num_thresholds), dtype)

    def compute(confidence: Array, hits: Array) -> tuple[Array, Array]:
        # A row reaches the thresholds up to its confidence, so counts accumulate from the top.
        highest = jnp.searchsorted(threshold, confidence, side="right") - 1
        counts = jnp.zeros(num_thresholds, jnp.int32).at[highest].add(1)
        num_hits = jnp.zeros(num_thresholds, dtype).at[highest].add(hits)
        num_above = jnp.cumsum(counts[::-1])[::-1].astype(dtype)
        return jnp.cumsum(num_hits[::-1])[::-1] / num_above, num_above / hits.shape[0]

    confidence, hits = (jnp.max(probabilities, axis=-1), score_hits(probabilities, labels))
    accuracy, share = map_leading(compute, labels.ndim - 1)(confidence, hits)
    return CredibilityAccuracy(threshold, accuracy, share)
