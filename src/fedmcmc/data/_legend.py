"""Names of clients, groups and codes, and how they are printed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax

from fedmcmc._types import ArrayTree
from fedmcmc.data._groups import GroupLabels, row_values
from fedmcmc.data._rows import Levels

MAX_SHOWN = 10
"""Levels of text above which a printed federation says only how many there are."""


@dataclass(frozen=True, eq=False)
class Legend:
    """Names of clients, of the groups within them, and of codes.

    Equal to every other, so that data that differ by names alone share one compiled program.
    """

    labels: Levels | None = None
    coding: Mapping[str, Levels] = field(default_factory=dict)
    group_labels: GroupLabels | None = None
    orders: Mapping[str, str] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Legend)

    def __hash__(self) -> int:
        return hash(Legend)


def columns_in_words(rows: ArrayTree, legend: Legend) -> dict[str, str]:
    """Return the type of each column by its name, with the levels of codes in their order."""
    columns = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(row_values(rows)):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        shape = str(list(leaf.shape[1:])) if leaf.ndim > 1 else ""
        columns[name or "rows"] = f"{leaf.dtype}{shape}"
        levels, order = legend.coding.get(name, ()), legend.orders.get(name)
        between = " < " if order == "ordered" else ", "
        codes = between.join(f"{code} {level!r}" for code, level in enumerate(levels))
        if len(levels) > MAX_SHOWN:
            codes = f"{len(levels)} codes"  # which may be names
        if levels:
            columns[name or "rows"] += f" ({order}: {codes})"
    return columns
