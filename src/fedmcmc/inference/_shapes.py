"""Precisions as flat arrays, whatever the structure, and what is done to fitted ones."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._types import ArrayTree
from fedmcmc.gaussian import Gaussian, with_mean
from fedmcmc.pytrees import trees

__all__ = ["checked_clip", "clipped", "flat_precision", "from_flat", "in_structure"]


def flat_precision(q: Gaussian) -> Array:
    """Return the precision as ``[]``, ``[d]`` or ``[d, d]``."""
    if q.structure == "diagonal":
        return trees.ravel(q.precision)
    precision: Array = q.precision
    return precision


def from_flat(mean: ArrayTree, precision: Array, structure: str) -> Gaussian:
    """Return the Gaussian with this mean and a precision as of `flat_precision`."""
    if structure == "diagonal":
        return with_mean(mean, ravel_pytree(mean)[1](precision), structure)
    return with_mean(mean, precision, structure)


def in_structure(information: Array, structure: str) -> Array:
    """Return an information ``[d]`` or ``[d, d]`` as the precision of a structure.

    A scaled identity has the mean of the diagonal.
    """
    if structure == "scaled_identity":
        return jnp.mean(information)
    return information


def clipped(values: Array, num_sds: float | None) -> Array:
    """Return `values` clipped to their mean plus and minus so many standard deviations.

    Of a matrix ``[d, d]`` the diagonal is clipped. ``None`` leaves everything as it is.
    """
    if num_sds is None or values.ndim == 0:
        return values
    diagonal = jnp.diagonal(values) if values.ndim == 2 else values
    center, spread = jnp.mean(diagonal), num_sds * jnp.std(diagonal)
    new = jnp.clip(diagonal, center - spread, center + spread)
    if values.ndim == 2:
        return values + jax.numpy.diag(new - diagonal)
    return new


def checked_clip(clip: float | None) -> float | None:
    """Return a number of standard deviations for `clipped`.

    Raises
    ------
    ValueError
        If it is not positive.
    """
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise ValueError(f"clip must be a positive number of standard deviations, got {clip!r}.")
    return None if clip is None else float(clip)
