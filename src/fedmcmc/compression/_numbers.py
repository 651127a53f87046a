"""Settings of compressors: one number for all clients, or one per client."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.pytrees import schedules
from fedmcmc.types import Client, PerClient, Sender


def value_for(number: Array | PerClient, client: Client | Sender) -> Array:
    """Return the number that holds for this client."""
    return number.of(client) if isinstance(number, PerClient) else number


def as_positive(x: float | Array, name: str) -> Array:
    """Return one positive number as a leaf of a compressor.

    Raises
    ------
    ValueError
        If `x` is not a positive scalar.
    TypeError
        If `x` is a schedule: a message does not depend on the round.
    """
    number: Array = schedules.number(x, name, minimum=0.0, strict=True)
    if isinstance(number, schedules.Scheduled):
        raise TypeError(f"{name} must be a number; a schedule of the round is not supported.")
    return number


def as_per_client(
    x: float | Array, name: str, *, low: float, high: float = math.inf, integer: bool = False
) -> Array | PerClient:
    """Return `x`, one number or one per client, as a leaf of a compressor.

    Raises
    ------
    ValueError
        If `x` is neither ``[]`` nor ``[num_clients]``, or (if concrete) outside ``[low, high]``.
    TypeError
        If `x` is a schedule: a message does not depend on the round.
    """
    if callable(x):
        raise TypeError(
            f"{name} must be one number, or one per client; a schedule of the round is not "
            "supported."
        )
    array = jnp.asarray(x)
    if array.ndim > 1 or array.size == 0 or not jnp.issubdtype(array.dtype, jnp.number):
        raise ValueError(
            f"{name} must be one number, or one per client, got shape {array.shape} and dtype "
            f"{array.dtype}."
        )
    if not isinstance(array, jax.core.Tracer):
        values = np.asarray(x, np.float64)
        wrong = ~np.isfinite(values) | (values < low) | (values > high)
        if integer:
            wrong |= values != np.round(values)
        if np.any(wrong):
            kind = "an integer" if integer else "a number"
            bound = "" if math.isinf(high) else f" and at most {int(high) if integer else high}"
            raise ValueError(f"{name} must be {kind}, at least {low:g}{bound}, got {x}.")
    array = array.astype(jnp.float32)
    return PerClient(array) if array.ndim else array


def check_num_clients(number: Array | PerClient | None, name: str, num_clients: int) -> None:
    """Raise `ValueError` unless `number` has one entry, or one per client."""
    if isinstance(number, PerClient) and number.values.shape != (num_clients,):
        raise ValueError(
            f"{name} has {number.values.shape[0]} entries, but the data has {num_clients} clients."
        )
