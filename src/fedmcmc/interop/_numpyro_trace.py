"""Traces of a NumPyro model on rows at an unconstrained position, by public handlers only."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from numpyro import distributions as dist
from numpyro import handlers
from numpyro.distributions import Distribution, biject_to

from fedmcmc.types import ArrayTree

COUNTS = (11, 13)
"""Two numbers of rows for traces, chosen so that no model is likely to use them as constants."""
ROWS, PARAMS, LOCAL = "rows", "params", "local"
"""Flags of values that depend on rows, on a `numpyro.param` and on local sites."""
Trace = dict[str, dict[str, Any]]


def call_model(model: Callable[..., Any], rows: ArrayTree) -> Any:
    """Call `model` on rows: a dict by keyword, a tuple or list by position, else as one argument.

    NumPy arrays become JAX arrays, so that a model can index them by traced values.
    """
    rows = jax.tree.map(jnp.asarray, rows)
    if isinstance(rows, dict):
        return model(**rows)
    if isinstance(rows, (tuple, list)):
        return model(*rows)
    return model(rows)


def jacobian_name(site: str) -> str:
    """Return the name of the factor that holds the log Jacobian of a latent site.

    The factor counts as observed. Plates, scales and masks around the latent site apply to it too.
    Its prefix keeps its name apart from the names of the user's sites.
    """
    return f"_fedmcmc_log_det/{site}"


def start_trace(model: Callable[..., Any], rows: ArrayTree) -> Trace:
    """Trace `model` with every latent site at the image of the unconstrained zero.

    This needs no position, so it finds the latent sites and their shapes. Discrete latent sites,
    which have no unconstrained space, keep the values that the model draws.
    """
    return _trace(model, rows, _place_at_zero)


def trace_at(
    model: Callable[..., Any],
    rows: ArrayTree,
    position: dict[str, Array],
    params: dict[str, Any] | None = None,
) -> Trace:
    """Trace `model` with its latent sites at an unconstrained `position`.

    If the support of a latent site is not the real line, the trace also has a factor,
    `jacobian_name`, with the log Jacobian of the site's transformation.
    """
    return _trace(model, rows, partial(_place, position, params or {}))


def _trace(model: Callable[..., Any], rows: ArrayTree, place: Callable[[Any], Any]) -> Trace:
    # The key is for values that a model draws outside of its sites, such as the initial values of a
    # network whose parameters all get priors. No latent site is drawn.
    seeded = handlers.seed(model, jax.random.key(0))
    placed = handlers.substitute(seeded, substitute_fn=place)
    with _Sites() as trace:
        call_model(placed, rows)
    return trace


class _Sites(handlers.trace):
    """Trace that raises if a plate has the name of a site, since one would replace the other."""

    def postprocess_message(self, msg: Any) -> None:
        kinds = {msg["type"], self.trace.get(msg.get("name"), msg)["type"]}
        if "plate" in kinds and len(kinds) > 1:
            raise ValueError(
                f"{msg['name']!r} is the name of a plate and of a site: rename one of them. "
                f"NumPyro would keep one of the two, and the site might not be sampled."
            )
        super().postprocess_message(msg)


def is_latent(site: dict[str, Any]) -> bool:
    return site["type"] == "sample" and not site["is_observed"]


def _place_at_zero(site: dict[str, Any]) -> Array | None:
    if not is_latent(site) or site["fn"].support.is_discrete or site["value"] is not None:
        return None
    transform = biject_to(site["fn"].support)
    shape = site["kwargs"].get("sample_shape", ()) + site["fn"].shape()
    return transform(jnp.zeros(transform.inverse_shape(shape)))


def _place(
    position: dict[str, Array], params: dict[str, Any], site: dict[str, Any]
) -> Array | None:
    name = site["name"]
    if site["type"] == "param":
        return params.get(name)
    if not is_latent(site) or name not in position:
        return None
    fn, unconstrained = site["fn"], position[name]
    transform = biject_to(fn.support)
    # The body of NumPyro's scan sees one step; the position holds all steps.
    step = site["infer"].get("_scan_current_index")
    if step is not None and unconstrained.ndim > len(transform.inverse_shape(fn.shape())):
        unconstrained = unconstrained[step]
    support = getattr(fn.support, "base_constraint", fn.support)
    if support is dist.constraints.real:
        return unconstrained
    value = transform(unconstrained)
    log_det = transform.log_abs_det_jacobian(unconstrained, value)
    # Sum over the remaining event axes, so that each element of the batch has one term.
    extra = jnp.ndim(log_det) - (jnp.ndim(value) - len(fn.event_shape))
    log_det = jnp.sum(log_det, axis=tuple(range(-extra, 0))) if extra > 0 else log_det
    numpyro.factor(jacobian_name(name), log_det)
    return value


def log_prob(site: dict[str, Any]) -> Array:
    """Return the log density at a sample site, unsummed and scaled as its handlers require."""
    if site["intermediates"]:
        value = site["fn"].log_prob(site["value"], site["intermediates"])
    else:
        value = site["fn"].log_prob(site["value"])
    return value if site["scale"] is None else site["scale"] * value


def has_unit_scale(site: dict[str, Any]) -> bool:
    """Return whether a site has no scale, or a constant scale of one."""
    scale = site["scale"]
    if scale is None:
        return True
    return not isinstance(scale, jax.core.Tracer) and bool(np.all(np.asarray(scale) == 1))


def row_terms(sites: Trace, likelihood: dict[str, int]) -> Array:
    """Return the log likelihood of each row; `likelihood` maps sites to their axis of rows."""
    terms = []
    for name, axis in likelihood.items():
        term = log_prob(sites[name])
        terms.append(jnp.sum(term, axis=[i for i in range(term.ndim) if i != axis]))
    return sum(terms[1:], terms[0])


def bare(fn: Distribution) -> Any:
    """Return a distribution without the wrappers that only give it its shape."""
    while isinstance(fn, dist.ExpandedDistribution | dist.Independent):
        fn = fn.base_dist
    return fn


def name_of(fn: Distribution) -> str:
    """Return the name of a distribution without its masks and the wrappers that give its shape."""
    fn = bare(fn)
    if isinstance(fn, dist.MaskedDistribution):
        return name_of(fn.base_dist)
    if type(fn) is dist.TransformedDistribution:
        return f"TransformedDistribution of {name_of(fn.base_dist)}"
    return type(fn).__name__


def is_masked(fn: Distribution) -> bool:
    """Return whether a distribution, or a part of it, has a mask."""
    return any(isinstance(part, dist.MaskedDistribution) for part in parts(fn))


def parts(fn: Distribution) -> Iterator[Any]:
    """Yield a distribution and all distributions that it consists of."""
    yield fn
    for value in vars(fn).values():
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, dist.Distribution):
                yield from parts(part)


def layers(fn: Distribution) -> Iterator[Any]:
    """Yield a distribution and the distributions that it wraps, outermost before innermost."""
    yield fn
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
        yield fn


def is_factor(site: dict[str, Any]) -> bool:
    """Return whether the site is a `numpyro.factor`, which a plate may expand or a mask wrap."""
    return any(isinstance(fn, dist.Unit) for fn in layers(site["fn"]))


def position_shapes(shapes: dict[str, tuple[int, ...]]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of a position from the shapes of its sites."""
    dtype = jnp.result_type(float)
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def row_shapes(rows: ArrayTree, count: int) -> ArrayTree:
    """Return the shapes and dtypes of `count` rows."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), rows)


def labels_of(
    position: dict[str, Any], params: ArrayTree, rows: ArrayTree, local: tuple[str, ...] = ()
) -> list[tuple[Any, frozenset]]:
    """Return labels and flags of the flat inputs of a trace.

    Each leaf of rows has two flags, `ROWS` and its own index.
    """
    labels: list[tuple[Any, frozenset]] = [
        (("position", name), frozenset({LOCAL} if name in local else ()))
        for name in sorted(position)
    ]
    labels += [((PARAMS, i), frozenset({PARAMS})) for i, _ in enumerate(jax.tree.leaves(params))]
    labels += [((ROWS, i), frozenset({ROWS, i})) for i, _ in enumerate(jax.tree.leaves(rows))]
    return labels
