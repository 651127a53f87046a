"""Numbers on a grid as integers modulo 2^64, the terms of a secure sum.

A sum of integers does not depend on the order of its terms. By default JAX has no 64-bit integers,
so an integer is two or three parts of 32 bits here. On the host it is one NumPy `uint64` with the
same bits.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_static
from jax.typing import DTypeLike

from fedmcmc.types import ArrayTree

MAX_TERMS = 2**16
"""Largest number of terms: a sum of this many 16-bit limbs fits into 32 bits."""
WORD_BITS = 64
"""Bits of a number of a secure sum."""
FLOAT_BITS = 54
"""Bits of the largest integer: a float32 below ``2**54`` splits into parts of 32 bits."""
MAX_DIGITS = 100
"""Largest exponent of a resolution ``2**-digits``; products with float32 numbers stay finite."""


class Word(NamedTuple):
    """Integers modulo 2^64 for sending: two uint32 arrays, shaped as the numbers."""

    high: Array
    low: Array


class Limbs(NamedTuple):
    """Integers modulo 2^64 in parts that can be added, or sums of up to 65,536 integers.

    Three uint32 arrays. `low` and `middle` have 16 bits per integer, so their sums do not overflow.
    `high` has 32 bits; its overflow is the overflow modulo 2^64.
    """

    low: Array
    middle: Array
    high: Array


@register_static
@dataclass(frozen=True)
class Grid:
    """Grid of the multiples of ``2**-digits`` between ``-max_abs`` and `max_abs`.

    Attributes
    ----------
    digits
        Number of binary digits after the point.
    max_abs
        Largest number, a float32. Larger numbers are clipped to it.
    """

    digits: int
    max_abs: float

    @classmethod
    def of(cls, resolution: float, max_abs: float) -> "Grid":
        """Return the grid with a resolution and a largest number.

        Raises
        ------
        ValueError
            If `resolution` is not a power of two between ``2**-100`` and ``2**100``, or if
            `max_abs` is not positive or at least ``2**54`` steps.
        """
        step, bound = _positive(resolution, "resolution"), _positive(max_abs, "max_abs")
        mantissa, exponent = math.frexp(step)
        digits = 1 - exponent
        if mantissa != 0.5 or abs(digits) > MAX_DIGITS:
            raise ValueError(
                "resolution must be a power of two between 2**-100 and 2**100, such as the "
                f"default 2.0**-32, got {resolution!r}."
            )
        bound = float(np.float32(bound))
        if not bound * 2.0**digits < 2.0**FLOAT_BITS:
            raise ValueError(
                f"max_abs / resolution must be below 2**{FLOAT_BITS}, got {max_abs:g} / {step:g}: "
                "use a coarser resolution, or a smaller max_abs."
            )
        return cls(digits, bound)

    def check(self, num_terms: int) -> None:
        """Raise `ValueError` if a sum of this many numbers may overflow.

        An integer is at most ``max_abs / resolution + 1/2`` in size. A sum modulo 2^64 equals the
        sum if the sum lies in ``[-2^63, 2^63)``.
        """
        if num_terms > MAX_TERMS:
            raise ValueError(
                f"A secure sum adds at most {MAX_TERMS} messages, got {num_terms} clients."
            )
        largest = math.ceil(self.max_abs * 2.0**self.digits) + 1  # exact Python integers
        if num_terms * largest >= 2**63:
            raise ValueError(
                f"The sum of {num_terms} numbers up to max_abs={self.max_abs:g} in steps of "
                f"2**{-self.digits} may overflow 64 bits: use a coarser resolution, or a smaller "
                "max_abs."
            )

    def encode(self, numbers: Array) -> Word:
        """Return the nearest integers (ties to even) for numbers of size up to `max_abs`."""
        if numbers.dtype == jnp.float64:
            scaled = jnp.round(numbers * 2.0**self.digits)
            top = jnp.floor(scaled * 2.0**-32)
            low = (scaled - top * 2.0**32).astype(jnp.uint32)
            return Word(_bits(top.astype(jnp.int32)), low)
        scaled = jnp.round(numbers.astype(jnp.float32) * 2.0**self.digits)
        # Round before splitting: all later steps are exact.
        top = jnp.floor(scaled * 2.0**-24)
        low = _bits((scaled - top * 2.0**24).astype(jnp.int32))  # 24 bits
        signed = top.astype(jnp.int32)
        return Word(_bits(signed >> 8), low | (_bits(signed & 0xFF) << 24))

    def decode(self, total: Limbs | Word, dtype: DTypeLike) -> Array:
        """Return the numbers for integers or sums of integers.

        The relative error is at most ``2**-23`` (``2**-52`` in float64). Size and sign are separate
        because the upper half of a small negative integer, as a float, would absorb all digits.
        """
        high, low = carry(total) if isinstance(total, Limbs) else total
        negative = high >> 31 == 1
        low = jnp.where(negative, ~low + 1, low)
        high = jnp.where(negative, ~high + (low == 0).astype(jnp.uint32), high)
        wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
        size = high.astype(wide) * 2.0**32 + low.astype(wide)
        return (jnp.where(negative, -size, size) * 2.0**-self.digits).astype(dtype)


def limbs(word: Word) -> Limbs:
    """Return integers in parts that can be added."""
    return Limbs(word.low & 0xFFFF, word.low >> 16, word.high)


def carry(total: Limbs) -> Word:
    """Return sums of integers modulo 2^64 from the sums of their limbs."""
    middle = total.middle + (total.low >> 16)
    return Word(total.high + (middle >> 16), (total.low & 0xFFFF) | ((middle & 0xFFFF) << 16))


def host_words(tree: ArrayTree, num_lead: int = 0) -> np.ndarray:
    """Return all integers of a tree of `Word` as one vector ``[..., num_words]`` uint64.

    The first `num_lead` axes of every leaf (chains) stay the first axes of the result.

    Examples
    --------
    >>> grid = Grid.of(2.0**-32, 2.0**20)
    >>> [f"{word:016x}" for word in host_words(grid.encode(jnp.array([1.5, -2.25])))]
    ['0000000180000000', 'fffffffdc0000000']
    """
    parts = []
    for word in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Word)):
        high, low = (np.asarray(half).astype(np.uint64) for half in word)
        words = (high << np.uint64(32)) | low
        parts.append(words.reshape(*words.shape[:num_lead], -1))
    return np.concatenate(parts, axis=-1)


def limbs_of_host(total: np.ndarray, like: ArrayTree, num_lead: int = 0) -> ArrayTree:
    """Return a sum of vectors from `host_words` as a tree of `Limbs` shaped as `like`.

    The first `num_lead` axes of `total` become the first axes of every leaf.

    Raises
    ------
    ValueError
        If `total` does not match the number of words of `like`.
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


def _bits(signed: Array) -> Array:
    return jax.lax.bitcast_convert_type(signed, jnp.uint32)


def _positive(number: Any, name: str) -> float:
    try:
        value = float(number)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        raise ValueError(f"{name} must be a concrete number, got {number!r}.") from None
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be positive and finite, got {number!r}.")
    return value
