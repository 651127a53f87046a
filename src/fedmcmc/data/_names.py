"""Names of clients and groups in messages."""

from collections.abc import Sequence
from typing import Any

from fedmcmc._checks import in_quotes
from fedmcmc.data._groups import GroupLabels


def labels_of(data: Any) -> tuple[Any, ...]:
    """Return the labels of clients: those of data, names of sites, else numbers from 0."""
    labels = getattr(data, "labels", None)
    return tuple(range(data.federation.num_clients) if labels is None else labels)


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
