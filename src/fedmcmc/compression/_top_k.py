"""Compressor that sends the largest numbers of a message."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.compression._sparsify import as_fraction
from fedmcmc.compression._types import Compressor, Sparse
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Client, register_dataclass


def top_k(fraction: float, *, error_feedback: bool = True) -> Compressor:
    """Send the largest `fraction` of a message's numbers, at least one.

    Biased: ``|C(v) - v|^2 <= (1 - k / d) |v|^2``, the declared `omega`. With error feedback the
    sum of the sent messages differs from the sum of the original messages by one bounded error;
    even so, a sampler's mean is only right in the limit of small step sizes.

    Parameters
    ----------
    fraction
        Fraction in (0, 1]; ``k = round(fraction * d)`` of ``d`` numbers are sent, over all leaves.
    error_feedback
        If true, a client adds to its next message the numbers that it did not send.

    Raises
    ------
    ValueError
        If `fraction` is outside (0, 1].

    References
    ----------
    Stich et al. (2018), Sparsified SGD with memory, Algorithm 1.

    Examples
    --------
    >>> compressor = top_k(0.5, error_feedback=False)
    >>> compressor.encode((), jnp.array([3.0, -4.0]), (), None)[0].values.tolist()
    [0.0, -4.0]
    """
    if isinstance(fraction, jax.core.Tracer):
        raise TypeError("top_k needs a Python number: how many numbers are sent is static.")
    return TopK(float(as_fraction(fraction)), bool(error_feedback))


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class TopK(Compressor):
    """Compressor that sends the largest numbers; see `top_k`."""

    fraction: float = field(metadata={"static": True})
    error_feedback: bool = field(metadata={"static": True})

    @property
    def unbiased(self) -> bool:
        """False: small numbers are always set to zero."""
        return False

    def init(self, like: ArrayTree) -> ArrayTree:
        return trees.zeros_like(like) if self.error_feedback else ()

    def encode(
        self, draws: ArrayTree, message: ArrayTree, state: ArrayTree, client: Client
    ) -> tuple[Sparse, ArrayTree]:
        """Return the largest numbers of message plus error, and the new error."""
        if not trees.is_empty(state):
            message = trees.add(message, state)
        flat = jnp.abs(trees.ravel(message))
        _, indices = jax.lax.top_k(flat, self._num_sent(flat.size))
        sent = jnp.zeros(flat.size, bool).at[indices].set(True)
        values = jax.tree.map(
            lambda mask, x: jnp.where(mask, x, 0), trees.unravel(sent, message), message
        )
        if not trees.is_empty(state):
            state = trees.subtract(message, values)
        return Sparse(values), state

    def omega(self, like: ArrayTree) -> Array:
        size = trees.num_elements(like)
        return jnp.asarray(1 - self._num_sent(size) / max(size, 1), jnp.float32)

    def _num_sent(self, size: int) -> int:
        return min(size, max(1, round(self.fraction * size)))
