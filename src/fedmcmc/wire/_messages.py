"""Codes of compressors to bytes and back."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc._types import ArrayTree
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
from fedmcmc.wire._bits import (
    Reader,
    as_words,
    big_endian,
    float_bits,
    num_omega_bits,
    omega_bits,
)

Code = Dense | Quantized | Sparse | OneOf
"""What is written bit by bit; every other tree is written number by number."""
NUMBERS = tuple("biufc")
"""Kinds of NumPy's types that are numbers; those of JAX's own (bfloat16) are looked at closer."""
ZERO, ONE = np.zeros(1, np.uint8), np.ones(1, np.uint8)


def encode(code: ArrayTree) -> bytes:
    """Return the bytes of one code, message or broadcast.

    A compressor's code takes ``ceil(bits / 8)`` bytes, where `bits` is what the compressor reports
    for it (``StepInfo.bits``), parts that it leaves alone (`fedmcmc.Exact`) follow whole. Any other
    pytree of numbers is written number by number, big-endian.

    Parameters
    ----------
    code
        What `fedmcmc.rounds.client_step` returns, what a compressor's `encode` returns for one
        client, or a pytree of numbers: arrays on the host or on a device.

    Raises
    ------
    ValueError
        If `code` is not one message: its norms not ``[]`` float32, its levels not int32, the
        numbers of a compressor's code not floating point; or if a leaf is no array of numbers.

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
    _check(code)
    if isinstance(code, Dense):
        return _plain_bytes(code.values)
    return np.packbits(np.concatenate(_bits_of(jax.tree.map(np.asarray, code)))).tobytes()


def _bits_of(code: Code) -> list[np.ndarray]:
    """Return the bits of a code on the host, in parts."""
    if isinstance(code, OneOf):
        place, num = int(code.place), len(code.codes)
        if not 0 <= place < num:
            raise ValueError(f"A message is one of {num} codes, got place {place}.")
        head = [(place >> i) & 1 for i in reversed(range(place_bits(num)))]
        return [np.array(head, np.uint8), *_bits_of(code.codes[place])]
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
        if getattr(dtype, "kind", "") in NUMBERS:
            continue
        if dtype is None or not (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_):
            raise ValueError(
                "A message is a compressor's code or a tree of arrays of numbers, got a leaf "
                f"{type(leaf).__name__ if dtype is None else dtype}."
            )


def decode(data: bytes, like: ArrayTree) -> ArrayTree:
    """Return what `encode` wrote, with NumPy arrays as leaves.

    Every bit is as it was sent, but for what carries no information: a negative zero of a `Sparse`
    message may come back as zero, and levels under a norm that is zero do.

    Parameters
    ----------
    data
        All bytes of the message.
    like
        Of the same structure, shapes and types: arrays or `jax.ShapeDtypeStruct`, as of
        `fedmcmc.rounds.code_like`.

    Raises
    ------
    ValueError
        If `data` is cut short, too long or damaged, or was written for other shapes than those of
        `like`, as far as it then does not come out to the bit.

    Examples
    --------
    >>> from fedmcmc.compression import Dense
    >>> like = Dense(jax.ShapeDtypeStruct((2,), np.float32))
    >>> decode(encode(Dense(np.array([1.0, -2.0], np.float32))), like).values.tolist()
    [1.0, -2.0]
    """
    if isinstance(like, WithExact):
        _check_numbers(like.exact)
        size = sum(_num_bytes(leaf) for leaf in jax.tree.leaves(like.exact))
        if size > len(data):
            raise ValueError(
                f"The {len(data)} bytes given are not a message that ends with {size} bytes of "
                "exact parts: they are too few."
            )
        end = len(data) - size
        return WithExact(decode(data[:end], like.code), _read_plain(data[end:], like.exact))
    if not isinstance(like, Code):
        return _read_plain(data, like)
    _check(like)
    reader = Reader(data, _described(like))
    code = _read_code(reader, like)
    reader.finish()
    return code


def _described(like: Code) -> str:
    if isinstance(like, OneOf):
        return f"one of {len(like.codes)} codes: {', or '.join(map(_described, like.codes))}"
    numbers = like.levels if isinstance(like, Quantized) else like.values
    shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(numbers)]
    return f"{type(like).__name__} numbers of shapes {shapes}"


def _read_code(reader: Reader, like: Code) -> Code:
    if isinstance(like, OneOf):
        place, num = 0, len(like.codes)
        for bit in reader.bits(place_bits(num)):
            place = 2 * place + int(bit)
        if place >= num:
            reader.fail(f"code {place} of {num} is said to be sent")
        codes = [jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), one) for one in like.codes]
        codes[place] = _read_code(reader, like.codes[place])
        sent: Any = np.int32(place)
        return OneOf(sent, tuple(codes))
    if isinstance(like, Quantized):
        return _read_quantized(reader, like)
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(like.values))
    is_sparse = isinstance(like, Sparse) and reader.bits(1)[0]
    places = reader.places(size) if is_sparse else np.arange(size)
    return type(like)(_read_floats(reader, places, like.values))


def _num_bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def _read_plain(data: bytes, like: ArrayTree) -> ArrayTree:
    return _reader(like)(data)


def _reader(like: ArrayTree) -> Callable[[bytes], ArrayTree]:
    """Return what reads trees of numbers shaped as `like`."""
    _check_numbers(like)
    leaves, treedef = jax.tree.flatten(like)
    parts, size = [], 0
    for leaf in leaves:
        dtype, shape = np.dtype(leaf.dtype), tuple(leaf.shape)
        words = np.dtype(f"u{dtype.itemsize}")
        parts.append((size, math.prod(shape), words.newbyteorder(">"), words, dtype, shape))
        size += _num_bytes(leaf)

    def read(data: bytes) -> ArrayTree:
        if len(data) != size:
            raise ValueError(
                f"The {len(data)} bytes given are not a message of numbers of shapes "
                f"{[shape for *_, shape in parts]}: those take {size} bytes."
            )
        return jax.tree.unflatten(
            treedef,
            [
                np.frombuffer(data, sent, num, at).astype(words).view(dtype).reshape(shape)
                for at, num, sent, words, dtype, shape in parts
            ],
        )

    return read


def reader(like: ArrayTree) -> Callable[[bytes], ArrayTree]:
    """Return ``decode`` of messages shaped as `like`, for who reads many.

    What there is to know of the shapes of plain numbers is worked out once.

    Examples
    --------
    >>> read = reader({"a": jax.ShapeDtypeStruct((), np.float32)})
    >>> float(read(encode({"a": np.float32(2.5)}))["a"])
    2.5
    """
    if isinstance(like, WithExact | Code):
        return partial(decode, like=like)
    return _reader(like)


def _check(code: Any) -> None:
    strange = [x for x in jax.tree.leaves(code) if not hasattr(x, "dtype")]
    if strange:
        raise ValueError(f"A message is made of arrays, got {type(strange[0]).__name__}.")
    if isinstance(code, OneOf):
        if code.place.shape != () or code.place.dtype != jnp.int32:
            raise ValueError(
                f"A message's place must be [] int32, got {list(code.place.shape)} "
                f"{code.place.dtype}; several messages are written one by one."
            )
        for one in code.codes:
            _check(one)
        return
    if not isinstance(code, Quantized):
        for leaf in jax.tree.leaves(code.values):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(f"A message's numbers must be floating point, got {leaf.dtype}.")
        return
    for norm, levels in as_vectors(code):
        if norm.shape != () or norm.dtype != jnp.float32:
            raise ValueError(
                f"A message's norms must be [] float32, got {list(norm.shape)} {norm.dtype}; "
                "several messages are written one by one."
            )
        for leaf in levels:
            if leaf.dtype != jnp.int32:
                raise ValueError(f"A message's levels must be int32, got {leaf.dtype}.")


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
    # By the bits, as they are counted: -0.0 is a zero, subnormal numbers are not.
    sent = [as_words(leaf) << 1 != 0 for leaf in leaves]
    sent_numbers = [leaf.reshape(-1)[flags] for leaf, flags in zip(leaves, sent, strict=True)]
    places = np.flatnonzero(np.concatenate([ZERO[:0].view(bool), *sent]))
    where = _count_and_gaps(places)
    num_sparse = sum(map(num_omega_bits, where)) + 8 * sum(leaf.nbytes for leaf in sent_numbers)
    if num_sparse < 8 * sum(leaf.nbytes for leaf in leaves):
        count, gaps = map(omega_bits, where)
        return [ONE, *count, *gaps, *float_bits(sent_numbers)]
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
    if reader.bits(1)[0]:
        places = reader.places(levels.size)
        negative = reader.bits(places.size)
        sizes = reader.omega(places.size)
    else:
        every = reader.omega(levels.size) - 1
        places = np.flatnonzero(every)
        negative = reader.bits(places.size)
        sizes = every[places]
    if sizes.size and sizes.max() > np.iinfo(np.int32).max:
        reader.fail("a level of it does not fit int32")
    levels[places] = np.where(negative, -sizes.view(np.int32), sizes.view(np.int32))


def _read_floats(reader: Reader, places: np.ndarray, like: ArrayTree) -> ArrayTree:
    begin = 0

    def read(leaf: Any) -> np.ndarray:
        nonlocal begin
        values = np.zeros(math.prod(leaf.shape), leaf.dtype)
        first, last = np.searchsorted(places, (begin, begin + values.size))
        values[places[first:last] - begin] = reader.floats(int(last - first), values.dtype)
        begin += values.size
        return values.reshape(leaf.shape)

    return jax.tree.map(read, like)
