"""Priors that are no density: flat over an unbounded support, or masked out."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import distributions as dist
from numpyro.distributions import constraints

from fedmcmc._types import ArrayTree
from fedmcmc.interop import _numpyro_trace as tracing
from fedmcmc.interop._dependence import Tracer

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
    """Return whether the prior of a latent site is no density, as far as tracing can tell.

    That is: an `ImproperUniform`, whatever wraps or transforms it; a distribution that constants
    mask out (for traced constants see `sites_masked_out`); or one on an unbounded support whose log
    density does not depend on the value.
    """
    layers = list(_layers(site["fn"]))
    if any(isinstance(fn, dist.ImproperUniform) for fn in layers):
        return True
    masks = _masks(site)
    if any(not isinstance(x, jax.core.Tracer) and not np.all(np.asarray(x)) for x in masks):
        return True
    return not _is_bounded(layers[-1].support) and not _depends_on_value(site)


def has_traced_mask(site: dict[str, Any]) -> bool:
    """Return whether a mask of a site's distribution is traced, so that its value is not known."""
    return any(isinstance(mask, jax.core.Tracer) for mask in _masks(site))


def sites_masked_out(
    model: Callable[..., Any], shapes: ArrayTree, names: tuple[str, ...]
) -> set[str]:
    """Return the sites that masks leave out in part, where masks do not depend on the rows.

    Parameters
    ----------
    model
        NumPyro model.
    shapes
        Shapes of its rows.
    names
        Latent sites with masks.
    """

    def is_kept(rows: ArrayTree) -> list[jax.Array]:
        trace = tracing.start_trace(model, rows)
        return [
            jnp.all(jnp.stack([jnp.all(mask) for mask in _masks(trace[name])])) for name in names
        ]

    labels = [(place, frozenset({"rows"})) for place, _ in enumerate(jax.tree.leaves(shapes))]
    nodes = Tracer().outputs(jax.make_jaxpr(is_kept)(shapes), labels)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    kept = jax.jit(is_kept)(zeros)  # what does not depend on rows is the same for any
    return {
        name
        for name, node, all_kept in zip(names, nodes, kept, strict=True)
        if not node.flags and not all_kept
    }


def nonfinite_parameters(site: dict[str, Any]) -> dict[str, Any]:
    """Return the constant parameters of a site's distribution that are not finite, by name."""
    values = {
        name: getattr(fn, name, None) for fn in _layers(site["fn"]) for name in fn.arg_constraints
    }
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (float, np.ndarray, jax.Array))
        and not isinstance(value, jax.core.Tracer)
        and jnp.issubdtype(jnp.result_type(value), jnp.floating)
        and not np.all(np.isfinite(np.asarray(value)))
    }


def _layers(fn: Any) -> Iterator[Any]:
    """Yield a distribution and what it wraps."""
    yield fn
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
        yield fn


def _masks(site: dict[str, Any]) -> list[Any]:
    return [fn._mask for fn in _layers(site["fn"]) if isinstance(fn, dist.MaskedDistribution)]


def _is_bounded(support: Any) -> bool:
    support = getattr(support, "base_constraint", support)
    return isinstance(support, _BOUNDED) or (
        hasattr(support, "lower_bound") and hasattr(support, "upper_bound")
    )


def _depends_on_value(site: dict[str, Any]) -> bool:
    """Return whether the log density at a site reads the value there."""
    value = site["value"]
    like = jax.ShapeDtypeStruct(jnp.shape(value), jnp.result_type(value))
    closed = jax.make_jaxpr(site["fn"].log_prob)(like)
    (log_prob,) = Tracer().outputs(closed, [("value", frozenset({"value"}))])
    return bool(log_prob.flags)
