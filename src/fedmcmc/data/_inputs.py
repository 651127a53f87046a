"""Kinds of rows that constructors take, and what to call for others."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def is_table(rows: Any) -> bool:
    """Return whether rows are a table (pandas, Polars, Arrow) rather than arrays."""
    return hasattr(type(rows), "columns")


def constructor_of(data: Any) -> str:
    """Return a sentence on which constructor makes a `FederatedData` of `data`."""
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


def group_column(rows: Any, name: str, client: Any) -> Any:
    """Return a client's labels of groups, from a column of its rows or its table."""
    try:
        return np.asarray(rows[name])
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"groups={name!r} names no column of client {client!r}.") from error
