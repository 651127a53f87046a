"""Interface of compressors, and the codes that become bit strings."""

from typing import NamedTuple

from jax import Array

from fedmcmc.types import ArrayTree, Client, Described, Sender, undefined


class Compressor(Described):
    """Operator ``C`` that writes a message in fewer bits.

    ``C(v) = decode(encode(v))`` satisfies ``E |C(v) - v|^2 <= omega |v|^2`` and, if `unbiased`,
    ``E C(v) = v`` (assumption H2 of Vono et al., 2022). Messages are compressed independently
    over clients and rounds.

    A subclass is a frozen dataclass registered as a pytree, whose fields hold numbers (leaves) and
    structure (static). Its methods are pure; `like` holds a message's shapes.
    """

    @property
    def unbiased(self) -> bool:
        """True if ``E C(v) = v``."""
        return True

    def init(self, like: ArrayTree) -> ArrayTree:
        """Return the client's state before its first message, such as a memory."""
        return ()

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
        """Return all random draws of one message."""
        return ()

    def encode(
        self, draws: ArrayTree, message: ArrayTree, state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree]:
        """Return the code and the client's new state.

        The code is a `compression.Dense`, `compression.Quantized`, `compression.Sparse` or
        `compression.OneOf`. `compression.message_bits` counts its bits and `fedmcmc.wire` writes
        them.
        """
        raise undefined(self, "encode")

    def decode(self, code: ArrayTree, sender: Sender | Client) -> ArrayTree:
        """Return the message that the receiver reads from a code; by default its `values`."""
        return code.values

    def omega(self, like: ArrayTree) -> Array:
        """Return the bound on relative squared errors: ``[]``, or ``[num_clients]``.

        `fedmcmc.memory` needs it.
        """
        raise undefined(self, "omega")

    def check(self, like: ArrayTree, num_clients: int) -> None:
        """Raise `ValueError` if the compressor does not fit the messages or the clients."""


class Dense(NamedTuple):
    """Code that sends all numbers of a message unchanged; `values` has the message's shapes."""

    values: ArrayTree


class Quantized(NamedTuple):
    """Code of a message on a grid, ``norm * levels / num_levels``.

    Attributes
    ----------
    norm
        ``[]`` float32 for the complete message, or a tree with one norm per leaf (``()`` for
        leaves without numbers).
    levels
        int32, signed, shaped as the message; ``|levels| <= num_levels``. The receiver has
        ``num_levels``, so it is not sent.
    """

    norm: ArrayTree
    levels: ArrayTree


class Sparse(NamedTuple):
    """Code of a message with many zeros: only nonzero numbers are sent, with their positions."""

    values: ArrayTree


class OneOf(NamedTuple):
    """Code of one of several compressors.

    Attributes
    ----------
    place
        ``[]`` int32, index in `codes` of the code that is sent. The index is sent first.
    codes
        One `Dense`, `Quantized`, `Sparse` or `OneOf` per compressor; all but one are zeros and are
        not sent.
    """

    place: Array
    codes: tuple[ArrayTree, ...]


class WithExact(NamedTuple):
    """Code of a message together with the parts that are sent uncompressed.

    Attributes
    ----------
    code
        A `Dense`, `Quantized`, `Sparse` or `OneOf`.
    exact
        The message's `fedmcmc.types.Uncompressed` parts, in order.
    """

    code: ArrayTree
    exact: tuple[ArrayTree, ...]
