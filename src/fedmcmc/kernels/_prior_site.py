"""Gaussian factor of the prior, which the server computes from the log prior and refines."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc.gaussian import Gaussian, from_flat
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Posterior, register_dataclass


@register_dataclass
@dataclass(frozen=True, eq=False)
class PriorSite:
    """Gaussian factor of the prior: fixed, or fitted to `num_samples` draws.

    The log of a fitted factor has the expected gradient and second derivatives of the log prior
    under the approximation, the fixed point of variational inference (Bonnet and Price). For a
    Gaussian prior the fit is exact and does not depend on the draws.
    """

    fixed: ArrayTree  # a Gaussian, or () for a fitted factor
    structure: str = field(metadata={"static": True})
    num_samples: int = field(metadata={"static": True})

    @property
    def moves(self) -> bool:
        """If true, the factor can change between rounds."""
        return trees.is_empty(self.fixed)

    def init(self, posterior: Posterior, rng_key: Array, position: ArrayTree) -> Gaussian:
        """Return the factor for an approximation without variance at `position`."""
        if not self.moves:
            expected = Gaussian.uniform(position, self.structure)
            if trees.shapes_of(expected) != trees.shapes_of(self.fixed):
                raise ValueError(
                    f"prior must be a Gaussian over the position, shapes "
                    f"{jax.tree.map(jnp.shape, expected.precision_mean)}, got "
                    f"{jax.tree.map(jnp.shape, self.fixed.precision_mean)}."
                )
            return jax.tree.map(jnp.asarray, self.fixed)
        if is_constant(posterior.logprior_fn, position):
            return Gaussian.uniform(position, self.structure)
        return self._fit(posterior, rng_key, lambda key: position, position)

    def refine(
        self, posterior: Posterior, rng_key: Array, before: Gaussian, q: Any, damping: Array
    ) -> Gaussian:
        """Return `before`, moved by `damping` towards the factor for the approximation `q`.

        If no product was proper so far, or the new factor is not finite, return `before`.
        """
        if not self.moves or is_constant(posterior.logprior_fn, before.precision_mean):
            return before
        fitted = self._fit(posterior, rng_key, q.gaussian.draw, before.precision_mean)
        change = trees.select(
            q.ever_proper & trees.all_finite(fitted), fitted / before, trees.zeros_like(before)
        )
        return before * change**damping

    def _fit(
        self,
        posterior: Posterior,
        rng_key: Array,
        draw: Callable[[Array], ArrayTree],
        like: ArrayTree,
    ) -> Gaussian:
        """Return the factor with the mean gradient and curvature over draws."""
        structure = self.structure

        def sample_terms(key: Array) -> tuple[Array, Array, Array]:
            draw_key, probe_key = jax.random.split(key)
            flat, unravel_draw = ravel_pytree(draw(draw_key))
            gradient_fn = jax.grad(lambda x: posterior.logprior_fn(unravel_draw(x)))
            gradient = gradient_fn(flat)
            if structure == "dense":
                return flat, gradient, -jax.jacfwd(gradient_fn)(flat)
            # Hutchinson's estimator is exact if the prior has independent coordinates.
            probe = jax.random.rademacher(probe_key, flat.shape, flat.dtype)
            product = jax.jvp(gradient_fn, (flat,), (probe,))[1]
            return flat, gradient, -probe * product

        def add(i: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            return trees.add(sums, sample_terms(jax.random.fold_in(rng_key, i)))

        flat_like, unravel = ravel_pytree(like)
        num, zeros = self.num_samples, jnp.zeros_like(flat_like)
        square = jnp.outer(zeros, zeros) if structure == "dense" else zeros
        sums = jax.lax.fori_loop(0, num, add, (zeros, zeros, square))
        flat, gradient, precision = trees.scale(1 / num, sums)
        if structure == "scaled_identity":
            precision = jnp.mean(precision)
        elif structure == "dense":
            precision = (precision + precision.T) / 2
        linear = from_flat(unravel(flat), precision, structure)
        mean_part = trees.add(linear.precision_mean, unravel(gradient))
        return Gaussian(mean_part, linear.precision, structure)


def is_constant(log_density: Callable[[ArrayTree], Array], like: ArrayTree) -> bool:
    """Return true if the trace of a log density does not depend on its argument.

    Examples
    --------
    >>> is_constant(lambda x: 0.0, jnp.ones(2)), is_constant(lambda x: -x @ x, jnp.ones(2))
    (True, False)
    """
    jaxpr = jax.make_jaxpr(lambda x: jnp.asarray(log_density(x)))(trees.shapes_of(like)).jaxpr
    depends = set(jaxpr.invars)
    for equation in jaxpr.eqns:
        if any(not hasattr(x, "val") and x in depends for x in equation.invars):
            depends.update(equation.outvars)
    (result,) = jaxpr.outvars
    return hasattr(result, "val") or result not in depends
