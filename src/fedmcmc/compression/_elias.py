"""Exact lengths of messages in the Elias omega code, inside jit.

Elias (1975), Universal codeword sets and representations of the integers; Alistarh et al. (2017),
QSGD, section 3 and appendix A. `fedmcmc.wire` emits the very bit strings that are counted here.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedmcmc._types import ArrayTree
from fedmcmc.compression._types import Dense, OneOf, Quantized, Sparse
from fedmcmc.pytrees import trees

NORM_BITS = 32
FLAG_BITS = 1
SMALLEST_NORM = float(np.finfo(np.float32).tiny)
"""Smaller norms are subnormal numbers, which some backends take for zero and others do not."""
WORD = 32
# What a coordinate can cost at most: the gap 1, a sign and 35 bits of a level up to 2**23.
MAX_LEVEL_BITS = 37


def code_length(n: Array) -> Array:
    """Return the bits of the Elias omega code of each positive integer, int32.

    Examples
    --------
    >>> code_length(jnp.array([1, 2, 4, 8, 16, 65536])).tolist()
    [1, 3, 6, 7, 11, 28]
    """
    # Each group after the first is as long as the exponent of the exponent, and so on, which for
    # exponents below 32 has four thresholds.
    exponent = 31 - lax.clz(n.astype(jnp.int32))

    def beyond(threshold: int, bits: int) -> Array:
        return jnp.where(exponent >= threshold, bits, 0)

    first = exponent + 1 + beyond(1, 1)
    return first + beyond(2, 2) + beyond(4, 3) + beyond(8, 1) + beyond(16, 4)


def gap_lengths(sent: Array) -> Array:
    """Return the bits of the gaps between the true entries of `sent` ``[d]``, ``[]`` int32.

    A gap is the distance to the entry before, the first one's counted from the place before the
    beginning.

    Notes
    -----
    The length of a code grows only where a gap reaches a power of two, so the entries whose gap
    is at least ``2**m`` are counted for each ``m``. That the ``2**m - 1`` places before an entry
    are empty follows from two windows of half the length. The flags are kept in the bits of
    ``d / 32`` words, so that all windows together cost less than reading `sent` does.
    """
    words = _packed(sent)
    if sent.shape[0] < 2:  # no gap is longer than one
        return _count(words)
    num_windows = (sent.shape[0] - 1).bit_length()
    lengths = [_length(2**m) for m in range(num_windows + 1)]
    added = jnp.asarray(np.diff(lengths), jnp.int32)

    def widen(m: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        window, total = carry
        reach = jnp.left_shift(1, m)
        # The window of 2 * reach - 1 places: reach - 1 places, one more, and reach - 1 again.
        window = window & _before(~words, reach) & _before(window, reach)
        return window, total + added[m] * _count(words & window)

    every = jnp.full_like(words, 0xFFFFFFFF)
    bits: Array = lax.fori_loop(0, num_windows, widen, (every, _count(words)))[1]
    return bits


def _packed(flags: Array) -> Array:
    # Place j is bit j // num_words of word j % num_words: neighbors lie in neighboring words,
    # so that packing and shifting work on whole vectors.
    num_words = -(-flags.shape[0] // WORD)
    rows = jnp.pad(flags, (0, WORD * num_words - flags.shape[0])).reshape(WORD, num_words)
    shifts = jnp.arange(WORD, dtype=jnp.uint32)[:, None]
    return jnp.sum(rows.astype(jnp.uint32) << shifts, axis=0, dtype=jnp.uint32)


def _before(words: Array, distance: Array) -> Array:
    # The flags `distance` places before. Before the beginning nothing is empty: zeros enter.
    num_words = words.shape[0]
    rows, columns = distance // num_words, distance % num_words
    both = jnp.concatenate([_up(words, rows + 1), _up(words, rows)])
    return lax.dynamic_slice_in_dim(both, num_words - columns, num_words)


def _up(words: Array, shift: Array) -> Array:
    # To shift a word by all its bits or more is undefined.
    shifted = words << jnp.minimum(shift, WORD - 1).astype(jnp.uint32)
    return jnp.where(shift < WORD, shifted, jnp.uint32(0))


def _count(words: Array) -> Array:
    # Without a type the sum would be int64 where 64 bits are enabled.
    return jnp.sum(lax.population_count(words), dtype=jnp.int32)


def _length(n: int) -> int:
    bits = 1
    while n > 1:
        bits += n.bit_length()
        n = n.bit_length() - 1
    return bits


def place_bits(num: int) -> int:
    """Return the bits that say which one of `num` codes follows.

    Examples
    --------
    >>> [place_bits(num) for num in (1, 2, 3, 4, 5)]
    [0, 1, 2, 2, 3]
    """
    return (num - 1).bit_length()


def message_bits(code: Dense | Quantized | Sparse | OneOf) -> Array:
    """Return the exact number of bits of `code` as `fedmcmc.wire` writes it, ``[]`` int32.

    A `Dense` message takes the bits of its numbers. A quantized vector takes 32 bits of norm and,
    unless that is zero (or subnormal), one flag and the shorter of two codes: *dense*,
    ``l(|k| + 1)`` bits for each coordinate and a sign where ``k`` is not zero; or *sparse*,
    ``l(nonzeros + 1)`` bits and, for each nonzero, ``l(gap)``, a sign and ``l(|k|)``, where ``l``
    is `code_length`. A `Sparse` vector takes one flag and the shorter of all its numbers, or
    ``l(nonzeros + 1)`` and, for each nonzero, ``l(gap)`` and its number. Each number takes the
    bits of its own leaf's type. A `OneOf` takes `place_bits` and the bits of the code that is sent.

    Raises
    ------
    ValueError
        If the bits of a message of this size might not fit an int32 (58 million levels, 65 million
        sparse float32), and if there are neither one norm nor as many as leaves.
    """
    if isinstance(code, Dense):
        bits = trees.num_bits(code.values)
        _check_total(bits, code)
        return jnp.asarray(bits, jnp.int32)
    if isinstance(code, Sparse):
        return _sparse_bits(code)
    if isinstance(code, OneOf):
        each = [message_bits(one) for one in code.codes]
        return place_bits(len(each)) + jnp.stack(each)[code.place]
    _check_total(MAX_LEVEL_BITS * trees.num_elements(code.levels), code)
    # Vectors of a size are counted together: each has a loop over its gaps, which for a short one
    # takes as long as for many.
    by_size: dict[int, list[tuple[ArrayTree, Array]]] = {}
    for norm, leaves in as_vectors(code):
        levels = _concatenated(leaves)
        by_size.setdefault(levels.shape[0], []).append((norm, levels))
    each = [
        jax.vmap(_quantized_bits)(*map(jnp.stack, zip(*alike, strict=True)))
        for alike in by_size.values()
    ]
    return jnp.sum(jnp.concatenate(each), dtype=jnp.int32)


def as_vectors(code: Quantized) -> list[tuple[ArrayTree, list[ArrayTree]]]:
    """Return each norm of `code` with the leaves of levels that it belongs to.

    Raises
    ------
    ValueError
        If there are neither one norm nor as many as leaves (or leaves that hold numbers).
    """
    norms, levels = jax.tree.leaves(code.norm), jax.tree.leaves(code.levels)
    if len(norms) == len(levels) > 0:
        return [(norm, [leaf]) for norm, leaf in zip(norms, levels, strict=True)]
    if len(norms) == 1 and levels:
        return [(norms[0], levels)]
    starts = [i for i, leaf in enumerate(levels) if math.prod(leaf.shape)]
    if 0 < len(norms) == len(starts):
        # Leaves without numbers lie with those before them.
        bounds = [0, *starts[1:], len(levels)]
        return [(norm, levels[bounds[i] : bounds[i + 1]]) for i, norm in enumerate(norms)]
    raise ValueError(
        f"A quantized message has one norm, or one for each leaf of levels; got {len(norms)} norms "
        f"and {len(levels)} leaves."
    )


def _check_total(bits: int, code: Dense | Quantized | Sparse) -> None:
    if bits >= 2**31 - 2**16:  # room for norms and flags
        num = trees.num_elements(code.levels if isinstance(code, Quantized) else code.values)
        raise ValueError(
            f"The bits of a message are counted in an int32, which those of {num} numbers might "
            "exceed; send it in parts."
        )


def _concatenated(leaves: list[Array]) -> Array:
    return jnp.concatenate([leaf.reshape(-1) for leaf in leaves])


def _quantized_bits(norm: Array, levels: Array) -> Array:
    size = jnp.abs(levels)
    sent = size > 0
    value = jnp.where(sent, code_length(jnp.maximum(size, 1)), 0)
    # The three sums in one pass over the levels: XLA makes three passes of three sums on CPU.
    num, dense, values = lax.reduce(
        (sent.astype(jnp.int32), code_length(size + 1), value),
        (np.int32(0), np.int32(0), np.int32(0)),
        lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)),
        (0,),
    )
    sparse = code_length(num + 1) + num + gap_lengths(sent) + values
    body = FLAG_BITS + jnp.minimum(num + dense, sparse)
    return NORM_BITS + jnp.where(jnp.abs(norm) < SMALLEST_NORM, 0, body)


def _sparse_bits(code: Sparse) -> Array:
    leaves = jax.tree.leaves(code.values)
    num_numbers, dense = trees.num_elements(leaves), trees.num_bits(leaves)
    _check_total(num_numbers + dense, code)
    sent = [_nonzero(leaf.reshape(-1)) for leaf in leaves]
    counts = [jnp.sum(flags, dtype=jnp.int32) for flags in sent]
    numbers = [8 * x.dtype.itemsize * num for x, num in zip(leaves, counts, strict=True)]
    num = jnp.sum(jnp.stack(counts), dtype=jnp.int32)
    sparse = (
        code_length(num + 1)
        + gap_lengths(_concatenated(sent))
        + jnp.sum(jnp.stack(numbers), dtype=jnp.int32)
    )
    return FLAG_BITS + jnp.minimum(sparse, dense)


def _nonzero(numbers: Array) -> Array:
    # By the bits: a backend may take subnormal numbers for zero, but they are sent.
    bits = lax.bitcast_convert_type(numbers, f"uint{8 * numbers.dtype.itemsize}")
    return (bits << 1) != 0
