"""Second-order expansions and maxima of one client's target."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedmcmc._types import ArrayTree, Client
from fedmcmc.data import fold
from fedmcmc.gaussian import Gaussian
from fedmcmc.surrogates._target import Target, blockwise, value_and_gradient

__all__ = ["Maximum", "as_gaussian", "expand", "maximize", "prior_expansion"]

_BLOCK = 64  # Hessian-vector products taken at a time


def expand(target: Target, client: Client, flat: Array, dense: bool) -> tuple[Array, Array]:
    """Return the gradient ``[d]`` and minus the Hessian, ``[d, d]`` or its diagonal ``[d]``."""
    gradient = value_and_gradient(target, client, flat)[1]
    curvature = fold(
        lambda rows, mask: _curvature(lambda x: target.rows(x, rows, mask), flat, dense), client
    )
    if target.prior_fraction is not None:
        curvature = curvature + _curvature(target.prior, flat, dense)
    return gradient, curvature


def prior_expansion(target: Target, flat: Array, dense: bool) -> tuple[Array, Array]:
    """Return gradient and minus Hessian of the prior's part alone, as `expand`."""
    return jax.grad(target.prior)(flat), _curvature(target.prior, flat, dense)


def _curvature(fn: Callable[[Array], Array], flat: Array, dense: bool) -> Array:
    size = flat.shape[0]

    def column(i: Array) -> Array:
        tangent = jnp.zeros_like(flat).at[i].set(1)
        product = -jax.jvp(jax.grad(fn), (flat,), (tangent,))[1]
        return product if dense else product[i]

    # One block of Hessian-vector products at a time: no [d, d] is held for a diagonal.
    columns = blockwise(column, size, _BLOCK)
    return (columns + columns.T) / 2 if dense else columns


def as_gaussian(
    gradient: Array, precision: Array, flat: Array, unravel: Callable[[Array], ArrayTree]
) -> Gaussian:
    """Return the Gaussian whose log density has this gradient and minus Hessian at `flat`."""
    if precision.ndim == 1:
        return Gaussian(unravel(gradient + precision * flat), unravel(precision), "diagonal")
    # At full precision also where an accelerator would round the factors of a product.
    product = jnp.matmul(precision, flat, precision=jax.lax.Precision.HIGHEST)
    return Gaussian(unravel(gradient + product), precision, "dense")


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
