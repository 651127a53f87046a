"""Slice sampling of a few numbers, coordinate by coordinate: no settings, nothing is rejected."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

WIDTH = 1.0
"""Of an interval before it is stepped out."""
MAX_STEPS = 64
"""Widths of an interval at most, once it is stepped out."""
MAX_TRIES = 128
"""Points tried in an interval before the coordinate stays where it is."""


class _Interval(NamedTuple):
    low: Array
    high: Array
    left: Array  # steps that may still be taken, []
    right: Array


class _Search(NamedTuple):
    low: Array
    high: Array
    value: Array
    found: Array
    tries: Array


def slice_sweeps(
    rng_key: Array, log_density: Callable[[Array], Array], flat: Array, num_sweeps: int
) -> Array:
    """Return `flat` ``[d]`` after sweeps over its coordinates, which leave the density as it is.

    An interval around each coordinate is stepped out until both ends lie below a level under the
    density, or are `MAX_STEPS` widths apart, and shrinks towards where the coordinate was until a
    point in it lies above (Neal 2003, figures 3 and 5). A density that is not a number counts as
    zero.
    """
    size = flat.shape[0]

    def one(number: Array, now: Array) -> Array:
        at = number % size
        key = jax.random.fold_in(rng_key, number)
        below, place, share = jax.random.uniform(key, (3,), flat.dtype)

        def above(value: Array) -> Array:
            return log_density(now.at[at].set(value)) > level

        level = log_density(now) + jnp.log1p(-below)
        old = now[at]
        left = jnp.floor(share * MAX_STEPS).astype(jnp.int32)
        low = old - WIDTH * place
        interval = _Interval(low, low + WIDTH, left, MAX_STEPS - 1 - left)
        interval = jax.lax.while_loop(
            lambda x: (x.left > 0) & above(x.low),
            lambda x: x._replace(low=x.low - WIDTH, left=x.left - 1),
            interval,
        )
        interval = jax.lax.while_loop(
            lambda x: (x.right > 0) & above(x.high),
            lambda x: x._replace(high=x.high + WIDTH, right=x.right - 1),
            interval,
        )

        def try_again(search: _Search) -> _Search:
            u = jax.random.uniform(jax.random.fold_in(key, search.tries), (), flat.dtype)
            value = search.low + u * (search.high - search.low)
            return _Search(
                jnp.where(value < old, value, search.low),
                jnp.where(value < old, search.high, value),
                value,
                above(value),
                search.tries + 1,
            )

        start = _Search(interval.low, interval.high, old, jnp.array(False), jnp.int32(0))
        end = jax.lax.while_loop(lambda x: ~x.found & (x.tries < MAX_TRIES), try_again, start)
        return now.at[at].set(jnp.where(end.found, end.value, old))

    moved: Array = jax.lax.fori_loop(0, num_sweeps * size, one, flat)
    return moved
