"""Compressors that send some of a message's numbers: at random, or the largest."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from fedmcmc._types import ArrayTree, Client, Static
from fedmcmc.compression._codes import Sparse
from fedmcmc.compression._types import Compressor, no_check, no_draws, no_state
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import random_words, realise_words

__all__ = ["sparsify", "top_k"]


def sparsify(fraction: float | Array) -> Compressor:
    """Send each number with probability `fraction`, divided by it, and zero otherwise.

    Parameters
    ----------
    fraction
        ``[]``, in (0, 1].

    Raises
    ------
    ValueError
        If `fraction` is outside (0, 1].

    Notes
    -----
    Unbiased, ``omega = (1 - fraction) / fraction``, with equality: the variance of ``C(v)_j`` is
    ``omega v_j^2``, so the laws of samplers on Gaussian targets stay closed.

    Examples
    --------
    >>> round(float(sparsify(0.25).omega(jnp.zeros(8))), 6)
    3.0
    """
    q = _fraction(fraction)
    return Compressor(
        init=Partial(no_state),
        prepare=Partial(_prepare),
        encode=Partial(_encode_random, q),
        decode=Partial(_decode),
        omega=Partial(_omega_random, q),
        check=Partial(no_check),
        unbiased=Static(True),
    )


def top_k(fraction: float, *, error_feedback: bool = True) -> Compressor:
    """Send the largest `fraction` of a message's numbers, at least one.

    Parameters
    ----------
    fraction
        In (0, 1]; ``round(fraction * d)`` numbers of ``d`` are sent, of all leaves together.
    error_feedback
        Whether a client adds what it did not send to its next message.

    Raises
    ------
    ValueError
        If `fraction` is outside (0, 1].

    Notes
    -----
    Biased: ``|C(v) - v|^2 <= (1 - k / d) |v|^2``, which is the `omega` declared. With error
    feedback the sum of what was sent lags the sum of the messages by one bounded error; a sampler's
    mean is then right only as the step size goes to zero.

    References
    ----------
    Stich, Cordonnier and Jaggi (2018), Sparsified SGD with memory, Algorithm 1.

    Examples
    --------
    >>> compressor = top_k(0.5, error_feedback=False)
    >>> compressor.encode((), jnp.array([3.0, -4.0]), (), None)[0].values.tolist()
    [0.0, -4.0]
    """
    if isinstance(fraction, jax.core.Tracer):
        raise TypeError("top_k needs a Python number: how many numbers are sent is static.")
    q = Static(float(_fraction(fraction)))
    return Compressor(
        init=Partial(trees.zeros_like) if error_feedback else Partial(no_state),
        prepare=Partial(no_draws),
        encode=Partial(_encode_largest, q),
        decode=Partial(_decode),
        omega=Partial(_omega_largest, q),
        check=Partial(no_check),
        unbiased=Static(False),
    )


def _fraction(fraction: float | Array) -> Any:
    q = schedules.number(fraction, "fraction", minimum=0.0, strict=True)
    if isinstance(q, schedules.Scheduled):
        raise TypeError("fraction must be a number; a schedule of the round is not supported.")
    if not isinstance(q, jax.core.Tracer) and float(q) > 1:
        raise ValueError(f"fraction must be in (0, 1], got {fraction}.")
    return q


def _prepare(rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
    del client
    return random_words(rng_key, like)


def _encode_random(
    fraction: Array, draws: ArrayTree, message: ArrayTree, state: ArrayTree, client: Client
) -> tuple[Sparse, ArrayTree]:
    del client

    def leafwise(x: Array, words: Array) -> Array:
        # 24 bits of a word are a uniform on [0, 1) that float32 holds exactly.
        uniform = (words >> 8).astype(jnp.float32) * 2.0**-24
        # What is not finite is always sent, so that it does not go unnoticed.
        sent = (uniform < fraction.astype(jnp.float32)) | ~jnp.isfinite(x)
        return jnp.where(sent, x / trees.cast(fraction, x), 0)

    return Sparse(jax.tree.map(leafwise, message, realise_words(draws, message))), state


def _encode_largest(
    fraction: Static[float], draws: ArrayTree, message: ArrayTree, state: ArrayTree, client: Client
) -> tuple[Sparse, ArrayTree]:
    del draws, client
    if not trees.is_empty(state):
        message = trees.add(message, state)
    flat = jnp.abs(trees.ravel(message))
    _, places = jax.lax.top_k(flat, _num_sent(fraction, flat.size))
    sent = jnp.zeros(flat.size, bool).at[places].set(True)
    values = jax.tree.map(
        lambda chosen, x: jnp.where(chosen, x, 0), trees.unravel(sent, message), message
    )
    if not trees.is_empty(state):
        state = trees.subtract(message, values)
    return Sparse(values), state


def _num_sent(fraction: Static[float], size: int) -> int:
    return max(1, round(fraction.value * size))


def _decode(code: Sparse, client: Client) -> ArrayTree:
    del client
    return code.values


def _omega_random(fraction: Array, like: ArrayTree) -> Array:
    del like
    return (1 - fraction) / fraction


def _omega_largest(fraction: Static[float], like: ArrayTree) -> Array:
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(like))
    return jnp.asarray(1 - _num_sent(fraction, size) / size, jnp.float32)
