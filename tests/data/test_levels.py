"""Levels of text: one order for all clients, mistakes of spelling, and numbers written as text."""

import warnings

import numpy as np
import pandas as pd
import polars
import pytest

from fedmcmc import FederatedData
from fedmcmc.data import Column, Dictionary, code_rows, in_words


def categories(values, levels):
    return pd.DataFrame({"y": pd.Categorical(values, categories=levels, ordered=True)})


def unordered(values, levels=None):
    return pd.DataFrame({"y": pd.Categorical(values, categories=levels)})


def polars_categories(*values):
    return polars.DataFrame({"y": polars.Series(values, dtype=polars.Categorical)})


def text(*values):
    return pd.DataFrame({"y": list(values)})


def enum(values, levels):
    return polars.DataFrame({"y": polars.Series(values, dtype=polars.Enum(levels))})


MERGED_ORDERS = {
    "a level between": (
        [categories(["severe"], ["mild", "severe"])],
        categories(["moderate"], ["mild", "moderate", "severe"]),
        ["mild", "moderate", "severe"],
    ),
    "the last level alone": (
        [categories(["severe"], ["severe"])],
        categories(["mild"], ["mild", "severe"]),
        ["mild", "severe"],
    ),
    "a chain over three clients": (
        [categories(["b"], ["b", "c"]), categories(["d"], ["c", "d"])],
        categories(["a"], ["a", "b"]),
        ["a", "b", "c", "d"],
    ),
    "numbers": ([categories([3], [3, 1])], categories([1], [3, 2, 1]), ["3", "2", "1"]),
    "an order at one client": (
        [text("mild")],
        categories(["mild"], ["severe", "mild"]),
        ["severe", "mild"],
    ),
    "enumerations": ([enum(["x"], ["z", "x"])], enum(["y"], ["z", "y", "x"]), ["z", "y", "x"]),
}


@pytest.mark.parametrize("name", MERGED_ORDERS)
def test_orders_of_clients_are_merged(name):
    tables, table, levels = MERGED_ORDERS[name]
    for clients in ([*tables, table], [table, *tables]):
        data = FederatedData.from_clients(clients)
        assert data.coding == {"y": tuple(levels)} and data.orders == {"y": "ordered"}
        values = [str(value) for client in clients for value in client["y"].to_list()]
        assert [levels[code] for code in data.rows["y"]] == values
        assert f"(ordered: 0 {levels[0]!r} < 1 {levels[1]!r}" in repr(data)


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ({"A": "ab", "B": "ba"}, r"'a' < 'b' \(client 'A'\), 'b' < 'a' \(client 'B'\)"),
        (
            {"A": "ab", "B": "bc", "C": "ca"},
            r"contradict.*'c' < 'a' \(client 'C'\).*client 'A'.*client 'B'",
        ),
        ({"A": "ac", "B": "bc"}, r"whether 'a' or 'b' comes first: .*'A'\), 'b' < 'c' \(client 'B"),
        ({"A": "a", "B": "b"}, r"whether 'a' or 'b' comes first.*Declare all categories"),
    ],
)
def test_orders_that_contradict_or_are_incomplete_raise(orders, message):
    tables = {name: categories(list(levels), list(levels)) for name, levels in orders.items()}
    with pytest.raises(ValueError, match=message):
        FederatedData.from_clients(tables)
    polars_tables = {name: enum(list(levels), list(levels)) for name, levels in orders.items()}
    with pytest.raises(ValueError, match=message):
        FederatedData.from_clients(polars_tables)


def test_text_outside_of_the_ordered_categories_raises():
    with pytest.raises(ValueError, match=r"client 1 holds 'z', which is none.*'c' < 'a'"):
        FederatedData.from_clients([categories(["a"], ["c", "a"]), text("z")])


@pytest.mark.parametrize(
    ("clients", "levels", "order"),
    [
        (
            [text("high", "low", "medium"), text("medium", "low", "high")],
            ["high", "low", "medium"],
            "alphabetical",
        ),
        ([unordered([10, 2]), unordered([2, 3, 1])], ["1", "2", "3", "10"], "numerical"),
        ([unordered(["10", "9"])], ["9", "10"], "numerical"),
        ([unordered([2.5, 10.0])], ["2.5", "10"], "numerical"),
        ([unordered(["b", "a"], ["b", "a"])] * 2, ["b", "a"], "as declared"),
        ([unordered(["b"]), unordered(["a"])], ["a", "b"], "alphabetical"),
        ([polars_categories("m", "f"), polars_categories("f", "m")], list("fm"), "alphabetical"),
    ],
)
def test_unordered_levels_are_sorted_or_as_declared(clients, levels, order):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = FederatedData.from_clients(clients)
    assert data.coding == {"y": tuple(levels)} and data.orders == {"y": order}
    values = [
        f"{value:g}" if isinstance(value, float) else str(value)
        for table in clients
        for value in table["y"]
    ]
    assert [levels[code] for code in data.rows["y"]] == values
    assert f"y: int32 ({order}: 0 {levels[0]!r}, 1 {levels[1]!r}" in repr(data)


def test_a_lost_declared_order_warns():
    clients = [unordered(["drug"], ["placebo", "drug"]), unordered(["placebo"], ["placebo"])]
    message = "client 0 has the categories 'placebo', 'drug'"
    with pytest.warns(UserWarning, match=message) as caught:
        data = FederatedData.from_clients(clients)
    assert data.coding == {"y": ("drug", "placebo")} and caught[0].filename == __file__


def test_a_report_names_the_order():
    ordered = categories(["a", "c"], ["c", "b", "a"])
    words = in_words(FederatedData.from_clients([ordered.assign(z=["u", "v"])]))
    assert words["columns"] == (
        "y: 0 is 'c', 1 is 'b', 2 is 'a' (ordered categories)\nz: 0 is 'u', 1 is 'v'"
    )


SAME = [
    ("Female", "Female "),
    ("a  b", "a b"),
    ("a\u00a0b", "a b"),
    ("Z\u00fcrich", "Zu\u0308rich"),
]


@pytest.mark.parametrize(("text_a", "text_b"), SAME)
def test_texts_that_look_the_same_raise(text_a, text_b):
    message = "differ only in white space or in the encoding of letters"
    with pytest.raises(
        ValueError, match=rf"'y' has the levels .*client 'P'.*client 'Q'.*{message}"
    ):
        FederatedData.from_clients({"P": text(text_a, text_a), "Q": text(text_b)})
    table = pd.DataFrame({"x": [1, 2, 3], "y": [text_a, text_b, "z"], "c": 1})
    with pytest.raises(ValueError, match=rf"'y' has the levels.*{message}"):
        FederatedData.from_dataframe(table, client="c")
    with pytest.raises(ValueError, match=rf"'y' has the clients.*{message}"):
        FederatedData.from_dataframe(table, client="y")
    with pytest.raises(ValueError, match=rf"'y' has the groups.*{message}"):
        FederatedData.from_dataframe(table, client="c", groups="y")
    with pytest.raises(ValueError, match=message):
        FederatedData.from_clients({text_a: text("u"), text_b: text("v")})
    with pytest.raises(ValueError, match=message):
        FederatedData.from_arrays(np.ones(2), [text_a, text_b])
    with pytest.raises(ValueError, match=rf"Client 0 has the groups.*{message}"):
        FederatedData.from_clients([np.ones(2)], groups=[[text_a, text_b]])


@pytest.mark.parametrize(("text_a", "text_b"), [("Female", "female"), ("post-op", "post\u2013op")])
def test_texts_that_differ_in_case_or_dashes_warn(text_a, text_b):
    message = rf"'y' has the levels '{text_a}' \(client 'P'\) and '{text_b}' \(client 'Q'\)"
    with pytest.warns(UserWarning, match=message) as caught:
        data = FederatedData.from_clients({"P": text(text_a), "Q": text(text_b)})
    assert len(data.coding["y"]) == 2 and caught[0].filename == __file__
    with pytest.warns(UserWarning, match="labels"):
        FederatedData.from_clients({text_a: text("u"), text_b: text("v")})
    with pytest.warns(UserWarning, match="labels"):
        FederatedData.from_arrays(np.ones(2), [text_a, text_b])


@pytest.mark.parametrize(
    ("clients", "levels"),
    [
        ({"A": text("high", "low"), "B": text("medium")}, "'high' .client 'A'., 'low'.*'medium'"),
        (
            {"A": text("f", "m"), "B": text("f", "m", "fem")},
            "only one client has: 'fem' .client 'B'",
        ),
        ({"A": text("f", "m"), "B": text("female", "male")}, "'f' .*, 'm' .*, 'female' .*, 'male'"),
        (
            {"A": unordered(["a"]), "B": unordered(["a", "c"])},
            "only one client has: 'c' .client 'B'",
        ),
    ],
)
def test_levels_that_only_one_client_has_are_reported(clients, levels):
    """Nothing but the declared levels shows that a client writes a level differently."""
    with pytest.warns(
        UserWarning, match=rf"Column 'y' has levels .*{levels}.*a dictionary"
    ) as caught:
        data = FederatedData.from_clients(clients)
    assert len(caught) == 1 and caught[0].filename == __file__
    codes = {value for table in clients.values() for value in table["y"].to_list()}
    assert data.coding == {"y": tuple(sorted(codes))}
    dictionary = Dictionary({"y": Column("category", levels=tuple(sorted(codes)))})
    data = FederatedData.from_clients(clients, dictionary=dictionary)  # without a warning
    assert data.coding == {"y": tuple(sorted(codes))}


def test_names_of_clients_in_a_column_are_not_reported():
    FederatedData.from_clients({"A": text("a", "a"), "B": text("b")})


@pytest.mark.filterwarnings("ignore:Column 'y' has levels that only one client has")
def test_a_marker_of_a_missing_value_warns():
    with pytest.warns(UserWarning, match="client 'B' holds 'NA', which becomes an ordinary level"):
        FederatedData.from_clients({"A": text("f"), "B": text("m", "NA")})


NUMBERS = [
    ["0.5", "10", "2.5"],
    ["1,5", "2"],
    ["1 000", "20"],
    [" 3 ", "4"],
    ["<5", "6"],
    ["54", "NA", "61"],
    ["1", "."],
    ["12", "15", "18", "unknown"],
    ["1,234.5", "2"],
    ["5%", "10%"],
]


@pytest.mark.parametrize("values", NUMBERS, ids=str)
def test_numbers_written_as_text_raise(values):
    message = r"Column 'y'.* holds numbers written as text \('.*pd.to_numeric.*\"category\"\)"
    with pytest.raises(ValueError, match=message):
        FederatedData.from_clients({"A": text("f"), "B": text(*values)})
    with pytest.raises(ValueError, match=message):
        FederatedData.from_dataframe(text(*values).assign(c="u"), client="c")
    with pytest.raises(ValueError, match=message):
        FederatedData.from_clients([polars.DataFrame({"y": values})])
    coded = pd.DataFrame({"y": pd.Categorical(values)})
    assert len(FederatedData.from_clients([coded]).coding["y"]) == len(values)


@pytest.mark.parametrize("values", [["I", "II"], ["1", "2", "3a", "3b"], ["10 mg", "5 mg"]])
def test_text_with_few_numbers_stays_text(values):
    assert FederatedData.from_clients([text(*values)]).coding["y"] == tuple(sorted(values))


@pytest.mark.parametrize(
    ("levels", "values", "message"),
    [
        (("1", "2", "3"), [1, 2], r"such as '1'\) or codes of the levels '1', '2', '3'"),
        (("1", "2", "3"), [1.0, 3.0], "Turn the column into text"),
        (("10", "20"), [0, 1], "such as '10'"),
        (("yes", "no"), [True, False], "holds booleans, and its levels are 'yes', 'no'"),
        (("True", "False"), [True, False], "holds booleans"),
        (("mild", "severe"), [0, 2], "holds 2 in row 1"),
    ],
)
def test_numbers_that_can_be_levels_or_codes_raise(levels, values, message):
    for rows in (pd.DataFrame({"g": values}), {"g": np.array(values)}):
        with pytest.raises(ValueError, match=message):
            code_rows(rows, {"g": levels}, "site 'Bern'", remedy="")


@pytest.mark.parametrize(
    ("levels", "values", "codes"),
    [
        (("1", "2", "3"), ["3", "1"], [2, 0]),
        (("0", "1", "2"), [2, 0], [2, 0]),
        (("mild", "severe"), [1, 0], [1, 0]),
        (("<30", "30-60", ">60"), [2, 0], [2, 0]),
        (("False", "True"), [True, False], [1, 0]),
    ],
)
def test_clear_levels_and_codes_are_coded(levels, values, codes):
    for rows in (pd.DataFrame({"g": values}), {"g": np.array(values)}):
        coded = code_rows(rows, {"g": levels}, "site 'Bern'", remedy="")
        assert coded["g"].tolist() == codes
