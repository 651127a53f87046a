"""Lists of numbers as bits: integers in the omega code, and floating-point numbers unchanged.

Bits are uint8 (0 or 1) when they are written, and bool when they are read.
"""

import itertools
from collections.abc import Iterator
from typing import NoReturn

import numpy as np

MAX_EXPONENT = 31
"""Largest exponent of two in a uint32."""
CHUNK_SIZE = 1 << 15
"""Number of integers whose bits are expanded together, as a matrix that fits the cache."""


def _group_widths() -> np.ndarray:
    """Return widths ``[group, exponent]`` of the groups in a codeword, without their leading 1.

    From the last group to the first, the widths are the number's exponent, the exponent of that
    exponent, and so on down to one. A width of zero means that the codeword has ended.
    """
    widths = np.zeros((6, MAX_EXPONENT + 1), np.uint8)
    for exponent in range(1, MAX_EXPONENT + 1):
        chain = [exponent]
        while chain[0] > 1:
            chain.insert(0, chain[0].bit_length() - 1)
        widths[: len(chain), exponent] = chain
    return widths


WIDTHS = _group_widths()
LENGTHS = 1 + WIDTHS.sum(axis=0, dtype=np.int64) + (WIDTHS > 0).sum(axis=0)
"""Length of a codeword in bits by the number's exponent."""


def _exponents(numbers: np.ndarray) -> np.ndarray:
    """Return the exponent of two of each positive uint32, from its float64."""
    return (numbers.astype(np.float64).view(np.int64) >> 52) - 1023


def num_omega_bits(numbers: np.ndarray) -> int:
    """Return the total length of the codewords of `numbers` (positive, uint32) in bits."""
    return int(np.bincount(_exponents(numbers), minlength=MAX_EXPONENT + 1) @ LENGTHS)


def omega_bits(numbers: np.ndarray) -> list[np.ndarray]:
    """Return the codewords of `numbers` (positive, uint32), group by group, as bits."""
    exponents = _exponents(numbers)
    parts = []
    for group, next_group in itertools.pairwise(WIDTHS):
        widths = group[exponents]
        continues = widths > 0
        parts.append(continues.view(np.uint8))
        numbers, exponents, widths = numbers[continues], exponents[continues], widths[continues]
        if not numbers.size:
            break
        # A group encodes the width of the next one; the last group encodes the number.
        next_widths = next_group[exponents]
        parts.append(_low_bits(np.where(next_widths > 0, next_widths, numbers), widths))
    return parts


def _low_bits(numbers: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Return the ``widths[i]`` lowest bits of each ``numbers[i]`` in one vector."""
    parts = []
    for start, mask in _bit_masks(widths):
        size = mask.shape[1] // 8
        chunk = numbers[start : start + len(mask)].astype(f">u{size}")
        parts.append(np.unpackbits(chunk.view(np.uint8)).reshape(mask.shape)[mask])
    return np.concatenate(parts)


def _bit_masks(widths: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield pairs ``(start, mask)``: `mask` selects bits of the words from `start` on."""
    for start in range(0, len(widths), CHUNK_SIZE):
        chunk = widths[start : start + CHUNK_SIZE]
        size = 8 << int(np.searchsorted((8, 16), chunk.max()))
        yield start, np.arange(size, dtype=np.uint8) >= (size - chunk)[:, None]


def float_bits(leaves: list[np.ndarray]) -> list[np.ndarray]:
    return [np.unpackbits(big_endian(leaf)) for leaf in leaves]


def big_endian(leaf: np.ndarray) -> np.ndarray:
    """Return the bytes of an array's numbers, highest byte first, ``[num_bytes]`` uint8."""
    return as_words(leaf).astype(f">u{leaf.dtype.itemsize}").view(np.uint8)


def as_words(leaf: np.ndarray) -> np.ndarray:
    """Return the numbers of an array as unsigned integers with the same bits, ``[size]``."""
    return np.ascontiguousarray(leaf).reshape(-1).view(f"u{leaf.dtype.itemsize}")


class Reader:
    """Reader of the bits of one message.

    Methods raise `ValueError` if the bits cannot contain the requested numbers. `expected`
    describes the expected message in these errors.
    """

    def __init__(self, data: bytes, expected: str) -> None:
        self._bits = np.unpackbits(np.frombuffer(data, np.uint8)).view(bool)
        self._position = 0
        self._expected = expected

    def fail(self, reason: str) -> NoReturn:
        raise ValueError(
            f"These {self._bits.size // 8} bytes are not a message of {self._expected}: {reason}."
        )

    def finish(self) -> None:
        """Check that only the zeros that pad the last byte remain."""
        padding = self._bits[self._position :]
        if padding.size >= 8:
            self.fail(f"it ends after {-(-self._position // 8)} bytes")
        if padding.any():
            self.fail("the bits that pad the last byte are not zero")

    def bits(self, count: int) -> np.ndarray:
        start, self._position = self._position, self._position + count
        if self._position > self._bits.size:
            self.fail("they end too early")
        return self._bits[start : self._position]

    def floats(self, count: int, dtype: np.dtype) -> np.ndarray:
        data, size = np.packbits(self.bits(8 * dtype.itemsize * count)), dtype.itemsize
        return data.view(f">u{size}").astype(f"u{size}").view(dtype)

    def _low_bits(self, widths: np.ndarray) -> np.ndarray:
        """Return the uint32 numbers that the function `_low_bits` wrote."""
        numbers = np.empty(len(widths), np.uint32)
        bits = self.bits(int(widths.sum(dtype=np.int64)))
        stop = 0
        for index, mask in _bit_masks(widths):
            start, stop = stop, stop + int(np.count_nonzero(mask))
            expanded = np.zeros(mask.shape, bool)
            expanded[mask] = bits[start:stop]
            words = np.packbits(expanded).view(f">u{mask.shape[1] // 8}")
            numbers[index : index + len(mask)] = words
        return numbers

    def omega(self, count: int) -> np.ndarray:
        """Return `count` positive integers, uint32, from their codewords."""
        numbers = np.ones(count, np.uint32)
        unfinished = np.arange(count)
        while unfinished.size:
            unfinished = unfinished[self.bits(unfinished.size)]
            widths = numbers[unfinished]
            if widths.size and widths.max() > MAX_EXPONENT:
                self.fail("one of its integers does not fit into 32 bits")
            low_bits = self._low_bits(widths.astype(np.uint8))
            numbers[unfinished] = (np.uint32(1) << widths) | low_bits
        return numbers

    def places(self, size: int) -> np.ndarray:
        """Return the indices in ``[0, size)`` of the numbers that were sent."""
        count = int(self.omega(1)[0]) - 1
        if count > size:
            self.fail(f"it claims to contain {count} of {size} numbers")
        places = np.cumsum(self.omega(count), dtype=np.int64) - 1
        if count and places[-1] >= size:
            self.fail(f"it claims to contain number {places[-1]} of {size}")
        return places
