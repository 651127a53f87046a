"""Checks of arguments that several packages share."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

__all__ = [
    "expect",
    "expect_optimizer",
    "in_quotes",
    "missing_extra_error",
    "probability_vector",
    "positive_integer",
]

_DEPLOY = ("grpcio>=1.60", "cryptography>=42")
_BEFORE_312 = ("matplotlib<3.11", "xarray<2026.4") if sys.version_info < (3, 12) else ()
EXTRAS = {
    "arviz": ("arviz-base>=0.8", "arviz-stats[xarray]>=0.8", "h5netcdf>=1.4", "h5py>=3.11"),
    "cuda12": ("jax[cuda12]",),
    "deploy": _DEPLOY,
    "flax": ("flax>=0.12",),
    "models": ("formulaic>=1.1", "pandas>=2.2"),
    "nvflare": (*_DEPLOY, "nvflare>=2.9,<3"),
    "plots": ("arviz-plots>=0.8", "matplotlib>=3.9", *_BEFORE_312),
    "tpu": ("jax[tpu]",),
    "zarr": ("zarr>=3.0",),
}
"""Packages of each extra in pyproject.toml, for users without a clone of the repository."""


def missing_extra_error(what: str, extra: str) -> ImportError:
    """Return the error for a missing extra, with the command that installs it.

    Examples
    --------
    >>> print(missing_extra_error("draws_to needs zarr", "zarr"))
    draws_to needs zarr: pip install "zarr>=3.0"
    """
    packages = " ".join(f'"{package}"' for package in EXTRAS[extra])
    return ImportError(f"{what}: pip install {packages}")


def in_quotes(label: object) -> str:
    """Return the label of a client or group for a message, with text in quotes.

    Examples
    --------
    >>> in_quotes("Bern"), in_quotes(3)
    ("'Bern'", '3')
    """
    return repr(str(label)) if isinstance(label, str) else str(label)


def expect(value: object, kind: type, name: str) -> None:
    """Raise `TypeError` unless `value` is a `kind`, before a trace fails with a worse message."""
    if not isinstance(value, kind):
        is_at_root = hasattr(sys.modules["fedmcmc"], kind.__name__)
        package = "" if is_at_root else f"{kind.__module__.split('.')[1]}."
        raise TypeError(
            f"{name} must be a fedmcmc.{package}{kind.__name__}, got {type(value).__name__}."
        )


def expect_optimizer(value: object, name: str, *, or_none: bool = False) -> None:
    """Raise `TypeError` unless `value` is an optimizer of optax, or ``None`` if that is allowed."""
    if or_none and value is None:
        return
    import optax  # optional for many users, and a fifth of the import time of fedmcmc

    if not isinstance(value, optax.GradientTransformation):
        expected = "an optax.GradientTransformation" + " or None" * or_none
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}.")


def integers_per_client(x: object, name: str) -> np.ndarray:
    """Return positive integers, one per client, as an array ``[num_clients]``.

    Raises
    ------
    ValueError
        If `x` is anything else.
    """
    values = np.asarray(x)
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer) or (values < 1).any():
        raise ValueError(f"{name} must be a positive integer, or one per client, got {x!r}.")
    return values


def positive_integer(x: Any, name: str) -> int:
    """Return `x` as an int.

    Raises
    ------
    ValueError
        If `x` is not a positive integer.
    """
    try:
        is_integer = int(x) == x
    except (TypeError, ValueError, OverflowError):
        is_integer = False
    if not is_integer or x < 1:
        raise ValueError(f"{name} must be a positive integer, got {x!r}.")
    return int(x)


def check_positive_numbers(**numbers: float) -> None:
    """Raise if a number is not positive or not finite.

    Raises
    ------
    ValueError
        If so, with the name of the number.
    """
    for name, number in numbers.items():
        if not (np.isfinite(number) and number > 0):
            raise ValueError(f"{name} must be a positive number, got {number!r}.")


def probability_vector(x: object, name: str) -> Array:
    """Return `x`, ``[num_clients]``, as an array of floats.

    Raises
    ------
    ValueError
        If `x` does not contain positive numbers that sum to one, one per client.
    """
    parts = jnp.asarray(x, jnp.result_type(float))
    if parts.ndim != 1:
        raise ValueError(f"{name} must have shape [num_clients], got shape {parts.shape}.")
    if not isinstance(parts, jax.core.Tracer):
        # Use NumPy: inside jit, jax.numpy would trace a comparison of concrete arrays.
        values = np.asarray(parts, np.float64)
        if not (values.min() > 0 and abs(values.sum() - 1) < 1e-4):
            raise ValueError(
                f"{name} must be positive and sum to one, got a sum of {values.sum():.6g} and a "
                f"smallest entry of {values.min():.6g}."
            )
    return parts
