"""Checks that a NumPyro model fits the rows: its arguments, its columns and observed values."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import distributions as dist

from fedmcmc.data import FederatedData, row_values, warn_caller
from fedmcmc.interop import _numpyro_trace as tracing
from fedmcmc.interop._dependence import NO_FLAGS, output_flags
from fedmcmc.interop._numpyro_structure import Structure
from fedmcmc.interop._rows import describe_row
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree

ORDINAL = "Ordered"
"""Prefix of the names of ordinal distributions."""
MAX_LEVELS_SHOWN = 5
MAX_FLOAT32_OUTCOME = 1e4
"""Largest absolute outcome for which single precision leaves enough digits to compare groups."""


def refuse_columns_as_clients(model: Callable[..., Any], data: FederatedData) -> None:
    """Raise `TypeError` if the labels of the clients are names of the model's arguments.

    Such labels mean that a dictionary of columns was interpreted as a dictionary of clients.
    """
    rows, labels = row_values(data.rows), data.labels
    if len(jax.tree.leaves(rows)) != 1 or rows is not jax.tree.leaves(rows)[0]:
        return
    try:
        arguments = inspect.signature(model).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return
    shared = [label for label in labels if label in arguments]
    if len(shared) > 1 and len(shared) in (len(labels), len(arguments)):
        raise TypeError(
            f"The clients of the data are {', '.join(map(repr, labels))}, which are arguments of "
            f"the model: a dictionary of columns was interpreted as a dictionary of clients. For "
            f"one client pass the dictionary in a list, FederatedData.from_clients([columns]); for "
            f"several clients pass one dictionary of columns per client, or use "
            f"FederatedData.from_dataframe(table, client=...)."
        )


def check_arguments(model: Callable[..., Any], rows: ArrayTree) -> tuple[str, ...]:
    """Return the names of the model's arguments that `rows`, a dict, lack and that have a default.

    Raise if the rows lack an argument without a default, or have a key that is no argument.
    """
    if not isinstance(rows, dict):
        return ()
    try:
        arguments = inspect.signature(model).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return ()
    by_name = [
        name
        for name, argument in arguments.items()
        if argument.kind in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY)
    ]
    absent = [name for name in by_name if name not in rows]
    required = [name for name in absent if arguments[name].default is inspect.Parameter.empty]
    extra = [name for name in rows if name not in by_name]
    if any(argument.kind == argument.VAR_KEYWORD for argument in arguments.values()):
        extra = []
    if required or extra:
        problem = f"lack {required[0]!r}" if required else f"hold {extra[0]!r}, too"
        raise TypeError(
            f"The model takes {', '.join(by_name)}; the rows hold {', '.join(rows)}. They "
            f"{problem}: rename or drop columns, or use functools.partial to bind arguments that "
            f"are not columns."
        )
    return tuple(absent)


def check_support(
    model: Callable[..., Any],
    structure: Structure,
    rows: ArrayTree,
    data: FederatedData | None,
    compiled: dict[str, Callable[..., Any]],
) -> None:
    """Raise if an observed value lies outside of the support of its distribution.

    Masked sites and supports that depend on the latent sites are not checked. Programs in
    `compiled` are reused.
    """
    shapes = tracing.position_shapes(structure.latent_shapes)

    def tables_at(position: ArrayTree, rows: ArrayTree) -> dict[str, tuple[Array, Array]]:
        trace = tracing.trace_at(model, rows, position)
        tables = {name: _outside(trace[name], axis) for name, axis in structure.likelihood.items()}
        return {name: table for name, table in tables.items() if table is not None}

    flags = output_flags(tables_at, (shapes, rows), (frozenset({"position"}), NO_FLAGS))
    fixed = [name for name, pair in flags.items() if not pair[0] | pair[1]]
    if not fixed:
        return
    zeros = trees.zeros_like(shapes)

    def fixed_tables(rows: ArrayTree) -> dict[str, tuple[Array, Array]]:
        tables = tables_at(zeros, rows)
        return {name: tables[name] for name in fixed}

    tables = compiled.setdefault("support", jax.jit(fixed_tables))(rows)
    for name, (outside, value) in jax.tree.map(np.asarray, tables).items():
        if outside.any():
            site = tracing.trace_at(model, jax.tree.map(lambda x: x[:1], rows), zeros)[name]
            raise ValueError(
                f"Site {name!r} observes {outside.sum()} values that its distribution "
                f"({tracing.name_of(site['fn'])}) cannot have, the first, {value}, in "
                f"{describe_row(int(outside.argmax()), data)}. Recode them, or choose another "
                f"distribution (check_rows=False turns this check off)."
            )


def _outside(site: dict[str, Any], axis: int) -> tuple[Array, Array] | None:
    """Return a mask of rows outside the support, ``[num_rows]``, and the first such value."""
    fn, value = site["fn"], jnp.asarray(site["value"])
    if tracing.is_factor(site) or tracing.is_masked(fn):
        return None
    # A censoring interval may start outside the support, such as a positive time between 0 and 1.
    if isinstance(tracing.bare(fn), dist.IntervalCensoredDistribution):
        return None
    try:
        inside = jnp.asarray(fn.support(value))
        batch = jnp.broadcast_to(inside, jnp.broadcast_shapes(inside.shape, fn.batch_shape))
    except Exception:  # NumPyro cannot evaluate this support; the likelihood may still be fine
        return None
    if inside.ndim > max(value.ndim - fn.event_dim, 0):
        return None
    outside = ~jnp.all(batch, axis=[i for i in range(batch.ndim) if i != axis])
    value_axis = axis - batch.ndim + inside.ndim
    if value_axis < 0:
        return outside, value
    return outside, jnp.take(value, jnp.argmax(outside), axis=value_axis)


def warn_of_group_effects(
    model: Callable[..., Any], structure: Structure, rows: ArrayTree
) -> tuple[str, ...]:
    """Warn of scalar latent sites whose scale is another latent site, and return their names.

    Such a site looks like a group effect, but has one value for all clients. Coefficients with a
    common scale (a horseshoe) are different: they have an axis.
    """
    scalars = [name for name, shape in structure.shared_shapes.items() if not shape]

    def scales(position: ArrayTree, rows: ArrayTree) -> dict[str, Any]:
        trace = tracing.trace_at(model, rows, position)
        by_site = {name: getattr(trace[name]["fn"], "scale", None) for name in scalars}
        return {name: jnp.asarray(scale) for name, scale in by_site.items() if scale is not None}

    shapes = tracing.position_shapes(structure.latent_shapes)
    site_flags = {name: frozenset({name}) for name in shapes}
    flags = output_flags(scales, (shapes, rows), (site_flags, NO_FLAGS))
    unmarked = {name: reached - {name} for name, reached in flags.items() if reached - {name}}
    for name, sources in sorted(unmarked.items()):
        warn_caller(
            f"Site {name!r} has one value for all clients, and its scale depends on "
            f"{', '.join(map(repr, sorted(sources)))}, as the scale of a group effect would. The "
            f"model is written for one client's rows, but clients share its latent sites. For an "
            f"effect per client mark the site with infer={{'local': True}}, or pass "
            f"local=[{name!r}]."
        )
    return tuple(sorted(unmarked))


def warn_of_large_outcomes(
    model: Callable[..., Any],
    structure: Structure,
    rows: ArrayTree,
    compiled: dict[str, Callable[..., Any]],
) -> None:
    """Warn if outcomes in single precision are so large that too few digits distinguish groups."""
    zeros = trees.zeros_like(tracing.position_shapes(structure.latent_shapes))

    def largest_outcomes(rows: ArrayTree) -> dict[str, Array]:
        trace = tracing.trace_at(model, rows, zeros)
        outcomes = {
            name: jnp.asarray(trace[name]["value"])
            for name in structure.likelihood
            if not tracing.is_factor(trace[name])
        }
        return {
            name: jnp.nanmax(jnp.abs(value))
            for name, value in outcomes.items()
            if value.dtype == jnp.float32
        }

    largest = compiled.setdefault("sizes", jax.jit(largest_outcomes))(rows)
    for name, size in jax.tree.map(np.asarray, largest).items():
        if size > MAX_FLOAT32_OUTCOME:
            warn_caller(
                f"Site {name!r} observes absolute values up to {size:.3g}, where the spacing of "
                f"numbers in single precision is {np.spacing(size):.2g}; sums over rows and groups "
                f"are less precise. Subtract the mean and choose a larger unit, or call "
                f"jax.config.update('jax_enable_x64', True) before you create the data."
            )


def warn_of_unordered_outcomes(
    model: Callable[..., Any], structure: Structure, data: FederatedData
) -> None:
    """Warn if the outcome of an ordinal distribution is text in alphabetical order."""
    rows = row_values(data.rows)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(rows)]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
    unordered = {
        i: name
        for i, name in enumerate(names)
        if data.orders.get(name) == "alphabetical" and len(data.coding[name]) > 2
    }
    if not unordered:
        return

    def ordinal_values(position: ArrayTree, rows: ArrayTree) -> dict[str, Any]:
        trace = tracing.trace_at(model, rows, position)
        return {
            name: trace[name]["value"]
            for name in structure.likelihood
            if type(tracing.bare(trace[name]["fn"])).__name__.startswith(ORDINAL)
        }

    arguments = (tracing.position_shapes(structure.latent_shapes), rows)
    treedef = jax.tree.structure(rows)
    column_flags = jax.tree.unflatten(treedef, [frozenset({i}) for i in range(len(names))])
    flags = output_flags(ordinal_values, arguments, (NO_FLAGS, column_flags))
    for site, reached in sorted(flags.items()):
        for column in sorted(reached & unordered.keys()):
            name = unordered[column]
            levels = [repr(level) for level in data.coding[name]]
            ellipsis = ["..."] if len(levels) > MAX_LEVELS_SHOWN else []
            warn_caller(
                f"Site {site!r} has an ordinal distribution, and its outcome {name!r} is text in "
                f"alphabetical order: {', '.join(levels[:MAX_LEVELS_SHOWN] + ellipsis)}. Declare "
                f"the order of the levels before you create the data, for example with "
                f"pd.Categorical(column, categories=[...], ordered=True)."
            )
