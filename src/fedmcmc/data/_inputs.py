"""Kinds of rows that the constructors accept, and advice for other kinds."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def is_table(rows: object) -> bool:
    """Return whether rows are a table (pandas, Polars, Arrow) rather than arrays."""
    return hasattr(type(rows), "columns")


def refuse_groupby(clients: object) -> None:
    """Raise `TypeError` if clients are a grouped table, or its pairs of a label and a table."""
    is_pairs = isinstance(clients, list) and any(
        isinstance(x, tuple) and any(map(is_table, x)) for x in clients
    )
    if is_pairs or type(clients).__name__ in ("DataFrameGroupBy", "GroupBy"):
        raise TypeError(
            "from_clients takes tables, got a grouped table, which holds pairs of a label and a "
            "table. Pass the ungrouped table to from_dataframe(table, client=...), or a dictionary "
            "with the table of each label to from_clients."
        )


def constructor_of(data: object) -> str:
    """Return advice on the constructor that makes a `FederatedData` from `data`."""
    if is_table(data):
        return (
            "Call FederatedData.from_dataframe(table, client=...) with the name of the column that "
            "holds each row's client, or FederatedData.from_clients([table]) for a single client."
        )
    if isinstance(data, Mapping):
        return (
            "Call FederatedData.from_clients(clients) with the rows of each client by its label, "
            "or FederatedData.from_clients([columns]) with the columns of a single client."
        )
    return (
        "Call FederatedData.from_clients(clients) with a table or a dictionary of columns per "
        "client, or FederatedData.from_arrays(rows, client_ids)."
    )


def group_column(rows: Any, name: str, client: Any) -> np.ndarray:
    """Return a client's labels of groups from a column of its rows or table."""
    try:
        return np.asarray(rows[name])
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"Client {client!r} has no column {name!r}, named by groups=.") from error
