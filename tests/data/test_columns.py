"""Columns of numbers in the types that a model can compute with, and inputs that hold none."""

import datetime
import decimal

import jax.numpy as jnp
import numpy as np
import pandas as pd
import polars
import pytest

from fedmcmc import FederatedData
from fedmcmc.data import ClientLoader

NARROW = ["int8", "int16", "uint8", "uint16", "uint32", "uint64"]


def every(column):
    """Return the data of one client from each constructor."""
    table = pd.DataFrame({"y": column, "c": 1})
    return [
        FederatedData.from_clients([{"y": column}]),
        FederatedData.from_clients([table[["y"]]]),
        FederatedData.from_clients([polars.DataFrame({"y": column})]),
        FederatedData.from_dataframe(table, client="c"),
        FederatedData.from_arrays({"y": column}, np.zeros(len(column), int)),
        ClientLoader([len(column)], lambda _: {"y": column}).load(),
    ]


@pytest.mark.parametrize("dtype", NARROW)
def test_integers_do_not_wrap(dtype):
    column = np.array([100, 20], dtype)
    for data in every(column):
        y = data.rows["y"]
        assert (y * y).tolist() == [10_000, 400] and (y - 101).tolist() == [-1, -81]


def test_half_precision_becomes_single():
    column = np.array([300.0, 0.5], np.float16)
    for rows in ({"y": column}, pd.DataFrame({"y": column})):
        data = FederatedData.from_clients([rows])
        assert (data.rows["y"] ** 2).tolist() == [90_000, 0.25]
    pictures = FederatedData.from_clients([np.full((3, 2, 2), 200, np.uint8)]).rows
    assert jnp.sum(pictures, axis=(1, 2)).tolist() == [800] * 3


def test_integers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"\['y'\] do not fit into int32.*4294967295"):
        FederatedData.from_clients([{"y": np.array([1, 2**32 - 1], np.uint32)}])


def test_integers_of_two_types_stay_integers():
    parts = [np.array([1, 2], np.uint64), np.array([-3], np.int8)]
    for clients in ([{"y": x} for x in parts], [pd.DataFrame({"y": x}) for x in parts]):
        y = FederatedData.from_clients(clients).rows["y"]
        assert y.dtype == jnp.int32 and y.tolist() == [1, 2, -3]


@pytest.mark.parametrize(
    "values, wanted",
    [
        (pd.Series([1, 2], dtype=object), [1, 2]),
        (pd.array([1, 2], dtype="Int64"), [1, 2]),
        (pd.array([True, False], dtype="boolean"), [1, 0]),
        (pd.Series([True, False], dtype=object), [1, 0]),
        ([decimal.Decimal("1.5"), decimal.Decimal(2)], [1.5, 2]),
    ],
)
def test_numbers_in_columns_of_objects(values, wanted):
    data = FederatedData.from_clients([pd.DataFrame({"y": values})])
    assert data.rows["y"].tolist() == wanted


@pytest.mark.parametrize(
    "values, message",
    [
        ([True, None], "1 missing value, the first in row 1"),
        (pd.array([True, None], dtype="boolean"), "1 missing value, the first in row 1"),
        (pd.array([1, None], dtype="Int64"), "1 missing value, the first in row 1"),
        (pd.array(["a", None], dtype="string"), "1 missing value, the first in row 1"),
        ([1, "a"], "holds both int and str"),
        ([datetime.date(2026, 1, 1)] * 2, "holds date, which is not a number"),
        ([datetime.timedelta(1)] * 2, "holds Duration.*which is not a number"),
        ([1j, 2], "holds complex128, which is not a number"),
        ([[1], [2]], "holds list, which is not a number"),
    ],
)
def test_what_is_no_number_is_refused_by_name(values, message):
    with pytest.raises(ValueError, match=f"Column 'y' of client 'B' .*{message}"):
        FederatedData.from_clients({"B": pd.DataFrame({"y": values})})


def tables(**columns):
    return pd.DataFrame(columns)


@pytest.mark.parametrize(
    "clients, error, message",
    [
        (tables(site=["a"], y=[1.0]), TypeError, r"from_dataframe\(table, client=...\)"),
        (polars.DataFrame({"y": [1]}), TypeError, r"from_dataframe\(table, client=...\)"),
        ([{"x": [1.0, 2.0]}], ValueError, "'x' of client 0 is a list.*np.asarray"),
        ([{"x": 3.0}], ValueError, "client 0 holds single values"),
        (None, TypeError, "one entry per client, got NoneType"),
        (
            {"A": pd.DataFrame([[1, 2]], columns=["y", "y"])},
            ValueError,
            "client 'A' has 2 columns with the name 'y'",
        ),
        (
            [pd.DataFrame(np.ones((2, 2)))],
            ValueError,
            "a column with the name 0, which is not text",
        ),
        (
            [pd.DataFrame([[1]], columns=pd.MultiIndex.from_tuples([("a", "b")]))],
            ValueError,
            r"the name \('a', 'b'\), which is not text",
        ),
        ([polars.DataFrame({"y": [1]}).lazy()], TypeError, "client 0 is a LazyFrame.*collect"),
        ({"A": tables(y=[1]), "B": {"y": np.ones(1)}}, TypeError, "'A' has a table, client 'B'"),
        ({"A": tables(y=[1]), "B": tables(y=[])}, ValueError, "client 'B' holds no rows"),
        ({"A": {"y": np.ones(1)}, "B": {"z": np.ones(1)}}, ValueError, "'B' has no column 'y'"),
        (
            {"A": {"y": np.ones(1)}, "B": {"y": np.array([1, np.inf])}},
            ValueError,
            r"\['y'\], first row 1 of client 'B'",
        ),
        (
            {"A": {"y": np.ma.masked_array([1.0, 2.0], [0, 1])}},
            ValueError,
            "client 'A' hold masked values",
        ),
        ([{"y": np.array(["a"])}], ValueError, r"\['y'\]: pass each client's rows as a table"),
        ([{"y": np.array(["2026-01-01"], "M8[D]")}], ValueError, "days since a fixed day"),
    ],
)
def test_clients_that_are_none(clients, error, message):
    with pytest.raises(error, match=message):
        FederatedData.from_clients(clients)


@pytest.mark.parametrize("library", [pd, polars])
def test_grouped_tables_are_refused_with_the_way_out(library):
    table = library.DataFrame({"c": ["a", "b"], "y": [1.0, 2.0]})
    grouped = table.groupby("c") if library is pd else table.group_by("c")
    for clients in (grouped, list(grouped)):
        with pytest.raises(TypeError, match="got a grouped table"):
            FederatedData.from_clients(clients)


def test_clients_may_come_from_a_generator():
    data = FederatedData.from_clients({"y": np.full(2, i)} for i in range(2))
    assert data.rows["y"].tolist() == [0, 0, 1, 1]


def test_columns_may_differ_in_order_and_in_kinds_of_numbers():
    data = FederatedData.from_clients([tables(a=[1], b=[2]), tables(b=[0.5], a=[3])])
    assert data.rows["a"].tolist() == [1, 3] and data.rows["b"].tolist() == [2.0, 0.5]


def test_dates_and_numbers_of_categories_are_labels():
    days = pd.to_datetime(["2026-01-02", "2026-01-01"])
    table = tables(y=[1, 2], day=days, site=pd.Categorical([10, 2]))
    assert FederatedData.from_dataframe(table, client="site", columns=["y"]).labels == (2, 10)
    data = FederatedData.from_dataframe(table, client="day", columns=["y"])
    assert [label[:10] for label in data.labels] == ["2026-01-01", "2026-01-02"]
    with pytest.raises(ValueError, match="holds both text and numbers"):
        FederatedData.from_dataframe(tables(y=[1, 2], c=["a", 1]), client="c")
