"""The largest of a message's numbers."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree, Client, register_dataclass
from fedmcmc.compression._sparsify import fraction_of
from fedmcmc.compression._types import Compressor, Sparse
from fedmcmc.pytrees import trees


def top_k(fraction: float, *, error_feedback: bool = True) -> Compressor:
    """Send the largest `fraction` of a message's numbers, at least one.

    Parameters
    ----------
    fraction
        In (0, 1]; ``round(fraction * d)`` numbers of ``d`` are sent, of all leaves together.
    error_feedback
        Whether a client adds what it did not send to its next message.

    Raises
    ------
    ValueError
        If `fraction` is outside (0, 1].

    Notes
    -----
    Biased: ``|C(v) - v|^2 <= (1 - k / d) |v|^2``, which is the `omega` declared. With error
    feedback the sum of what was sent lags the sum of the messages by one bounded error; a sampler's
    mean is then right only as the step size goes to zero.

    References
    ----------
    Stich, Cordonnier and Jaggi (2018), Sparsified SGD with memory, Algorithm 1.

    Examples
    --------
    >>> compressor = top_k(0.5, error_feedback=False)
    >>> compressor.encode((), jnp.array([3.0, -4.0]), (), None)[0].values.tolist()
    [0.0, -4.0]
    """
    if isinstance(fraction, jax.core.Tracer):
        raise TypeError("top_k needs a Python number: how many numbers are sent is static.")
    return TopK(float(fraction_of(fraction)), bool(error_feedback))


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class TopK(Compressor):
    """The largest numbers; see `top_k`."""

    fraction: float = field(metadata={"static": True})
    error_feedback: bool = field(metadata={"static": True})

    @property
    def unbiased(self) -> bool:
        """Small numbers are always zero."""
        return False

    def init(self, like: ArrayTree) -> ArrayTree:
        return trees.zeros_like(like) if self.error_feedback else ()

    def encode(
        self, draws: ArrayTree, message: ArrayTree, state: ArrayTree, client: Client
    ) -> tuple[Sparse, ArrayTree]:
        """Return the largest numbers of message and error together, and what is left of them."""
        if not trees.is_empty(state):
            message = trees.add(message, state)
        flat = jnp.abs(trees.ravel(message))
        _, places = jax.lax.top_k(flat, self._num_sent(flat.size))
        sent = jnp.zeros(flat.size, bool).at[places].set(True)
        values = jax.tree.map(
            lambda chosen, x: jnp.where(chosen, x, 0), trees.unravel(sent, message), message
        )
        if not trees.is_empty(state):
            state = trees.subtract(message, values)
        return Sparse(values), state

    def omega(self, like: ArrayTree) -> Array:
        size = trees.num_elements(like)
        return jnp.asarray(1 - self._num_sent(size) / max(size, 1), jnp.float32)

    def _num_sent(self, size: int) -> int:
        return min(size, max(1, round(self.fraction * size)))
