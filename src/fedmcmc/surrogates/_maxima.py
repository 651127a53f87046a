"""Maximum of a log density by L-BFGS, within a compiled program."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Maximum(NamedTuple):
    """Result of `maximize`.

    Attributes
    ----------
    flat, gradient
        Raveled position and gradient, ``[d]``.
    num_steps
        Number of steps.
    gain
        Twice the gain that was predicted for the last quasi-Newton step, in nats.
    """

    flat: Array
    num_steps: Array
    gain: Array
    gradient: Array


def maximize(
    fn: Callable[[Array], tuple[Array, Array]], flat: Array, max_steps: Array, tolerance: Array
) -> Maximum:
    """Maximize by the L-BFGS of optax until the predicted gain is below `tolerance`.

    `fn` returns value and gradient. The prediction is for the step before the line search, so that
    a line search without progress does not end the iteration.
    """

    def loss(x: Array) -> Array:
        # Reverse mode cannot enter loops of dynamic length in fn, so its gradient is put in.
        at_x = jax.lax.stop_gradient(x)
        value, gradient = fn(at_x)
        return -(value + jax.lax.stop_gradient(gradient) @ (x - at_x))

    import optax

    # optax.lbfgs in two parts, because the step before the line search is needed.
    quasi_newton = optax.scale_by_lbfgs()
    line_search = optax.scale_by_zoom_linesearch(
        max_linesearch_steps=20, initial_guess_strategy="one"
    )

    def body(carry: tuple[Maximum, Array, Any]) -> tuple[Maximum, Array, Any]:
        current, value, (memory, search) = carry
        slope = -current.gradient
        # optax adds an int32 to an int64, which strict promotion forbids in x64.
        with jax.numpy_dtype_promotion("standard"):
            step, memory = quasi_newton.update(slope, memory, current.flat)
        updates, search = line_search.update(
            -step, search, current.flat, value=value, grad=slope, value_fn=loss
        )
        following = Maximum(
            optax.apply_updates(current.flat, updates),
            current.num_steps + 1,
            jnp.abs(slope @ step),
            -search.grad,
        )
        return following, search.value, (memory, search)

    def is_unfinished(carry: tuple[Maximum, Array, Any]) -> Array:
        current = carry[0]
        return (current.num_steps < max_steps) & (current.gain > tolerance)

    value, gradient = fn(flat)
    start = Maximum(flat, jnp.zeros((), jnp.int32), jnp.full((), jnp.inf, flat.dtype), gradient)
    states = quasi_newton.init(flat), line_search.init(flat)
    carry = start, -value.astype(flat.dtype), states
    return jax.lax.while_loop(is_unfinished, body, carry)[0]
