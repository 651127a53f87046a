"""Log likelihoods with their derivatives at a few points, asked of all clients at once."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import (
    ArrayTree,
    Client,
    Federation,
    Posterior,
    as_functions,
    register_dataclass,
)
from fedmcmc.compression import Memory
from fedmcmc.gradients import Terms, fold_terms, minus_hessian
from fedmcmc.kernels._evaluations import Points, zero_where
from fedmcmc.kernels._questions import (
    Question,
    below_range,
    impossible_in_sum,
)
from fedmcmc.kernels._shared import check_model
from fedmcmc.pytrees import trees


class Expanded(NamedTuple):
    """Sums over clients of expansions of log likelihoods at some points.

    Attributes
    ----------
    value
        ``[num]``, ``log p(rows | point) - log p(rows | centre)``.
    gradient
        ``[num, d]`` over raveled positions.
    curvature
        Minus the Hessian: its upper triangle row by row, ``[num, d (d + 1) / 2]``; its diagonal,
        ``[num, d]``; or ``()``.
    """

    value: ArrayTree
    gradient: ArrayTree
    curvature: ArrayTree


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Expansions(Question):
    """Log likelihoods with their derivatives at a few points; see `expansions`."""

    curvature: str = field(metadata={"static": True})

    def answer(self, content: Points, client: Client) -> Expanded:
        loglikelihood_fn = self.posterior.loglikelihood_fn

        def of_terms(terms_fn: Terms, mask: Array) -> tuple[Array, Array, ArrayTree]:
            at_centre = terms_fn(content.centre)

            def one(point: ArrayTree) -> tuple[Array, Array, ArrayTree]:
                def total(flat: Array) -> Array:
                    place = trees.cast_like(trees.unravel(flat, point), point)
                    return jnp.sum(jnp.where(mask, terms_fn(place) - at_centre, 0))

                flat = trees.ravel(point)
                value, gradient = jax.value_and_grad(total)(flat)
                if self.curvature == "none":
                    return value, gradient, ()
                dense = self.curvature == "dense"
                curvature = minus_hessian(total, flat, dense=dense)
                upper = jnp.triu_indices(flat.shape[0])
                return value, gradient, curvature[upper] if dense else curvature

            return jax.lax.map(one, content.points)

        return Expanded(*fold_terms(loglikelihood_fn, of_terms, client))

    @property
    def leaves_out_beyond(self) -> bool:
        return True

    def answer_in_range(self, answer: Expanded, most: float) -> Expanded:
        """Return an answer with the lowest value where a place is of no use, as a mode is none.

        Twice that where derivatives or a large value do not fit, so that they are counted.
        """
        lowest = -trees.cast(most, answer.value)
        derivatives = answer.gradient, answer.curvature
        finite = jnp.isfinite(answer.value) & jax.vmap(trees.all_finite)(derivatives)
        impossible = ~finite | below_range(answer.value, most)
        sizes = jax.tree.map(
            lambda x: jnp.max(jnp.abs(x), axis=1), (answer.value[:, None], derivatives)
        )
        beyond = jnp.stack(jax.tree.leaves(sizes)).max(0) > most
        value = jnp.where(impossible, lowest, jnp.where(beyond, 2 * lowest, answer.value))
        none = impossible | beyond
        return Expanded(value, *zero_where(none, derivatives))

    def answer_from_range(self, total: Expanded, most: float) -> Expanded:
        impossible = impossible_in_sum(total.value, most)
        return total._replace(value=jnp.where(impossible, -jnp.inf, total.value))

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

    def check_compressor(self, compressor: Any) -> None:
        if not compressor.unbiased or isinstance(compressor, Memory):
            raise ValueError(
                "Gradients and curvatures at a point need an unbiased compressor without memory "
                "(quantize, with many levels): steps along others lead elsewhere."
            )


def expansions(
    posterior: Posterior, *, curvature: Literal["dense", "diagonal", "none"] = "dense"
) -> Expansions:
    """Ask all clients for log likelihoods, gradients and minus Hessians at a few `Points`.

    What Newton's method and the Laplace approximation at a mode need; numbers that are not finite
    are sent as they are.
    """
    return as_functions(Expansions(posterior, curvature))
