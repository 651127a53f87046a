"""Independent normal priors on the leaves of a position."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree

__all__ = ["logprior", "positive", "prior_scales"]


def logprior(scales: ArrayTree, position: ArrayTree) -> Array:
    """Return the normalized log density; `scales` is a tree prefix of the position."""
    leaves = jax.tree.leaves(position)
    each = jax.tree.leaves(jax.tree.broadcast(scales, position))
    terms = [_normal(x, scale.astype(x.dtype)) for x, scale in zip(leaves, each, strict=True)]
    return sum(terms[1:], terms[0])


def _normal(x: Array, scale: Array) -> Array:
    # Every entry of a scale that broadcasts counts equally often.
    constant = x.size * (0.5 * math.log(2 * math.pi) + jnp.mean(jnp.log(scale)))
    return -0.5 * jnp.sum((x / scale) ** 2) - constant.astype(x.dtype)


def prior_scales(scales: Any, like: ArrayTree) -> ArrayTree:
    """Check `given`, the argument `prior_scale` of `from_flax`, and return a tree of arrays."""
    if callable(scales):
        scales = jax.tree_util.tree_map_with_path(
            lambda path, leaf: scales(jax.tree_util.keystr(path, simple=True, separator="."), leaf),
            like,
        )
    try:
        jax.tree.broadcast(scales, like)
    except ValueError as error:
        raise ValueError(
            f"prior_scale must be a number, a tree prefix of the position, or a function "
            f"(path, leaf) -> number; got {jax.tree.structure(scales)} for a position "
            f"{jax.tree.structure(like)}."
        ) from error

    def check(scale: Any, leaves: ArrayTree) -> Array:
        for leaf in jax.tree.leaves(leaves):
            positive(scale, leaf.shape, "prior_scale")
        return positive(scale, jnp.shape(scale), "prior_scale")

    return jax.tree.map(check, scales, like)


def positive(number: Any, shape: tuple[int, ...], name: str) -> Array:
    """Return `number` as an array that broadcasts to `shape`; positive, where it is concrete."""
    array = jnp.asarray(number)
    try:
        fits = np.broadcast_shapes(array.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits or not jnp.isrealobj(array) or array.dtype == bool:
        raise ValueError(
            f"{name} must be a number or broadcast to the shape {shape}, got shape {array.shape} "
            f"and dtype {array.dtype}."
        )
    if not isinstance(array, jax.core.Tracer) and not (
        np.isfinite(array).all() and np.all(array > 0)
    ):
        raise ValueError(f"{name} must be positive and finite, got {number}.")
    return array.astype(jnp.result_type(float))
