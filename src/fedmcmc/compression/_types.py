"""What a compressor is."""

from jax import Array

from fedmcmc._types import ArrayTree, Client, Sender

__all__ = ["Compressor", "Remembering"]


class Compressor:
    """A way to say a message in fewer bits.

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

        The code is a `compression.Dense`, `compression.Quantized` or `compression.Sparse`, of
        which `compression.message_bits` counts the bits and `fedmcmc.wire` writes them.
        """
        raise NotImplementedError

    def decode(self, code: ArrayTree, sender: Sender | Client) -> ArrayTree:
        """Return what the receiver understands: the code's values, which are the whole message."""
        return code.values

    def omega(self, like: ArrayTree) -> Array:
        """Return the bound on relative squared errors: ``[]``, or ``[num_clients]``."""
        raise NotImplementedError

    def check(self, like: ArrayTree, num_clients: int) -> None:
        """Raise `ValueError` where the compressor does not fit."""


class Remembering(Compressor):
    """A compressor of the difference to what both sides remember of a client's messages.

    Attributes
    ----------
    of
        Whose memory the server adds: ``"all"`` clients', the ``"active"`` ones', or ``None`` for
        all of them where messages are weighted, else the active ones'; a static field.
    """

    of: str | None

    def recall(self, state: ArrayTree) -> ArrayTree:
        """Return the client's memory."""
        raise NotImplementedError

    def change(self, code: ArrayTree, sender: Sender | Client) -> ArrayTree:
        """Return by how much a code moves its sender's memory."""
        raise NotImplementedError

    def followed_by(self, outer: Compressor) -> "Remembering":
        """Return the same memory, of messages that `outer` compresses further.

        Raises
        ------
        ValueError
            If `outer` does not fit.
        """
        raise NotImplementedError
