"""What a compressor is, and what its codes consist of before they become bit strings."""

from typing import NamedTuple

from jax import Array

from fedmcmc._types import ArrayTree, Client, Described, Sender, undefined


class Compressor(Described):
    """A way to write a message in fewer bits.

    ``C(v) = decode(encode(v))`` obeys ``E |C(v) - v|^2 <= omega |v|^2`` and, if `unbiased`,
    ``E C(v) = v`` (assumption H2 of Vono et al., 2022). Messages are compressed independently
    over clients and rounds.

    A subclass is a frozen dataclass registered as a pytree, whose fields hold numbers (leaves) and
    structure (static). Its methods are pure; `like` holds a message's shapes.
    """

    @property
    def unbiased(self) -> bool:
        """Whether ``E C(v) = v``."""
        return True

    def init(self, like: ArrayTree) -> ArrayTree:
        """Return what a client keeps between its messages (its memory, its error)."""
        return ()

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
        """Return all that is random in one message."""
        return ()

    def encode(
        self, draws: ArrayTree, message: ArrayTree, state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree]:
        """Return the code and what the client keeps.

        The code is a `compression.Dense`, `compression.Quantized`, `compression.Sparse` or
        `compression.OneOf`, of which `compression.message_bits` counts the bits and `fedmcmc.wire`
        writes them.
        """
        raise undefined(self, "encode")

    def decode(self, code: ArrayTree, sender: Sender | Client) -> ArrayTree:
        """Return what the receiver understands: the code's values, which are the whole message."""
        return code.values

    def omega(self, like: ArrayTree) -> Array:
        """Return the bound on relative squared errors: ``[]``, or ``[num_clients]``.

        `fedmcmc.memory` needs it.
        """
        raise undefined(self, "omega")

    def check(self, like: ArrayTree, num_clients: int) -> None:
        """Raise `ValueError` where the compressor does not fit."""


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


class OneOf(NamedTuple):
    """The code of one of several compressors.

    Attributes
    ----------
    place
        ``[]`` int32, which of `codes` is sent, after its place.
    codes
        One per compressor, each a `Dense`, `Quantized`, `Sparse` or `OneOf`; zeros where it is not
        sent.
    """

    place: Array
    codes: tuple[ArrayTree, ...]


class WithExact(NamedTuple):
    """A code, and the parts of its message that cross as they are.

    Attributes
    ----------
    code
        A `Dense`, `Quantized`, `Sparse` or `OneOf`.
    exact
        The message's `fedmcmc.Uncompressed` parts, in its order.
    """

    code: ArrayTree
    exact: tuple[ArrayTree, ...]
