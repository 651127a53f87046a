"""Checks of how a NumPyro model uses the columns and clients of a `FederatedData`."""

import inspect
from collections.abc import Callable
from typing import Any

import jax

from fedmcmc._types import ArrayTree
from fedmcmc.data import FederatedData, values_of, warn_caller
from fedmcmc.interop import _numpyro_trace as tracing
from fedmcmc.interop._dependence import Tracer
from fedmcmc.interop._numpyro_inputs import position_shapes
from fedmcmc.interop._numpyro_structure import Structure

ORDINAL = "Ordered"
"""Beginning of the names of ordinal distributions."""


def refuse_columns_as_clients(model: Callable[..., Any], data: FederatedData) -> None:
    """Raise `TypeError` if the clients of the data are called as the arguments of the model.

    A dictionary of columns was then taken for one of clients, whose rows are one array each.
    """
    rows, labels = values_of(data.rows), data.labels
    if len(jax.tree.leaves(rows)) != 1 or rows is not jax.tree.leaves(rows)[0]:
        return
    try:
        arguments = inspect.signature(model).parameters
    except (TypeError, ValueError):  # of a callable that does not say
        return
    shared = [label for label in labels if label in arguments]
    if len(shared) > 1 and len(shared) in (len(labels), len(arguments)):
        raise TypeError(
            f"The clients of the data are {', '.join(map(repr, labels))}, which are arguments of "
            f"the model: a dictionary of columns was taken for one of clients. For one client "
            f"pass it in a list, FederatedData.from_clients([columns]); for several pass one "
            f"dictionary of columns each, or FederatedData.from_dataframe(table, client=...)."
        )


def warn_of_unordered_outcomes(
    model: Callable[..., Any], structure: Structure, data: FederatedData
) -> None:
    """Warn if the outcome of an ordinal distribution is text in alphabetical order."""
    rows = values_of(data.rows)
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

    shapes = position_shapes(structure.every)
    closed, outputs = jax.make_jaxpr(ordinal_values, return_shape=True)(shapes, rows)
    labels: list[Any] = [(("position", i), frozenset()) for i in range(len(shapes))]
    labels += [(("rows", i), frozenset({i})) for i in range(len(names))]
    for site, node in zip(sorted(outputs), Tracer().outputs(closed, labels), strict=True):
        for column in sorted(node.flags & unordered.keys()):
            name = unordered[column]
            levels = data.coding[name]
            shown = ", ".join([*map(repr, levels[:5]), *["..."] * (len(levels) > 5)])
            warn_caller(
                f"Site {site!r} has an ordinal distribution, and its outcome {name!r} is text in "
                f"alphabetical order: {shown}. Declare the order of the levels before the data are "
                f"made, as by pd.Categorical(column, categories=[...], ordered=True)."
            )
