"""Compressors one after another."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree, Client, Sender, register_dataclass
from fedmcmc.compression._memory import Memory
from fedmcmc.compression._types import Compressor
from fedmcmc.pytrees import trees


def chain(*compressors: Compressor) -> Compressor:
    """Compress by each in turn; what is sent is the last one's code.

    Raises
    ------
    ValueError
        Without any, or with a `memory` inside: that goes around a chain.

    Notes
    -----
    Unbiased if all are, with ``1 + omega = prod(1 + omega_i)``. The last may be `quantize` after
    `sparsify`: its sparse code then pays for the numbers that are left.

    Examples
    --------
    >>> import fedmcmc
    >>> halves = fedmcmc.sparsify(0.5)
    >>> float(chain(halves, halves).omega(jnp.zeros(3)))
    3.0
    """
    if not compressors:
        raise ValueError("chain needs at least one compressor, got none.")
    if any(isinstance(inner, Memory) for inner in compressors):
        raise ValueError(
            "chain holds a memory; write memory(chain(...), rate): the memory is of what the "
            "receiver understands."
        )
    return Chain(compressors)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Chain(Compressor):
    """Compressors in turn; see `chain`."""

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
        """Return the last one's code of what the others leave of the message."""
        states = []
        code: ArrayTree = None
        for i, inner in enumerate(self.compressors):
            code, new = inner.encode(draws[i], message, state[i], client)
            message = trees.cast_like(inner.decode(code, client), message)
            states.append(new)
        return code, tuple(states)

    def decode(self, code: ArrayTree, sender: Sender | Client) -> ArrayTree:
        return self.compressors[-1].decode(code, sender)

    def omega(self, like: ArrayTree) -> Array:
        # With omega the error so far and w the next one's. Unbiased next: the two errors are
        # orthogonal. Biased next: they may add up.
        omega = jnp.zeros((), jnp.float32)
        for inner in self.compressors:
            w = inner.omega(like)
            if inner.unbiased:
                omega = (1 + omega) * (1 + w) - 1
            else:
                omega = jnp.square(jnp.sqrt(omega) + jnp.sqrt((1 + omega) * w))
        return omega

    def check(self, like: ArrayTree, num_clients: int) -> None:
        for inner in self.compressors:
            inner.check(like, num_clients)
