"""Compressor that sends a random subset of a message's numbers."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.compression._numbers import as_positive
from fedmcmc.compression._types import Compressor, Sparse
from fedmcmc.pytrees import trees
from fedmcmc.random import random_words, realize_words
from fedmcmc.types import ArrayTree, Client, register_dataclass


def sparsify(fraction: float | Array) -> Compressor:
    """Send each number with probability `fraction`, divided by it, and zero otherwise.

    Unbiased with ``omega = (1 - fraction) / fraction``, and the bound is exact: the variance of
    ``C(v)_j`` is ``omega v_j^2``. Samplers on Gaussian targets therefore still have an exact
    stationary distribution.

    Parameters
    ----------
    fraction
        Probability ``[]``, in (0, 1].

    Raises
    ------
    ValueError
        If `fraction` is outside (0, 1].

    Examples
    --------
    >>> round(float(sparsify(0.25).omega(jnp.zeros(8))), 6)
    3.0
    """
    return Sparsify(as_fraction(fraction))


def as_fraction(fraction: float | Array) -> Array:
    """Return `fraction` as a leaf; raise `ValueError` if it is outside (0, 1]."""
    number = as_positive(fraction, "fraction")
    if not isinstance(number, jax.core.Tracer) and float(number) > 1:
        raise ValueError(f"fraction must be in (0, 1], got {fraction}.")
    return number


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Sparsify(Compressor):
    """Compressor that sends numbers at random; see `sparsify`."""

    fraction: Array

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
        return random_words(rng_key, like)

    def encode(
        self, draws: ArrayTree, message: ArrayTree, state: ArrayTree, client: Client
    ) -> tuple[Sparse, ArrayTree]:
        """Return the message with the numbers that are not sent set to zero."""
        fraction = self.fraction

        def leafwise(x: Array, words: Array) -> Array:
            # 24 bits of a word are a uniform on [0, 1) that float32 holds exactly.
            uniform = (words >> 8).astype(jnp.float32) * 2.0**-24
            # Always send NaN and infinity, so that they are noticed.
            sent = (uniform < fraction.astype(jnp.float32)) | ~jnp.isfinite(x)
            return jnp.where(sent, x / trees.cast(fraction, x), 0)

        return Sparse(jax.tree.map(leafwise, message, realize_words(draws, message))), state

    def omega(self, like: ArrayTree) -> Array:
        return (1 - self.fraction) / self.fraction
