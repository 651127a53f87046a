"""Reading a bit string from its beginning to its end."""

from typing import NoReturn

import numpy as np

from fedmcmc.wire._bits import MAX_EXPONENT, masks

__all__ = ["Reader"]


class Reader:
    """The bits of one message, taken one list after another.

    Every method raises `ValueError` where the bits do not allow what is asked for. `expected`
    says in such an error what the message was read as.
    """

    def __init__(self, data: bytes, expected: str) -> None:
        self._bits = np.unpackbits(np.frombuffer(data, np.uint8))
        self._position = 0
        self._expected = expected

    def fail(self, reason: str) -> NoReturn:
        """Raise the error that the bytes are not the expected message."""
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
        """Return the next `count` bits, uint8."""
        begin, self._position = self._position, self._position + count
        if self._position > self._bits.size:
            self.fail("they end too early")
        return self._bits[begin : self._position]

    def flags(self, count: int) -> np.ndarray:
        """Return the next `count` bits, bool."""
        return self.bits(count).view(bool)

    def floats(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Return `count` numbers of type `dtype`."""
        size = dtype.itemsize
        words = np.packbits(self.bits(8 * size * count)).view(f">u{size}")
        return words.astype(f"u{size}").view(dtype)

    def numbers(self, widths: np.ndarray) -> np.ndarray:
        """Return numbers of the given widths in bits, uint32."""
        values = np.empty(len(widths), np.uint32)
        taken = self.bits(int(widths.sum(dtype=np.int64)))
        end = 0
        for first, mask in masks(widths):
            begin, end = end, end + int(np.count_nonzero(mask))
            spread = np.zeros(mask.shape, np.uint8)
            spread[mask] = taken[begin:end]
            words = np.packbits(spread).view(f">u{mask.shape[1] // 8}")
            values[first : first + len(mask)] = words
        return values

    def omega(self, count: int) -> np.ndarray:
        """Return `count` positive integers, uint32, from their codewords."""
        numbers = np.ones(count, np.uint32)
        unread = np.arange(count)
        while unread.size:
            unread = unread[self.flags(unread.size)]
            widths = numbers[unread]
            if widths.size and widths.max() > MAX_EXPONENT:
                self.fail("an integer of it does not fit 32 bits")
            numbers[unread] = (np.uint32(1) << widths) | self.numbers(widths.astype(np.uint8))
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
