"""What a compressor is."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, Client, PerClient, Static

__all__ = ["Compressor", "no_check", "no_draws", "no_state", "of_client"]


class Memory(NamedTuple):
    """What both sides remember of a client's messages.

    Attributes
    ----------
    recall
        ``state -> message``, the client's memory.
    change
        ``(code, client) -> message``, by which a message moves it.
    of
        Whose memory the server adds: ``"all"`` clients', the ``"active"`` ones', or ``None`` for
        all of them where messages are weighted, else the active ones'.
    followed_by
        ``compressor -> compressor``: the same memory, of messages that another one compresses
        further.
    """

    recall: Callable[..., ArrayTree]
    change: Callable[..., ArrayTree]
    of: Static[str | None]
    followed_by: Callable[..., "Compressor"]


class Compressor(NamedTuple):
    """A way to say a message in fewer bits.

    ``C(v) = decode(encode(v))`` obeys ``E |C(v) - v|^2 <= omega |v|^2`` and, if `unbiased`,
    ``E C(v) = v`` (assumption H2 of Vono et al., 2022). Messages are compressed independently
    over clients and rounds.

    Attributes
    ----------
    init
        ``like -> state``: what a client keeps between its messages (its memory, its error).
    prepare
        ``(rng_key, like, client) -> draws``: all that is random in one message.
    encode
        ``(draws, message, state, client) -> (code, state)``; the code is a
        `compression.Dense`, `compression.Quantized` or `compression.Sparse`, of which
        `compression.message_bits` counts the bits and `fedmcmc.wire` writes them.
    decode
        ``(code, client) -> message``, what the receiver understands.
    omega
        ``like -> []``, or ``[num_clients]`` where clients differ.
    check
        ``(like, num_clients) -> None``, raises `ValueError` where the compressor does not fit.
    unbiased
        Whether ``E C(v) = v``.
    memory
        For a compressor of the difference to what was said before, else ``None``.

    Notes
    -----
    `like` is the message's shapes.
    """

    init: Callable[..., ArrayTree]
    prepare: Callable[..., ArrayTree]
    encode: Callable[..., tuple[ArrayTree, ArrayTree]]
    decode: Callable[..., ArrayTree]
    omega: Callable[..., Array]
    check: Callable[..., None]
    unbiased: Static[bool]
    memory: Memory | None = None


def no_state(like: ArrayTree) -> ArrayTree:
    """Keep nothing."""
    del like
    return ()


def no_draws(rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
    """Draw nothing."""
    del rng_key, like, client
    return ()


def no_check(like: ArrayTree, num_clients: int) -> None:
    """Any message fits."""
    del like, num_clients


def of_client(number: Any, client: Client) -> Array:
    """Return a number that all clients share, or this client's own."""
    return number.of(client) if isinstance(number, PerClient) else number


def per_client_number(
    x: Any, name: str, *, low: float, high: float = math.inf, integer: bool = False
) -> Any:
    """Return `x`, one number or one a client, as a leaf of a compressor.

    Raises
    ------
    ValueError
        If it is not ``[]`` or ``[num_clients]``, or (where concrete) outside ``[low, high]``.
    TypeError
        If it is a schedule: a message does not know the round.
    """
    if callable(x):
        raise TypeError(
            f"{name} must be one number, or one a client; a schedule of the round is not supported."
        )
    array = jnp.asarray(x)
    if array.ndim > 1 or array.size == 0 or not jnp.issubdtype(array.dtype, jnp.number):
        raise ValueError(
            f"{name} must be one number, or one a client, got shape {array.shape} and dtype "
            f"{array.dtype}."
        )
    try:
        given = np.asarray(x, np.float64)
    except Exception:  # a traced number has no value to look at
        given = None
    if given is not None:
        wrong = ~np.isfinite(given) | (given < low) | (given > high)
        if integer:
            wrong |= given != np.round(given)
        if np.any(wrong):
            kind = "an integer" if integer else "a number"
            most = "" if math.isinf(high) else f" and at most {int(high) if integer else high}"
            raise ValueError(f"{name} must be {kind}, at least {low:g}{most}, got {x}.")
    array = array.astype(jnp.float32)
    return PerClient(array) if array.ndim else array


def check_number(number: Any, name: str, num_clients: int) -> None:
    """Raise `ValueError` unless `number` has one entry, or one a client."""
    if isinstance(number, PerClient) and number.values.shape != (num_clients,):
        raise ValueError(
            f"{name} has {number.values.shape[0]} entries, but the data has {num_clients} clients."
        )
