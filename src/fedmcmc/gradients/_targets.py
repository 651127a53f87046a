"""Log density of one client over raveled positions ``[d]``: values, gradients, expansions."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients._curvature import minus_hessian
from fedmcmc.gradients._terms import Terms, fold_terms, row_terms
from fedmcmc.pytrees import in_single_precision, trees
from fedmcmc.types import ArrayTree, Client, Posterior


class ClientDensity(NamedTuple):
    """Log density ``log p(rows | position) + prior_fraction * log prior`` of raveled positions.

    A `prior_fraction` of ``None`` omits the prior, so that an infinite or undefined prior cannot
    enter as zero times infinity.
    """

    posterior: Posterior
    prior_fraction: Array | None
    unravel: Callable[[Array], ArrayTree]

    def terms(self, flat: Array, rows: ArrayTree) -> Array:
        """Return the log likelihood of each row, ``[num]``."""
        return row_terms(self.posterior.loglikelihood_fn, self.unravel(flat), rows)

    def fold(
        self, fn: Callable[[Callable[[Array], Array]], ArrayTree], client: Client
    ) -> ArrayTree:
        """Return the sum of ``fn(total_fn)`` over chunks of the client's terms.

        `total_fn` maps a raveled position to the sum of the chunk's log likelihoods, ``[]``.
        """

        def fold_chunk(terms_fn: Terms, mask: Array) -> ArrayTree:
            return fn(lambda flat: jnp.sum(jnp.where(mask, terms_fn(self.unravel(flat)), 0)))

        return fold_terms(self.posterior.loglikelihood_fn, fold_chunk, client)

    def prior(self, flat: Array) -> Array:
        """Return the log prior times its fraction, ``[]``."""
        log_prior = self.posterior.logprior_fn(self.unravel(flat))
        return trees.cast(self.prior_fraction, log_prior) * log_prior

    def value_and_gradient(self, client: Client, flat: Array) -> tuple[Array, Array]:
        """Return the log density at `flat`, ``[]``, and its gradient ``[d]``."""
        total = self.fold(lambda total_fn: jax.value_and_grad(total_fn)(flat), client)
        if self.prior_fraction is None:
            return total
        value, gradient = jax.value_and_grad(self.prior)(flat)
        return total[0] + value.astype(total[0].dtype), total[1] + gradient

    @in_single_precision
    def expand(self, client: Client, flat: Array, dense: bool) -> tuple[Array, Array]:
        """Return the gradient ``[d]`` and minus the Hessian, ``[d, d]`` or its diagonal ``[d]``."""
        gradient = self.value_and_gradient(client, flat)[1]
        curvature = self.fold(lambda total_fn: minus_hessian(total_fn, flat, dense=dense), client)
        if self.prior_fraction is not None:
            curvature = curvature + minus_hessian(self.prior, flat, dense=dense)
        return gradient, curvature

    def expand_prior(self, flat: Array, dense: bool) -> tuple[Array, Array]:
        """Return the gradient and minus the Hessian of the prior's part; see `expand`."""
        return jax.grad(self.prior)(flat), minus_hessian(self.prior, flat, dense=dense)

    def change(self, client: Client, flat: Array, shift: Array) -> Array:
        """Return the change of the log density from `flat` to ``flat + shift``, row by row."""

        def chunk_change(terms_fn: Terms, mask: Array) -> Array:
            terms = terms_fn(self.unravel(flat + shift)) - terms_fn(self.unravel(flat))
            return jnp.sum(jnp.where(mask, terms, 0))

        total = fold_terms(self.posterior.loglikelihood_fn, chunk_change, client)
        if self.prior_fraction is None:
            return total
        return total + (self.prior(flat + shift) - self.prior(flat)).astype(total.dtype)


def as_gaussian(
    gradient: Array, precision: Array, flat: Array, unravel: Callable[[Array], ArrayTree]
) -> Gaussian:
    """Return the Gaussian whose log density has this gradient and this precision at `flat`."""
    if precision.ndim == 1:
        return Gaussian(unravel(gradient + precision * flat), unravel(precision), "diagonal")
    # Request full precision: accelerators may round the factors of a product.
    product = jnp.matmul(precision, flat, precision=jax.lax.Precision.HIGHEST)
    return Gaussian(unravel(gradient + product), precision, "dense")
