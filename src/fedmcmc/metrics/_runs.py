"""Summaries of repeated runs, of curves over rounds, and of what was sent."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.metrics._arguments import (
    as_finite,
    broadcast,
    positive_integer,
    positive_numbers,
    same_precision,
    single_precision,
)


class EstimationError(NamedTuple):
    """Mean squared error of estimates ``[...]``: ``mse = squared_bias + variance``."""

    mse: Array
    squared_bias: Array
    variance: Array


def estimation_error(estimates: Any, truth: Any) -> EstimationError:
    """Return how far the estimates of repeated runs are from the truth, in squared norms.

    ``mse = mean_r |est_r - mu|^2``, ``squared_bias = |mean_r est_r - mu|^2`` and ``variance =
    mean_r |est_r - mean_r est_r|^2`` (divided by the number of runs, not one less): all three are
    sums over coordinates. The code of figure 1 of Vono et al. (2022) averages the variance, and it
    alone, over coordinates.

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
    >>> found = estimation_error(jnp.array([[2.0, 0.0], [4.0, 0.0]]), jnp.zeros(2))
    >>> float(found.mse), float(found.squared_bias), float(found.variance)
    (10.0, 9.0, 1.0)
    """
    points = as_finite("estimates", estimates, "num_runs, d")
    mu = as_finite("truth", truth, "d")
    if points.shape[-1] != mu.shape[-1]:
        raise ValueError(
            f"estimates and truth must have the same last axis, got {points.shape} and {mu.shape}."
        )
    return _estimation_error(*broadcast(("estimates", points, 2), ("truth", mu, 1)))


def relative_efficiency(bits: Any, num_parameters: int, bits_per_number: int = 32) -> Array:
    """Return how many times shorter messages are than uncompressed ones.

    ``32 d / bits`` (Vono et al. 2022, table 3).

    Parameters
    ----------
    bits
        Bits of a message, counted or bounded, positive, ``[...]``.
    num_parameters
        ``d``, numbers in a message.
    bits_per_number
        Of an uncompressed number.

    Returns
    -------
    Array
        ``[...]``, above 1 where compression saves.

    Raises
    ------
    ValueError
        If a number is not positive.

    Examples
    --------
    >>> float(relative_efficiency(1000, num_parameters=50))
    1.600000023841858
    """
    plain = positive_integer("num_parameters", num_parameters) * positive_integer(
        "bits_per_number", bits_per_number
    )
    sent = positive_numbers("bits", bits)
    return jnp.asarray(plain, sent.dtype) / sent


def rounds_to_threshold(values: Any, threshold: Any, window: int = 10) -> Array:
    """Return the number of rounds until a running mean reaches a threshold.

    The smallest ``r`` such that the mean of ``values[r - window : r]`` is at least `threshold`;
    rounds count from 1 and the mean is over full windows only.

    Parameters
    ----------
    values
        ``[..., num_rounds]``, one per round and larger is better, such as a test accuracy.
    threshold
        A number, or ``[...]``.
    window
        Rounds averaged over, static, at most `num_rounds`.

    Returns
    -------
    Array
        ``[...]``, infinite where the threshold is never reached.

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
    level = single_precision(threshold)
    curve, level = broadcast(("values", curve, 1), ("threshold", level, 0))
    return _rounds_to_threshold(curve, level, window=width)


def best_running_mean(values: Any, window: int = 100) -> Array:
    """Return the largest mean of `window` consecutive values.

    Parameters
    ----------
    values
        ``[..., num_rounds]``, one per round, such as a test accuracy.
    window
        Rounds averaged over, static, at most `num_rounds`.

    Returns
    -------
    Array
        ``[...]``, in the units of the values.

    Raises
    ------
    ValueError
        As `rounds_to_threshold`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> float(best_running_mean(jnp.array([0.0, 1.0, 0.5, 0.0]), window=2))
    0.75
    """
    curve, width = _curve(values, window)
    return _best_running_mean(curve, window=width)


def _curve(values: Any, window: int) -> tuple[Array, int]:
    curve, width = as_finite("values", values, "num_rounds"), positive_integer("window", window)
    if width > curve.shape[-1]:
        raise ValueError(f"window must be at most the {curve.shape[-1]} rounds, got {width}.")
    return curve, width


def _running_mean(curve: Array, window: int) -> Array:
    # Sums of each window on its own: differences of a cumulative sum would lose digits.
    sizes = (1,) * (curve.ndim - 1) + (window,)
    zero = jnp.zeros((), curve.dtype)
    sums = jax.lax.reduce_window(curve, zero, jax.lax.add, sizes, (1,) * curve.ndim, "VALID")
    return sums / window


@jax.jit
def _estimation_error(estimates: Array, truth: Array) -> EstimationError:
    estimates, truth = same_precision(estimates, truth)
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
    first = (jnp.argmax(reached, axis=-1) + window).astype(curve.dtype)
    return jnp.where(jnp.any(reached, axis=-1), first, jnp.inf)


@partial(jax.jit, static_argnames="window")
def _best_running_mean(curve: Array, *, window: int) -> Array:
    return jnp.max(_running_mean(curve, window), axis=-1)
