"""Descriptions of clients, groups and columns for messages and reports."""

from collections.abc import Sequence
from typing import Any

from fedmcmc._checks import in_quotes
from fedmcmc.data._federated import FederatedData
from fedmcmc.data._groups import GroupLabels
from fedmcmc.data._legend import MAX_SHOWN, list_columns

MAX_NAMED_CLIENTS = 100
"""Maximal number of clients that a report lists by name; more clients are probably people."""

ORDERS = {
    "ordered": "ordered categories",
    "as declared": "in the order of the categories",
    "alphabetical": "in alphabetical order",
    "numerical": "in numerical order",
}


def labels_of(data: Any) -> tuple[Any, ...]:
    """Return the labels of clients from data or a consortium, by default numbers from 0."""
    labels = getattr(data, "labels", None)
    if labels is not None:
        return tuple(labels)
    federation = data if hasattr(data, "num_clients") else data.federation
    return tuple(range(federation.num_clients))


def group_name(
    labels: Sequence[Any], group_labels: GroupLabels | None, client: int, group: int
) -> str:
    """Return ``group 'P7' of client 'Bern'``; a group without a label has its number as name.

    Examples
    --------
    >>> group_name(["Bern"], (("P3", "P7"),), 0, 1)
    "group 'P7' of client 'Bern'"
    >>> group_name(["Bern"], None, 0, 0)
    "group 0 of client 'Bern'"
    """
    names = () if group_labels is None else group_labels[client]
    label = names[group] if group < len(names) else group
    return f"group {in_quotes(label)} of client {in_quotes(labels[client])}"


def in_words(data: FederatedData) -> dict[str, str]:
    """Return descriptions of the clients and of the columns with the meaning of their codes.

    Examples
    --------
    >>> import pandas as pd
    >>> clinics = {"Bern": pd.DataFrame({"sex": ["f", "m"]}), "Jura": pd.DataFrame({"sex": ["m"]})}
    >>> in_words(FederatedData.from_clients(clinics))
    {'client names': 'Bern (2 rows), Jura (1 row)', 'columns': "sex: 0 is 'f', 1 is 'm'"}
    """
    return {"client names": _describe_clients(data), "columns": _describe_columns(data)}


def _describe_clients(data: FederatedData) -> str:
    sizes = data.sizes.tolist()
    if len(sizes) > MAX_NAMED_CLIENTS:
        return f"{len(sizes):,}, with {min(sizes):,} to {max(sizes):,} rows"
    groups = [None] * len(sizes) if data.num_groups is None else data.num_groups.tolist()
    counts = [
        _count(size, "row") + (f" in {_count(num, 'group')}" if num is not None else "")
        for size, num in zip(sizes, groups, strict=True)
    ]
    return ", ".join(f"{label} ({x})" for label, x in zip(data.labels, counts, strict=True))


def _count(num: int, noun: str) -> str:
    return f"{num:,} {noun}{'s' * (num != 1)}"


def _describe_columns(data: FederatedData) -> str:
    lines = []
    for name, kind, levels, order in list_columns(data.rows, data.legend):
        if len(levels) > MAX_SHOWN:
            kind = f"{len(levels):,} codes"  # levels may be names of people
        elif levels:
            kind = ", ".join(f"{code} is {level!r}" for code, level in enumerate(levels))
            kind += f" ({ORDERS[order]})" if len(levels) > 2 else ""
        lines.append(f"{name}: {kind}")
    return "\n".join(lines)
