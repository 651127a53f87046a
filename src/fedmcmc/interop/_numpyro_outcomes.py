"""Draws of a NumPyro model's outcomes, if a draw has the distribution of the observation."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from numpyro import distributions as dist
from numpyro.distributions import Distribution

from fedmcmc.interop import _numpyro_trace as tracing
from fedmcmc.interop._dependence import Node, Tracer
from fedmcmc.interop._numpyro_trace import COUNTS
from fedmcmc.types import ArrayTree

_CENSORED = (
    dist.LeftCensoredDistribution,
    dist.RightCensoredDistribution,
    dist.IntervalCensoredDistribution,
)
_WRAPPERS = (dist.ExpandedDistribution, dist.Independent, dist.MaskedDistribution)
Outcomes = tuple[tuple[str, int], ...]


def why_not_drawable(site: dict[str, Any]) -> str:
    """Return why a draw from an observed site's distribution is no replicate, or an empty string.

    The reason is a clause without the site's name.
    """
    if tracing.is_factor(site):
        return "is a factor, which has no distribution to draw from"
    # `sample` does not draw from the weighted density.
    if not tracing.has_unit_scale(site):
        return "is weighted (numpyro.handlers.scale), and no distribution has the weighted density"
    fn = site["fn"]
    for part in tracing.parts(_without_masks(fn)):
        name = tracing.name_of(part)
        if isinstance(part, _CENSORED):
            return (
                f"has a censored distribution ({name}): a draw would be the uncensored value, and "
                f"the rows do not contain the censoring times of uncensored rows"
            )
        if isinstance(part, dist.MaskedDistribution):
            return f"has a masked distribution within {tracing.name_of(fn)}"
        if not _samples_its_density(type(part)):
            return (
                f"has the distribution {name}, which defines log_prob and inherits sample from "
                f"{_definer(type(part), 'sample').__name__}: define sample too"
            )
    return ""


def _definer(cls: type, method: str) -> type:
    return next((base for base in cls.__mro__ if method in vars(base)), dist.Distribution)


def _samples_its_density(cls: type) -> bool:
    """Return whether `sample` fits `log_prob`, which a user's class may have redefined alone."""
    density_class, sample_class = _definer(cls, "log_prob"), _definer(cls, "sample")
    if density_class.__module__.startswith("numpyro.") or sample_class is density_class:
        return True
    return sample_class is dist.Distribution or issubclass(sample_class, density_class)


def _without_masks(fn: Distribution) -> Any:
    while isinstance(fn, _WRAPPERS):
        fn = fn.base_dist
    return fn


def _mask_of(fn: Distribution) -> Array | None:
    """Return the mask of a value's entries, true where an entry counts, or ``None`` for no mask."""
    mask = None
    while isinstance(fn, _WRAPPERS):
        if isinstance(fn, dist.MaskedDistribution) and fn._mask is not True:
            layer_mask = jnp.asarray(fn._mask)
            if layer_mask.ndim:
                layer_mask = layer_mask.reshape((*layer_mask.shape, *(1,) * fn.event_dim))
            mask = layer_mask if mask is None else mask & layer_mask
        fn = fn.base_dist
    return mask


def draw_site(rng_key: Array, site: dict[str, Any]) -> Array:
    """Draw a value for an observed site in the shape of its value; masked entries do not change."""
    value, mask = jnp.asarray(site["value"]), _mask_of(site["fn"])
    draw = as_recorded(_draw(rng_key, site), value.dtype)
    return draw if mask is None else jnp.where(mask, draw, value)


def _draw(rng_key: Array, site: dict[str, Any]) -> Array:
    fn, shape = site["fn"], jnp.shape(site["value"])
    batch_shape = shape[: len(shape) - fn.event_dim]
    if batch_shape != fn.batch_shape:
        fn = fn.expand(batch_shape)
    return fn.sample(rng_key)


def as_recorded(draw: Array, dtype: DTypeLike) -> Array:
    """Return a draw in the dtype of the rows, rounded if the rows record it as an integer."""
    if jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(draw.dtype, jnp.floating):
        draw = jnp.rint(draw)
    return draw.astype(dtype)


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

    If outcomes cannot be drawn, return ``None`` and the reason, a clause. `values` and `why_not`
    are nodes and `why_not_drawable` of all sites, traced on ``COUNTS[0]`` rows with `tracer`.
    """
    leaf_ids = {node: i for i, node in enumerate(tracer.inputs(tracing.labels_of({}, (), rows)))}
    leaf_of: dict[str, int] = {}
    for name in observed:
        if why_not[name]:
            return None, f"site {name!r} {why_not[name]}"
        leaf = leaf_ids.get(tracer.uncast(values[name][0]))
        if leaf is None:
            return None, f"what site {name!r} observes is computed from the rows, not one of them"
        if leaf in leaf_of.values():
            return None, f"site {name!r} observes what another site does"
        leaf_of[name] = leaf
    site_name = ""

    def draw(position: ArrayTree, rows: ArrayTree) -> dict[str, tuple[Array, Array | None]]:
        nonlocal site_name
        trace, draws = tracing.trace_at(model, rows, position), {}
        for site_name in leaf_of:
            site = trace[site_name]
            draws[site_name] = _draw(jax.random.key(0), site), _mask_of(site["fn"])
        return draws

    position, batch = tracing.position_shapes(shapes), tracing.row_shapes(rows, COUNTS[0])
    # An error here only means that outcomes cannot be drawn; the model may still be fitted.
    try:
        closed, draws = jax.make_jaxpr(draw, return_shape=True)(position, batch)
    except Exception as error:
        first_line = str(error).strip().split("\n")[0]
        return None, (
            f"drawing from the distribution of site {site_name!r} fails with "
            f"{type(error).__name__}{': ' + first_line if first_line else ''}"
        )
    leaves = jax.tree.leaves(batch)
    for name, leaf in leaf_of.items():
        if draws[name][0].shape != leaves[leaf].shape:
            return None, (
                f"a draw of site {name!r} on {COUNTS[0]} rows has shape {draws[name][0].shape}, "
                f"and the observed value has shape {leaves[leaf].shape}"
            )
    nodes = iter(tracer.outputs(closed, tracing.labels_of(position, (), batch)))
    dependencies: dict[str, frozenset[Any]] = {}
    for name in sorted(draws):  # the order of the leaves of a dict
        draw_flags, *mask_flags = (next(nodes).flags for _ in jax.tree.leaves(draws[name]))
        dependencies[name] = draw_flags.union(*mask_flags)
        other_leaves = set(leaf_of.values()) - {leaf_of[name]}
        if any(other_leaves & flags for flags in mask_flags):
            return None, (
                f"the mask of site {name!r} depends on another outcome: masked entries would keep "
                f"values that do not fit a new draw of that outcome"
            )
    # Each site is drawn after the outcomes that its distribution depends on.
    waiting, ordered = dict(leaf_of), []
    while waiting:
        ready = [name for name in waiting if not dependencies[name] & set(waiting.values())]
        if not ready:
            name = next(iter(waiting))
            return None, f"the distribution of site {name!r} depends on its own outcome"
        ordered.append((ready[0], waiting.pop(ready[0])))
    return tuple(ordered), ""
