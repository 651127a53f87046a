"""Drawing the outcomes of a NumPyro model, where a draw has the distribution of the observation."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro import distributions as dist

from fedmcmc._types import ArrayTree
from fedmcmc.interop import _numpyro_trace as tracing
from fedmcmc.interop._dependence import Node, Tracer
from fedmcmc.interop._numpyro_inputs import COUNTS, labels_of, position_shapes, row_shapes
from fedmcmc.interop._numpyro_weights import is_one

_CENSORED = (
    dist.LeftCensoredDistribution,
    dist.RightCensoredDistribution,
    dist.IntervalCensoredDistribution,
)
Outcomes = tuple[tuple[str, int], ...]


def why_not_drawable(site: dict[str, Any]) -> str:
    """Return why a draw from an observed site's distribution is no replicate, or an empty string.

    The reason is a clause without the site's name.
    """
    if tracing.is_factor(site):
        return "is a factor, which has no distribution to draw from"
    # The density with a weight is not that of what `sample` draws.
    if not is_one(site["scale"]):
        return "is weighted (numpyro.handlers.scale), and no distribution has the weighted density"
    fn = site["fn"]
    for part in tracing.parts(_unmasked(fn)):
        name = tracing.name_of(part)
        if isinstance(part, _CENSORED):
            return (
                f"has a censored distribution ({name}): a draw would be the uncensored value, and "
                f"the rows do not say at which value an uncensored row would have been censored"
            )
        if isinstance(part, dist.MaskedDistribution):
            return f"has a masked distribution within {tracing.name_of(fn)}"
        if not _samples_its_density(type(part)):
            return (
                f"has the distribution {name}, which defines log_prob and inherits sample from "
                f"{_definer(type(part), 'sample').__name__}: define sample, too"
            )
    return ""


def _definer(cls: type, method: str) -> type:
    return next((base for base in cls.__mro__ if method in vars(base)), dist.Distribution)


def _samples_its_density(cls: type) -> bool:
    """Return whether a user's class that has its own density has its own sampling, too."""
    of_density, of_sample = _definer(cls, "log_prob"), _definer(cls, "sample")
    if of_density.__module__.startswith("numpyro.") or of_sample is of_density:
        return True
    return of_sample is dist.Distribution or issubclass(of_sample, of_density)


def _unmasked(fn: Any) -> Any:
    """Return a distribution without the masks around it."""
    fn = tracing.bare(fn)
    while isinstance(fn, dist.MaskedDistribution):
        fn = tracing.bare(fn.base_dist)
    return fn


def _mask_of(fn: Any) -> Array | None:
    """Return which entries of a value count, or ``None`` if all do."""
    mask = None
    while isinstance(fn, dist.ExpandedDistribution | dist.Independent | dist.MaskedDistribution):
        if isinstance(fn, dist.MaskedDistribution) and fn._mask is not True:
            own = jnp.asarray(fn._mask)
            own = own.reshape((*own.shape, *(1,) * fn.event_dim)) if own.ndim else own
            mask = own if mask is None else mask & own
        fn = fn.base_dist
    return mask


def draw_site(rng_key: Array, site: dict[str, Any]) -> Array:
    """Draw a value for an observed site, of the shape of its value; a masked entry stays."""
    value, mask = jnp.asarray(site["value"]), _mask_of(site["fn"])
    drawn = as_recorded(tracing.draw_site(rng_key, site), value.dtype)
    return drawn if mask is None else jnp.where(mask, drawn, value)


def as_recorded(drawn: Array, dtype: Any) -> Array:
    """Return a draw in the dtype of the rows; a measurement in whole numbers is rounded."""
    if jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(drawn.dtype, jnp.floating):
        drawn = jnp.rint(drawn)
    return drawn.astype(dtype)


def find_outcomes(
    model: Callable[..., Any],
    rows: ArrayTree,
    shapes: dict[str, tuple[int, ...]],
    values: Mapping[str, list[Node]],
    why_not: Mapping[str, str],
    observed: tuple[str, ...],
    tracer: Tracer,
) -> tuple[Outcomes | None, str]:
    """Return observed sites in an order in which they can be drawn, and the leaf of each.

    Where they cannot be drawn it returns ``None`` and the reason, a clause. `values` and `why_not`
    are of all sites, traced on the first of `COUNTS` with `tracer`.
    """
    ids = {node: i for i, node in enumerate(tracer.inputs(labels_of((), (), rows)))}
    leaf_of: dict[str, int] = {}
    for name in observed:
        if why_not[name]:
            return None, f"site {name!r} {why_not[name]}"
        leaf = ids.get(tracer.uncast(values[name][0]))
        if leaf is None:
            return None, f"what site {name!r} observes is computed from the rows, not one of them"
        if leaf in leaf_of.values():
            return None, f"site {name!r} observes what another site does"
        leaf_of[name] = leaf
    site_name = ""

    def draws(position: ArrayTree, rows: ArrayTree) -> dict[str, tuple[Array, Array | None]]:
        nonlocal site_name
        trace, drawn = tracing.trace_at(model, rows, position), {}
        for site_name in leaf_of:
            fn = trace[site_name]["fn"]
            drawn[site_name] = (
                tracing.draw_site(jax.random.key(0), trace[site_name]),
                _mask_of(fn),
            )
        return drawn

    position, batch = position_shapes(shapes), row_shapes(rows, COUNTS[0])
    # The likelihood alone decides whether a model can be fitted, so no error here is one.
    try:
        closed, drawn = jax.make_jaxpr(draws, return_shape=True)(position, batch)
    except Exception as error:
        first_line = str(error).strip().split("\n")[0]
        return None, (
            f"drawing from the distribution of site {site_name!r} fails with "
            f"{type(error).__name__}{': ' + first_line if first_line else ''}"
        )
    leaves = jax.tree.leaves(batch)
    for name, leaf in leaf_of.items():
        if drawn[name][0].shape != leaves[leaf].shape:
            return None, (
                f"a draw of site {name!r} on {COUNTS[0]} rows has shape {drawn[name][0].shape}, "
                f"and what it observes has shape {leaves[leaf].shape}"
            )
    nodes = iter(tracer.outputs(closed, labels_of(position, (), batch)))
    needs: dict[str, frozenset[Any]] = {}
    for name in sorted(drawn):  # as the leaves of a dict are
        of_draw, *of_mask = (next(nodes).flags for _ in jax.tree.leaves(drawn[name]))
        needs[name] = of_draw.union(*of_mask)
        others = set(leaf_of.values()) - {leaf_of[name]}
        if any(others & flags for flags in of_mask):
            return None, (
                f"the mask of site {name!r} depends on another outcome: a value that is not drawn "
                f"would stay beside a new one of that"
            )
    # Each site is drawn after the outcomes that its distribution looks at.
    waiting, ordered = dict(leaf_of), []
    while waiting:
        ready = [name for name in waiting if not needs[name] & set(waiting.values())]
        if not ready:
            name = next(iter(waiting))
            return None, f"the distribution of site {name!r} depends on its own outcome"
        ordered.append((ready[0], waiting.pop(ready[0])))
    return tuple(ordered), ""
