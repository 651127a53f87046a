"""Question for the log likelihoods of all clients and their derivatives at a few points."""

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.gradients import Terms, fold_terms, minus_hessian
from fedmcmc.kernels._evaluations import Points, zero_where
from fedmcmc.kernels._questions import (
    Question,
    below_range,
    impossible_in_sum,
    require_unbiased,
)
from fedmcmc.kernels._shared import check_model
from fedmcmc.pytrees import trees
from fedmcmc.types import (
    ArrayTree,
    Client,
    Disclosure,
    Federation,
    Posterior,
    as_functions,
    register_dataclass,
)


class Expanded(NamedTuple):
    """Sums over clients of expansions of log likelihoods at points.

    Attributes
    ----------
    value
        ``[num]``, ``log p(rows | point) - log p(rows | centre)``.
    gradient
        ``[num, d]`` over raveled positions.
    curvature
        Minus the Hessian: upper triangle row by row, ``[num, d (d + 1) / 2]``; diagonal,
        ``[num, d]``; or ``()``.
    """

    value: ArrayTree
    gradient: ArrayTree
    curvature: ArrayTree

    def to_range(self, limit: float) -> "Expanded":
        """Return the answer for a secure sum of numbers up to `limit`; see `Ranged`.

        A point that cannot be a mode gets the lowest value. If derivatives or a large value are
        outside the range, the point gets twice the lowest value, so that it can be counted.
        """
        lowest = -trees.cast(limit, self.value)
        derivatives = self.gradient, self.curvature
        finite = jnp.isfinite(self.value) & jax.vmap(trees.all_finite)(derivatives)
        impossible = ~finite | below_range(self.value, limit)
        sizes = jax.tree.map(
            lambda x: jnp.max(jnp.abs(x), axis=1), (self.value[:, None], derivatives)
        )
        outside = jnp.stack(jax.tree.leaves(sizes)).max(0) > limit
        value = jnp.where(impossible, lowest, jnp.where(outside, 2 * lowest, self.value))
        return Expanded(value, *zero_where(impossible | outside, derivatives))

    def from_range(self, limit: float) -> "Expanded":
        """Return the sum of such answers, with minus infinity for a density of zero."""
        impossible = impossible_in_sum(self.value, limit)
        return self._replace(value=jnp.where(impossible, -jnp.inf, self.value))


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Expansions(Question):
    """Log likelihoods and their derivatives at a few points; see `expansions`."""

    curvature: str = field(metadata={"static": True})

    traits = replace(Question.traits, check_compressor=require_unbiased, marks_range_ends=True)
    disclosure = Disclosure(
        "the log likelihood, its gradient and its curvature at positions that the server chooses",
        hidden_in_sums=True,
    )

    def answer(self, content: Points, client: Client) -> Expanded:
        loglikelihood_fn = self.posterior.loglikelihood_fn

        def expand_terms(terms_fn: Terms, mask: Array) -> tuple[Array, Array, ArrayTree]:
            at_centre = terms_fn(content.centre)

            def expand(point: ArrayTree) -> tuple[Array, Array, ArrayTree]:
                def total(flat: Array) -> Array:
                    position = trees.cast_like(trees.unravel(flat, point), point)
                    return jnp.sum(jnp.where(mask, terms_fn(position) - at_centre, 0))

                flat = trees.ravel(point)
                value, gradient = jax.value_and_grad(total)(flat)
                if self.curvature == "none":
                    return value, gradient, ()
                dense = self.curvature == "dense"
                curvature = minus_hessian(total, flat, dense=dense)
                upper = jnp.triu_indices(flat.shape[0])
                return value, gradient, curvature[upper] if dense else curvature

            return jax.lax.map(expand, content.points)

        return Expanded(*fold_terms(loglikelihood_fn, expand_terms, client))

    def answer_like(self, content: Points) -> Expanded:
        size = trees.num_elements(content.centre)
        num = jax.tree.leaves(content.points)[0].shape[0]
        dtype = jax.eval_shape(trees.ravel, content.centre).dtype
        curvature: ArrayTree = ()
        if self.curvature != "none":
            entries = size * (size + 1) // 2 if self.curvature == "dense" else size
            curvature = jax.ShapeDtypeStruct((num, entries), dtype)
        value = jax.ShapeDtypeStruct((num,), jnp.result_type(float))
        gradient = jax.ShapeDtypeStruct((num, size), dtype)
        return Expanded(value, gradient, curvature)

    def check_content(self, content: Points, federation: Federation) -> None:
        check_model(self.posterior, content.centre, federation)


def expansions(
    posterior: Posterior, *, curvature: Literal["dense", "diagonal", "none"] = "dense"
) -> Expansions:
    """Return the question for log likelihoods, gradients and minus Hessians at a few `Points`.

    Newton's method and the Laplace approximation need these sums. Numbers that are not finite are
    sent unchanged.
    """
    return as_functions(Expansions(posterior, curvature))
