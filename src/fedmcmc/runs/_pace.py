"""How long the segments of a run are."""

from typing import NamedTuple

MAX_SEGMENT = 2**14
"""Rounds in a segment at most."""
SEGMENT_SECONDS = 0.5
"""Time that a segment should take, so that progress moves and an interrupt is heard."""
BLOCK_SECONDS = 5.0
"""If a block takes longer than this, segments are shorter than a block."""


class Pace(NamedTuple):
    """Lengths of segments, in rounds.

    Attributes
    ----------
    block
        Rounds that are prepared together.
    longest
        Longest segment.
    """

    block: int
    longest: int

    def next_length(self, length: int, ran: int, took: float) -> int:
        """Return about how long to make a segment after one of `ran` rounds took that long."""
        # The first call of a program compiles, which only makes the next segment short.
        rate = ran / max(took, 1e-6)
        if rate * SEGMENT_SECONDS < self.block:
            # A part of a block prepares all of it: short parts would do little else.
            return int(max(1, min(4 * length, self.block, rate * BLOCK_SECONDS)))
        return int(min(4 * length, rate * SEGMENT_SECONDS))

    def end_of(self, at: int, length: int) -> int:
        """Return where a segment of about `length` rounds ends: with a block, if one does in it."""
        stop = at + min(length, self.longest)
        whole = stop // self.block * self.block
        return whole if whole > at and self.longest >= self.block else stop


def pace_of(block: int) -> Pace:
    """Return the pace of a run that prepares so many rounds together."""
    return Pace(block, max(MAX_SEGMENT // block, 1) * block)
