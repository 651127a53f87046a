"""Expectation propagation in natural parameters: cavities, projections, what is proper.

A global approximation is the product of the prior's site and one site per client,
``q = q_0 * prod_k q_k``. A client's cavity is ``q / q_k``; its likelihood times the cavity is the
tilted distribution; the change of the global natural parameters that the tilted Gaussian asks for
is its message.

Source: Guo et al. (2023), Federated learning as variational inference, Algorithm 1.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._types import ArrayTree
from fedmcmc.gaussian._gaussian import Gaussian
from fedmcmc.pytrees import trees

__all__ = ["as_dense", "is_proper", "plus_precision", "project", "with_mean"]


def is_proper(q: Gaussian) -> Array:
    """Return whether `q` is finite with a positive definite precision, ``[]`` bool."""
    finite = trees.all_finite(q)
    if q.structure == "dense":
        # Cholesky marks a matrix that is not positive definite by NaN.
        return finite & jnp.all(jnp.isfinite(jnp.linalg.cholesky(q.precision)))
    lowest = [jnp.min(leaf) > 0 for leaf in jax.tree.leaves(q.precision) if leaf.size]
    return finite & jnp.all(jnp.array(lowest))


def as_dense(q: Gaussian) -> Gaussian:
    """Return `q` with a dense precision ``[d, d]``."""
    if q.structure == "dense":
        return q
    ones = jax.tree.map(jnp.ones_like, q.precision_mean)
    diagonal = trees.ravel(q.apply_precision(ones))
    return Gaussian(q.precision_mean, jnp.diag(diagonal), "dense")


def project(q: Gaussian, structure: str) -> Gaussian:
    """Return the Gaussian of this structure with the mean of `q` and the variances nearest to its.

    Moment matching, which minimizes the divergence ``KL(q || .)`` within the family: a diagonal
    covariance keeps the variances, a scaled identity their mean.

    Examples
    --------
    >>> q = Gaussian.from_moments(jnp.zeros(2), jnp.array([[2.0, 1.0], [1.0, 4.0]]))
    >>> [float(1 / x) for x in project(q, "diagonal").precision.round(5)]
    [2.0, 4.0]
    >>> round(1 / float(project(q, "scaled_identity").precision), 5)
    3.0
    """
    if q.structure == structure:
        return q
    if structure == "dense":
        return as_dense(q)
    flat, unravel = ravel_pytree(q.mean())
    variances = jnp.diagonal(q.covariance())
    if structure == "diagonal":
        return with_mean(unravel(flat), unravel(1 / variances), structure)
    return with_mean(unravel(flat), 1 / jnp.mean(variances), structure)


def with_mean(mean: ArrayTree, precision: Any, structure: str) -> Gaussian:
    """Return the Gaussian with this mean and precision."""
    q = Gaussian(mean, precision, structure)
    return Gaussian(q.apply_precision(mean), precision, structure)


def plus_precision(q: Gaussian, number: Array) -> Gaussian:
    """Return `q` with `number` added to its precision in every direction, precision mean as it is.

    The product with a Gaussian of mean zero and precision `number`.
    """
    if q.structure == "dense":
        eye = jnp.eye(q.precision.shape[0], dtype=q.precision.dtype)
        added = trees.cast(number, eye) * eye
        return Gaussian(q.precision_mean, q.precision + added, q.structure)
    precision = jax.tree.map(lambda leaf: leaf + trees.cast(number, leaf), q.precision)
    return Gaussian(q.precision_mean, precision, q.structure)
