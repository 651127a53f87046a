"""Distances between the predictions of two samplers."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fedmcmc.metrics._arguments import as_probabilities, broadcast_leading, promote


def agreement(probabilities: ArrayLike, reference: ArrayLike) -> Array:
    """Return the share of rows for which both samplers predict the same class.

    ``(1 / n) sum_x 1{argmax p(.|x) = argmax q(.|x)}`` (Izmailov et al. 2021, with HMC as the
    reference). If classes have equal probability, the first of them is predicted. Symmetric.

    Parameters
    ----------
    probabilities, reference
        ``[..., num_rows, num_classes]``, each row summing to one.

    Returns
    -------
    Array
        ``[...]``, a fraction in ``[0, 1]``; leading axes are broadcast.

    Raises
    ------
    ValueError
        If shapes do not fit or concrete rows are no probabilities.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> p = jnp.array([[0.9, 0.1], [0.4, 0.6]])
    >>> float(agreement(p, p)), float(agreement(p, p[:, ::-1]))
    (1.0, 0.0)
    """
    return _agreement(*_check_pair(probabilities, reference))


def total_variation(probabilities: ArrayLike, reference: ArrayLike) -> Array:
    """Return the mean over rows of the total variation distance of two predictions.

    ``(1 / n) sum_x (1 / 2) sum_y |p(y|x) - q(y|x)|`` (Izmailov et al. 2021). Symmetric.

    Parameters
    ----------
    probabilities, reference
        See `agreement`, which raises the same errors.

    Returns
    -------
    Array
        ``[...]``, in ``[0, 1]``; leading axes are broadcast.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> p = jnp.array([[0.75, 0.25], [0.5, 0.5]])
    >>> float(total_variation(p, p)), float(total_variation(p, p[:, ::-1]))
    (0.0, 0.25)
    """
    return _total_variation(*_check_pair(probabilities, reference))


def _check_pair(probabilities: ArrayLike, reference: ArrayLike) -> list[Array]:
    p = as_probabilities("probabilities", probabilities)
    q = as_probabilities("reference", reference)
    if p.shape[-2:] != q.shape[-2:]:
        raise ValueError(
            f"probabilities and reference must have the same rows and classes, got {p.shape} and "
            f"{q.shape}."
        )
    return broadcast_leading(("probabilities", p, 2), ("reference", q, 2))


@jax.jit
def _agreement(p: Array, q: Array) -> Array:
    return jnp.mean(jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1), axis=-1, dtype=p.dtype)


@jax.jit
def _total_variation(p: Array, q: Array) -> Array:
    p, q = promote(p, q)
    return jnp.mean(jnp.sum(jnp.abs(p - q), axis=-1), axis=-1) / 2
