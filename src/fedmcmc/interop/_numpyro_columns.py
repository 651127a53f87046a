"""Checks of a NumPyro model's use of the columns and clients of a `FederatedData`."""

import inspect
from collections.abc import Callable
from typing import Any

import jax

from fedmcmc._types import ArrayTree
from fedmcmc.data import FederatedData, values_of, warn_caller
from fedmcmc.interop import _numpyro_trace as tracing
from fedmcmc.interop._dependence import NO_FLAGS, output_flags
from fedmcmc.interop._numpyro_inputs import position_shapes
from fedmcmc.interop._numpyro_structure import Structure

ORDINAL = "Ordered"
"""Prefix of the names of ordinal distributions."""
MAX_LEVELS_SHOWN = 5


def refuse_columns_as_clients(model: Callable[..., Any], data: FederatedData) -> None:
    """Raise `TypeError` if the labels of the clients are names of the model's arguments.

    A dictionary of columns was then interpreted as a dictionary of clients with one array each.
    """
    rows, labels = values_of(data.rows), data.labels
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

    arguments = (position_shapes(structure.latent_shapes), rows)
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
