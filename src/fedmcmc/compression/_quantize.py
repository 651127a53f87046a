"""Stochastic quantizer of QSGD."""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.compression._elias import SMALLEST_NORM
from fedmcmc.compression._numbers import as_per_client, check_num_clients, value_for
from fedmcmc.compression._types import Compressor, Dense, Quantized
from fedmcmc.pytrees import trees, where_any
from fedmcmc.random import random_words, word_halves
from fedmcmc.types import ArrayTree, Client, PerClient, Sender, register_dataclass

MAX_LEVELS = 2**23
"""Largest number of levels: a level of a finer grid would need more bits than a float32."""


def quantize(num_levels: int | Array, *, per_leaf: bool = False) -> Compressor:
    """Round each number at random to one of ``num_levels`` fractions of the message's norm.

    ``C(v)_j = |v| sign(v_j) k_j / s`` with ``s = num_levels``, where ``k_j`` is one of the two
    integers next to ``s |v_j| / |v|``, with probabilities that make ``C`` unbiased. The bound is
    ``omega = min(d / s^2, sqrt(d) / s)`` for ``d`` numbers per norm.

    Parameters
    ----------
    num_levels
        Number of levels ``[]``, or ``[num_clients]`` if clients differ, at least one. "p bits" in
        the literature are ``2**p`` levels.
    per_leaf
        If true, each leaf of a message has its own norm. By default all leaves are one vector.

    Raises
    ------
    ValueError
        If a number of levels is not an integer between 1 and ``2**23``. `identity` sends messages
        without compression.

    References
    ----------
    Alistarh et al. (2017), QSGD, section 3.1; eq. 4 of Vono et al. (2022).

    Examples
    --------
    >>> compressor = quantize(16)
    >>> float(compressor.omega(jnp.zeros(784)))
    1.75
    """
    levels = as_per_client(num_levels, "num_levels", low=1, high=MAX_LEVELS, integer=True)
    return Quantize(levels, bool(per_leaf))


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Quantize(Compressor):
    """Stochastic quantizer; see `quantize`."""

    num_levels: Array | PerClient  # float32
    per_leaf: bool = field(metadata={"static": True})

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
        return random_words(rng_key, like)

    def encode(
        self, draws: ArrayTree, message: ArrayTree, state: ArrayTree, client: Client
    ) -> tuple[Quantized | Dense, ArrayTree]:
        """Return norm and levels, or a `Dense` code if the message has no numbers."""
        if not trees.num_elements(message):
            return Dense(message), state
        num_levels = value_for(self.num_levels, client)
        # Sixteen bits are too few for the norm and for the levels.
        message = jax.tree.map(trees.widen, message)
        # The norm is rounded to float32 here, so that client and receiver use the same number.
        if self.per_leaf:
            norm = jax.tree.map(lambda x: _norm([x]) if x.size else (), message)
            relative = jax.tree.map(lambda x, n: _relative(x, n) if x.size else x, message, norm)
        else:
            norm = _norm(jax.tree.leaves(message))
            relative = jax.tree.map(lambda x: _relative(x, norm), message)
        # Round each half before joining them: on CPU, XLA does not fuse a concatenation, so the
        # levels, which are read several times, are computed once.
        flat = trees.ravel(relative)
        leading, trailing = word_halves(draws, flat.size)
        half = leading.shape[0]
        levels = jnp.concatenate(
            [_round(flat[:half], leading, num_levels), _round(flat[half:], trailing, num_levels)]
        )
        return Quantized(norm, trees.unravel(levels, message)), state

    def decode(self, code: Quantized | Dense, sender: Sender | Client) -> ArrayTree:
        if isinstance(code, Dense):
            return code.values
        # XLA may divide by a number or multiply by its reciprocal, depending on the rest of the
        # program. The barrier makes client and server compute the same.
        num_levels = jax.lax.optimization_barrier(value_for(self.num_levels, sender))

        def leafwise(levels: Array, norm: Array) -> Array:
            fractions = levels.astype(jnp.float32) / num_levels
            return norm * fractions if levels.size else fractions

        if self.per_leaf:
            return jax.tree.map(leafwise, code.levels, code.norm)
        return jax.tree.map(lambda levels: leafwise(levels, code.norm), code.levels)

    def omega(self, like: ArrayTree) -> Array:
        sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(like)]
        size = max(sizes, default=0) if self.per_leaf else sum(sizes)
        num_levels = self.num_levels
        s = num_levels.values if isinstance(num_levels, PerClient) else num_levels
        return jnp.minimum(size / s**2, math.sqrt(size) / s)

    def check(self, like: ArrayTree, num_clients: int) -> None:
        check_num_clients(self.num_levels, "num_levels", num_clients)


def _norm(leaves: list[Array]) -> Array:
    norm = _plain_norm(leaves)
    # Outside this range the squares overflow or underflow float32.
    safe = (norm > 1e-15) & (norm < 1e15)
    norm = where_any(~safe, _scaled_norm, norm, leaves)
    # A subnormal norm is sent as zero. A norm that is not finite is kept, and then no decoded
    # number is finite.
    return jnp.where(norm < SMALLEST_NORM, 0, norm)


def _plain_norm(leaves: list[Array]) -> Array:
    squares = [jnp.sum(jnp.square(x)).astype(jnp.float32) for x in leaves]
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))


def _scaled_norm(leaves: list[Array]) -> Array:
    largest = jnp.max(
        jnp.stack([jnp.max(jnp.abs(x)).astype(jnp.float32) for x in leaves if x.size])
    )
    scale = jnp.where(largest > 0, largest, 1)
    return largest * _plain_norm([x / trees.cast(scale, x) for x in leaves])


def _round(x: Array, words: Array, num_levels: Array) -> Array:
    """Return the signed levels of numbers that are relative to the norm."""
    s = trees.cast(num_levels, x)
    exact = jnp.minimum(jnp.abs(x) * s, s)
    below = jnp.floor(exact)
    # A word is below ``fraction * 2**32`` with probability `fraction`.
    up = words < ((exact - below) * 2.0**32).astype(jnp.uint32)
    level = below.astype(jnp.int32) + up.astype(jnp.int32)
    return jnp.where(x < 0, -level, level)


def _relative(x: Array, norm: Array) -> Array:
    return x / trees.cast(jnp.where(norm > 0, norm, 1), x)
