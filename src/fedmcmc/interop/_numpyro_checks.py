"""Whether rows are what a NumPyro model takes: its arguments, and values that can be observed."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import distributions as dist

from fedmcmc._types import ArrayTree
from fedmcmc.data import FederatedData
from fedmcmc.interop import _numpyro_trace as tracing
from fedmcmc.interop._dependence import Tracer
from fedmcmc.interop._numpyro_inputs import position_shapes
from fedmcmc.interop._numpyro_structure import Structure

_POSITION = "position"
LARGE = 1e4
"""Size of outcomes in single precision beyond which too few of their digits are left."""


def check_arguments(model: Callable[..., Any], rows: ArrayTree) -> tuple[str, ...]:
    """Return the arguments with a default that `rows`, a dict, do not hold.

    Raises
    ------
    TypeError
        If the rows hold what the model does not take, or lack what it needs.
    """
    if not isinstance(rows, dict):
        return ()
    try:
        arguments = inspect.signature(model).parameters
    except (TypeError, ValueError):  # of a callable that does not say
        return ()
    kinds = {argument.kind for argument in arguments.values()}
    by_name = [
        name
        for name, argument in arguments.items()
        if argument.kind in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY)
    ]
    absent = [name for name in by_name if name not in rows]
    needed = [name for name in absent if arguments[name].default is inspect.Parameter.empty]
    extra = [name for name in rows if name not in by_name]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        extra = []
    if needed or extra:
        what = f"lack {needed[0]!r}" if needed else f"hold {extra[0]!r}, too"
        raise TypeError(
            f"The model takes {', '.join(by_name)}; the rows hold {', '.join(rows)}. They {what}: "
            f"rename or drop columns, or bind arguments that are no columns with functools.partial."
        )
    return tuple(absent)


def check_support(
    model: Callable[..., Any],
    structure: Structure,
    rows: ArrayTree,
    data: FederatedData | None,
    compiled: dict[str, Callable[..., Any]],
) -> None:
    """Raise `ValueError` where an observed value can never be one of its distribution.

    Supports that depend on the latent sites are not checked, nor are masked sites. `rows` are
    those of `data`, if there is one; `compiled` has the programs of earlier calls.
    """
    shapes = position_shapes(structure.every)

    def found(position: ArrayTree, rows: ArrayTree) -> dict[str, tuple[Array, Array]]:
        trace = tracing.trace_at(model, rows, position)
        tables = {name: _outside(trace[name], axis) for name, axis in structure.likelihood.items()}
        return {name: table for name, table in tables.items() if table is not None}

    closed, outputs = jax.make_jaxpr(found, return_shape=True)(shapes, rows)
    labels = [((_POSITION, i), frozenset({_POSITION})) for i in range(len(shapes))]
    labels += [(("rows", i), frozenset()) for i in range(len(jax.tree.leaves(rows)))]
    nodes = iter(Tracer().outputs(closed, labels))
    fixed = [name for name in outputs if _POSITION not in next(nodes).flags | next(nodes).flags]
    if not fixed:
        return
    zeros = {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in shapes.items()}

    def fixed_tables(rows: ArrayTree) -> dict[str, tuple[Array, Array]]:
        tables = found(zeros, rows)
        return {name: tables[name] for name in fixed}

    tables = compiled.setdefault("support", jax.jit(fixed_tables))(rows)
    for name, (outside, value) in jax.tree.map(np.asarray, tables).items():
        if outside.any():
            site = tracing.trace_at(model, jax.tree.map(lambda x: x[:1], rows), zeros)[name]
            raise ValueError(
                f"Site {name!r} observes {outside.sum()} values that its distribution "
                f"({tracing.name_of(site['fn'])}) cannot have, the first, {value}, in "
                f"{place_of(int(outside.argmax()), data)}. Recode them, or choose another "
                f"distribution (check_rows=False turns this off)."
            )


def warn_of_group_effects(
    model: Callable[..., Any], structure: Structure, rows: ArrayTree
) -> tuple[str, ...]:
    """Warn of scalar latent sites whose scale is another latent site, and return their names.

    Such a site has one value for all clients.

    Coefficients with a common scale (a horseshoe) are no such sites: they have an axis.
    """
    scalars = [name for name, shape in structure.shapes.items() if not shape]
    sites = sorted(structure.every)

    def scales(position: ArrayTree, rows: ArrayTree) -> dict[str, Any]:
        trace = tracing.trace_at(model, rows, position)
        found = {name: getattr(trace[name]["fn"], "scale", None) for name in scalars}
        return {name: jnp.asarray(scale) for name, scale in found.items() if scale is not None}

    closed, outputs = jax.make_jaxpr(scales, return_shape=True)(
        position_shapes(structure.every), rows
    )
    labels: list[Any] = [((_POSITION, site), frozenset({site})) for site in sites]
    labels += [(("rows", i), frozenset()) for i in range(len(jax.tree.leaves(rows)))]
    warned = []
    for name, node in zip(sorted(outputs), Tracer().outputs(closed, labels), strict=True):
        others = sorted(node.flags - {name})
        if others:
            warned.append(name)
            warnings.warn(
                f"Site {name!r} has one value for all clients, and its scale depends on "
                f"{', '.join(map(repr, others))}, as that of a group effect would. The model is "
                f"written for one client's rows, but clients share its latent sites. For an effect "
                f"per client mark it with infer={{'local': True}}, or name it in local=[{name!r}].",
                stacklevel=3,  # who calls `from_numpyro`
            )
    return tuple(warned)


def warn_of_large_outcomes(
    model: Callable[..., Any],
    structure: Structure,
    rows: ArrayTree,
    compiled: dict[str, Callable[..., Any]],
) -> None:
    """Warn of outcomes in single precision that are so large that few digits tell groups apart."""
    shapes = position_shapes(structure.every)
    zeros = {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in shapes.items()}

    def sizes(rows: ArrayTree) -> dict[str, Array]:
        trace = tracing.trace_at(model, rows, zeros)
        found = {
            name: jnp.asarray(trace[name]["value"])
            for name in structure.likelihood
            if not tracing.is_factor(trace[name])
        }
        return {
            name: jnp.nanmax(jnp.abs(value))
            for name, value in found.items()
            if value.dtype == jnp.float32
        }

    found = compiled.setdefault("sizes", jax.jit(sizes))(rows)
    for name, size in jax.tree.map(np.asarray, found).items():
        if size > LARGE:
            warnings.warn(
                f"Site {name!r} observes values up to {size:.3g} in size, which single precision "
                f"tells apart by {np.spacing(size):.2g} at best; sums over rows and groups lose "
                f"more. Subtract their mean and choose a larger unit, or call "
                f"jax.config.update('jax_enable_x64', True) before the data are made.",
                stacklevel=3,  # who calls `from_numpyro`
            )


def _outside(site: dict[str, Any], axis: int) -> tuple[Array, Array] | None:
    """Return which rows are outside of the support, ``[num_rows]``, and the first such value."""
    fn, value = site["fn"], jnp.asarray(site["value"])
    if tracing.is_factor(site) or tracing.is_masked(fn):
        return None
    # The bounds of an interval may lie outside, as a time between 0 and 1 has them.
    if isinstance(tracing.bare(fn), dist.IntervalCensoredDistribution):
        return None
    try:
        inside = jnp.asarray(fn.support(value))
        batch = jnp.broadcast_to(inside, jnp.broadcast_shapes(inside.shape, fn.batch_shape))
    except Exception:  # a support that numpyro cannot tell; the likelihood may be fine
        return None
    if inside.ndim > max(value.ndim - fn.event_dim, 0):
        return None
    outside = ~jnp.all(batch, axis=[i for i in range(batch.ndim) if i != axis])
    at = axis - batch.ndim + inside.ndim
    return outside, jnp.take(value, jnp.argmax(outside), axis=at) if at >= 0 else value


def place_of(row: int, data: FederatedData | None) -> str:
    """Return where a row is, by its number among all rows."""
    if data is None:
        return f"row {row} of example"
    client = int(np.searchsorted(np.asarray(data.start), row, side="right")) - 1
    return f"row {row - int(data.start[client])} of client {data.labels[client]!r}"
