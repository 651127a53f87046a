"""Compressors applied in sequence."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.compression._memory import Memory
from fedmcmc.compression._types import Compressor
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Client, Sender, register_dataclass


def chain(*compressors: Compressor) -> Compressor:
    """Apply compressors in sequence; the last one's code is sent.

    The result is unbiased if all compressors are, with ``1 + omega = prod(1 + omega_i)``. After
    `sparsify`, `quantize` may be the last: its sparse code then only pays for nonzero numbers.

    Raises
    ------
    ValueError
        If there is no compressor, or one is a `memory`: write ``memory(chain(...))`` instead.

    Examples
    --------
    >>> import fedmcmc
    >>> half = fedmcmc.sparsify(0.5)
    >>> float(chain(half, half).omega(jnp.zeros(3)))
    3.0
    """
    if not compressors:
        raise ValueError("chain needs at least one compressor, got none.")
    if any(isinstance(inner, Memory) for inner in compressors):
        raise ValueError(
            "chain holds a memory; write memory(chain(...), rate), which stores decoded messages."
        )
    return CompressorChain(compressors)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class CompressorChain(Compressor):
    """Compressors applied in sequence; see `chain`."""

    compressors: tuple[Compressor, ...]

    @property
    def unbiased(self) -> bool:
        return all(inner.unbiased for inner in self.compressors)

    def init(self, like: ArrayTree) -> ArrayTree:
        return tuple(inner.init(like) for inner in self.compressors)

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
        keys = jax.random.split(rng_key, len(self.compressors))
        return tuple(c.prepare(keys[i], like, client) for i, c in enumerate(self.compressors))

    def encode(
        self, draws: ArrayTree, message: ArrayTree, state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree]:
        """Return the code of the last compressor, for the message decoded from the previous one."""
        states = []
        code: ArrayTree = None
        for i, inner in enumerate(self.compressors):
            code, new_state = inner.encode(draws[i], message, state[i], client)
            message = trees.cast_like(inner.decode(code, client), message)
            states.append(new_state)
        return code, tuple(states)

    def decode(self, code: ArrayTree, sender: Sender | Client) -> ArrayTree:
        return self.compressors[-1].decode(code, sender)

    def omega(self, like: ArrayTree) -> Array:
        # The error of an unbiased compressor is orthogonal to the error so far; the error of a
        # biased one may point in the same direction.
        omega = jnp.zeros((), jnp.float32)
        for inner in self.compressors:
            next_omega = inner.omega(like)
            if inner.unbiased:
                omega = (1 + omega) * (1 + next_omega) - 1
            else:
                omega = jnp.square(jnp.sqrt(omega) + jnp.sqrt((1 + omega) * next_omega))
        return omega

    def check(self, like: ArrayTree, num_clients: int) -> None:
        for inner in self.compressors:
            inner.check(like, num_clients)
