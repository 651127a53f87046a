"""Checks of arguments, and one way to batch over leading axes.

Shapes are always checked, values only if they are concrete. A check of values reads them on the
host, so it must run before an argument is traced.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from fedmcmc.pytrees import trees

TOLERANCE = 5e-3
"""Largest error of a sum of probabilities: bfloat16 has a relative rounding error of 2^-8."""


def as_wide_float(value: ArrayLike) -> Array:
    """Return floats of at least 32 bits, so that counts and sums are exact enough."""
    array = trees.as_float(value)
    return array if array.dtype.itemsize >= 4 else array.astype(jnp.float32)


def promote(*arrays: Array) -> list[Array]:
    """Return floats in the widest of their dtypes, also if JAX's promotion is strict."""
    dtype = max((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize)
    return [array.astype(dtype) for array in arrays]


def as_positive(name: str, value: ArrayLike) -> Array:
    """Return positive numbers of any shape."""
    concrete = _concrete(value)
    if concrete is not None and not (np.isfinite(concrete) & (concrete > 0)).all():
        raise ValueError(f"{name} must be positive and finite, got {value!r}.")
    return as_wide_float(value)


def as_fractions(name: str, value: ArrayLike) -> Array:
    """Return numbers in ``(0, 1)`` of any shape."""
    concrete = _concrete(value)
    if concrete is not None and not ((concrete > 0) & (concrete < 1)).all():
        raise ValueError(f"{name} must lie in (0, 1), got {value!r}.")
    return as_wide_float(value)


def as_finite(name: str, value: ArrayLike, axes: str) -> Array:
    """Return finite numbers whose last axes are `axes` (such as ``"num_draws"``), none empty."""
    shape = jnp.shape(value)
    num_axes = len(axes.split(", "))
    if len(shape) < num_axes or 0 in shape[len(shape) - num_axes :]:
        raise ValueError(f"{name} must have shape [..., {axes}], none of them 0, got {shape}.")
    concrete = _concrete(value)
    if concrete is not None and not np.isfinite(concrete).all():
        num_bad = int((~np.isfinite(concrete)).sum())
        raise ValueError(
            f"{name} must be finite, got {num_bad} NaN or infinite of {concrete.size}."
        )
    return as_wide_float(value)


def as_probabilities(name: str, value: ArrayLike) -> Array:
    """Return probabilities ``[..., num_rows, num_classes]`` that sum to one over classes."""
    shape = jnp.shape(value)
    if len(shape) < 2 or 0 in shape[-2:]:
        raise ValueError(
            f"{name} must have shape [..., num_rows, num_classes], none of them 0, got {shape}; "
            f"for two classes give both, 1 - p and p."
        )
    concrete = _concrete(value)
    if concrete is not None:
        _check_simplex(name, concrete)
    return as_wide_float(value)


def as_labels(value: ArrayLike, probabilities: Array) -> Array:
    """Return labels ``[..., num_rows]`` that fit `probabilities`."""
    num_rows, num_classes = probabilities.shape[-2:]
    shape, dtype = jnp.shape(value), jnp.result_type(value)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"labels must be integers in [0, {num_classes}), got dtype {dtype}.")
    if shape[-1:] != (num_rows,):
        raise ValueError(
            f"labels must be one per row of the probabilities, [..., {num_rows}], got {shape}."
        )
    concrete = _concrete(value)
    if concrete is not None and not ((concrete >= 0) & (concrete < num_classes)).all():
        raise ValueError(
            f"labels must lie in [0, {num_classes}), because the probabilities have {num_classes} "
            f"classes, got [{concrete.min()}, {concrete.max()}]."
        )
    labels = jnp.asarray(value)
    # A narrow dtype may not hold num_classes, with which labels are compared.
    return labels if labels.dtype.itemsize > 4 else labels.astype(jnp.int32)


def as_semidefinite(name: str, value: ArrayLike, *, dense: bool) -> Array:
    """Return symmetric positive semidefinite matrices, or variances that are not negative."""
    concrete = _concrete(value)
    if concrete is not None:
        matrices = concrete.astype(np.float64)
        if not np.isfinite(matrices).all():
            raise ValueError(f"{name} must be finite, got NaN or infinite entries.")
        if dense:
            _check_matrices(name, matrices)
        elif matrices.min() < 0:
            raise ValueError(
                f"{name} must not be negative, got a variance of {matrices.min():.3g}."
            )
    return as_wide_float(value)


def broadcast_leading(*arrays: tuple[str, Array, int]) -> list[Array]:
    """Broadcast the leading axes of ``(name, array, number of last axes)`` with each other."""
    leading = [array.shape[: array.ndim - num_last] for _, array, num_last in arrays]
    try:
        common = np.broadcast_shapes(*leading)
    except ValueError:
        shapes = ", ".join(f"{name} {array.shape}" for name, array, _ in arrays)
        raise ValueError(f"Leading axes must broadcast against each other, got {shapes}.") from None
    return [
        jnp.broadcast_to(array, common + array.shape[array.ndim - num_last :])
        for _, array, num_last in arrays
    ]


def map_leading(fn: Callable[..., Any], num_axes: int) -> Callable[..., Any]:
    """Map `fn` over the first `num_axes` axes of all its arguments."""
    for _ in range(num_axes):
        fn = jax.vmap(fn)
    return fn


def _concrete(value: ArrayLike) -> np.ndarray | None:
    """Return `value` on the host, or ``None`` while it is traced."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
        return None
    return np.asarray(value)


def _check_matrices(name: str, matrices: np.ndarray) -> None:
    # Single precision may round symmetry and eigenvalues by this much.
    size = np.abs(matrices).max(axis=(-2, -1))
    slack = 4 * matrices.shape[-1] * float(np.finfo(np.float32).eps) * size
    skew = np.abs(matrices - np.swapaxes(matrices, -1, -2)).max(axis=(-2, -1))
    if (skew > slack).any():
        raise ValueError(f"{name} must be symmetric, got entries that differ by {skew.max():.3g}.")
    smallest = np.linalg.eigvalsh(matrices)[..., 0]
    if (smallest < -slack).any():
        raise ValueError(
            f"{name} must be positive semidefinite, got a smallest eigenvalue of "
            f"{smallest.min():.3g}."
        )


def _check_simplex(name: str, values: np.ndarray) -> None:
    totals = values.sum(axis=-1, dtype=np.float64)
    # The comparisons are false for NaN, which must not pass.
    if not ((values >= -TOLERANCE).all() and (np.abs(totals - 1) <= TOLERANCE).all()):
        worst = totals.ravel()[np.argmax(np.abs(totals - 1))]
        raise ValueError(
            f"{name} must be probabilities: at least 0 and, over the last axis, of sum 1 within "
            f"{TOLERANCE}, got a smallest value of {values.min():.4g} and a sum of "
            f"{worst:.4g}. (Logits need jax.nn.softmax.)"
        )
