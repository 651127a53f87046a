"""Groups of rows within clients, such as patients of a hospital or pupils of a school."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.data._levels import report_similar
from fedmcmc.data._rows import is_missing
from fedmcmc.types import ArrayTree, Client, register_dataclass

GroupLabels = tuple[tuple[Any, ...], ...]
"""Labels of each client's groups; entry ``i`` of a client is the label of its group ``i``."""


@register_dataclass
@dataclass(frozen=True)
class Grouped:
    """Rows with the group of each row, which models do not see.

    Attributes
    ----------
    values
        Columns of the model, leaves ``[num_rows, ...]``.
    group
        ``[num_rows]`` int32, numbered from 0 in each client.
    max_groups
        Static number of groups of the client with the most groups.
    """

    values: ArrayTree
    group: ArrayTree
    max_groups: int = field(metadata={"static": True})


def row_values(rows: ArrayTree) -> ArrayTree:
    """Return the rows that a model takes, without groups."""
    return rows.values if isinstance(rows, Grouped) else rows


def max_groups(client: Client) -> int:
    """Return the number of groups of the client with the most groups (static)."""
    return client.rows.max_groups if isinstance(client.rows, Grouped) else 1


def as_labels(labels: object) -> np.ndarray:
    """Return labels as an array: dates as text, a mixture of text and numbers as objects."""
    if isinstance(labels, list | tuple) and len({isinstance(x, str) for x in labels}) > 1:
        return np.array(labels, object)
    array = np.asarray(labels)
    if array.dtype.kind in "mM":
        return np.array([None if x == "NaT" else x for x in array.astype(str).tolist()], object)
    return array


def number_groups(
    values: ArrayTree, labels: Sequence[Any], sizes: np.ndarray, owners: Sequence[Any]
) -> tuple[Grouped, GroupLabels]:
    """Return rows with groups numbered by first appearance in each client, and the groups' labels.

    `values` are the rows of all clients, sorted by client. `labels` holds, for each client, one
    label per row; `sizes` the number of rows of each client, and `owners` the clients' labels for
    messages. Raise `ValueError` if a label is missing.
    """
    if len(labels) != len(sizes):
        raise ValueError(
            f"groups must hold one array of labels per client, {len(sizes)}; got {len(labels)}."
        )
    numbers, names = [], []
    for client, of_client, size in zip(owners, labels, sizes, strict=True):
        array = as_labels(of_client)
        if array.shape != (size,):
            raise ValueError(
                f"groups must hold one label per row: client {client!r} has {size} rows, and "
                f"labels of shape {array.shape}."
            )
        codes: dict[Hashable, int] = {}
        for row, label in enumerate(array.tolist()):
            if is_missing(label):
                raise ValueError(
                    f"Row {row} of client {client!r} has no group: its label is {label}."
                )
            codes.setdefault(label, len(codes))
        report_similar(dict.fromkeys(codes), f"Client {client!r}", "groups")
        numbers.append(np.array([codes[label] for label in array.tolist()], np.int32))
        names.append(tuple(codes))
    return Grouped(values, np.concatenate(numbers), max(map(len, names))), tuple(names)


def own_groups(client: Client, offsets: Array) -> Array:
    """Return the groups of the client's rows at `offsets`, in ``[0, max_groups(client))``."""
    if isinstance(client.rows, Grouped):
        return jnp.asarray(client.rows.group[client.start + offsets])
    return jnp.zeros(offsets.shape, jnp.int32)


def pool_groups(rows: ArrayTree, start: Array, num_rows: int) -> Grouped:
    """Return rows whose groups are numbered consecutively over all clients."""
    num_clients = start.shape[0]
    client = jnp.searchsorted(start, jnp.arange(num_rows, dtype=start.dtype), side="right") - 1
    if not isinstance(rows, Grouped):
        return Grouped(rows, client.astype(jnp.int32), num_clients)
    # Each client has the same range of numbers. Numbers of groups that it lacks stay unused.
    group = client.astype(jnp.int32) * rows.max_groups + rows.group
    return Grouped(rows.values, group, num_clients * rows.max_groups)


def count_groups(rows: ArrayTree, start: Array, size: Array) -> np.ndarray | None:
    """Return the number of groups of each client, ``[num_clients]``, outside of compiled code."""
    if not isinstance(rows, Grouped) or isinstance(rows.group, jax.core.Tracer):
        return None
    group, starts = np.asarray(rows.group), np.asarray(start)
    ends = starts + np.asarray(size)
    return np.array([group[i:j].max() + 1 for i, j in zip(starts, ends, strict=True)], np.int32)
