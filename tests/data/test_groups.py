"""Groups within clients: labels of rows become numbers that start at zero in each client."""

import chex
import numpy as np
import pandas as pd
import pytest

from fedmcmc import FederatedData
from fedmcmc.data import fold, own_rows_in_groups

CLIENTS = [{"x": np.arange(4.0)}, {"x": np.arange(3.0)}]
LABELS = [["b", "a", "b", "c"], [7, 7, 9]]
DATA = FederatedData.from_clients(CLIENTS, groups=LABELS)
PLAIN = FederatedData.from_clients(CLIENTS)


def test_groups_are_numbered_in_order_of_appearance():
    assert DATA.rows.group.tolist() == [0, 1, 0, 2, 0, 0, 1]
    assert DATA.num_groups.tolist() == [3, 2] and PLAIN.num_groups is None
    assert DATA.group_labels == (("b", "a", "c"), (7, 9)) and PLAIN.group_labels is None
    _, mask, group = own_rows_in_groups(DATA.client(1))
    assert group[mask].tolist() == [0, 0, 1] and group.shape == (4,)
    assert "2 clients, 7 rows, 3 to 4 per client, 5 groups; x: float32" in repr(DATA)


def test_rows_and_labels_may_come_in_any_order():
    clients, order = np.array([0, 0, 0, 0, 1, 1, 1]), np.array([4, 0, 1, 5, 2, 3, 6])
    rows = {"x": np.concatenate([client["x"] for client in CLIENTS])[order]}
    labels = np.array([str(label) for client in LABELS for label in client])[order]
    data = FederatedData.from_arrays(rows, clients[order], groups=labels)
    chex.assert_trees_all_equal(data.federation, DATA.federation)
    assert data.rows.group.tolist() == DATA.rows.group.tolist()
    assert data.group_labels == (("b", "a", "c"), ("7", "9"))
    with pytest.raises(ValueError, match="one label per row"):
        FederatedData.from_arrays(rows, clients, groups=labels[1:])


def test_functions_of_rows_do_not_see_groups():
    chex.assert_trees_all_equal_structs(DATA.federation.rows, PLAIN.federation.rows)
    assert DATA.client_rows(1)["x"].tolist() == [0, 1, 2]
    assert fold(lambda rows, mask: (rows["x"] * mask).sum(), DATA.client(0)) == 6


def test_pooled_groups_have_different_numbers():
    """Without groups, each client is a group."""
    pooled = DATA.pooled(groups=True)
    assert pooled.rows.group.tolist() == [0, 1, 0, 2, 3, 3, 4]
    assert pooled.rows.max_groups == 6
    assert PLAIN.pooled(groups=True).rows.group.tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_a_column_holds_the_labels():
    table = pd.DataFrame(
        {"clinic": ["B", "A", "B", "B"], "patient": ["p", "p", "q", "p"], "x": [1.0, 2.0, 3.0, 4.0]}
    )
    tables = [part.drop(columns="clinic") for _, part in table.groupby("clinic")]
    for data in (
        FederatedData.from_dataframe(table, client="clinic", groups="patient"),
        FederatedData.from_clients(tables, groups="patient"),
    ):
        assert {name: column.tolist() for name, column in data.rows.values.items()} == {
            "x": [2, 1, 3, 4]
        }
        assert data.rows.group.tolist() == [0, 0, 1, 0]
        assert data.group_labels == (("p",), ("p", "q"))
    table = table.assign(patient=[30, 7, 4, 30])
    data = FederatedData.from_dataframe(table, client="clinic", groups="patient")
    assert data.group_labels == ((7,), (30, 4))
    arrays = [{"x": np.ones(2), "who": np.array(["a", "b"])}]
    assert FederatedData.from_clients(arrays, groups="who").num_groups.tolist() == [2]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([["a"] * 4], "one array of labels per client, 2; got 1"),
        ([["a"] * 4, ["a"] * 2], "client 1 has 3 rows"),
        ([["a", None, "a", "a"], ["a"] * 3], "Row 1 of client 0 has no group"),
        ([[0.0, 1.0, np.nan, 1.0], ["a"] * 3], "Row 2 of client 0 has no group"),
        ("who", "Client 0 has no column 'who'"),
    ],
)
def test_labels_that_do_not_fit_raise(groups, message):
    with pytest.raises(ValueError, match=message):
        FederatedData.from_clients(CLIENTS, groups=groups)
