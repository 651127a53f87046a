"""One client's log density over raveled positions: expansions, maxima, and maps over clients.

Everything works on raveled positions ``[d]``, for one client; `over_clients` maps it over all.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree, Client, Posterior
from fedmcmc.data import CHUNK_ROWS, FederatedData
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import BLOCK, Terms, blockwise, fold_terms, minus_hessian, row_size
from fedmcmc.pytrees import trees

DENSE_LIMIT = 256
"""Up to this many dimensions a matrix ``[d, d]`` per client may be built to check a fit."""

_BUDGET = 2**26  # numbers that all clients treated at a time may take


class Target(NamedTuple):
    """``log p(rows | position) + prior_fraction * log prior`` over raveled positions.

    A `prior_fraction` of ``None`` leaves the prior out, so that an infinite or undefined prior
    cannot enter as zero times infinity.
    """

    posterior: Posterior
    prior_fraction: Array | None
    unravel: Callable[[Array], ArrayTree]

    def fold(
        self, fn: Callable[[Callable[[Array], Array]], ArrayTree], client: Client
    ) -> ArrayTree:
        """Return the sum of ``fn(total_fn)`` over chunks of the client's terms.

        `total_fn` takes a raveled position to the sum of the chunk's log likelihoods, ``[]``.
        """

        def of_terms(terms_fn: Terms, mask: Array) -> ArrayTree:
            return fn(lambda flat: jnp.sum(jnp.where(mask, terms_fn(self.unravel(flat)), 0)))

        return fold_terms(self.posterior.loglikelihood_fn, of_terms, client)

    def prior(self, flat: Array) -> Array:
        """Return the prior's part, ``[]``."""
        log_prior = self.posterior.logprior_fn(self.unravel(flat))
        return trees.cast(self.prior_fraction, log_prior) * log_prior

    def value_and_gradient(self, client: Client, flat: Array) -> tuple[Array, Array]:
        """Return the target at `flat` ``[]`` and its gradient ``[d]``."""
        total = self.fold(lambda total_fn: jax.value_and_grad(total_fn)(flat), client)
        if self.prior_fraction is None:
            return total
        value, gradient = jax.value_and_grad(self.prior)(flat)
        return total[0] + value.astype(total[0].dtype), total[1] + gradient

    def expand(self, client: Client, flat: Array, dense: bool) -> tuple[Array, Array]:
        """Return the gradient ``[d]`` and minus the Hessian, ``[d, d]`` or its diagonal ``[d]``."""
        gradient = self.value_and_gradient(client, flat)[1]
        curvature = self.fold(lambda total_fn: minus_hessian(total_fn, flat, dense=dense), client)
        if self.prior_fraction is not None:
            curvature = curvature + minus_hessian(self.prior, flat, dense=dense)
        return gradient, curvature

    def expand_prior(self, flat: Array, dense: bool) -> tuple[Array, Array]:
        """Return gradient and minus Hessian of the prior's part alone, as `expand`."""
        return jax.grad(self.prior)(flat), minus_hessian(self.prior, flat, dense=dense)

    def change(self, client: Client, flat: Array, shift: Array) -> Array:
        """Return the target at ``flat + shift`` minus that at `flat`, summed row by row."""

        def of_terms(terms_fn: Terms, mask: Array) -> Array:
            terms = terms_fn(self.unravel(flat + shift)) - terms_fn(self.unravel(flat))
            return jnp.sum(jnp.where(mask, terms, 0))

        total = fold_terms(self.posterior.loglikelihood_fn, of_terms, client)
        if self.prior_fraction is None:
            return total
        return total + (self.prior(flat + shift) - self.prior(flat)).astype(total.dtype)


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
