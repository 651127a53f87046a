"""Checks of what users pass, and one way to batch over leading axes.

Shapes are always checked, values where they are concrete. A check of values reads them on the
host, so it runs on the arguments, before anything is staged out.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.pytrees import trees

TOLERANCE = 5e-3
"""How far probabilities may be from summing to one: rounding to bfloat16 takes them 2^-8 off."""


def single_precision(value: Any) -> Array:
    """Return `value` as a float of at least 32 bits, in which counts and sums are exact enough."""
    array = trees.as_float(value)
    return array if array.dtype.itemsize >= 4 else array.astype(jnp.float32)


def same_precision(*arrays: Array) -> list[Array]:
    """Return floats in the widest of their dtypes, also where JAX is told not to promote."""
    dtype = max((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize)
    return [array.astype(dtype) for array in arrays]


def positive_integer(name: str, value: Any) -> int:
    """Return an integer argument that is at least one."""
    if isinstance(value, jax.core.Tracer) or int(value) != value or value < 1:
        raise ValueError(f"{name} must be a static integer of at least 1, got {value!r}.")
    return int(value)


def positive_numbers(name: str, value: Any) -> Array:
    """Return positive numbers of any shape."""
    concrete = _concrete(value)
    if concrete is not None and not (np.isfinite(concrete) & (concrete > 0)).all():
        raise ValueError(f"{name} must be positive, got {value!r}.")
    return single_precision(value)


def unit_interval(name: str, value: Any) -> Array:
    """Return a number, or an array of them, in ``(0, 1)``."""
    concrete = _concrete(value)
    if concrete is not None and not ((concrete > 0) & (concrete < 1)).all():
        raise ValueError(f"{name} must lie in (0, 1), got {value!r}.")
    return single_precision(value)


def as_finite(name: str, value: Any, axes: str) -> Array:
    """Return an array whose last axes are `axes` (``"num_draws"``), none empty, all finite."""
    shape = jnp.shape(value)
    num_axes = len(axes.split(", "))
    if len(shape) < num_axes or 0 in shape[len(shape) - num_axes :]:
        raise ValueError(f"{name} must have shape [..., {axes}], none of them 0, got {shape}.")
    concrete = _concrete(value)
    if concrete is not None and not np.isfinite(concrete).all():
        bad = int((~np.isfinite(concrete)).sum())
        raise ValueError(f"{name} must be finite, got {bad} NaN or infinite of {concrete.size}.")
    return single_precision(value)


def as_probabilities(name: str, value: Any) -> Array:
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
    return single_precision(value)


def as_labels(value: Any, probabilities: Array) -> Array:
    """Return labels ``[..., num_rows]`` that fit probabilities, of the same leading axes."""
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
            f"labels must lie in [0, {num_classes}), as the probabilities have {num_classes} "
            f"classes, got [{concrete.min()}, {concrete.max()}]."
        )
    labels = jnp.asarray(value)
    # A narrow dtype may not hold num_classes, with which labels are compared.
    return labels if labels.dtype.itemsize > 4 else labels.astype(jnp.int32)


def as_semidefinite(name: str, value: Any, *, dense: bool) -> Array:
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
    return single_precision(value)


def broadcast(*arrays: tuple[str, Array, int]) -> list[Array]:
    """Broadcast the leading axes of ``(name, array, number of own axes)`` against each other."""
    lead = [array.shape[: array.ndim - num_own] for _, array, num_own in arrays]
    try:
        common = np.broadcast_shapes(*lead)
    except ValueError:
        shapes = ", ".join(f"{name} {array.shape}" for name, array, _ in arrays)
        raise ValueError(f"Leading axes must broadcast against each other, got {shapes}.") from None
    return [
        jnp.broadcast_to(array, common + array.shape[array.ndim - num_own :])
        for _, array, num_own in arrays
    ]


def over_leading(fn: Callable[..., Any], num_axes: int) -> Callable[..., Any]:
    """Map `fn` over the first `num_axes` axes of all its arguments."""
    for _ in range(num_axes):
        fn = jax.vmap(fn)
    return fn


def _concrete(value: Any) -> np.ndarray | None:
    """Return `value` on the host, ``None`` while it is being traced."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
        return None
    return np.asarray(value)


def _check_matrices(name: str, matrices: np.ndarray) -> None:
    # What rounding the entries to single precision does to symmetry and to eigenvalues.
    size = np.abs(matrices).max(axis=(-2, -1))
    slack = 4 * matrices.shape[-1] * float(np.finfo(np.float32).eps) * size
    skew = np.abs(matrices - np.swapaxes(matrices, -1, -2)).max(axis=(-2, -1))
    if (skew > slack).any():
        raise ValueError(f"{name} must be symmetric, got entries that differ by {skew.max():.3g}.")
    least = np.linalg.eigvalsh(matrices)[..., 0]
    if (least < -slack).any():
        raise ValueError(
            f"{name} must be positive semidefinite, got a smallest eigenvalue of {least.min():.3g}."
        )


def _check_simplex(name: str, values: np.ndarray) -> None:
    total = values.sum(axis=-1, dtype=np.float64)
    # The comparisons are false for NaN, which must not pass.
    if not ((values >= -TOLERANCE).all() and (np.abs(total - 1) <= TOLERANCE).all()):
        worst = total.ravel()[np.argmax(np.abs(total - 1))]
        raise ValueError(
            f"{name} must be probabilities: at least 0 and, over the last axis, of sum 1 within "
            f"{TOLERANCE}, got a smallest value of {values.min():.4g} and a sum of "
            f"{worst:.4g}. (Logits need jax.nn.softmax.)"
        )
