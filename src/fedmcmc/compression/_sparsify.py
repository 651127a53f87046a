"""Some of a message's numbers, chosen at random."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree, Client, register_dataclass
from fedmcmc.compression._types import Compressor, Sparse
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import random_words, realize_words


def sparsify(fraction: float | Array) -> Compressor:
    """Send each number with probability `fraction`, divided by it, and zero otherwise.

    Parameters
    ----------
    fraction
        ``[]``, in (0, 1].

    Raises
    ------
    ValueError
        If `fraction` is outside (0, 1].

    Notes
    -----
    Unbiased, ``omega = (1 - fraction) / fraction``, with equality: the variance of ``C(v)_j`` is
    ``omega v_j^2``, so the laws of samplers on Gaussian targets stay closed.

    Examples
    --------
    >>> round(float(sparsify(0.25).omega(jnp.zeros(8))), 6)
    3.0
    """
    return Sparsify(fraction_of(fraction))


def fraction_of(fraction: float | Array) -> Any:
    """Return `fraction` as a leaf, after checks."""
    q = schedules.number(fraction, "fraction", minimum=0.0, strict=True)
    if isinstance(q, schedules.Scheduled):
        raise TypeError("fraction must be a number; a schedule of the round is not supported.")
    if not isinstance(q, jax.core.Tracer) and float(q) > 1:
        raise ValueError(f"fraction must be in (0, 1], got {fraction}.")
    return q


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Sparsify(Compressor):
    """Numbers that are sent at random; see `sparsify`."""

    fraction: Array

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
        return random_words(rng_key, like)

    def encode(
        self, draws: ArrayTree, message: ArrayTree, state: ArrayTree, client: Client
    ) -> tuple[Sparse, ArrayTree]:
        """Return the numbers that are sent, divided by the fraction, among zeros."""
        fraction = self.fraction

        def leafwise(x: Array, words: Array) -> Array:
            # 24 bits of a word are a uniform on [0, 1) that float32 holds exactly.
            uniform = (words >> 8).astype(jnp.float32) * 2.0**-24
            # What is not finite is always sent, so that it does not go unnoticed.
            sent = (uniform < fraction.astype(jnp.float32)) | ~jnp.isfinite(x)
            return jnp.where(sent, x / trees.cast(fraction, x), 0)

        return Sparse(jax.tree.map(leafwise, message, realize_words(draws, message))), state

    def omega(self, like: ArrayTree) -> Array:
        return (1 - self.fraction) / self.fraction
