"""Types of columns: numbers become types in which models can compute, and dates become labels."""

import decimal

import jax.numpy as jnp
import numpy as np
import pandas as pd
import polars
import pytest

from fedmcmc import FederatedData
from fedmcmc.data import ClientLoader


def load_with_each_constructor(column):
    table = pd.DataFrame({"y": column, "c": 1})
    return [
        FederatedData.from_clients([{"y": column}]),
        FederatedData.from_clients([table[["y"]]]),
        FederatedData.from_clients([polars.DataFrame({"y": column})]),
        FederatedData.from_dataframe(table, client="c"),
        FederatedData.from_arrays({"y": column}, np.zeros(len(column), int)),
        ClientLoader([len(column)], lambda _: {"y": column}).load(),
    ]


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "uint16", "uint32", "uint64"])
def test_integers_do_not_wrap(dtype):
    for data in load_with_each_constructor(np.array([100, 20], dtype)):
        y = data.rows["y"]
        assert (y * y).tolist() == [10_000, 400] and (y - 101).tolist() == [-1, -81]


def test_half_precision_becomes_single():
    column = np.array([300.0, 0.5], np.float16)
    for rows in ({"y": column}, pd.DataFrame({"y": column})):
        data = FederatedData.from_clients([rows])
        assert (data.rows["y"] ** 2).tolist() == [90_000, 0.25]
    pictures = FederatedData.from_clients([np.full((3, 2, 2), 200, np.uint8)]).rows
    assert jnp.sum(pictures, axis=(1, 2)).tolist() == [800] * 3


def test_integers_of_two_types_stay_integers():
    parts = [np.array([1, 2], np.uint64), np.array([-3], np.int8)]
    for clients in ([{"y": x} for x in parts], [pd.DataFrame({"y": x}) for x in parts]):
        y = FederatedData.from_clients(clients).rows["y"]
        assert y.dtype == jnp.int32 and y.tolist() == [1, 2, -3]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pd.Series([1, 2], dtype=object), [1, 2]),
        (pd.array([1, 2], dtype="Int64"), [1, 2]),
        (pd.array([True, False], dtype="boolean"), [1, 0]),
        (pd.Series([True, False], dtype=object), [1, 0]),
        ([decimal.Decimal("1.5"), decimal.Decimal(2)], [1.5, 2]),
    ],
)
def test_columns_of_objects_hold_numbers(values, expected):
    data = FederatedData.from_clients([pd.DataFrame({"y": values})])
    assert data.rows["y"].tolist() == expected


def test_columns_may_differ_in_order_and_in_types_of_numbers():
    tables = [pd.DataFrame({"a": [1], "b": [2]}), pd.DataFrame({"b": [0.5], "a": [3]})]
    rows = FederatedData.from_clients(tables).rows
    assert rows["a"].tolist() == [1, 3] and rows["b"].tolist() == [2.0, 0.5]


def test_clients_may_come_from_a_generator():
    data = FederatedData.from_clients({"y": np.full(2, i)} for i in range(2))
    assert data.rows["y"].tolist() == [0, 0, 1, 1]


def test_dates_and_categories_of_numbers_become_labels():
    days = pd.to_datetime(["2026-01-02", "2026-01-01"])
    table = pd.DataFrame({"y": [1, 2], "day": days, "site": pd.Categorical([10, 2])})
    assert FederatedData.from_dataframe(table, client="site", columns=["y"]).labels == (2, 10)
    data = FederatedData.from_dataframe(table, client="day", columns=["y"])
    assert [label[:10] for label in data.labels] == ["2026-01-01", "2026-01-02"]
