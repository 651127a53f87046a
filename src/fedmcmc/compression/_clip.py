"""Messages of a bounded norm."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree, Client, register_dataclass
from fedmcmc.compression._types import Compressor, Dense
from fedmcmc.pytrees import schedules, trees


def clip(norm: float | Array) -> Compressor:
    """Scale a message down to at most this Euclidean norm, over all leaves.

    Parameters
    ----------
    norm
        ``[]``, positive.

    Raises
    ------
    ValueError
        If `norm` is not a positive number.

    Notes
    -----
    Biased, and it saves no bits by itself: in a `chain` it bounds what a client can send. The
    declared ``omega = 1`` is that of a message far above the bound.

    Examples
    --------
    >>> code, _ = clip(2.5).encode((), jnp.array([3.0, -4.0]), (), None)
    >>> code.values.tolist()
    [1.5, -2.0]
    """
    bound = schedules.number(norm, "norm", minimum=0.0, strict=True)
    if isinstance(bound, schedules.Scheduled):
        raise TypeError("norm must be a number; a schedule of the round is not supported.")
    return Clip(bound)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Clip(Compressor):
    """Messages scaled down to a norm; see `clip`."""

    norm: Array

    @property
    def unbiased(self) -> bool:
        """Long messages are always too short."""
        return False

    def encode(
        self, draws: ArrayTree, message: ArrayTree, state: ArrayTree, client: Client
    ) -> tuple[Dense, ArrayTree]:
        norm = trees.norm(message)
        most = self.norm.astype(norm.dtype)
        return Dense(trees.scale(jnp.where(norm > most, most / norm, 1), message)), state

    def omega(self, like: ArrayTree) -> Array:
        return jnp.ones((), jnp.float32)
