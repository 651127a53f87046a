"""What a compressed message consists of, before it becomes a bit string."""

from typing import NamedTuple

from fedmcmc._types import ArrayTree

__all__ = ["Dense", "Quantized", "Sparse", "WithExact"]


class Dense(NamedTuple):
    """All numbers of a message, as they are: leaves of `values` shaped as the message."""

    values: ArrayTree


class Quantized(NamedTuple):
    """A message on a grid: ``norm * levels / num_levels``.

    Attributes
    ----------
    norm
        ``[]`` float32 for the whole message, or a tree of them, one per leaf that
        holds numbers (and ``()`` for the others).
    levels
        int32, signed, shaped as the message; ``|levels| <= num_levels``. The receiver knows
        ``num_levels``, so it is not sent.
    """

    norm: ArrayTree
    levels: ArrayTree


class Sparse(NamedTuple):
    """A message of which most numbers are zero: only the others are sent, with their places."""

    values: ArrayTree


class WithExact(NamedTuple):
    """A code, and the parts of its message that cross as they are.

    Attributes
    ----------
    code
        A `Dense`, `Quantized` or `Sparse`.
    exact
        The message's `fedmcmc.Exact` parts, in its order.
    """

    code: ArrayTree
    exact: tuple[ArrayTree, ...]
