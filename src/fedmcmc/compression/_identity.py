"""Compressor that sends messages unchanged."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from fedmcmc.compression._types import Compressor, Dense
from fedmcmc.types import ArrayTree, Client, register_dataclass


def identity() -> Compressor:
    """Send messages unchanged; ``omega = 0``.

    Examples
    --------
    >>> float(identity().omega(jnp.zeros(3)))
    0.0
    """
    return Identity()


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Identity(Compressor):
    """Compressor that sends every number unchanged; see `identity`."""

    def encode(
        self, draws: ArrayTree, message: ArrayTree, state: ArrayTree, client: Client
    ) -> tuple[Dense, ArrayTree]:
        return Dense(message), state

    def omega(self, like: ArrayTree) -> Array:
        return jnp.zeros((), jnp.float32)
