"""Conversion of messages and compressors' codes to bytes and back."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc.compression import (
    SMALLEST_NORM,
    Dense,
    OneOf,
    Quantized,
    Sparse,
    WithExact,
    as_vectors,
    place_bits,
)
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree
from fedmcmc.wire._bits import (
    Reader,
    as_words,
    big_endian,
    float_bits,
    num_omega_bits,
    omega_bits,
)

Code = Dense | Quantized | Sparse | OneOf
"""Codes that are written bit by bit; any other tree is written number by number."""
NUMBER_KINDS = tuple("biufc")
"""Kinds of NumPy's numeric types; types of JAX, such as bfloat16, have other kinds."""
ZERO, ONE = np.zeros(1, np.uint8), np.ones(1, np.uint8)


def encode(code: ArrayTree) -> bytes:
    """Return the bytes of one code, message or broadcast.

    A compressor's code takes ``ceil(bits / 8)`` bytes for the `bits` that the compressor reports
    (``StepInfo.bits``), and its exact parts (`fedmcmc.types.Uncompressed`) follow. Any other pytree
    of numbers is written number by number, big-endian.

    Parameters
    ----------
    code
        Code from `fedmcmc.rounds.client_step` or from a compressor's `encode` for one client, or a
        pytree of numbers. Its arrays are on the host or on a device.

    Raises
    ------
    ValueError
        If norms are not ``[]`` float32, levels are not int32, numbers of a compressor's code are
        not floating-point, or a leaf is not an array of numbers.

    Examples
    --------
    >>> from fedmcmc.compression import Quantized
    >>> code = Quantized(norm=np.float32(1.5), levels=np.array([0, 2, 0, -1], np.int32))
    >>> message = encode(code)
    >>> len(message)
    6
    >>> decode(message, code).levels.tolist()
    [0, 2, 0, -1]
    >>> encode({"a": np.float32(1.0), "b": np.int32(3)}).hex()
    '3f80000000000003'
    """
    if isinstance(code, WithExact):
        return encode(code.code) + _plain_bytes(code.exact)
    if not isinstance(code, Code):
        return _plain_bytes(code)
    _check_code(code)
    if isinstance(code, Dense):
        return _plain_bytes(code.values)
    return np.packbits(np.concatenate(_code_bits(jax.tree.map(np.asarray, code)))).tobytes()


def _code_bits(code: Code) -> list[np.ndarray]:
    """Return the bits of a code of NumPy arrays, in parts."""
    if isinstance(code, OneOf):
        place, num = int(code.place), len(code.codes)
        if not 0 <= place < num:
            raise ValueError(f"A message is one of {num} codes, got place {place}.")
        head = [(place >> i) & 1 for i in reversed(range(place_bits(num)))]
        return [np.array(head, np.uint8), *_code_bits(code.codes[place])]
    if isinstance(code, Dense):
        return float_bits(jax.tree.leaves(code.values))
    if isinstance(code, Sparse):
        return _sparse_bits(jax.tree.leaves(code.values))
    parts = []
    for norm, levels in as_vectors(code):
        parts += _quantized_bits(norm, np.concatenate([leaf.reshape(-1) for leaf in levels]))
    return parts


def _plain_bytes(tree: ArrayTree) -> bytes:
    _check_numbers(tree)
    return b"".join(big_endian(np.asarray(leaf)).data for leaf in jax.tree.leaves(tree))


def _check_numbers(tree: ArrayTree) -> None:
    for leaf in jax.tree.leaves(tree):
        dtype = getattr(leaf, "dtype", None)
        if getattr(dtype, "kind", "") in NUMBER_KINDS:
            continue  # the fast check
        if dtype is None or not (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_):
            raise ValueError(
                "A message is a compressor's code or a tree of arrays of numbers, got a leaf "
                f"{type(leaf).__name__ if dtype is None else dtype}."
            )


def decode(data: bytes, like: ArrayTree) -> ArrayTree:
    """Return the tree that `encode` wrote, with NumPy arrays as leaves.

    All bits are the ones that were sent, with two exceptions that carry no information: a negative
    zero in a `Sparse` message may become zero, and levels with a norm of zero become zero.

    Parameters
    ----------
    data
        All bytes of the message.
    like
        Tree of the same structure, shapes and types, of arrays or `jax.ShapeDtypeStruct`, such as
        the result of `fedmcmc.rounds.code_like`.

    Raises
    ------
    ValueError
        If `data` is too short, too long or damaged. A message of other shapes raises the same error
        unless it happens to have the right number of bits.

    Examples
    --------
    >>> from fedmcmc.compression import Dense
    >>> like = Dense(jax.ShapeDtypeStruct((2,), np.float32))
    >>> decode(encode(Dense(np.array([1.0, -2.0], np.float32))), like).values.tolist()
    [1.0, -2.0]
    """
    if isinstance(like, WithExact):
        _check_numbers(like.exact)
        size = trees.num_bytes(like.exact)
        if size > len(data):
            raise ValueError(
                f"These {len(data)} bytes are not a message that ends with {size} bytes of exact "
                "parts: they are too few."
            )
        end = len(data) - size
        return WithExact(decode(data[:end], like.code), _plain_decoder(like.exact)(data[end:]))
    if not isinstance(like, Code):
        return _plain_decoder(like)(data)
    _check_code(like)
    reader = Reader(data, _describe(like))
    code = _read_code(reader, like)
    reader.finish()
    return code


def make_decoder(like: ArrayTree) -> Callable[[bytes], ArrayTree]:
    """Return a function that decodes messages like `like`, for a receiver of many messages.

    For plain numbers the shapes are analyzed only once.

    Examples
    --------
    >>> read = make_decoder({"a": jax.ShapeDtypeStruct((), np.float32)})
    >>> float(read(encode({"a": np.float32(2.5)}))["a"])
    2.5
    """
    if isinstance(like, WithExact | Code):
        return partial(decode, like=like)
    return _plain_decoder(like)


def _plain_decoder(like: ArrayTree) -> Callable[[bytes], ArrayTree]:
    _check_numbers(like)
    leaves, treedef = jax.tree.flatten(like)
    parts, size = [], 0
    for leaf in leaves:
        dtype, shape = np.dtype(leaf.dtype), tuple(leaf.shape)
        words = np.dtype(f"u{dtype.itemsize}")
        parts.append((size, math.prod(shape), words.newbyteorder(">"), words, dtype, shape))
        size += trees.num_bytes(leaf)

    def read(data: bytes) -> ArrayTree:
        if len(data) != size:
            raise ValueError(
                f"These {len(data)} bytes are not a message of numbers of shapes "
                f"{[shape for *_, shape in parts]}, which take {size} bytes."
            )
        return jax.tree.unflatten(
            treedef,
            [
                np.frombuffer(data, big, num, offset).astype(words).view(dtype).reshape(shape)
                for offset, num, big, words, dtype, shape in parts
            ],
        )

    return read


def _describe(like: Code) -> str:
    """Return a description of the expected code for error messages."""
    if isinstance(like, OneOf):
        return f"one of {len(like.codes)} codes: {', or '.join(map(_describe, like.codes))}"
    numbers = like.levels if isinstance(like, Quantized) else like.values
    shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(numbers)]
    return f"{type(like).__name__} numbers of shapes {shapes}"


def _read_code(reader: Reader, like: Code) -> Code:
    if isinstance(like, OneOf):
        place, num = 0, len(like.codes)
        for bit in reader.bits(place_bits(num)):
            place = 2 * place + int(bit)
        if place >= num:
            reader.fail(f"it claims to be code {place} of {num}")
        codes = [jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), x) for x in like.codes]
        codes[place] = _read_code(reader, like.codes[place])
        sent: Any = np.int32(place)
        return OneOf(sent, tuple(codes))
    if isinstance(like, Quantized):
        return _read_quantized(reader, like)
    is_sparse = isinstance(like, Sparse) and reader.bits(1)[0]
    size = trees.num_elements(like.values)
    places = reader.places(size) if is_sparse else np.arange(size)
    return type(like)(_read_floats(reader, places, like.values))


def _check_code(code: Code) -> None:
    """Raise unless a code has the types and shapes of one message."""
    not_arrays = [x for x in jax.tree.leaves(code) if not hasattr(x, "dtype")]
    if not_arrays:
        raise ValueError(f"A message is made of arrays, got {type(not_arrays[0]).__name__}.")
    if isinstance(code, OneOf):
        _check_scalar("place", code.place, jnp.int32)
        for option in code.codes:
            _check_code(option)
        return
    if not isinstance(code, Quantized):
        for leaf in jax.tree.leaves(code.values):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(f"A message's numbers must be floating point, got {leaf.dtype}.")
        return
    for norm, levels in as_vectors(code):
        _check_scalar("norms", norm, jnp.float32)
        for leaf in levels:
            if leaf.dtype != jnp.int32:
                raise ValueError(f"A message's levels must be int32, got {leaf.dtype}.")


def _check_scalar(name: str, leaf: Any, dtype: Any) -> None:
    if leaf.shape != () or leaf.dtype != dtype:
        raise ValueError(
            f"A message's {name} must be [] {np.dtype(dtype)}, got {list(leaf.shape)} "
            f"{leaf.dtype}; several messages are written one by one."
        )


def _count_and_gaps(places: np.ndarray) -> list[np.ndarray]:
    count = np.array([places.size + 1], np.uint32)
    return [count, np.diff(places, prepend=-1).astype(np.uint32)]


def _quantized_bits(norm: np.ndarray, levels: np.ndarray) -> list[np.ndarray]:
    head = float_bits([norm])
    if abs(norm) < SMALLEST_NORM:
        return head
    places = np.flatnonzero(levels)
    sizes = np.abs(levels).view(np.uint32)
    negative = (levels[places] < 0).view(np.uint8)
    dense = [sizes + 1]
    sparse = [*_count_and_gaps(places), sizes[places]]
    if sum(map(num_omega_bits, sparse)) < sum(map(num_omega_bits, dense)):
        count, gaps, values = map(omega_bits, sparse)
        return [*head, ONE, *count, *gaps, negative, *values]
    return [*head, ZERO, *omega_bits(dense[0]), negative]


def _sparse_bits(leaves: list[np.ndarray]) -> list[np.ndarray]:
    # The compressors' count of bits also takes -0.0 for zero, but no subnormal number.
    masks = [as_words(leaf) << 1 != 0 for leaf in leaves]
    nonzero = [leaf.reshape(-1)[mask] for leaf, mask in zip(leaves, masks, strict=True)]
    places = np.flatnonzero(np.concatenate([np.zeros(0, bool), *masks]))
    indices = _count_and_gaps(places)
    num_sparse = sum(map(num_omega_bits, indices)) + 8 * trees.num_bytes(nonzero)
    if num_sparse < 8 * trees.num_bytes(leaves):
        count, gaps = map(omega_bits, indices)
        return [ONE, *count, *gaps, *float_bits(nonzero)]
    return [ZERO, *float_bits(leaves)]


def _read_quantized(reader: Reader, like: Quantized) -> Quantized:
    norms, levels = [], []
    for _, leaves in as_vectors(like):
        sizes = [math.prod(leaf.shape) for leaf in leaves]
        norms.append(reader.floats(1, np.dtype(np.float32))[0])
        flat = np.zeros(sum(sizes), np.int32)
        if not abs(norms[-1]) < SMALLEST_NORM:
            _read_levels(reader, flat)
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        levels += [x.reshape(leaf.shape) for x, leaf in zip(parts, leaves, strict=True)]
    return Quantized(
        jax.tree.unflatten(jax.tree.structure(like.norm), norms),
        jax.tree.unflatten(jax.tree.structure(like.levels), levels),
    )


def _read_levels(reader: Reader, levels: np.ndarray) -> None:
    """Read the levels of a vector into `levels`, which contains zeros."""
    if reader.bits(1)[0]:
        places = reader.places(levels.size)
        negative = reader.bits(places.size)
        sizes = reader.omega(places.size)
    else:
        all_sizes = reader.omega(levels.size) - 1
        places = np.flatnonzero(all_sizes)
        negative = reader.bits(places.size)
        sizes = all_sizes[places]
    if sizes.size and sizes.max() > np.iinfo(np.int32).max:
        reader.fail("one of its levels does not fit into int32")
    levels[places] = np.where(negative, -sizes.view(np.int32), sizes.view(np.int32))


def _read_floats(reader: Reader, places: np.ndarray, like: ArrayTree) -> ArrayTree:
    start = 0

    def read(leaf: Any) -> np.ndarray:
        nonlocal start
        values = np.zeros(math.prod(leaf.shape), leaf.dtype)
        low, high = np.searchsorted(places, (start, start + values.size))
        values[places[low:high] - start] = reader.floats(int(high - low), values.dtype)
        start += values.size
        return values.reshape(leaf.shape)

    return jax.tree.map(read, like)
