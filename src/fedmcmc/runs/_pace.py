"""Lengths of the segments of a run."""

from typing import NamedTuple

MAX_SEGMENT = 2**14
"""Maximum number of rounds in a segment."""
SEGMENT_SECONDS = 0.5
"""Target duration of a segment: the progress bar moves and interrupts take effect."""
BLOCK_SECONDS = 5.0
"""Duration of a block above which segments are shorter than a block."""


class Pace(NamedTuple):
    """Lengths of segments, in rounds.

    Attributes
    ----------
    block
        Number of rounds that are prepared together.
    longest
        Length of the longest segment.
    """

    block: int
    longest: int

    def next_length(self, length: int, num_rounds: int, seconds: float) -> int:
        """Return a length for the next segment, given rounds and duration of the last segment."""
        # The first call of a program compiles, which only makes the next segment short.
        rate = num_rounds / max(seconds, 1e-6)
        if rate * SEGMENT_SECONDS < self.block:
            # A segment within a block prepares the whole block, so that short segments would
            # spend their time on preparation.
            return int(max(1, min(4 * length, self.block, rate * BLOCK_SECONDS)))
        return int(min(4 * length, rate * SEGMENT_SECONDS))

    def end_of(self, start: int, length: int) -> int:
        """Return the end of a segment of about `length` rounds, which ends a block if possible."""
        stop = start + min(length, self.longest)
        block_end = stop // self.block * self.block
        return block_end if block_end > start and self.longest >= self.block else stop


def pace_of(block: int) -> Pace:
    """Return the pace of a run that prepares `block` rounds together."""
    return Pace(block, max(MAX_SEGMENT // block, 1) * block)
