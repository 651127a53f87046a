"""Random permutations of ``0 .. size - 1``, computed entry by entry.

The cost of an entry does not depend on the size, and an entry does not need the others. A client
can therefore shuffle its rows without a table, and a compiled program works for any number of rows.
"""

import jax
import jax.numpy as jnp
from jax import Array

_NUM_SWAPS = 32
NUM_WORDS = 2 * _NUM_SWAPS
"""Number of random words per permutation."""


def shuffle_words(rng_key: Array) -> Array:
    """Draw the random words of a permutation, ``[NUM_WORDS]`` uint32."""
    return jax.random.bits(rng_key, (NUM_WORDS,), jnp.uint32)


def shuffled(words: Array, index: Array, size: Array) -> Array:
    """Return the entries at `index` of a random permutation of ``0 .. size - 1``, int32.

    The swap-or-not shuffle: in each of 32 rounds, ``x`` and ``k - x (mod size)`` are partners for a
    random ``k``, and a random function of the pair decides whether they swap.

    Parameters
    ----------
    words
        Random words ``[NUM_WORDS]`` from `shuffle_words`; the same for all entries of a
        permutation.
    index
        Indices of any shape, in ``[0, size)``.
    size
        Number of entries ``[]``, at least one.

    References
    ----------
    Hoang et al. (2012), An enciphering scheme based on a card shuffle.

    Examples
    --------
    >>> words = shuffle_words(jax.random.key(0))
    >>> sorted(shuffled(words, jnp.arange(5), 5).tolist())
    [0, 1, 2, 3, 4]
    """
    num = jnp.asarray(size).astype(jnp.uint32)
    # Divide once per round: a division per entry took most of the time.
    centers = words[:_NUM_SWAPS] % num

    def swap(i: Array, x: Array) -> Array:
        ahead = centers[i] + num - x
        partner = jnp.minimum(ahead, ahead - num)  # modulo num; numbers below zero wrap around
        return jnp.where(_coin(jnp.maximum(x, partner), words[_NUM_SWAPS + i]), partner, x)

    entries = jnp.asarray(index).astype(jnp.uint32)
    return jax.lax.fori_loop(0, _NUM_SWAPS, swap, entries, unroll=4).astype(jnp.int32)


def _coin(x: Array, word: Array) -> Array:
    """Return a pseudorandom bool for each `x`, by the last step of MurmurHash3."""
    x = (x ^ word) * jnp.uint32(0x9E3779B1)
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return ((x ^ (x >> jnp.uint32(16))) & jnp.uint32(1)).astype(bool)
