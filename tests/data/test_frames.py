"""Data from tables: columns by name, text as codes, clients by labels, and no row in print."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import polars
import pytest

import fedmcmc

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
    data = fedmcmc.FederatedData.from_dataframe(table, client="clinic")
    assert data.labels == ("Basel", "Bern", "Chur")
    assert data.sizes.tolist() == [2, 2, 1]
    assert set(data.rows) == set(TABLE) - {"clinic"}
    basel = jax.tree.map(np.asarray, data.client_rows(0))
    np.testing.assert_array_equal(basel["age"], [61.0, 34.0])
    np.testing.assert_array_equal(basel["visits"], [2, 5])
    np.testing.assert_array_equal(basel["smokes"], [0, 1])
    np.testing.assert_array_equal(basel["arm"], [0, 1])
    np.testing.assert_array_equal(basel["stage"], [0, 2])
    assert data.coding == {"arm": ("a", "b", "c"), "stage": ("early", "mid", "late")}


def test_a_list_of_tables_is_one_client_each_with_codes_that_agree():
    tables = {name: some.drop(columns="clinic") for name, some in TABLE.groupby("clinic")}
    whole = fedmcmc.FederatedData.from_dataframe(TABLE, client="clinic")
    for clients in (tables, list(tables.values())):
        data = fedmcmc.FederatedData.from_clients(clients)
        chex.assert_trees_all_equal(data.rows, whole.rows)
        assert data.coding == whole.coding
        assert data.labels == (whole.labels if clients is tables else (0, 1, 2))


def test_names_serve_as_ids():
    data = fedmcmc.FederatedData.from_arrays(np.arange(3.0), ["b", "a", "b"])
    assert data.labels == ("a", "b")
    np.testing.assert_array_equal(data.rows, [1.0, 0.0, 2.0])


def test_what_is_printed_holds_no_row():
    data = fedmcmc.FederatedData.from_dataframe(TABLE, client="clinic", columns=["age", "arm"])
    clients = "FederatedData(3 clients ('Basel', 'Bern', 'Chur'), 5 rows, "
    columns = "age: float32, arm: int32 (alphabetical: 0 'a', 1 'b', 2 'c'))"
    assert repr(data) == str(data) == f"{clients}1 to 2 per client; {columns}"
    assert repr(fedmcmc.FederatedData.from_clients([np.full((2, 3), 61.0)])) == (
        "FederatedData(1 clients, 2 rows, 2 to 2 per client; rows: float32[3])"
    )
    seen = []
    jax.jit(lambda data: seen.append(repr(data)) or data.size)(data)
    assert seen == [f"{clients[:-2]}; {columns}"]


def test_names_alone_compile_nothing_anew():
    traces = []

    @jax.jit
    def total(data):
        traces.append(1)
        return jnp.sum(data.rows["age"])

    renamed = TABLE.assign(clinic=TABLE["clinic"].str.upper())
    for table in (TABLE, renamed):
        assert total(fedmcmc.FederatedData.from_dataframe(table, client="clinic")) == 260
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({}, {"client": "site"}, "one of 'clinic', 'age', .*; got 'site'"),
        ({"clinic": None}, {}, "5 rows have no client"),
        ({"age": [1.0, np.nan, 2.0, np.nan, 3.0]}, {}, "'age' has 2 missing values.*row 1"),
        ({"arm": ["a", None, "b", "a", "a"]}, {}, "'arm' has 1 missing value,.*row 1"),
        ({"when": pd.Timestamp("2026-01-01")}, {}, "'when' holds Datetime.*Turn it into a number"),
        ({}, {"columns": ["age", "weight"]}, "no column 'weight'; its columns are clinic, age"),
        ({}, {"columns": []}, "at least one column"),
    ],
)
def test_bad_tables(change, settings, message):
    with pytest.raises(ValueError, match=message):
        table = TABLE.assign(**change)
        fedmcmc.FederatedData.from_dataframe(table, **({"client": "clinic"} | settings))


def test_missing_floats_are_nan_where_that_is_allowed():
    table = TABLE.assign(age=[1.0, np.nan, 2.0, np.nan, 3.0])
    data = fedmcmc.FederatedData.from_dataframe(
        table, client="clinic", columns=["age"], allow_nonfinite=True
    )
    assert np.isnan(data.rows["age"]).sum() == 2


def test_numbers_that_lose_their_digits_warn():
    seconds = 1.7e9 + np.arange(10) / 7
    with pytest.warns(UserWarning, match=r"'seconds'.*differ by 1.29 around 1.7e\+09.*subtract"):
        fedmcmc.FederatedData.from_clients([{"seconds": seconds, "age": 50 + np.arange(10) / 7}])
    table = pd.DataFrame({"seconds": seconds, "clinic": 3})
    with pytest.warns(UserWarning, match="seconds") as said:
        fedmcmc.FederatedData.from_dataframe(table, client="clinic")
        fedmcmc.FederatedData.from_arrays({"seconds": seconds}, np.zeros(10, int))
    assert [warning.filename for warning in said] == [__file__] * 2
    fedmcmc.FederatedData.from_clients([{"days": 2000 + np.arange(10) / 7, "one": np.ones(10)}])


def test_numbers_at_one_client_and_text_at_another_are_refused():
    """A word in one cell makes a column of a CSV file text, whose codes would be no ages."""
    texts = TABLE.assign(age=["54", "unknown", "61", "70", "48"])
    with pytest.raises(ValueError, match=r"'age' of client 'Basel' is text .*'unknown'.*'Bern'"):
        fedmcmc.FederatedData.from_clients({"Bern": TABLE, "Basel": texts})


def test_what_is_missing_is_said_of_its_client():
    holes = TABLE.assign(arm=["a", None, "b", "a", "a"])
    with pytest.raises(ValueError, match="'arm' of client 'Basel' has 1 missing value,"):
        fedmcmc.FederatedData.from_clients({"Bern": TABLE, "Basel": holes})


def test_names_of_rows_are_not_printed():
    names = pd.DataFrame({"name": [f"Patient {i}" for i in range(30)], "x": np.arange(30.0)})
    with pytest.warns(
        UserWarning, match="'name' is text of 30 different values in 30 rows"
    ) as said:
        data = fedmcmc.FederatedData.from_clients([names])
    assert said[0].filename == __file__
    assert "30 codes" in repr(data) and "Patient" not in repr(data)


def test_tables_that_do_not_fit_together():
    with pytest.raises(ValueError, match="table of client 1 has no column 'arm'"):
        fedmcmc.FederatedData.from_clients([TABLE, TABLE.drop(columns="arm")])
    with pytest.raises(ValueError, match="table of client 1 has an extra column 'more'"):
        fedmcmc.FederatedData.from_clients([TABLE, TABLE.assign(more=1)])
    with pytest.raises(TypeError, match="must be a DataFrame, got dict"):
        fedmcmc.FederatedData.from_dataframe({"a": [1]}, client="a")
