"""Accumulator interface."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree

Transform = Callable[[ArrayTree], ArrayTree]
"""``draw -> pytree``, value that is accumulated."""


class Accumulator(NamedTuple):
    """Statistic that processes draws one by one, in memory of fixed size.

    Attributes
    ----------
    init
        ``draw -> state``: initial state of one chain. Only the shapes and types of `draw` matter.
    update
        ``(rng_key, index, draw, state) -> state``: state of one chain after draw number `index`,
        ``[]`` int32, counted from zero. All chains are at the same index.
    result
        ``(state, count) -> result``, on the host: result of all chains after `count` draws each;
        `state` has NumPy leaves ``[num_chains, ...]``.
    """

    init: Callable[..., ArrayTree]
    update: Callable[..., ArrayTree]
    result: Callable[[ArrayTree, int], Any]


def transformed(fn: Transform | tuple[()], draw: ArrayTree) -> ArrayTree:
    """Return ``fn(draw)``, or the draw itself for ``fn = ()``."""
    return fn(draw) if callable(fn) else draw


def zero_mean(like: ArrayTree) -> ArrayTree:
    """Return zeros with the shapes of `like`, in at least float32."""
    return jax.tree.map(lambda leaf: jnp.zeros_like(trees.widen(trees.as_float(leaf))), like)
