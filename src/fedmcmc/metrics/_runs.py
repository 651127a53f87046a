"""Summaries of repeated runs, curves over rounds, and message sizes."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fedmcmc._checks import positive_integer
from fedmcmc.metrics._arguments import (
    as_finite,
    as_positive,
    as_wide_float,
    broadcast_leading,
    promote,
)


class EstimationError(NamedTuple):
    """Mean squared error of estimates ``[...]``: ``mse = squared_bias + variance``."""

    mse: Array
    squared_bias: Array
    variance: Array


def estimation_error(estimates: ArrayLike, truth: ArrayLike) -> EstimationError:
    """Return the mean squared error of the estimates of repeated runs, with bias and variance.

    ``mse = mean_r |est_r - mu|^2``, ``squared_bias = |mean_r est_r - mu|^2`` and ``variance =
    mean_r |est_r - mean_r est_r|^2`` (divided by the number of runs, not one less) are sums over
    coordinates. The code of figure 1 of Vono et al. (2022) averages only the variance over them.

    Parameters
    ----------
    estimates
        ``[..., num_runs, d]``, for instance each run's mean of draws.
    truth
        ``[..., d]``.

    Returns
    -------
    EstimationError
        Each ``[...]``, in squared units of the estimates; leading axes are broadcast.

    Raises
    ------
    ValueError
        If shapes do not fit or concrete numbers are not finite.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> error = estimation_error(jnp.array([[2.0, 0.0], [4.0, 0.0]]), jnp.zeros(2))
    >>> float(error.mse), float(error.squared_bias), float(error.variance)
    (10.0, 9.0, 1.0)
    """
    points = as_finite("estimates", estimates, "num_runs, d")
    mu = as_finite("truth", truth, "d")
    if points.shape[-1] != mu.shape[-1]:
        raise ValueError(
            f"estimates and truth must have the same last axis, got {points.shape} and {mu.shape}."
        )
    return _estimation_error(*broadcast_leading(("estimates", points, 2), ("truth", mu, 1)))


def relative_efficiency(bits: ArrayLike, num_parameters: int, bits_per_number: int = 32) -> Array:
    """Return the size of an uncompressed message divided by the size of a message.

    ``32 d / bits`` (Vono et al. 2022, table 3).

    Parameters
    ----------
    bits
        Number of bits of a message, counted or bounded, positive, ``[...]``.
    num_parameters
        ``d``, number of numbers in a message.
    bits_per_number
        Number of bits of an uncompressed number.

    Returns
    -------
    Array
        ``[...]``, above 1 if compression saves bits.

    Raises
    ------
    ValueError
        If a number is not positive.

    Examples
    --------
    >>> float(relative_efficiency(1000, num_parameters=50))
    1.600000023841858
    """
    plain = positive_integer(num_parameters, "num_parameters")
    plain *= positive_integer(bits_per_number, "bits_per_number")
    compressed = as_positive("bits", bits)
    return jnp.asarray(plain, compressed.dtype) / compressed


def rounds_to_threshold(values: ArrayLike, threshold: ArrayLike, window: int = 10) -> Array:
    """Return the number of rounds until a running mean reaches a threshold.

    This is the smallest ``r`` for which the mean of ``values[r - window : r]`` is at least
    `threshold`. Rounds count from 1, and only full windows count.

    Parameters
    ----------
    values
        ``[..., num_rounds]``, one value per round, such as a test accuracy; larger is better.
    threshold
        A number, or ``[...]``.
    window
        Number of rounds in a mean, static, at most `num_rounds`.

    Returns
    -------
    Array
        ``[...]``, infinite if the threshold is never reached.

    Raises
    ------
    ValueError
        If shapes do not fit, concrete numbers are not finite or `window` is out of range.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> curve = jnp.array([0.0, 0.5, 1.0, 1.0])
    >>> [float(rounds_to_threshold(curve, level, window=2)) for level in (0.75, 1.5)]
    [3.0, inf]
    """
    curve, width = _curve(values, window)
    level = as_wide_float(threshold)
    curve, level = broadcast_leading(("values", curve, 1), ("threshold", level, 0))
    return _rounds_to_threshold(curve, level, window=width)


def best_running_mean(values: ArrayLike, window: int = 100) -> Array:
    """Return the largest mean of `window` consecutive values.

    Parameters
    ----------
    values
        ``[..., num_rounds]``, one value per round, such as a test accuracy.
    window
        See `rounds_to_threshold`, which raises the same errors.

    Returns
    -------
    Array
        ``[...]``, in the units of the values.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> float(best_running_mean(jnp.array([0.0, 1.0, 0.5, 0.0]), window=2))
    0.75
    """
    curve, width = _curve(values, window)
    return _best_running_mean(curve, window=width)


def _curve(values: ArrayLike, window: int) -> tuple[Array, int]:
    curve, width = (as_finite("values", values, "num_rounds"), positive_integer(window, "window"))
    if width > curve.shape[-1]:
        raise ValueError(f"window must be at most the {curve.shape[-1]} rounds, got {width}.")
    return curve, width


def _running_mean(curve: Array, window: int) -> Array:
    # Each window is summed separately: differences of a cumulative sum would lose digits.
    sizes = (1,) * (curve.ndim - 1) + (window,)
    zero = jnp.zeros((), curve.dtype)
    sums = jax.lax.reduce_window(curve, zero, jax.lax.add, sizes, (1,) * curve.ndim, "VALID")
    return sums / window


@jax.jit
def _estimation_error(estimates: Array, truth: Array) -> EstimationError:
    estimates, truth = promote(estimates, truth)
    center = jnp.mean(estimates, axis=-2)
    return EstimationError(
        _mean_square(estimates - truth[..., None, :]),
        jnp.sum(jnp.square(center - truth), axis=-1),
        _mean_square(estimates - center[..., None, :]),
    )


def _mean_square(gaps: Array) -> Array:
    return jnp.mean(jnp.sum(jnp.square(gaps), axis=-1), axis=-1)


@partial(jax.jit, static_argnames="window")
def _rounds_to_threshold(curve: Array, threshold: Array, *, window: int) -> Array:
    means = _running_mean(curve, window)
    reached = means >= threshold[..., None].astype(means.dtype)
    num_rounds = (jnp.argmax(reached, axis=-1) + window).astype(curve.dtype)
    return jnp.where(jnp.any(reached, axis=-1), num_rounds, jnp.inf)


@partial(jax.jit, static_argnames="window")
def _best_running_mean(curve: Array, *, window: int) -> Array:
    return jnp.max(_running_mean(curve, window), axis=-1)
