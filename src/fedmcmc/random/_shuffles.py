"""Random permutations of ``0 .. size - 1``, one entry at a time.

An entry costs the same whatever the size and needs no other entry: a client can shuffle its rows
without a table of them, and a compiled program does not depend on how many there are.
"""

import jax
import jax.numpy as jnp
from jax import Array

_NUM_SWAPS = 32
NUM_WORDS = 2 * _NUM_SWAPS
"""Random words that make a permutation."""


def shuffle_words(rng_key: Array) -> Array:
    """Draw what makes a permutation, ``[NUM_WORDS]`` uint32."""
    return jax.random.bits(rng_key, (NUM_WORDS,), jnp.uint32)


def shuffled(words: Array, index: Array, size: Array) -> Array:
    """Return the entries at `index` of a random permutation of ``0 .. size - 1``, int32.

    Swap or not: each of 32 times, ``x`` and ``k - x (mod size)`` are partners, for a random ``k``,
    and change places or do not by a random function of the pair.

    Parameters
    ----------
    words
        ``[NUM_WORDS]``, of `shuffle_words`; the same for all entries of a permutation.
    index
        Any shape, in ``[0, size)``.
    size
        ``[]``, at least one.

    References
    ----------
    Hoang, Morris and Rogaway (2012), An enciphering scheme based on a card shuffle.

    Examples
    --------
    >>> words = shuffle_words(jax.random.key(0))
    >>> sorted(shuffled(words, jnp.arange(5), 5).tolist())
    [0, 1, 2, 3, 4]
    """
    num = jnp.asarray(size).astype(jnp.uint32)
    # One division per swap: one division per entry took most of the time.
    centers = words[:_NUM_SWAPS] % num

    def swap(i: Array, x: Array) -> Array:
        ahead = centers[i] + num - x
        partner = jnp.minimum(ahead, ahead - num)  # modulo num: what is below zero wraps around
        return jnp.where(_coin(jnp.maximum(x, partner), words[_NUM_SWAPS + i]), partner, x)

    first = jnp.asarray(index).astype(jnp.uint32)
    return jax.lax.fori_loop(0, _NUM_SWAPS, swap, first, unroll=4).astype(jnp.int32)


def _coin(x: Array, word: Array) -> Array:
    """Return a random function of `x`, bool: the last step of MurmurHash3 on words."""
    x = (x ^ word) * jnp.uint32(0x9E3779B1)
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return ((x ^ (x >> jnp.uint32(16))) & jnp.uint32(1)).astype(bool)
