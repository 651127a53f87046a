"""Groups within clients: patients of a hospital, pupils of a school; each row belongs to one."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, Client, register_dataclass
from fedmcmc.data._levels import report_similar
from fedmcmc.data._rows import is_missing


@register_dataclass
@dataclass(frozen=True)
class Grouped:
    """Rows, and which of its client's groups each belongs to.

    A column like any other to whatever moves rows about; a model never sees it.

    Attributes
    ----------
    values
        What the model takes, leaves ``[num_rows, ...]``.
    group
        ``[num_rows]`` int32, from 0 in each client.
    most
        Groups of the client that has most, static.
    """

    values: ArrayTree
    group: ArrayTree
    most: int = field(metadata={"static": True})


def row_values(rows: ArrayTree) -> Any:
    """Return what a model takes of rows, with groups or without."""
    return rows.values if isinstance(rows, Grouped) else rows


def max_groups(client: Client) -> int:
    """Return how many groups the client with most of them has (static); one where none are told."""
    return client.rows.most if isinstance(client.rows, Grouped) else 1


def label_array(labels: Any) -> np.ndarray:
    """Return labels as an array, dates as text; a list of text and numbers stays as it is."""
    if isinstance(labels, list | tuple) and len({isinstance(x, str) for x in labels}) > 1:
        return np.array(labels, object)
    own = np.asarray(labels)
    if own.dtype.kind in "mM":
        return np.array([None if x == "NaT" else x for x in own.astype(str).tolist()], object)
    return own


GroupLabels = tuple[tuple[Any, ...], ...]
"""Labels of each client's groups: group ``i`` of a client has its label ``i``."""


def grouped(
    values: ArrayTree, labels: Sequence[Any], sizes: np.ndarray, owners: Sequence[Any]
) -> tuple[Grouped, GroupLabels]:
    """Return rows with groups numbered in each client, in order of first appearance.

    The second result holds the labels of each client's groups, in the order of their numbers.

    Parameters
    ----------
    values
        Rows of all clients, one client after the other.
    labels
        Per client, one label per row.
    sizes
        ``[num_clients]``, rows of each.
    owners
        Labels of the clients, for messages.

    Raises
    ------
    ValueError
        If there is not one label per row, or a label is missing.
    """
    if len(labels) != len(sizes):
        raise ValueError(
            f"groups must hold one array of labels per client, {len(sizes)}; got {len(labels)}."
        )
    numbers, names = [], []
    for client, own, size in zip(owners, labels, sizes, strict=True):
        own = label_array(own)
        if own.shape != (size,):
            raise ValueError(
                f"groups must hold one label per row: client {client!r} has {size} rows, and "
                f"labels of shape {own.shape}."
            )
        places: dict[Hashable, int] = {}
        for row, label in enumerate(own.tolist()):
            if is_missing(label):
                raise ValueError(
                    f"Row {row} of client {client!r} has no group: its label is {label}."
                )
            places.setdefault(label, len(places))
        report_similar(dict.fromkeys(places), f"Client {client!r}", "groups")
        numbers.append(np.array([places[label] for label in own.tolist()], np.int32))
        names.append(tuple(places))
    most = max(int(own.max(initial=-1)) + 1 for own in numbers)
    return Grouped(values, np.concatenate(numbers), most), tuple(names)


def own_groups(client: Client, offsets: Array) -> Array:
    """Return the groups of the client's rows at `offsets`, in ``[0, max_groups(client))``."""
    if isinstance(client.rows, Grouped):
        return jnp.asarray(client.rows.group[client.start + offsets])
    return jnp.zeros(offsets.shape, jnp.int32)


def all_groups(rows: ArrayTree, start: Array, num_rows: int) -> Grouped:
    """Return rows whose groups number on from client to client."""
    num_clients = start.shape[0]
    client = jnp.searchsorted(start, jnp.arange(num_rows), side="right") - 1
    if not isinstance(rows, Grouped):
        return Grouped(rows, client.astype(jnp.int32), num_clients)
    # As many places per client as the largest needs: those that a client has not stay empty.
    group = client.astype(jnp.int32) * rows.most + rows.group
    return Grouped(rows.values, group, num_clients * rows.most)


def count_groups(rows: ArrayTree, start: Any, size: Any) -> np.ndarray | None:
    """Return the number of groups of each client, ``[num_clients]``, outside of compiled code."""
    if not isinstance(rows, Grouped) or isinstance(rows.group, jax.core.Tracer):
        return None
    group = np.asarray(rows.group)
    return np.array(
        [
            group[a : a + n].max() + 1
            for a, n in zip(np.asarray(start), np.asarray(size), strict=True)
        ],
        np.int32,
    )
