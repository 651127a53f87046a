"""Slice sampling of a few numbers, coordinate by coordinate, without settings or rejections."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

WIDTH = 1.0
"""Initial width of an interval."""
MAX_WIDTHS = 64
"""Largest width of an interval after stepping out, in units of `WIDTH`."""
MAX_TRIES = 128
"""Number of points tried in an interval before the coordinate keeps its value."""


class _Interval(NamedTuple):
    low: Array
    high: Array
    left: Array  # number of remaining steps to the left, []
    right: Array


class _Search(NamedTuple):
    low: Array
    high: Array
    value: Array
    accepted: Array
    tries: Array


def slice_sweeps(
    rng_key: Array, log_density: Callable[[Array], Array], flat: Array, num_sweeps: int
) -> Array:
    """Return `flat` ``[d]`` after sweeps over its coordinates that leave the density invariant.

    For each coordinate, an interval is stepped out until the density at both ends is below a random
    level, or the interval has `MAX_WIDTHS` widths. It then shrinks towards the old value until a
    point in it is above the level (Neal 2003, figures 3 and 5). A density of NaN counts as zero.
    """
    size = flat.shape[0]

    def update(number: Array, position: Array) -> Array:
        index = number % size
        key = jax.random.fold_in(rng_key, number)
        below, place, share = jax.random.uniform(key, (3,), flat.dtype)

        def is_above(value: Array) -> Array:
            return log_density(position.at[index].set(value)) > level

        level = log_density(position) + jnp.log1p(-below)
        old = position[index]
        left = jnp.floor(share * MAX_WIDTHS).astype(jnp.int32)
        low = old - WIDTH * place
        interval = _Interval(low, low + WIDTH, left, MAX_WIDTHS - 1 - left)
        interval = jax.lax.while_loop(
            lambda x: (x.left > 0) & is_above(x.low),
            lambda x: x._replace(low=x.low - WIDTH, left=x.left - 1),
            interval,
        )
        interval = jax.lax.while_loop(
            lambda x: (x.right > 0) & is_above(x.high),
            lambda x: x._replace(high=x.high + WIDTH, right=x.right - 1),
            interval,
        )

        def shrink(search: _Search) -> _Search:
            u = jax.random.uniform(jax.random.fold_in(key, search.tries), (), flat.dtype)
            value = search.low + u * (search.high - search.low)
            return _Search(
                jnp.where(value < old, value, search.low),
                jnp.where(value < old, search.high, value),
                value,
                is_above(value),
                search.tries + 1,
            )

        start = _Search(interval.low, interval.high, old, jnp.array(False), jnp.int32(0))
        end = jax.lax.while_loop(lambda x: ~x.accepted & (x.tries < MAX_TRIES), shrink, start)
        return position.at[index].set(jnp.where(end.accepted, end.value, old))

    moved: Array = jax.lax.fori_loop(0, num_sweeps * size, update, flat)
    return moved
