"""Exact lengths of messages in the Elias omega code, inside jit.

Elias (1975), Universal codeword sets and representations of the integers; Alistarh et al. (2017),
QSGD, section 3 and appendix A. `fedmcmc.wire` writes the bit strings that are counted here.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedmcmc.compression._types import Dense, OneOf, Quantized, Sparse
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree

NORM_BITS = 32
FLAG_BITS = 1
SMALLEST_NORM = float(np.finfo(np.float32).tiny)
"""Smallest norm that is sent. Some backends read smaller (subnormal) numbers as zero."""
WORD = 32
MAX_LEVEL_BITS = 37
"""Largest cost of a coordinate: the gap 1, a sign and 35 bits for a level up to 2**23."""


def code_length(n: Array) -> Array:
    """Return the number of bits of the Elias omega code of each positive integer, int32.

    Examples
    --------
    >>> code_length(jnp.array([1, 2, 4, 8, 16, 65536])).tolist()
    [1, 3, 6, 7, 11, 28]
    """
    # A group of bits for the number follows a group for the length of that group, and so on. For
    # exponents below 32 the number of bits in these groups grows at a few thresholds.
    exponent = 31 - lax.clz(n.astype(jnp.int32))

    def bits_from(threshold: int, bits: int) -> Array:
        return jnp.where(exponent >= threshold, bits, 0)

    length = exponent + 1 + bits_from(1, 1)
    return length + bits_from(2, 2) + bits_from(4, 3) + bits_from(8, 1) + bits_from(16, 4)


def gap_lengths(sent: Array) -> Array:
    """Return the number of bits of the gaps between true entries of `sent` ``[d]``, ``[]`` int32.

    A gap is the distance to the previous true entry; the first gap counts from position -1.

    Notes
    -----
    The length of a code only grows at powers of two, so for each ``m`` we count the entries with a
    gap of at least ``2**m``. Two overlapping windows of half the length show that the
    ``2**m - 1`` positions before an entry are empty. The flags are packed into ``d / 32`` words,
    so that all windows together cost less than reading `sent`.
    """
    words = _pack(sent)
    if sent.shape[0] < 2:  # no gap is longer than one
        return _count(words)
    num_windows = (sent.shape[0] - 1).bit_length()
    lengths = [_omega_length(2**m) for m in range(num_windows + 1)]
    added_bits = jnp.asarray(np.diff(lengths), jnp.int32)

    def widen(m: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        window, total = carry
        reach = jnp.left_shift(1, m)
        # The new window has 2 * reach - 1 positions: reach - 1, one more, and reach - 1 again.
        window = window & _shift(~words, reach) & _shift(window, reach)
        return window, total + added_bits[m] * _count(words & window)

    ones = jnp.full_like(words, 0xFFFFFFFF)
    bits: Array = lax.fori_loop(0, num_windows, widen, (ones, _count(words)))[1]
    return bits


def _pack(flags: Array) -> Array:
    # Position j is bit j // num_words of word j % num_words. Neighbors lie in neighboring words,
    # so packing and shifting work on complete vectors.
    num_words = -(-flags.shape[0] // WORD)
    rows = jnp.pad(flags, (0, WORD * num_words - flags.shape[0])).reshape(WORD, num_words)
    shifts = jnp.arange(WORD, dtype=jnp.uint32)[:, None]
    return jnp.sum(rows.astype(jnp.uint32) << shifts, axis=0, dtype=jnp.uint32)


def _shift(words: Array, distance: Array) -> Array:
    """Return for each position the flag `distance` positions before it; zero before the start."""
    num_words = words.shape[0]
    rows, columns = distance // num_words, distance % num_words
    both = jnp.concatenate([_shift_bits(words, rows + 1), _shift_bits(words, rows)])
    return lax.dynamic_slice_in_dim(both, num_words - columns, num_words)


def _shift_bits(words: Array, shift: Array) -> Array:
    # A shift of a word by 32 bits or more is undefined.
    shifted = words << jnp.minimum(shift, WORD - 1).astype(jnp.uint32)
    return jnp.where(shift < WORD, shifted, jnp.uint32(0))


def _count(words: Array) -> Array:
    # Without a type the sum would be int64 if 64 bits are enabled.
    return jnp.sum(lax.population_count(words), dtype=jnp.int32)


def _omega_length(n: int) -> int:
    bits = 1
    while n > 1:
        bits += n.bit_length()
        n = n.bit_length() - 1
    return bits


def place_bits(num: int) -> int:
    """Return the number of bits of an index of one of `num` codes.

    Examples
    --------
    >>> [place_bits(num) for num in (1, 2, 3, 4, 5)]
    [0, 1, 2, 2, 3]
    """
    return (num - 1).bit_length()


def message_bits(code: Dense | Quantized | Sparse | OneOf) -> Array:
    """Return the exact number of bits of `code` as `fedmcmc.wire` writes it, ``[]`` int32.

    With ``l(n)`` the length of the Elias omega code of ``n``:

    - `Dense`: the bits of its numbers.
    - `Quantized`: 32 bits for the norm and, unless the norm is zero or subnormal, one flag and the
      shorter of two codes: *dense*, ``l(|k| + 1)`` bits per level ``k`` and a sign if it is not
      zero; or *sparse*, ``l(nonzeros + 1)`` bits and ``l(gap) + 1 + l(|k|)`` per nonzero level.
    - `Sparse`: one flag and the shorter of all its numbers, or ``l(nonzeros + 1)`` bits and
      ``l(gap)`` bits and the number per nonzero. Numbers have the bits of their leaf's type.
    - `OneOf`: an index and the code that is sent.

    Raises
    ------
    ValueError
        If the count might exceed an int32 (58 million levels, 65 million sparse float32), or if
        the code has neither one norm nor one norm per leaf.
    """
    if isinstance(code, Dense):
        bits = trees.num_bits(code.values)
        _check_total(bits, code)
        return jnp.asarray(bits, jnp.int32)
    if isinstance(code, Sparse):
        return _sparse_bits(code)
    if isinstance(code, OneOf):
        bits_per_code = [message_bits(inner) for inner in code.codes]
        return place_bits(len(bits_per_code)) + jnp.stack(bits_per_code)[code.place]
    _check_total(MAX_LEVEL_BITS * trees.num_elements(code.levels), code)
    # Count vectors of the same size together: each count has a loop over gaps, and one loop over
    # many short vectors takes as long as a loop over one.
    by_size: dict[int, list[tuple[ArrayTree, Array]]] = {}
    for norm, leaves in as_vectors(code):
        levels = _concatenate(leaves)
        by_size.setdefault(levels.shape[0], []).append((norm, levels))
    bits_per_vector = [
        jax.vmap(_quantized_bits)(*map(jnp.stack, zip(*vectors, strict=True)))
        for vectors in by_size.values()
    ]
    return jnp.sum(jnp.concatenate(bits_per_vector), dtype=jnp.int32)


def as_vectors(code: Quantized) -> list[tuple[ArrayTree, list[ArrayTree]]]:
    """Return each norm of `code` with its leaves of levels.

    Raises
    ------
    ValueError
        If there is neither one norm nor one norm per leaf (or per leaf that holds numbers).
    """
    norms, levels = jax.tree.leaves(code.norm), jax.tree.leaves(code.levels)
    if len(norms) == len(levels) > 0:
        return [(norm, [leaf]) for norm, leaf in zip(norms, levels, strict=True)]
    if len(norms) == 1 and levels:
        return [(norms[0], levels)]
    starts = [i for i, leaf in enumerate(levels) if math.prod(leaf.shape)]
    if 0 < len(norms) == len(starts):
        # Leaves without numbers join the vector before them.
        bounds = [0, *starts[1:], len(levels)]
        return [(norm, levels[bounds[i] : bounds[i + 1]]) for i, norm in enumerate(norms)]
    raise ValueError(
        f"A quantized message has one norm, or one for each leaf of levels; got {len(norms)} norms "
        f"and {len(levels)} leaves."
    )


def _check_total(bits: int, code: Dense | Quantized | Sparse) -> None:
    if bits >= 2**31 - 2**16:  # leaves a margin for norms and flags
        num = trees.num_elements(code.levels if isinstance(code, Quantized) else code.values)
        raise ValueError(
            f"The bits of a message are counted in an int32, which a message of {num} numbers "
            "might exceed; send it in parts."
        )


def _concatenate(leaves: list[Array]) -> Array:
    return jnp.concatenate([leaf.reshape(-1) for leaf in leaves])


def _quantized_bits(norm: Array, levels: Array) -> Array:
    size = jnp.abs(levels)
    sent = size > 0
    level_bits = jnp.where(sent, code_length(jnp.maximum(size, 1)), 0)
    # Compute three sums in one pass over the levels: on CPU, XLA would make three passes.
    num_sent, dense, values = lax.reduce(
        (sent.astype(jnp.int32), code_length(size + 1), level_bits),
        (np.int32(0), np.int32(0), np.int32(0)),
        lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)),
        (0,),
    )
    sparse = code_length(num_sent + 1) + num_sent + gap_lengths(sent) + values
    body = FLAG_BITS + jnp.minimum(num_sent + dense, sparse)
    return NORM_BITS + jnp.where(jnp.abs(norm) < SMALLEST_NORM, 0, body)


def _sparse_bits(code: Sparse) -> Array:
    leaves = jax.tree.leaves(code.values)
    num_numbers, dense = trees.num_elements(leaves), trees.num_bits(leaves)
    _check_total(num_numbers + dense, code)
    sent = [_is_nonzero(leaf.reshape(-1)) for leaf in leaves]
    counts = [jnp.sum(flags, dtype=jnp.int32) for flags in sent]
    number_bits = [8 * x.dtype.itemsize * num for x, num in zip(leaves, counts, strict=True)]
    num_sent = jnp.sum(jnp.stack(counts), dtype=jnp.int32)
    sparse = (
        code_length(num_sent + 1)
        + gap_lengths(_concatenate(sent))
        + jnp.sum(jnp.stack(number_bits), dtype=jnp.int32)
    )
    return FLAG_BITS + jnp.minimum(sparse, dense)


def _is_nonzero(numbers: Array) -> Array:
    # Compare bits: subnormal numbers are sent, although some backends read them as zero.
    bits = lax.bitcast_convert_type(numbers, f"uint{8 * numbers.dtype.itemsize}")
    return (bits << 1) != 0
