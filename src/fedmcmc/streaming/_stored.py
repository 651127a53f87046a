"""A fixed number of a run's draws, chosen at random or evenly spaced."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial

from fedmcmc._checks import positive_integer
from fedmcmc.random import integers_below
from fedmcmc.streaming._types import Accumulator, Transform, transformed
from fedmcmc.types import ArrayTree, Static, as_functions


class Stored(NamedTuple):
    """Stored draws of a run.

    Attributes
    ----------
    draws
        Leaves ``[num_chains, num_stored, ...]``, for example for quantiles:
        ``numpy.quantile(stored.draws, 0.95, axis=(0, 1))``.
    indices
        ``[num_chains, num_stored]``, numbers of the draws, counted from zero.
    num_seen
        Number of draws per chain before the choice.
    """

    draws: ArrayTree
    indices: np.ndarray
    num_seen: int


class _StoredState(NamedTuple):
    draws: ArrayTree  # leaves [size, ...]
    indices: Array  # [size] int32


def reservoir(size: int, fn: Transform | None = None) -> Accumulator:
    """Keep a random subset of `size` draws per chain; all subsets are equally likely.

    Parameters
    ----------
    size
        Number of draws per chain.
    fn
        Function ``draw -> pytree`` whose value is stored; by default the identity.

    Returns
    -------
    Accumulator
        Accumulator of `Stored` draws, in random order.

    References
    ----------
    Vitter (1985), Random sampling with a reservoir, algorithm R.
    """
    return _accumulator(positive_integer(size, "size"), fn, _random_slot)


def thinned(size: int, fn: Transform | None = None) -> Accumulator:
    """Keep between ``size / 2`` and `size` evenly spaced draws of each chain, from the first draw.

    Initially all draws are kept. When the memory is full, each second draw is dropped and the
    distance between draws doubles. The draws stay in order, as autocorrelations and effective
    sample sizes require.

    Parameters
    ----------
    size
        Largest number of draws per chain, even.
    fn
        Function ``draw -> pytree`` whose value is stored; by default the identity.

    Returns
    -------
    Accumulator
        Accumulator of `Stored` draws.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> keep = thinned(4)
    >>> state = keep.init(jnp.zeros(()))
    >>> for i in range(11):
    ...     state = keep.update(None, jnp.int32(i), jnp.float32(i), state)
    >>> keep.result(jax.tree.map(lambda leaf: np.asarray(leaf)[None], state), 11).draws.tolist()
    [[0.0, 4.0, 8.0]]
    """
    num = positive_integer(size, "size")
    if num % 2:
        raise ValueError(f"thinned needs an even size, as it drops each second draw, got {num}.")
    return _accumulator(num, fn, _even_slot)


def _accumulator(
    size: int, fn: Transform | None, place: Callable[..., tuple[_StoredState, Array]]
) -> Accumulator:
    mapped = as_functions(() if fn is None else fn)
    return Accumulator(
        Partial(_init, mapped, Static(size)),
        Partial(_update, mapped, Static(place), Static(size)),
        Partial(_result, Static(place), Static(size)),
    )


def _init(fn: Transform | tuple[()], size: Static[int], draw: ArrayTree) -> _StoredState:
    empty = jax.tree.map(
        lambda leaf: jnp.zeros((size.value, *jnp.shape(leaf)), jnp.result_type(leaf)),
        transformed(fn, draw),
    )
    return _StoredState(empty, jnp.zeros(size.value, jnp.int32))


def _update(
    fn: Transform | tuple[()],
    place: Static[Any],
    size: Static[int],
    rng_key: Array,
    index: Array,
    draw: ArrayTree,
    state: _StoredState,
) -> _StoredState:
    state, slot = place.value(size.value, rng_key, index, state)
    stored = jax.tree.map(
        lambda table, leaf: table.at[slot].set(leaf, mode="drop"),
        state.draws,
        transformed(fn, draw),
    )
    return _StoredState(stored, state.indices.at[slot].set(index, mode="drop"))


def _random_slot(
    size: int, rng_key: Array, index: Array, state: _StoredState
) -> tuple[_StoredState, Array]:
    chosen = integers_below(rng_key, index + 1, ())
    return state, jnp.where(index < size, index, chosen)


def _even_slot(
    size: int, rng_key: Array, index: Array, state: _StoredState
) -> tuple[_StoredState, Array]:
    del rng_key
    # Before draw `index` the table holds all multiples of the old distance below it. The distance
    # doubles when `index` is `size` times the old distance, a multiple of the new distance.
    old = _distance(size, index - 1)
    full = index == size * old

    def halve(table: Array) -> Array:
        return jnp.concatenate([table[::2], jnp.zeros_like(table[::2])])

    # `index` is the same for all chains, so vmap keeps the branch.
    state = jax.lax.cond(full, lambda s: jax.tree.map(halve, s), lambda s: s, state)
    distance = jnp.where(full, 2 * old, old)
    return state, jnp.where(index % distance == 0, index // distance, size)


def _distance(size: int, index: Array) -> Array:
    """Return the distance of the stored draws after draw `index`, a power of two."""
    powers = size * 2 ** np.arange(0, max(31 - int(size).bit_length(), 1), dtype=np.int64)
    return jnp.int32(1) << jnp.sum(index >= jnp.asarray(powers, jnp.int32), dtype=jnp.int32)


def _result(place: Static[Any], size: Static[int], state: _StoredState, count: int) -> Stored:
    num = min(count, size.value)
    if place.value is _even_slot:
        distance = int(_distance(size.value, jnp.int32(max(count - 1, 0))))
        num = -(-count // distance)
    draws = jax.tree.map(lambda leaf: leaf[:, :num], state.draws)
    return Stored(draws, np.asarray(state.indices)[:, :num], count)
