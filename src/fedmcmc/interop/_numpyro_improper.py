"""Priors that are no density: flat over an unbounded support, or masked out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import distributions as dist
from numpyro.distributions import constraints

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
    mask out; or one on an unbounded support whose log density does not depend on the value.
    """
    fn = site["fn"]
    while True:
        if isinstance(fn, dist.ImproperUniform):
            return True
        if isinstance(fn, dist.MaskedDistribution):
            mask = fn._mask
            if not isinstance(mask, jax.core.Tracer) and not np.all(np.asarray(mask)):
                return True
        if not hasattr(fn, "base_dist"):
            return not _is_bounded(fn.support) and not _depends_on_value(site)
        fn = fn.base_dist


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
