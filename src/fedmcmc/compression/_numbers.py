"""Numbers of compressors that all clients share, or that each client has for itself."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import Client, PerClient, Sender


def of_client(number: Any, client: Client | Sender) -> Array:
    """Return a number that all clients share, or this client's own."""
    return number.of(client) if isinstance(number, PerClient) else number


def per_client_number(
    x: Any, name: str, *, low: float, high: float = math.inf, integer: bool = False
) -> Any:
    """Return `x`, one number or one per client, as a leaf of a compressor.

    Raises
    ------
    ValueError
        If it is not ``[]`` or ``[num_clients]``, or (where concrete) outside ``[low, high]``.
    TypeError
        If it is a schedule: a message does not know the round.
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
    try:
        values = np.asarray(x, np.float64)
    except Exception:  # a traced number has no value to look at
        values = None
    if values is not None:
        wrong = ~np.isfinite(values) | (values < low) | (values > high)
        if integer:
            wrong |= values != np.round(values)
        if np.any(wrong):
            kind = "an integer" if integer else "a number"
            most = "" if math.isinf(high) else f" and at most {int(high) if integer else high}"
            raise ValueError(f"{name} must be {kind}, at least {low:g}{most}, got {x}.")
    array = array.astype(jnp.float32)
    return PerClient(array) if array.ndim else array


def check_number(number: Any, name: str, num_clients: int) -> None:
    """Raise `ValueError` unless `number` has one entry, or one per client."""
    if isinstance(number, PerClient) and number.values.shape != (num_clients,):
        raise ValueError(
            f"{name} has {number.values.shape[0]} entries, but the data has {num_clients} clients."
        )
