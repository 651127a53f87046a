"""Sums over the rows of all clients, outside of rounds."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, Client
from fedmcmc.data._processes import combined
from fedmcmc.pytrees import trees

__all__ = ["total_of_clients"]

TABLE_BYTES = 2**26
"""Memory for the terms of some clients."""


def total_of_clients(fn: Callable[[Client], ArrayTree], data: Any) -> ArrayTree:
    """Return the sum of ``fn(client)`` over all clients, where `fn` is a sum over rows.

    All rows are taken as those of one client; where clients are computed one by one, or only some
    are in this process (of a `ClientLoader`), each client's term is computed apart and terms are
    added in the order of the clients: the same numbers wherever the clients are.
    """
    if not data.partial and data.at_a_time != 1:
        return fn(data.pooled().client(jnp.zeros((), jnp.int32)))

    def one(index: Array) -> ArrayTree:
        return fn(data.client(index))

    shapes = jax.eval_shape(one, jnp.int32(0))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    here = np.asarray(data.members) if data.partial else np.arange(data.num_clients)
    step = max(TABLE_BYTES // max(size, 1), 1)
    total = trees.zeros_like(shapes)
    for begin in range(0, data.num_clients, step):
        ids = here[(here >= begin) & (here < begin + step)]
        end = min(begin + step, data.num_clients)
        table = jax.lax.map(one, jnp.asarray(ids, jnp.int32))
        if data.partial:
            table = _completed(table, shapes, ids - begin, end - begin)
        total = jax.tree.map(lambda t, leaf: t + jnp.sum(leaf, axis=0), total, table)
    return total


def _completed(table: ArrayTree, shapes: ArrayTree, places: np.ndarray, num: int) -> ArrayTree:
    """Return the terms of `num` clients, of which this process has those at `places`."""

    def whole(shape: jax.ShapeDtypeStruct, leaf: Array) -> Array:
        full = np.zeros((num, *shape.shape), shape.dtype)
        full[places] = np.asarray(leaf)
        words = combined(np.ascontiguousarray(full).view(np.uint8))
        return jnp.asarray(words.view(full.dtype).reshape(full.shape))

    return jax.tree.map(whole, shapes, table)
