"""Lists of numbers as bits and back, on the host: integers in the omega code, and raw floats.

A bit is a uint8 that is zero or one where it is written, a bool where it is read.
"""

import itertools
from collections.abc import Iterator
from typing import NoReturn

import numpy as np

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
        parts.append(_low_bits(np.where(following > 0, following, numbers), widths))
    return parts


def _low_bits(numbers: np.ndarray, widths: np.ndarray) -> np.ndarray:
    # The lowest widths[i] bits of each numbers[i], one number after another.
    parts = []
    for begin, mask in _masks(widths):
        size = mask.shape[1] // 8
        chunk = numbers[begin : begin + len(mask)].astype(f">u{size}")
        parts.append(np.unpackbits(chunk.view(np.uint8)).reshape(mask.shape)[mask])
    return np.concatenate(parts)


def _masks(widths: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    # Pairs (begin, mask): which bits of words [begin, begin + len(mask)) are sent.
    for begin in range(0, len(widths), CHUNK):
        chunk = widths[begin : begin + CHUNK]
        size = 8 << int(np.searchsorted((8, 16), chunk.max()))
        yield begin, np.arange(size, dtype=np.uint8) >= (size - chunk)[:, None]


def float_bits(leaves: list[np.ndarray]) -> list[np.ndarray]:
    return [np.unpackbits(big_endian(leaf)) for leaf in leaves]


def big_endian(leaf: np.ndarray) -> np.ndarray:
    """Return the bytes of the numbers of `leaf`, the highest first, ``[size]`` uint8."""
    return as_words(leaf).astype(f">u{leaf.dtype.itemsize}").view(np.uint8)


def from_big_endian(data: bytes | np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the numbers of type `dtype` that `big_endian` wrote, ``[size]``."""
    size = dtype.itemsize
    return np.frombuffer(data, f">u{size}").astype(f"u{size}").view(dtype)


def as_words(leaf: np.ndarray) -> np.ndarray:
    """Return the numbers of `leaf` as unsigned integers of the same bits, ``[size]``."""
    return np.ascontiguousarray(leaf).reshape(-1).view(f"u{leaf.dtype.itemsize}")


class Reader:
    """The bits of one message, read one list after another.

    Every method raises `ValueError` where the bits cannot hold what is asked for. `expected` says
    in the error what the message was read as.
    """

    def __init__(self, data: bytes, expected: str) -> None:
        self._bits = np.unpackbits(np.frombuffer(data, np.uint8)).view(bool)
        self._position = 0
        self._expected = expected

    def fail(self, reason: str) -> NoReturn:
        raise ValueError(
            f"The {self._bits.size // 8} bytes given are not a message of {self._expected}: "
            f"{reason}."
        )

    def finish(self) -> None:
        """Check that nothing is left but the zeros that fill up the last byte."""
        rest = self._bits[self._position :]
        if rest.size >= 8:
            self.fail(f"it ends after {-(-self._position // 8)} bytes")
        if rest.any():
            self.fail("the bits that fill up the last byte are not zero")

    def bits(self, count: int) -> np.ndarray:
        begin, self._position = self._position, self._position + count
        if self._position > self._bits.size:
            self.fail("they end too early")
        return self._bits[begin : self._position]

    def floats(self, count: int, dtype: np.dtype) -> np.ndarray:
        return from_big_endian(np.packbits(self.bits(8 * dtype.itemsize * count)), dtype)

    def _numbers(self, widths: np.ndarray) -> np.ndarray:
        # What `_low_bits` wrote, uint32.
        values = np.empty(len(widths), np.uint32)
        taken = self.bits(int(widths.sum(dtype=np.int64)))
        end = 0
        for first, mask in _masks(widths):
            begin, end = end, end + int(np.count_nonzero(mask))
            spread = np.zeros(mask.shape, bool)
            spread[mask] = taken[begin:end]
            words = np.packbits(spread).view(f">u{mask.shape[1] // 8}")
            values[first : first + len(mask)] = words
        return values

    def omega(self, count: int) -> np.ndarray:
        """Return `count` positive integers, uint32, from their codewords."""
        numbers = np.ones(count, np.uint32)
        unread = np.arange(count)
        while unread.size:
            unread = unread[self.bits(unread.size)]
            widths = numbers[unread]
            if widths.size and widths.max() > MAX_EXPONENT:
                self.fail("an integer of it does not fit 32 bits")
            numbers[unread] = (np.uint32(1) << widths) | self._numbers(widths.astype(np.uint8))
        return numbers

    def places(self, size: int) -> np.ndarray:
        """Return the places in ``[0, size)`` of the numbers that were sent."""
        count = int(self.omega(1)[0]) - 1
        if count > size:
            self.fail(f"{count} of {size} numbers are said to be sent")
        places = np.cumsum(self.omega(count), dtype=np.int64) - 1
        if count and places[-1] >= size:
            self.fail(f"place {places[-1]} of {size} numbers is said to be sent")
        return places
