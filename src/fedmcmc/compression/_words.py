"""Numbers on a grid, as integers modulo 2^64: what a secure sum adds.

A sum of integers does not depend on the order of its terms. JAX has no 64-bit integers unless a
whole process is told so, hence an integer is two or three parts of 32 bits here; on the host it is
one NumPy `uint64`, of the same bits.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_static

from fedmcmc._types import ArrayTree

MAX_TERMS = 2**16
"""Terms of a sum at most: so many 16-bit limbs add up in 32 bits."""
WORD_BITS = 64
"""Bits of a number of a secure sum."""
FLOAT_BITS = 54
"""A float32 below ``2**54`` splits into parts that 32-bit integers hold."""
EXTREME = 100
"""Resolutions lie between ``2**-100`` and ``2**100``: float32 has these, and products with them."""


class Word(NamedTuple):
    """One integer modulo 2^64 per number, as it crosses the network.

    Both ``[...]`` uint32, shaped as the numbers.
    """

    high: Array
    low: Array


class Limbs(NamedTuple):
    """The same integer in parts that can be added, or a sum of up to 65,536 such.

    All ``[...]`` uint32. Of one integer `low` and `middle` are 16 bits each, so that sums of them
    do not overflow; `high` is 32 bits, whose overflow is that of the 64.
    """

    low: Array
    middle: Array
    high: Array


@register_static
@dataclass(frozen=True)
class Grid:
    """The multiples of ``2**-digits`` up to `most` in size.

    Attributes
    ----------
    digits
        Binary digits behind the point.
    most
        What numbers beyond are moved to; a float32.
    """

    digits: int
    most: float

    @classmethod
    def of(cls, resolution: float, most: float) -> "Grid":
        """Return the grid of a resolution and a range.

        Raises
        ------
        ValueError
            If `resolution` is no power of two from ``2**-100`` to ``2**100``, or `most` is not
            positive or holds more than ``2**54`` steps of it.
        """
        step, bound = _positive(resolution, "resolution"), _positive(most, "most")
        mantissa, exponent = math.frexp(step)
        digits = 1 - exponent
        if mantissa != 0.5 or abs(digits) > EXTREME:
            raise ValueError(
                "resolution must be a power of two between 2**-100 and 2**100, such as the "
                f"default 2.0**-32, got {resolution!r}."
            )
        bound = float(np.float32(bound))
        if not bound * 2.0**digits < 2.0**FLOAT_BITS:
            raise ValueError(
                f"most / resolution must be below 2**{FLOAT_BITS}, got {most:g} / {step:g}: use a "
                "coarser resolution, or a smaller most."
            )
        return cls(digits, bound)

    def check(self, num_terms: int) -> None:
        """Raise `ValueError` unless a sum of so many numbers can neither overflow nor be misread.

        An integer is at most ``most / resolution + 1/2`` in size, and the signed reading of a sum
        modulo 2^64 is the sum if that lies in ``[-2^63, 2^63)``.
        """
        if num_terms > MAX_TERMS:
            raise ValueError(
                f"A secure sum has room for {MAX_TERMS} messages, got {num_terms} clients."
            )
        largest = math.ceil(self.most * 2.0**self.digits) + 1  # exact, in Python's integers
        if num_terms * largest >= 2**63:
            raise ValueError(
                f"The sum of {num_terms} numbers up to most={self.most:g} in steps of "
                f"2**{-self.digits} may overflow 64 bits: use a coarser resolution, or a smaller "
                "most."
            )

    def encode(self, numbers: Array) -> Word:
        """Return the integers nearest to numbers that are at most `most` in size (ties to even)."""
        if numbers.dtype == jnp.float64:
            scaled = jnp.round(numbers * 2.0**self.digits)
            top = jnp.floor(scaled * 2.0**-32)
            low = (scaled - top * 2.0**32).astype(jnp.uint32)
            return Word(_bits(top.astype(jnp.int32)), low)
        scaled = jnp.round(numbers.astype(jnp.float32) * 2.0**self.digits)
        # Rounded before it is split; every further step is exact.
        top = jnp.floor(scaled * 2.0**-24)
        low = _bits((scaled - top * 2.0**24).astype(jnp.int32))  # 24 bits
        signed = top.astype(jnp.int32)
        return Word(_bits(signed >> 8), low | (_bits(signed & 0xFF) << 24))

    def decode(self, total: Limbs | Word, dtype: Any) -> Array:
        """Return the numbers that integers, or sums of them, stand for.

        From size and sign: read as a float, the upper half of a sum just below zero would swallow
        all its digits. The relative error is at most ``2**-23`` (of float64 ``2**-52``).
        """
        high, low = carry(total) if isinstance(total, Limbs) else total
        negative = high >> 31 == 1
        low = jnp.where(negative, ~low + 1, low)
        high = jnp.where(negative, ~high + (low == 0).astype(jnp.uint32), high)
        wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
        size = high.astype(wide) * 2.0**32 + low.astype(wide)
        return (jnp.where(negative, -size, size) * 2.0**-self.digits).astype(dtype)


def limbs(word: Word) -> Limbs:
    """Return an integer in parts that can be added."""
    return Limbs(word.low & 0xFFFF, word.low >> 16, word.high)


def carry(total: Limbs) -> Word:
    """Return a sum of integers modulo 2^64, from the sums of their limbs."""
    middle = total.middle + (total.low >> 16)
    return Word(total.high + (middle >> 16), (total.low & 0xFFFF) | ((middle & 0xFFFF) << 16))


def host_words(tree: ArrayTree, num_lead: int = 0) -> np.ndarray:
    """Return all integers of a tree of `Word` in one vector ``[..., num_words]`` uint64.

    The first `num_lead` axes of every leaf (chains) are kept, in front.

    Examples
    --------
    >>> grid = Grid.of(2.0**-32, 2.0**20)
    >>> [f"{word:016x}" for word in host_words(grid.encode(jnp.array([1.5, -2.25])))]
    ['0000000180000000', 'fffffffdc0000000']
    """
    parts = []
    for word in jax.tree.leaves(tree, is_leaf=_is_word):
        high, low = (np.asarray(half).astype(np.uint64) for half in word)
        whole = (high << np.uint64(32)) | low
        parts.append(whole.reshape(*whole.shape[:num_lead], -1))
    return np.concatenate(parts, axis=-1)


def limbs_of_host(total: np.ndarray, like: ArrayTree, num_lead: int = 0) -> ArrayTree:
    """Return a sum of vectors of `host_words` in the shapes of a tree of `Limbs`.

    The first `num_lead` axes of `total` come first in every leaf.

    Raises
    ------
    ValueError
        If it has another number of words.
    """
    nodes, treedef = jax.tree.flatten(like, is_leaf=lambda node: isinstance(node, Limbs))
    sizes = [math.prod(node.low.shape) for node in nodes]
    if total.dtype != np.uint64 or total.shape[num_lead:] != (sum(sizes),):
        raise ValueError(
            f"A sum of these messages is [{sum(sizes)}] uint64, got {list(total.shape)} "
            f"{total.dtype}."
        )
    pieces = np.split(total, np.cumsum(sizes)[:-1], axis=-1)

    def split(words: np.ndarray, node: Limbs) -> Limbs:
        words = words.reshape((*total.shape[:num_lead], *node.low.shape))
        parts = ((0, 0xFFFF), (16, 0xFFFF), (32, 0xFFFFFFFF))
        low, middle, high = ((words >> np.uint64(by)) & np.uint64(mask) for by, mask in parts)
        return Limbs(*jax.tree.map(lambda part: np.asarray(part, np.uint32), (low, middle, high)))

    return jax.tree.unflatten(treedef, list(map(split, pieces, nodes)))


def _is_word(node: object) -> bool:
    return isinstance(node, Word)


def _bits(signed: Array) -> Array:
    return jax.lax.bitcast_convert_type(signed, jnp.uint32)


def _positive(number: Any, name: str) -> float:
    try:
        value = float(number)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        raise ValueError(f"{name} must be a number that is known now, got {number!r}.") from None
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be positive and finite, got {number!r}.")
    return value
