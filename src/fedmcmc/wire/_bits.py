"""Lists of numbers as arrays of bits, on the host: integers in the omega code, and raw floats.

A bit is a uint8 that is zero or one.
"""

import itertools
from collections.abc import Iterator

import numpy as np

__all__ = [
    "MAX_EXPONENT",
    "as_words",
    "big_endian",
    "float_bits",
    "from_big_endian",
    "low_bits",
    "masks",
    "num_omega_bits",
    "omega_bits",
]

MAX_EXPONENT = 31
# Numbers whose bits are spread at a time: a matrix that stays in the cache.
CHUNK = 1 << 15


def _group_widths() -> np.ndarray:
    # [group, exponent]: how many bits a group of the codeword of a number adds to the number that
    # was read before; zero where the codeword has ended. The widths are the exponent, its
    # exponent, ... down to one, from the last group to the first.
    widths = np.zeros((6, MAX_EXPONENT + 1), np.uint8)
    for exponent in range(1, MAX_EXPONENT + 1):
        chain = [exponent]
        while chain[0] > 1:
            chain.insert(0, chain[0].bit_length() - 1)
        widths[: len(chain), exponent] = chain
    return widths


WIDTHS = _group_widths()
LENGTHS = 1 + WIDTHS.sum(axis=0, dtype=np.int64) + (WIDTHS > 0).sum(axis=0)


def _exponents(numbers: np.ndarray) -> np.ndarray:
    # floor(log2 n), from the exponent of the float64, which holds any uint32.
    return (numbers.astype(np.float64).view(np.int64) >> 52) - 1023


def num_omega_bits(numbers: np.ndarray) -> int:
    """Return the bits that the codewords of `numbers` (positive, uint32) take."""
    return int(np.bincount(_exponents(numbers), minlength=MAX_EXPONENT + 1) @ LENGTHS)


def omega_bits(numbers: np.ndarray) -> list[np.ndarray]:
    """Return the codewords of `numbers` (positive, uint32), group after group, as bits."""
    exponents = _exponents(numbers)
    parts = []
    for group, after in itertools.pairwise(WIDTHS):
        widths = group[exponents]
        more = widths > 0
        parts.append(more.view(np.uint8))
        numbers, exponents, widths = numbers[more], exponents[more], widths[more]
        if not numbers.size:
            break
        # A group says how wide the next one is; the last one is the number.
        following = after[exponents]
        parts.append(low_bits(np.where(following > 0, following, numbers), widths))
    return parts


def low_bits(numbers: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Return the lowest ``widths[i]`` bits of each ``numbers[i]``, one number after another."""
    parts = []
    for begin, mask in masks(widths):
        size = mask.shape[1] // 8
        chunk = numbers[begin : begin + len(mask)].astype(f">u{size}")
        parts.append(np.unpackbits(chunk.view(np.uint8)).reshape(mask.shape)[mask])
    return np.concatenate(parts)


def masks(widths: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield ``(begin, mask)``: which bits of words ``[begin, begin + len(mask))`` are sent."""
    for begin in range(0, len(widths), CHUNK):
        chunk = widths[begin : begin + CHUNK]
        size = 8 << int(np.searchsorted((8, 16), chunk.max()))
        yield begin, np.arange(size, dtype=np.uint8) >= (size - chunk)[:, None]


def float_bits(leaves: list[np.ndarray]) -> list[np.ndarray]:
    """Return the bits of all numbers of `leaves`."""
    return [np.unpackbits(np.frombuffer(big_endian(leaf), np.uint8)) for leaf in leaves]


def big_endian(leaf: np.ndarray) -> bytes:
    """Return the numbers of `leaf` as bytes."""
    return as_words(leaf).astype(f">u{leaf.dtype.itemsize}").tobytes()


def from_big_endian(data: bytes, dtype: np.dtype) -> np.ndarray:
    """Return the numbers of type `dtype` that `big_endian` wrote, ``[size]``."""
    size = dtype.itemsize
    return np.frombuffer(data, f">u{size}").astype(f"u{size}").view(dtype)


def as_words(leaf: np.ndarray) -> np.ndarray:
    """Return the numbers of `leaf` as unsigned integers of the same bits, ``[size]``."""
    return np.ascontiguousarray(leaf).reshape(-1).view(f"u{leaf.dtype.itemsize}")
