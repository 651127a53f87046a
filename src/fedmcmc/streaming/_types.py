"""What an accumulator is."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedmcmc._types import ArrayTree
from fedmcmc.pytrees import trees

Transform = Callable[[ArrayTree], ArrayTree]
"""``draw -> pytree``, what is accumulated of a draw."""


class Accumulator(NamedTuple):
    """Something that takes draws in one after the other, in memory of a fixed size.

    Attributes
    ----------
    init
        ``draw -> state``: the state before the first draw, from a draw's shapes; the values of
        `draw` do not matter. One chain's.
    update
        ``(rng_key, index, draw, state) -> state``: takes in draw number `index` ``[]`` int32,
        counted from zero. All chains are at the same index.
    result
        ``(state, count) -> result``, on the host: what all chains found in `count` draws; `state`
        has NumPy leaves ``[num_chains, ...]``.
    """

    init: Callable[..., ArrayTree]
    update: Callable[..., ArrayTree]
    result: Callable[[ArrayTree, int], Any]


def transformed(fn: Any, draw: ArrayTree) -> ArrayTree:
    """Return ``fn(draw)``, the draw itself for ``fn = ()``."""
    return draw if fn == () else fn(draw)


def first_mean(like: ArrayTree) -> ArrayTree:
    """Return zeros in which a mean of numbers like these loses few digits: at least float32."""
    return jax.tree.map(lambda leaf: jnp.zeros_like(trees.widen(trees.as_float(leaf))), like)
