"""The stochastic quantiser of QSGD."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from fedmcmc._types import ArrayTree, Client, PerClient, Static
from fedmcmc.compression._codes import Quantized
from fedmcmc.compression._elias import SMALLEST_NORM
from fedmcmc.compression._types import (
    Compressor,
    check_number,
    no_state,
    of_client,
    per_client_number,
)
from fedmcmc.pytrees import trees, where_any
from fedmcmc.random import random_words, word_halves

__all__ = ["quantize"]

MAX_LEVELS = 2**23
"""Above this many levels a level would have more bits than a float32."""


class _Config(NamedTuple):
    num_levels: Any  # [] float32 or PerClient of [num_clients]
    per_leaf: Static[bool]


def quantize(num_levels: int | Array, *, per_leaf: bool = False) -> Compressor:
    """Round each number at random to one of ``num_levels`` fractions of the message's norm.

    ``C(v)_j = |v| sign(v_j) k_j / s`` with ``s = num_levels``, ``a_j = s |v_j| / |v|`` and ``k_j``
    the integer below ``a_j``, or with probability ``a_j - floor(a_j)`` the one above.

    Parameters
    ----------
    num_levels
        ``[]``, or ``[num_clients]`` where clients differ, at least one; "p bits" of the
        literature are ``2**p`` levels.
    per_leaf
        Whether each leaf of a message has a norm of its own. By default all leaves are one vector.

    Raises
    ------
    ValueError
        If a number of levels is not an integer between 1 and ``2**23``; no compression at all is
        `identity`.

    Notes
    -----
    Unbiased, with ``omega = min(d / s^2, sqrt(d) / s)`` for ``d`` numbers under one norm. The norm
    is a float32 and is used as such when rounding, so nothing is lost on the way to the receiver.

    References
    ----------
    Alistarh et al. (2017), QSGD, section 3.1; eq. 4 of Vono et al. (2022).

    Examples
    --------
    >>> compressor = quantize(16)
    >>> float(compressor.omega(jnp.zeros(784)))
    1.75
    """
    levels = per_client_number(num_levels, "num_levels", low=1, high=MAX_LEVELS, integer=True)
    config = _Config(levels, Static(bool(per_leaf)))
    return Compressor(
        init=Partial(no_state),
        prepare=Partial(_prepare),
        encode=Partial(_encode, config),
        decode=Partial(_decode, config),
        omega=Partial(_omega, config),
        check=Partial(_check, config),
        unbiased=Static(True),
    )


def _prepare(rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
    del client
    return random_words(rng_key, like)


def _norm(leaves: list[Array]) -> Array:
    norm = _plain_norm(leaves)
    # Squares of numbers beyond these do not fit into a float32.
    safe = (norm > 1e-15) & (norm < 1e15)
    norm = where_any(~safe, _relative_norm, norm, leaves)
    # A subnormal norm is sent as zero. One that is not finite stays so, and then no decoded
    # number is finite.
    return jnp.where(norm < SMALLEST_NORM, 0, norm)


def _plain_norm(leaves: list[Array]) -> Array:
    squares = [jnp.sum(jnp.square(x)).astype(jnp.float32) for x in leaves]
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))


def _relative_norm(leaves: list[Array]) -> Array:
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x)).astype(jnp.float32) for x in leaves]))
    scale = jnp.where(largest > 0, largest, 1)
    return largest * _plain_norm([x / trees.cast(scale, x) for x in leaves])


def _round(x: Array, words: Array, num_levels: Array) -> Array:
    """Return signed levels of numbers relative to the norm."""
    s = trees.cast(num_levels, x)
    exact = jnp.minimum(jnp.abs(x) * s, s)
    below = jnp.floor(exact)
    # The word is below ``fraction * 2**32`` with probability `fraction`.
    up = words < ((exact - below) * 2.0**32).astype(jnp.uint32)
    level = below.astype(jnp.int32) + up.astype(jnp.int32)
    return jnp.where(x < 0, -level, level)


def _relative(x: Array, norm: Array) -> Array:
    return x / trees.cast(jnp.where(norm > 0, norm, 1), x)


def _encode(
    config: _Config, draws: ArrayTree, message: ArrayTree, state: ArrayTree, client: Client
) -> tuple[Quantized, ArrayTree]:
    num_levels = of_client(config.num_levels, client)
    # Sixteen bits hold neither the norm nor the levels.
    message = jax.tree.map(trees.widen, message)
    if config.per_leaf.value:
        norm = jax.tree.map(lambda x: _norm([x]), message)
        relative = jax.tree.map(_relative, message, norm)
    else:
        norm = _norm(jax.tree.leaves(message))
        relative = jax.tree.map(lambda x: _relative(x, norm), message)
    # The two halves are joined after rounding: XLA does not fuse a concatenation on CPU, so that
    # levels, which are read several times, are computed once.
    flat, (first, second) = trees.ravel(relative), word_halves(draws, trees.num_elements(message))
    half = first.shape[0]
    levels = jnp.concatenate(
        [_round(flat[:half], first, num_levels), _round(flat[half:], second, num_levels)]
    )
    return Quantized(norm, trees.unravel(levels, message)), state


def _decode(config: _Config, code: Quantized, client: Client) -> ArrayTree:
    num_levels = of_client(config.num_levels, client)

    def leafwise(levels: Array, norm: Array) -> Array:
        return norm * (levels.astype(jnp.float32) / num_levels)

    if config.per_leaf.value:
        return jax.tree.map(leafwise, code.levels, code.norm)
    return jax.tree.map(lambda levels: leafwise(levels, code.norm), code.levels)


def _omega(config: _Config, like: ArrayTree) -> Array:
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(like)]
    size = max(sizes) if config.per_leaf.value else sum(sizes)
    given = config.num_levels
    s = given.values if isinstance(given, PerClient) else given
    return jnp.minimum(size / s**2, math.sqrt(size) / s)


def _check(config: _Config, like: ArrayTree, num_clients: int) -> None:
    del like
    check_number(config.num_levels, "num_levels", num_clients)
