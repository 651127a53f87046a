"""Wasserstein distance of Gaussians."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fedmcmc.metrics._arguments import (
    as_finite,
    as_semidefinite,
    broadcast_leading,
    map_leading,
    promote,
)


def gaussian_w2(
    mean: ArrayLike, covariance: ArrayLike, other_mean: ArrayLike, other_covariance: ArrayLike
) -> Array:
    """Return the 2-Wasserstein distance of two Gaussians.

    It is the square root of ``|m1 - m2|^2 + tr(S1 + S2 - 2 (S2^(1/2) S1 S2^(1/2))^(1/2))``. The
    trace is computed without cancellation as ``min_U |A - B U|^2`` over orthogonal ``U``, with
    ``A A' = S1`` and ``B B' = S2``.

    Parameters
    ----------
    mean, other_mean
        ``[..., d]``.
    covariance, other_covariance
        ``[..., d, d]``, or variances ``[..., d]``; possibly singular.

    Returns
    -------
    Array
        ``[...]``, in the units of the means; leading axes of the two Gaussians are broadcast.

    Raises
    ------
    ValueError
        If shapes do not fit or, for concrete values, a number is not finite or a covariance is not
        symmetric and positive semidefinite (up to rounding).

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> float(gaussian_w2(jnp.zeros(2), jnp.eye(2), jnp.array([3.0, 4.0]), jnp.eye(2)))
    5.0
    >>> float(gaussian_w2(jnp.zeros(1), jnp.ones(1), jnp.zeros(1), jnp.array([9.0])))
    2.0
    """
    m1, s1 = _check_moments("mean", mean, "covariance", covariance)
    m2, s2 = _check_moments("other_mean", other_mean, "other_covariance", other_covariance)
    if m1.shape[-1] != m2.shape[-1]:
        raise ValueError(
            f"Both Gaussians must have the same dimension, got means {m1.shape} and {m2.shape}."
        )
    if s1.ndim == m1.ndim and s2.ndim == m2.ndim:
        distance, num_axes = _diagonal_w2, 1
    else:
        distance, num_axes = _dense_w2, 2
        s1, s2 = (s if s.ndim > m.ndim else _as_matrix(s) for m, s in ((m1, s1), (m2, s2)))
    return distance(
        *broadcast_leading(
            ("mean", m1, 1),
            ("covariance", s1, num_axes),
            ("other_mean", m2, 1),
            ("other_covariance", s2, num_axes),
        )
    )


def _check_moments(
    mean_name: str, mean: ArrayLike, covariance_name: str, covariance: ArrayLike
) -> tuple[Array, Array]:
    checked_mean = as_finite(mean_name, mean, "d")
    shape, variances = jnp.shape(covariance), checked_mean.shape
    matrices = (*variances, variances[-1])
    if shape not in (variances, matrices):
        raise ValueError(
            f"{covariance_name} must be matrices {matrices} or variances {variances}, because "
            f"{mean_name} is {variances}, got {shape}."
        )
    return checked_mean, as_semidefinite(covariance_name, covariance, dense=shape == matrices)


def _as_matrix(variance: Array) -> Array:
    return map_leading(jnp.diag, variance.ndim - 1)(variance)


@jax.jit
def _diagonal_w2(m1: Array, v1: Array, m2: Array, v2: Array) -> Array:
    m1, v1, m2, v2 = promote(m1, v1, m2, v2)
    spread = jnp.sqrt(v1) - jnp.sqrt(v2)
    return jnp.sqrt(jnp.sum(jnp.square(m1 - m2) + jnp.square(spread), axis=-1))


@jax.jit
def _dense_w2(m1: Array, s1: Array, m2: Array, s2: Array) -> Array:
    m1, s1, m2, s2 = promote(m1, s1, m2, s2)
    a, b = _root(s1), _root(s2)
    product = partial(jnp.matmul, precision="highest")
    left, _, right = jnp.linalg.svd(product(jnp.swapaxes(b, -1, -2), a), full_matrices=False)
    gap = a - product(b, product(left, right))
    return jnp.sqrt(jnp.sum(jnp.square(m1 - m2), axis=-1) + jnp.sum(jnp.square(gap), axis=(-2, -1)))


def _root(covariance: Array) -> Array:
    """Return ``A`` with ``A A'`` the covariance, whose eigenvalues may be rounded below zero."""
    values, vectors = jnp.linalg.eigh(covariance)
    return vectors * jnp.sqrt(jnp.maximum(values, 0))[..., None, :]
