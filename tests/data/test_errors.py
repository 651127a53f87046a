"""Error messages about clients, tables and columns that are not valid data."""

import datetime

import numpy as np
import pandas as pd
import polars
import pytest

from fedmcmc import FederatedData

ONES = np.ones(1)
TABLE = pd.DataFrame({"clinic": ["Bern", "Basel", "Bern"], "age": [50.0, 61.0, 72.0]})
from_arrays, from_clients = FederatedData.from_arrays, FederatedData.from_clients
from_dataframe = FederatedData.from_dataframe


def table(**columns):
    return pd.DataFrame(columns)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([True, None], "1 missing value, the first in row 1"),
        (pd.array([True, None], dtype="boolean"), "1 missing value, the first in row 1"),
        (pd.array([1, None], dtype="Int64"), "1 missing value, the first in row 1"),
        (pd.array(["a", None], dtype="string"), "1 missing value, the first in row 1"),
        (["a", None], "1 missing value, the first in row 1"),
        ([1, "a"], "holds both int and str"),
        ([datetime.date(2026, 1, 1)] * 2, "holds date, which is not a number"),
        ([datetime.timedelta(1)] * 2, "holds Duration.*which is not a number"),
        ([1j, 2], "holds complex128, which is not a number"),
        ([[1], [2]], "holds list, which is not a number"),
    ],
)
def test_columns_that_hold_no_numbers_raise(values, message):
    with pytest.raises(ValueError, match=f"Column 'y' of client 'B' .*{message}"):
        from_clients({"B": table(y=values)})


@pytest.mark.parametrize(
    ("clients", "error", "message"),
    [
        ([], ValueError, "at least one client"),
        (None, TypeError, "one entry per client, got NoneType"),
        (table(site=["a"], y=[1.0]), TypeError, r"from_dataframe\(table, client=...\)"),
        (polars.DataFrame({"y": [1]}), TypeError, r"from_dataframe\(table, client=...\)"),
        ([polars.DataFrame({"y": [1]}).lazy()], TypeError, "client 0 is a LazyFrame.*collect"),
        ([{"x": [1.0, 2.0]}], ValueError, "'x' of client 0 is a list.*np.asarray"),
        ([{"x": 3.0}], ValueError, "client 0 holds single values"),
        # Names of columns.
        (
            {"A": pd.DataFrame([[1, 2]], columns=["y", "y"])},
            ValueError,
            "client 'A' has 2 columns with the name 'y'",
        ),
        ([pd.DataFrame(np.ones((2, 2)))], ValueError, "the name 0, which is not text"),
        (
            [pd.DataFrame([[1]], columns=pd.MultiIndex.from_tuples([("a", "b")]))],
            ValueError,
            r"the name \('a', 'b'\), which is not text",
        ),
        # Clients that do not fit together.
        ({"A": table(y=[1]), "B": {"y": ONES}}, TypeError, "'A' has a table, client 'B'"),
        ({"A": table(y=[1]), "B": table(y=[])}, ValueError, "client 'B' holds no rows"),
        ({"A": {"y": ONES}, "B": {"z": ONES}}, ValueError, "same structure.*'B' has no column 'y'"),
        ([TABLE, TABLE[["age"]]], ValueError, "table of client 1 has no column 'clinic'"),
        ([TABLE, TABLE.assign(b=1)], ValueError, "table of client 1 has an extra column 'b'"),
        (
            {"A": table(y=["a"]), "B": table(y=["a", None])},
            ValueError,
            "'y' of client 'B' has 1 missing value,",
        ),
        ([np.ones((2, 1)), np.ones((0, 1))], ValueError, "client 1 has none"),
        (
            [np.ones((2, 1)), np.ones((2, 3))],
            ValueError,
            r"\(1,\) at client 0, \(3,\) at client 1",
        ),
        (
            {"A": table(y=[54]), "B": table(y=["54", "unknown"])},
            ValueError,
            r"'y' of client 'B' is text .*'unknown'.*'A'",
        ),
        # Values.
        ([{"x": np.ones(2), "y": np.ones(3)}], ValueError, r"number of rows.*\(2,\), \(3,\)"),
        (
            {"A": {"y": ONES}, "B": {"y": np.array([1, np.nan])}},
            ValueError,
            r"\['y'\], first row 1 of client 'B'",
        ),
        ([np.array([1e300, 0.0])], ValueError, "first row 0 of client 0"),
        (
            {"A": {"y": np.ma.masked_array([1.0, 2.0], [0, 1])}},
            ValueError,
            "client 'A' hold masked values",
        ),
        ([{"y": np.array(["a"])}], ValueError, r"must be numbers.*\['y'\]: pass each client's"),
        ([{"y": np.array(["2026-01-01"], "M8[D]")}], ValueError, "days since a fixed day"),
        (
            [{"y": np.array([1, 2**32 - 1], np.uint32)}],
            ValueError,
            r"\['y'\] do not fit into int32.*4294967295",
        ),
        ([{"id": np.array([2**40, 5])}], ValueError, r"\['id'\] do not fit into int32"),
    ],
)
def test_invalid_clients_raise(clients, error, message):
    with pytest.raises(error, match=message):
        from_clients(clients)


@pytest.mark.parametrize("library", [pd, polars])
def test_grouped_tables_raise_with_the_remedy(library):
    ungrouped = library.DataFrame({"c": ["a", "b"], "y": [1.0, 2.0]})
    grouped = ungrouped.groupby("c") if library is pd else ungrouped.group_by("c")
    for clients in (grouped, list(grouped)):
        with pytest.raises(TypeError, match="got a grouped table"):
            from_clients(clients)


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({}, {"client": "site"}, "one of 'clinic', 'age'; got 'site'"),
        ({"clinic": None}, {}, "3 rows have no client"),
        ({"clinic": ["a", 1, "a"]}, {}, "holds both text and numbers"),
        ({"age": [np.nan, 1.0, np.nan]}, {}, "'age' has 2 missing values.*row 0"),
        ({"arm": ["a", None, "b"]}, {}, "'arm' has 1 missing value,.*row 1"),
        ({"when": pd.Timestamp("2026-01-01")}, {}, "'when' holds Datetime.*Turn it into a number"),
        ({}, {"columns": ["age", "weight"]}, "no column 'weight'; its columns are clinic, age"),
        ({}, {"columns": []}, "at least one column"),
    ],
)
def test_invalid_tables_raise(changes, settings, message):
    with pytest.raises(ValueError, match=message):
        from_dataframe(TABLE.assign(**changes), **({"client": "clinic"} | settings))


def test_a_dictionary_is_no_table():
    with pytest.raises(TypeError, match="must be a DataFrame, got dict"):
        from_dataframe({"a": [1]}, client="a")


@pytest.mark.parametrize(
    ("ids", "num_clients", "message"),
    [
        ([0, 2, 2], None, "client 1 has none"),
        ([0.0, 1.0, 1.0], None, "dtype float64"),
        ([0, -1, 1], None, "client_ids must be 0 or larger, got -1 in row 1"),
        ([-1, -1, -1], None, "client_ids must be 0 or larger, got -1 in row 0"),
        ([0, 1, 5], 2, "client_ids must be smaller than num_clients=2, got 5 in row 2"),
    ],
)
def test_invalid_ids_of_clients_raise(ids, num_clients, message):
    with pytest.raises(ValueError, match=message):
        from_arrays(np.ones(3), np.array(ids), num_clients=num_clients)


def test_a_client_beyond_the_last_raises():
    with pytest.raises(IndexError, match="no client 2, only 0 to 1"):
        from_clients([np.ones(2), np.ones(1)]).client(2)
