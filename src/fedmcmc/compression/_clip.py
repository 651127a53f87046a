"""Compressor that bounds the norm of messages."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from fedmcmc.compression._numbers import as_positive
from fedmcmc.compression._types import Compressor, Dense
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Client, register_dataclass


def clip(norm: float | Array) -> Compressor:
    """Scale messages down to at most this Euclidean norm, over all leaves.

    The result is biased and saves no bits. In a `chain` it bounds what a client can send. The
    declared ``omega = 1`` is the limit for messages far above the bound.

    Parameters
    ----------
    norm
        Largest norm ``[]``, positive.

    Raises
    ------
    ValueError
        If `norm` is not a positive number.

    Examples
    --------
    >>> code, _ = clip(2.5).encode((), jnp.array([3.0, -4.0]), (), None)
    >>> code.values.tolist()
    [1.5, -2.0]
    """
    return Clip(as_positive(norm, "norm"))


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Clip(Compressor):
    """Compressor that scales messages down to a norm; see `clip`."""

    norm: Array

    @property
    def unbiased(self) -> bool:
        """False: messages above the bound are always shortened."""
        return False

    def encode(
        self, draws: ArrayTree, message: ArrayTree, state: ArrayTree, client: Client
    ) -> tuple[Dense, ArrayTree]:
        norm = trees.norm(message)
        bound = self.norm.astype(norm.dtype)
        return Dense(trees.scale(jnp.where(norm > bound, bound / norm, 1), message)), state

    def omega(self, like: ArrayTree) -> Array:
        return jnp.ones((), jnp.float32)
