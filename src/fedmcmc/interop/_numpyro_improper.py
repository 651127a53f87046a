"""Detection of improper priors: flat over an unbounded support, or masked out."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.constraints import Constraint

from fedmcmc.interop import _numpyro_trace as tracing
from fedmcmc.interop._dependence import output_flags
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree

_BOUNDED = tuple(
    type(support)
    for support in (
        constraints.unit_interval,
        constraints.circular,
        constraints.simplex,
        constraints.corr_cholesky,
        constraints.corr_matrix,
        constraints.sphere,
        constraints.l1_ball,
    )
)


def is_improper(site: dict[str, Any]) -> bool:
    """Return whether the prior of a latent site is improper, as far as tracing can show.

    The prior is improper if its distribution is or wraps an `ImproperUniform`, if a constant mask
    leaves out some of it (`sites_masked_out` checks traced masks), or if its support is unbounded
    and its log density does not depend on the value.
    """
    layers = list(tracing.layers(site["fn"]))
    if any(isinstance(fn, dist.ImproperUniform) for fn in layers):
        return True
    masks = _masks(site)
    if any(not isinstance(x, jax.core.Tracer) and not np.all(np.asarray(x)) for x in masks):
        return True
    return not _is_bounded(layers[-1].support) and not _depends_on_value(site)


def has_traced_mask(site: dict[str, Any]) -> bool:
    """Return whether a mask of a site's distribution is traced, so that its value is unknown."""
    return any(isinstance(mask, jax.core.Tracer) for mask in _masks(site))


def sites_masked_out(
    model: Callable[..., Any], shapes: ArrayTree, names: tuple[str, ...]
) -> set[str]:
    """Return the sites that are partly masked out by masks that do not depend on the rows."""

    def are_unmasked(rows: ArrayTree) -> list[jax.Array]:
        trace = tracing.start_trace(model, rows)
        return [
            jnp.all(jnp.stack([jnp.all(mask) for mask in _masks(trace[name])])) for name in names
        ]

    flags = output_flags(are_unmasked, (shapes,), (frozenset({"rows"}),))
    unmasked = jax.jit(are_unmasked)(trees.zeros_like(shapes))
    return {
        name
        for name, reached, is_unmasked in zip(names, flags, unmasked, strict=True)
        if not reached and not is_unmasked
    }


def nonfinite_parameters(site: dict[str, Any]) -> dict[str, Any]:
    """Return the constant parameters of a site's distribution that are not finite, by name."""
    values = {
        name: getattr(fn, name, None)
        for fn in tracing.layers(site["fn"])
        for name in fn.arg_constraints
    }
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (float, np.ndarray, jax.Array))
        and not isinstance(value, jax.core.Tracer)
        and jnp.issubdtype(jnp.result_type(value), jnp.floating)
        and not np.all(np.isfinite(np.asarray(value)))
    }


def _masks(site: dict[str, Any]) -> list[Any]:
    layers = tracing.layers(site["fn"])
    return [fn._mask for fn in layers if isinstance(fn, dist.MaskedDistribution)]


def _is_bounded(support: Constraint) -> bool:
    support = getattr(support, "base_constraint", support)
    return isinstance(support, _BOUNDED) or (
        hasattr(support, "lower_bound") and hasattr(support, "upper_bound")
    )


def _depends_on_value(site: dict[str, Any]) -> bool:
    value = site["value"]
    like = jax.ShapeDtypeStruct(jnp.shape(value), jnp.result_type(value))
    return bool(output_flags(site["fn"].log_prob, (like,), (frozenset({"value"}),)))
