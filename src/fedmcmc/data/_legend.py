"""Names of clients, groups and codes, and descriptions of columns."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import jax

from fedmcmc.data._groups import GroupLabels, row_values
from fedmcmc.data._rows import Levels
from fedmcmc.types import ArrayTree

MAX_SHOWN = 10
"""Maximal number of clients or of levels of a column that are listed by name."""


@dataclass(frozen=True, eq=False)
class Legend:
    """Names of clients, of the groups within them, and of codes.

    All legends are equal, so that data which differ only in names share one compiled program.
    """

    labels: Levels | None = None
    coding: Mapping[str, Levels] = field(default_factory=dict)
    group_labels: GroupLabels | None = None
    orders: Mapping[str, str] = field(default_factory=dict)

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Legend)

    def __hash__(self) -> int:
        return hash(Legend)


def list_columns(rows: ArrayTree, legend: Legend) -> Iterator[tuple[str, str, Levels, str]]:
    """Yield the name, the type, the levels and the name of their order for each column."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(row_values(rows)):
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "rows"
        kind = f"{leaf.dtype}{list(leaf.shape[1:]) if leaf.ndim > 1 else ''}"
        yield name, kind, legend.coding.get(name, ()), legend.orders.get(name, "")


def describe_columns(rows: ArrayTree, legend: Legend) -> dict[str, str]:
    """Return a description of each column by name: its type, and its levels in their order."""
    columns = {}
    for name, kind, levels, order in list_columns(rows, legend):
        separator = " < " if order == "ordered" else ", "
        codes = separator.join(f"{code} {level!r}" for code, level in enumerate(levels))
        if len(levels) > MAX_SHOWN:
            codes = f"{len(levels)} codes"  # levels may be names of people
        columns[name] = f"{kind} ({order}: {codes})" if levels else kind
    return columns
