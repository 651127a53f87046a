"""Maxima of log densities over raveled positions, and maps over clients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree
from fedmcmc.data import CHUNK_ROWS, FederatedData
from fedmcmc.gradients import BLOCK, blockwise, row_size

DENSE_LIMIT = 256
"""Up to this many dimensions a matrix ``[d, d]`` per client may be built to check a fit."""

_BUDGET = 2**26  # numbers that all clients treated at a time may take


class Maximum(NamedTuple):
    """Where an ascent ended.

    `flat` ``[d]``; `num_steps` and `num_evaluations` ``[]`` int32 (of value and gradient together);
    `gain` ``[]``, twice what a full step from where the last one began promised, in nats;
    `gradient` ``[d]``.
    """

    flat: Array
    num_steps: Array
    num_evaluations: Array
    gain: Array
    gradient: Array


def maximize(
    fn: Callable[[Array], tuple[Array, Array]], flat: Array, max_steps: Array, tolerance: Array
) -> Maximum:
    """Ascend by the L-BFGS of optax until a step promises less than `tolerance`.

    `fn` returns value and gradient. The promise is that of the whole quasi-Newton step, so a line
    search that gets stuck does not pass for arrival.
    """

    def loss(x: Array) -> Array:
        # fn holds loops of dynamic length, which reverse mode cannot enter; its own gradient is
        # put in their place.
        at = jax.lax.stop_gradient(x)
        value, gradient = fn(at)
        return -(value + jax.lax.stop_gradient(gradient) @ (x - at))

    import optax

    # The two parts of optax.lbfgs, apart because the step before the line search is needed.
    quasi_newton = optax.scale_by_lbfgs()
    line_search = optax.scale_by_zoom_linesearch(
        max_linesearch_steps=20, initial_guess_strategy="one"
    )

    def body(carry: tuple[Maximum, Array, Any]) -> tuple[Maximum, Array, Any]:
        now, value, (memory, search) = carry
        slope = -now.gradient
        # optax adds an int32 to an int64 in here, which strict promotion forbids in x64.
        with jax.numpy_dtype_promotion("standard"):
            step, memory = quasi_newton.update(slope, memory, now.flat)
        updates, search = line_search.update(
            -step, search, now.flat, value=value, grad=slope, value_fn=loss
        )
        evaluations = jnp.asarray(search.info.num_linesearch_steps, jnp.int32)
        now = Maximum(
            optax.apply_updates(now.flat, updates),
            now.num_steps + 1,
            now.num_evaluations + evaluations,
            jnp.abs(slope @ step),
            -search.grad,
        )
        return now, search.value, (memory, search)

    def unfinished(carry: tuple[Maximum, Array, Any]) -> Array:
        now = carry[0]
        return (now.num_steps < max_steps) & (now.gain > tolerance)

    value, gradient = fn(flat)
    one = jnp.ones((), jnp.int32)
    begin = Maximum(flat, 0 * one, one, jnp.full((), jnp.inf, flat.dtype), gradient)
    start = (begin, -value.astype(flat.dtype), (quasi_newton.init(flat), line_search.init(flat)))
    return jax.lax.while_loop(unfinished, body, start)[0]


def over_clients(fn: Callable[[Array], ArrayTree], num_clients: int, cost: int) -> ArrayTree:
    """Return ``fn(index)`` of every client, stacked; one client takes about `cost` numbers."""
    return blockwise(fn, num_clients, max(1, _BUDGET // max(cost, 1)))


def client_cost(data: FederatedData, size: int) -> int:
    """Return about how many numbers second derivatives of one client take."""
    chunk, block = min(data.max_size, CHUNK_ROWS), min(size, BLOCK)
    return chunk * (row_size(data.rows) + block) + size * block
