"""Scores of predictive probabilities, with labels and without."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fedmcmc.metrics._arguments import as_labels, as_probabilities, broadcast_leading


def accuracy(probabilities: ArrayLike, labels: ArrayLike) -> Array:
    """Return the share of rows whose most probable class is the label.

    If classes have equal probability, the first of them is predicted.

    Parameters
    ----------
    probabilities
        ``[..., num_rows, num_classes]``, each row summing to one.
    labels
        ``[..., num_rows]``, integers in ``[0, num_classes)``.

    Returns
    -------
    Array
        ``[...]``, a fraction in ``[0, 1]``; leading axes are broadcast.

    Raises
    ------
    ValueError
        If shapes do not fit or, for concrete values, rows are no probabilities or labels are out
        of range (under `jax.jit` such labels give NaN).

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> probabilities = jnp.array([[0.75, 0.25], [0.5, 0.5], [0.25, 0.75], [1.0, 0.0]])
    >>> float(accuracy(probabilities, jnp.array([0, 0, 1, 1])))
    0.75
    """
    return _accuracy(*check_predictions(probabilities, labels))


def negative_log_likelihood(probabilities: ArrayLike, labels: ArrayLike) -> Array:
    """Return the mean over rows of ``-log p(label)``, in nats.

    It is infinite if a label has probability zero, also by underflow. Compute the softmax in a
    dtype that represents the labels' probabilities.

    Parameters
    ----------
    probabilities, labels
        See `accuracy`, which raises the same errors.

    Returns
    -------
    Array
        ``[...]``, in nats per row, at least 0. Table S2 of Vono et al. (2022) prints hundredths.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> round(float(negative_log_likelihood(jnp.full((3, 4), 0.25), jnp.array([0, 1, 3]))), 4)
    1.3863
    """
    return _negative_log_likelihood(*check_predictions(probabilities, labels))


def brier_score(probabilities: ArrayLike, labels: ArrayLike) -> Array:
    """Return the mean over rows of ``sum_y (p(y) - 1{y = label})^2``: a sum over classes.

    The score is 0 for one-hot truth, ``1 - 1 / num_classes`` for uniform probabilities, and 2 for
    certainty of a wrong class (Brier 1950). Some libraries divide it by 2 or by the number of
    classes.

    Parameters
    ----------
    probabilities, labels
        See `accuracy`, which raises the same errors.

    Returns
    -------
    Array
        ``[...]``, in ``[0, 2]``. Table S2 of Vono et al. (2022) prints hundredths.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> float(brier_score(jnp.full((3, 4), 0.25), jnp.array([0, 1, 3])))
    0.75
    """
    return _brier_score(*check_predictions(probabilities, labels))


def predictive_entropy(probabilities: ArrayLike) -> Array:
    """Return each row's entropy ``-sum_y p(y) log p(y)``, in nats; ``0 log 0 = 0``.

    Parameters
    ----------
    probabilities
        ``[..., num_rows, num_classes]``, each row summing to one.

    Returns
    -------
    Array
        ``[..., num_rows]``, in ``[0, log num_classes]``.

    Raises
    ------
    ValueError
        If the shape does not fit or concrete rows are no probabilities.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> predictive_entropy(jnp.array([[1.0, 0.0], [0.5, 0.5]])).round(4).tolist()
    [0.0, 0.6930999755859375]
    """
    return _entropy(as_probabilities("probabilities", probabilities))


def check_predictions(probabilities: ArrayLike, labels: ArrayLike) -> list[Array]:
    """Return checked probabilities and labels with the same leading axes."""
    checked = as_probabilities("probabilities", probabilities)
    return broadcast_leading(
        ("probabilities", checked, 2), ("labels", as_labels(labels, checked), 1)
    )


def mask_bad_labels(values: Array, probabilities: Array, labels: Array) -> Array:
    """Return `values` ``[..., num_rows]``, NaN if a label names no class (under `jax.jit`)."""
    valid = (labels >= 0) & (labels < probabilities.shape[-1])
    return jnp.where(valid, values, jnp.nan)


def score_hits(probabilities: Array, labels: Array) -> Array:
    """Return 1 if the most probable class is the label, else 0, ``[..., num_rows]``."""
    hits = jnp.argmax(probabilities, axis=-1).astype(labels.dtype) == labels
    return mask_bad_labels(hits.astype(probabilities.dtype), probabilities, labels)


@jax.jit
def _accuracy(probabilities: Array, labels: Array) -> Array:
    return jnp.mean(score_hits(probabilities, labels), axis=-1)


@jax.jit
def _negative_log_likelihood(probabilities: Array, labels: Array) -> Array:
    of_label = jnp.take_along_axis(probabilities, labels[..., None], axis=-1)[..., 0]
    # Rounding leaves probabilities such as -1e-9, whose logarithm would be NaN.
    losses = -jnp.log(jnp.maximum(of_label, 0))
    return jnp.mean(mask_bad_labels(losses, probabilities, labels), axis=-1)


@jax.jit
def _brier_score(probabilities: Array, labels: Array) -> Array:
    truth = jax.nn.one_hot(labels, probabilities.shape[-1], dtype=probabilities.dtype)
    gaps = jnp.sum(jnp.square(probabilities - truth), axis=-1)
    return jnp.mean(mask_bad_labels(gaps, probabilities, labels), axis=-1)


@jax.jit
def _entropy(probabilities: Array) -> Array:
    # Rounding leaves probabilities such as -1e-9, whose entr would be -inf, and 1.0000001.
    bounded = jnp.clip(probabilities, 0, 1)
    return jnp.sum(jax.scipy.special.entr(bounded), axis=-1)
