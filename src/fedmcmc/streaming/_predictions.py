"""Running posterior predictive averages and calibration."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial
from jax.typing import ArrayLike

from fedmcmc._checks import positive_integer
from fedmcmc.pytrees import trees
from fedmcmc.streaming._types import Accumulator, zero_mean
from fedmcmc.types import ArrayTree, Static, as_functions

Predict = Callable[[ArrayTree, ArrayTree], ArrayTree]
"""``(position, batch) -> predictions``, leaves ``[batch_size, ...]``."""


class Calibration(NamedTuple):
    """Calibration of the predictions of single draws, by bins ``[num_chains, num_bins]``.

    Attributes
    ----------
    share
        Share of all draws' predictions in each bin of confidence.
    confidence, accuracy
        Mean highest probability and share of correct predictions; zero in an empty bin.
    error
        ``[num_chains]``, expected calibration error of single draws' predictions. For their
        average, use `predictive` and `fedmcmc.metrics.expected_calibration_error`.
    """

    share: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray
    error: np.ndarray


def predictive(predict_fn: Predict, batch: ArrayTree) -> Accumulator:
    """Accumulate the average of predictions over draws, such as ``p(y | x, data)``.

    Parameters
    ----------
    predict_fn
        Function ``(draw, batch) -> predictions``, of any shapes: class probabilities
        (`fedmcmc.interop.flax.predictive`), densities, means.
    batch
        Rows to predict for.

    Returns
    -------
    Accumulator
        Accumulator of the average, leaves ``[num_chains, ...]``.
    """
    arguments = (as_functions(predict_fn), jax.tree.map(jnp.asarray, batch))
    return Accumulator(
        Partial(_predictive_init, *arguments),
        Partial(_predictive_update, *arguments),
        Partial(_predictive_result),
    )


def _predictive_init(predict_fn: Predict, batch: ArrayTree, draw: ArrayTree) -> ArrayTree:
    return zero_mean(predict_fn(draw, batch))


def _predictive_update(
    predict_fn: Predict,
    batch: ArrayTree,
    rng_key: Array,
    index: Array,
    draw: ArrayTree,
    mean: ArrayTree,
) -> ArrayTree:
    del rng_key
    return _update_mean(mean, predict_fn(draw, batch), index)


def _update_mean(mean: ArrayTree, value: ArrayTree, index: Array) -> ArrayTree:
    share = 1 / (index + 1).astype(jnp.result_type(float))
    return jax.tree.map(
        lambda m, v: m + trees.cast(share, m) * (v.astype(m.dtype) - m), mean, value
    )


def _predictive_result(state: ArrayTree, count: int) -> ArrayTree:
    del count
    return state


def calibration(
    predict_fn: Predict, batch: ArrayTree, labels: ArrayLike, num_bins: int = 15
) -> Accumulator:
    """Accumulate confidence and accuracy of predictions over draws, by bins of confidence.

    Parameters
    ----------
    predict_fn
        Function ``(draw, batch) -> [batch_size, num_classes]``, class probabilities.
    batch
        Rows to predict for.
    labels
        ``[batch_size]`` integers.
    num_bins
        Number ``M`` of bins ``((m - 1) / M, m / M]`` of the highest probability.

    Returns
    -------
    Accumulator
        Accumulator of each chain's `Calibration`.

    References
    ----------
    Guo et al. (2017), On calibration of modern neural networks, equations 2 and 3.
    """
    bins = Static(positive_integer(num_bins, "num_bins"))
    truth = jnp.asarray(labels)
    if truth.ndim != 1 or not jnp.issubdtype(truth.dtype, jnp.integer):
        raise ValueError(
            f"labels must be integers of shape [batch_size], got shape {truth.shape} and dtype "
            f"{truth.dtype}."
        )
    arguments = (as_functions(predict_fn), jax.tree.map(jnp.asarray, batch), truth, bins)
    return Accumulator(
        Partial(_calibration_init, bins),
        Partial(_calibration_update, *arguments),
        Partial(_calibration_result),
    )


def _calibration_init(bins: Static[int], draw: ArrayTree) -> Array:
    del draw
    return jnp.zeros((3, bins.value))  # shares, confidences and hits, over all predictions


def _calibration_update(
    predict_fn: Predict,
    batch: ArrayTree,
    labels: Array,
    bins: Static[int],
    rng_key: Array,
    index: Array,
    draw: ArrayTree,
    state: Array,
) -> Array:
    del rng_key
    probabilities = predict_fn(draw, batch)
    top = jnp.max(probabilities, axis=-1)
    hit = jnp.argmax(probabilities, axis=-1) == labels
    bin_index = jnp.clip(jnp.ceil(top * bins.value).astype(jnp.int32) - 1, 0, bins.value - 1)
    rows = jnp.stack([jnp.ones_like(top), top, hit.astype(top.dtype)])
    sums = jnp.zeros_like(state).at[:, bin_index].add(rows.astype(state.dtype))
    return _update_mean(state, sums / labels.shape[0], index)


def _calibration_result(state: np.ndarray, count: int) -> Calibration:
    del count
    share, confidence, hits = np.moveaxis(state, 1, 0)
    full = np.where(share > 0, share, 1)
    error = np.abs(confidence - hits).sum(axis=-1)
    return Calibration(share, confidence / full, hits / full, error)
