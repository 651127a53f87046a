"""Groups within clients: labels of rows, numbers in each client."""

import jax
import numpy as np
import pandas as pd
import pytest

from fedmcmc import FederatedData
from fedmcmc.data import fold, own_rows_in_groups

CLIENTS = [{"x": np.arange(4.0)}, {"x": np.arange(3.0)}]
LABELS = [["b", "a", "b", "c"], [7, 7, 9]]


def test_groups_are_numbered_as_they_appear():
    data = FederatedData.from_clients(CLIENTS, groups=LABELS)
    assert np.asarray(data.rows.group).tolist() == [0, 1, 0, 2, 0, 0, 1]
    assert data.num_groups.tolist() == [3, 2]
    assert data.group_labels == (("b", "a", "c"), (7, 9))
    assert FederatedData.from_clients(CLIENTS).group_labels is None
    _, mask, group = own_rows_in_groups(data.client(1))
    assert group[mask].tolist() == [0, 0, 1] and group.shape == (4,)
    assert "2 clients, 7 rows, 3 to 4 per client, 5 groups; x: float32" in repr(data)


def test_labels_of_rows_in_any_order():
    clients, order = np.array([0, 0, 0, 0, 1, 1, 1]), np.array([4, 0, 1, 5, 2, 3, 6])
    rows = {"x": np.concatenate([own["x"] for own in CLIENTS])[order]}
    labels = np.array([str(label) for own in LABELS for label in own])[order]
    data = FederatedData.from_arrays(rows, clients[order], groups=labels)
    wanted = FederatedData.from_clients(CLIENTS, groups=LABELS)
    for found, own in zip(jax.tree.leaves(data), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(found, own)
    assert data.group_labels == (("b", "a", "c"), ("7", "9"))
    with pytest.raises(ValueError, match="one label per row"):
        FederatedData.from_arrays(rows, clients, groups=labels[1:])


def test_what_knows_nothing_of_groups_sees_the_rows():
    data = FederatedData.from_clients(CLIENTS, groups=LABELS)
    plain = FederatedData.from_clients(CLIENTS)
    assert plain.num_groups is None
    assert jax.tree.structure(data.federation.rows) == jax.tree.structure(plain.federation.rows)
    assert data.client_rows(1)["x"].tolist() == [0, 1, 2]
    total = fold(lambda rows, mask: (rows["x"] * mask).sum(), data.client(0))
    assert total == 6


def test_all_groups_of_all_clients_number_on():
    for data in (FederatedData.from_clients(CLIENTS, groups=LABELS),):
        pooled = data.pooled(groups=True)
        assert np.asarray(pooled.rows.group).tolist() == [0, 1, 0, 2, 3, 3, 4]
        assert pooled.rows.max_groups == 6
    pooled = FederatedData.from_clients(CLIENTS).pooled(groups=True)
    assert np.asarray(pooled.rows.group).tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_a_column_names_them():
    table = pd.DataFrame(
        {"clinic": ["B", "A", "B", "B"], "patient": ["p", "p", "q", "p"], "x": [1.0, 2.0, 3.0, 4.0]}
    )
    data = FederatedData.from_dataframe(table, client="clinic", groups="patient")
    assert np.asarray(data.rows.values["x"]).tolist() == [2, 1, 3, 4]
    assert np.asarray(data.rows.group).tolist() == [0, 0, 1, 0]
    assert data.group_labels == (("p",), ("p", "q"))
    frames = [frame.drop(columns="clinic") for _, frame in table.groupby("clinic")]
    same = FederatedData.from_clients(frames, groups="patient")
    assert np.asarray(same.rows.group).tolist() == [0, 0, 1, 0] and list(same.rows.values) == ["x"]
    assert same.group_labels == data.group_labels
    numbers = FederatedData.from_dataframe(
        table.assign(patient=[30, 7, 4, 30]), client="clinic", groups="patient"
    )
    assert numbers.group_labels == ((7,), (30, 4))
    parts = [{"x": np.ones(2), "who": np.array(["a", "b"])}]
    assert FederatedData.from_clients(parts, groups="who").num_groups.tolist() == [2]


@pytest.mark.parametrize(
    "groups, words",
    [
        ([["a"] * 4], "one array of labels per client, 2; got 1"),
        ([["a"] * 4, ["a"] * 2], "client 1 has 3 rows"),
        ([["a", None, "a", "a"], ["a"] * 3], "Row 1 of client 0 has no group"),
        ([[0.0, 1.0, np.nan, 1.0], ["a"] * 3], "Row 2 of client 0 has no group"),
        ("who", "Client 0 has no column 'who'"),
    ],
)
def test_labels_that_do_not_fit_are_said(groups, words):
    with pytest.raises(ValueError, match=words):
        FederatedData.from_clients(CLIENTS, groups=groups)
