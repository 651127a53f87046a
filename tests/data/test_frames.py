"""Data from tables: columns by name, text as codes, clients by label, and what is printed."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import polars
import pytest

from fedmcmc import FederatedData

STAGES = ["early", "mid", "late"]
TABLE = pd.DataFrame(
    {
        "clinic": ["Bern", "Basel", "Bern", "Chur", "Basel"],
        "age": [50.0, 61.0, 72.0, 43.0, 34.0],
        "visits": [1, 2, 3, 4, 5],
        "smokes": [True, False, False, True, True],
        "arm": ["b", "a", "a", "c", "b"],
        "stage": pd.Categorical(["late", "early", "early", "mid", "late"], STAGES),
    }
)
POLARS = polars.DataFrame(
    {name: TABLE[name].tolist() for name in TABLE}, schema_overrides={"stage": polars.Enum(STAGES)}
)


@pytest.mark.parametrize("table", [TABLE, POLARS], ids=["pandas", "polars"])
def test_columns_keep_their_names_and_clients_their_labels(table):
    data = FederatedData.from_dataframe(table, client="clinic")
    assert data.labels == ("Basel", "Bern", "Chur")
    assert data.sizes.tolist() == [2, 2, 1]
    assert {name: column.tolist() for name, column in data.client_rows(0).items()} == {
        "age": [61.0, 34.0],
        "visits": [2, 5],
        "smokes": [0, 1],
        "arm": [0, 1],
        "stage": [0, 2],
    }
    assert data.coding == {"arm": ("a", "b", "c"), "stage": ("early", "mid", "late")}


@pytest.mark.filterwarnings("ignore:Column 'arm' has levels that only one client has")
def test_each_table_of_a_list_is_a_client_and_codes_agree():
    tables = {name: part.drop(columns="clinic") for name, part in TABLE.groupby("clinic")}
    expected = FederatedData.from_dataframe(TABLE, client="clinic")
    for clients in (tables, list(tables.values())):
        data = FederatedData.from_clients(clients)
        chex.assert_trees_all_equal(data.rows, expected.rows)
        assert data.coding == expected.coding
        assert data.labels == (expected.labels if clients is tables else (0, 1, 2))


def test_names_serve_as_ids():
    data = FederatedData.from_arrays(np.arange(3.0), ["b", "a", "b"])
    assert data.labels == ("a", "b")
    np.testing.assert_array_equal(data.rows, [1.0, 0.0, 2.0])


def test_a_repr_holds_no_row():
    data = FederatedData.from_dataframe(TABLE, client="clinic", columns=["age", "arm"])
    clients = "FederatedData(3 clients ('Basel', 'Bern', 'Chur'), 5 rows, "
    columns = "age: float32, arm: int32 (alphabetical: 0 'a', 1 'b', 2 'c'))"
    assert repr(data) == str(data) == f"{clients}1 to 2 per client; {columns}"
    assert repr(FederatedData.from_clients([np.full((2, 3), 61.0)])) == (
        "FederatedData(1 clients, 2 rows, 2 to 2 per client; rows: float32[3])"
    )
    reprs = []
    jax.jit(lambda data: reprs.append(repr(data)) or data.size)(data)
    assert reprs == [f"{clients[:-2]}; {columns}"]


def test_names_of_rows_warn_and_are_not_printed():
    names = pd.DataFrame({"name": [f"Patient {i}" for i in range(30)], "x": np.arange(30.0)})
    message = "'name' is text of 30 different values in 30 rows"
    with pytest.warns(UserWarning, match=message) as caught:
        data = FederatedData.from_clients([names])
    assert caught[0].filename == __file__
    assert "30 codes" in repr(data) and "Patient" not in repr(data)


def test_new_labels_of_clients_compile_nothing():
    @jax.jit
    @chex.assert_max_traces(1)
    def total(data):
        return jnp.sum(data.rows["age"])

    for table in (TABLE, TABLE.assign(clinic=TABLE["clinic"].str.upper())):
        assert total(FederatedData.from_dataframe(table, client="clinic")) == 260


def test_missing_floats_are_nan_where_that_is_allowed():
    table = TABLE.assign(age=[1.0, np.nan, 2.0, np.nan, 3.0])
    data = FederatedData.from_dataframe(
        table, client="clinic", columns=["age"], allow_nonfinite=True
    )
    assert np.isnan(data.rows["age"]).sum() == 2


def test_numbers_that_lose_their_digits_warn():
    seconds = 1.7e9 + np.arange(10) / 7
    with pytest.warns(UserWarning, match=r"'seconds'.*differ by 1.29 around 1.7e\+09.*subtract"):
        FederatedData.from_clients([{"seconds": seconds, "age": 50 + np.arange(10) / 7}])
    table = pd.DataFrame({"seconds": seconds, "clinic": 3})
    with pytest.warns(UserWarning, match="seconds") as caught:
        FederatedData.from_dataframe(table, client="clinic")
        FederatedData.from_arrays({"seconds": seconds}, np.zeros(10, int))
    assert [warning.filename for warning in caught] == [__file__] * 2
    FederatedData.from_clients([{"days": 2000 + np.arange(10) / 7, "ones": np.ones(10)}])
