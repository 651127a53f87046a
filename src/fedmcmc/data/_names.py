"""Names of clients and groups in messages."""

from collections.abc import Sequence
from typing import Any

from fedmcmc._checks import in_quotes
from fedmcmc.data._groups import GroupLabels


def labels_of(data: Any) -> tuple[Any, ...]:
    """Return the labels of clients: those of data, names of sites, else numbers from 0."""
    labels = getattr(data, "labels", None)
    if labels is not None:
        return tuple(labels)
    known = data if hasattr(data, "num_clients") else data.federation
    return tuple(range(known.num_clients))


def group_name(
    labels: Sequence[Any], group_labels: GroupLabels | None, client: int, group: int
) -> str:
    """Return ``group 'P7' of client 'Bern'``; the number of a group that has no label.

    Examples
    --------
    >>> group_name(["Bern"], (("P3", "P7"),), 0, 1)
    "group 'P7' of client 'Bern'"
    >>> group_name(["Bern"], None, 0, 0)
    "group 0 of client 'Bern'"
    """
    own = () if group_labels is None else group_labels[client]
    label = own[group] if group < len(own) else group
    return f"group {in_quotes(label)} of client {in_quotes(labels[client])}"
