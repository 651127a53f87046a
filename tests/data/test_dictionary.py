"""A study dictionary codes text, and its checks name client, column, row and value."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import polars
import pytest
import scipy.stats

import fedmcmc
from fedmcmc import FederatedData
from fedmcmc.data import Column, Dictionary, Rules, row_values

STUDY = """
outcome = "readmitted"
client = "hospital"
group = "patient"

[columns]
hospital = { type = "category", levels = ["Bern", "Basel"] }
patient = { type = "integer" }
age = { type = "number", unit = "years", range = [18, 110], description = "Age at admission" }
visits = { type = "integer", max_missing = 0.5 }
stay = { type = "time", unit = "days" }
readmitted = { type = "event" }
arm = { type = "category", levels = ["usual", "program"] }
pain = { type = "ordered", levels = ["none", "mild", "severe"] }
note = { type = "text", max_missing = 1.0 }

[sites]
Bern = 3
Basel = [1, 2]

[rules]
min_events = 1
"""
BERN = {
    "hospital": ["Bern"] * 3,
    "patient": [1, 1, 2],
    "age": [50.5, 61, 72],
    "visits": [1, None, 3],
    "stay": [0.5, 2, 9],
    "readmitted": [0, 1, 0],
    "arm": ["program", "usual", "program"],
    "pain": ["severe", "none", "mild"],
    "note": ["x", None, "y"],
}
BASEL = {
    "hospital": ["Basel"],
    "patient": [1],
    "age": [40.0],
    "visits": [0],
    "stay": [4.0],
    "readmitted": [1],
    "arm": ["usual"],
    "pain": ["mild"],
    "note": ["z"],
}
ROWS = {
    "age": [50.5, 61, 72, 40],
    "visits": [1, np.nan, 3, 0],
    "stay": [0.5, 2, 9, 4],
    "readmitted": [0, 1, 0, 1],
    "arm": [1, 0, 1, 0],
    "pain": [2, 0, 1, 1],
}
"""Rows of both clients, Bern before Basel, as numbers."""
KINDS = {
    "columns": lambda rows: rows,
    "pandas": pd.DataFrame,
    "polars": lambda rows: polars.DataFrame(rows, strict=False),
    "categories": lambda rows: pd.DataFrame(rows).astype({"arm": "category", "note": "object"}),
    "nullable": lambda rows: pd.DataFrame(rows).convert_dtypes(),
    "enumerations": lambda rows: polars.DataFrame(rows, strict=False).with_columns(
        polars.col("pain").cast(polars.Enum(["none", "mild", "severe"]))
    ),
}
"""Kinds of tables that hold the same rows."""


@pytest.fixture
def dictionary(tmp_path):
    (tmp_path / "study.toml").write_text(STUDY)
    return Dictionary.read(tmp_path / "study.toml")


def only(**columns):
    """Return a dictionary without roles and rules."""
    return Dictionary({name: Column(**column) for name, column in columns.items()})


def test_a_file_and_a_mapping_are_the_same_dictionary(dictionary):
    assert dictionary.columns["age"] == Column(
        "number", unit="years", range=(18, 110), description="Age at admission"
    )
    assert dictionary.levels == {
        "arm": ("usual", "program"),
        "pain": ("none", "mild", "severe"),
    }
    assert dictionary.outcome == ("readmitted",) and dictionary.events == ("readmitted",)
    assert dictionary.sites == {"Bern": 3, "Basel": (1, 2)} and dictionary.rules == Rules(
        min_events=1
    )
    text = json.dumps(dictionary.to_dict())
    assert Dictionary.from_dict(json.loads(text)) == dictionary
    assert "  pain: ordered, 'none' < 'mild' < 'severe'." in repr(dictionary)
    assert "  age: number, 18 to 110, years. Age at admission." in repr(dictionary)


@pytest.mark.parametrize("kind", KINDS)
def test_clients_are_coded_by_the_dictionary_alone(dictionary, kind):
    tables = {"Bern": KINDS[kind](BERN), "Basel": KINDS[kind](BASEL)}
    data = FederatedData.from_clients(tables, dictionary=dictionary)
    rows = row_values(data.rows)
    assert {*rows} == {*ROWS} and data.labels == ("Bern", "Basel")
    for name, values in ROWS.items():
        np.testing.assert_array_equal(rows[name], np.array(values, np.float32))
        assert rows[name].dtype == dictionary.rows[name].dtype, name
    assert rows["pain"].dtype == np.int32 and rows["visits"].dtype == np.float32
    assert data.coding == dictionary.levels
    assert data.orders == {"arm": "as declared", "pain": "ordered"}
    assert [list(labels) for labels in data.group_labels] == [[1, 2], [1]]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "columns"])
def test_one_table_has_the_same_rows(dictionary, kind):
    order = [3, 0, 1, 2]
    both = {name: [(BERN[name] + BASEL[name])[i] for i in order] for name in BERN}
    data = FederatedData.from_dataframe(KINDS[kind](both), dictionary=dictionary)
    assert data.labels == ("Basel", "Bern") and data.sizes.tolist() == [1, 3]
    rows = row_values(data.rows)
    for name, values in ROWS.items():
        np.testing.assert_array_equal(rows[name], np.array(values, np.float32)[order])
    assert [len(labels) for labels in data.group_labels] == [1, 2]


WRONG = [
    (
        "age",
        610.0,
        r"'age' of client 'Bern' holds 610.0 in row 1, outside of the range 18 to 110 y",
    ),
    (
        "age",
        None,
        r"'age' of client 'Bern' has 1 missing value in 3 rows, the first in row 1.*none",
    ),
    ("age", float("inf"), r"'age' of client 'Bern' holds inf in row 1, which is not finite"),
    ("age", "61", r"'age' of client 'Bern' holds '61' in row 1, which is not a number.*'number'"),
    ("visits", 1.5, r"'visits' of client 'Bern' holds 1.5 in row 1, which is not a whole number"),
    ("visits", 2**40, r"'visits' of client 'Bern' holds 1099511627776.* in row 1.*32 bits"),
    ("stay", -1.0, r"'stay' of client 'Bern' holds -1.0 in row 1, and a time is at least 0"),
    ("readmitted", 2, r"'readmitted' of client 'Bern' holds 2 in row 1, and an event is 0 or 1"),
    ("readmitted", 0, r"'readmitted' of client 'Bern' has 0 events.*at least 1 \(min_events\)"),
    ("arm", "Usual", r"'arm' of client 'Bern' holds 'Usual' in row 1, which is none of the levels"),
    ("arm", "usual ", r"'arm' of client 'Bern' holds 'usual ' in row 1"),
    ("arm", None, r"'arm' of client 'Bern' has 1 missing value in 3 rows, the first in row 1"),
    ("pain", "moderate", r"'moderate' in row 1, which is none of the levels 'none', 'mild', 'sev"),
    ("hospital", "Basel", r"'hospital' of client 'Bern' holds 'Basel' in row 1, and must hold the"),
    ("patient", None, r"'patient' of client 'Bern' has 1 missing value"),
]


@pytest.mark.parametrize(("column", "value", "message"), WRONG)
@pytest.mark.parametrize("kind", ["columns", "pandas", "polars"])
def test_a_wrong_value_is_named_with_client_column_and_row(
    dictionary, kind, column, value, message
):
    values = BERN[column].copy()
    values[1] = value
    if kind == "polars" and len({type(x) for x in values if x is not None}) > 1:
        values = polars.Series(values, dtype=polars.Object)
    table = KINDS[kind](BERN | {column: values})
    tables = {"Bern": table, "Basel": KINDS[kind](BASEL)}
    for fails in (
        lambda: dictionary.check(table, "Bern"),
        lambda: dictionary.code(table, "Bern"),
        lambda: FederatedData.from_clients(tables, dictionary=dictionary),
    ):
        with pytest.raises(ValueError, match=message):
            fails()


def test_a_row_of_one_table_is_named_by_its_place_in_the_table(dictionary):
    both = pd.concat([pd.DataFrame(BASEL), pd.DataFrame(BERN)], ignore_index=True)
    both.loc[2, "age"] = 7.0
    message = "'age' of client 'Bern' holds 7.0 in row 2, outside"
    with pytest.raises(ValueError, match=message):
        FederatedData.from_dataframe(both, dictionary=dictionary)
    arms = both.assign(age=50, arm=["usual", "usual", "Program", "program"])
    with pytest.raises(ValueError, match=r"'arm' of client 'Bern' holds 'Program' in row 2"):
        FederatedData.from_dataframe(arms, dictionary=dictionary)
    with pytest.raises(ValueError, match=r"'arm' of client 'Bern' holds 2 in row 3"):
        FederatedData.from_dataframe(both.assign(age=50, arm=[0, 1, 1, 2]), dictionary=dictionary)
    both.loc[3, "age"] = 9.0
    with pytest.raises(ValueError, match=r"in row 2 \(and 1 more value\), outside"):
        FederatedData.from_dataframe(both, dictionary=dictionary)


def test_rows_and_names_of_clients_are_checked(dictionary):
    table = pd.DataFrame(BERN)
    with pytest.raises(ValueError, match=r"Client 'Bern' has 2 rows, and the dictionary expects 3"):
        dictionary.check(table[:2], "Bern")
    more = pd.concat([pd.DataFrame(BASEL)] * 3)
    with pytest.raises(ValueError, match=r"Client 'Basel' has 3 rows, .* expects from 1 to 2"):
        dictionary.check(more, "Basel")
    with pytest.raises(ValueError, match=r"Client 'Chur' is none of the levels.*'Bern', 'Basel'"):
        dictionary.check(table, "Chur")
    with pytest.raises(ValueError, match=r"Client 0 is none of .*a mapping of tables by name"):
        FederatedData.from_clients([table], dictionary=dictionary)
    with pytest.raises(ValueError, match=r"has the column 'extra', which the dictionary does not"):
        dictionary.check(table.assign(extra=1), "Bern")
    with pytest.raises(ValueError, match=r"has no column 'age', which the dictionary lists"):
        dictionary.check(table.drop(columns="age"), "Bern")
    without = table.drop(columns=["hospital", "note"])
    assert dictionary.code(without, "Bern")["arm"].tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match=r"3 rows in column 'visits' and 2 in column 'age'"):
        dictionary.check({**BERN, "age": [50, 60]}, "Bern")
    with pytest.raises(TypeError, match=r"must be a DataFrame or a mapping of columns"):
        dictionary.check(np.ones(3), "Bern")


def test_rules_of_owners_are_checked():
    dictionary = Dictionary(
        {"age": Column("number")}, rules={"min_rows": 3, "min_rows_per_parameter": 2.5}
    )
    with pytest.raises(ValueError, match=r"Client 'A' has 2 rows, .*at least 3 \(min_rows\)"):
        dictionary.check({"age": [1, 2]}, "A")
    dictionary.check_parameters(2, 5, "A")
    with pytest.raises(ValueError, match=r"'A' has 4 rows, and a model of 2 parameters .* least 5"):
        dictionary.check_parameters(2, 4, "A")


def test_missing_values_are_allowed_up_to_a_fraction():
    dictionary = Dictionary(
        {"age": {"type": "number"}, "arm": {"type": "category", "levels": ["a", "b"]}},
        rules={"max_missing": 0.1},
    )
    rows = {"age": [1.0] * 27 + [None] * 3, "arm": ["a"] * 30}
    assert np.isnan(dictionary.code(rows)["age"]).sum() == 3
    data = FederatedData.from_clients([rows], dictionary=dictionary)
    assert int(np.isnan(data.rows["age"]).sum()) == 3
    message = "4 missing values in 30 rows, the first in row 26, .* at most a fraction of 0.1"
    with pytest.raises(ValueError, match=message):
        dictionary.check(rows | {"age": [1.0] * 26 + [None] * 4})
    exact = only(age={"type": "number", "max_missing": 0.29})
    exact.check({"age": [1.0] * 71 + [None] * 29})
    missing = rows | {"arm": ["a"] * 29 + [None]}
    dictionary.check(missing)
    with pytest.raises(ValueError, match=r"'arm' has no value in row 29, .* cannot hold missing"):
        dictionary.code(missing)


@pytest.mark.parametrize(
    ("column", "values", "codes"),
    [
        ({"type": "event", "levels": ["alive", "died", "moved"]}, ["died", "alive"], [1, 0]),
        ({"type": "event"}, [True, False], [1, 0]),
        ({"type": "event"}, np.array([1.0, 0.0]), [1, 0]),
        ({"type": "category", "levels": ["False", "True"]}, [True, False], [1, 0]),
        ({"type": "category", "levels": ["0", "1"]}, np.array([1, 0], np.int8), [1, 0]),
        ({"type": "category", "levels": ["2", "1"]}, ["1", "2"], [1, 0]),
        ({"type": "category", "levels": ["2", "1"]}, pd.Categorical([1, 2]), [1, 0]),
        ({"type": "ordered", "levels": ["b", "a"]}, np.array(["a", "b"]), [1, 0]),
    ],
)
def test_events_and_categories_are_coded(column, values, codes):
    dictionary = only(x=column, y={"type": "number"})
    coded = dictionary.code(pd.DataFrame({"x": values, "y": 1.0}))["x"]
    assert coded.tolist() == codes and coded.dtype == np.int32
    if not isinstance(values, pd.Categorical):
        assert dictionary.code({"x": values, "y": [1.0, 2.0]})["x"].tolist() == codes


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ({"type": "category", "levels": ["2", "1"]}, [1, 2], "can be levels .* or codes"),
        ({"type": "category", "levels": ["no", "yes"]}, [True, False], "holds booleans"),
        (
            {"type": "ordered", "levels": ["a", "b"]},
            pd.Categorical(["a", "b"], ["b", "a"], ordered=True),
            "ordered categories 'b' < 'a', in another order than the levels 'a', 'b'",
        ),
        ({"type": "event"}, ["yes", "no"], "holds 'yes' in row 0 .*which is not a number"),
        ({"type": "number"}, [True, False], "holds True in row 0 .*a boolean"),
        ({"type": "number"}, pd.to_datetime(["2024-01-01"] * 2), "row 0 .*which is not a number"),
        ({"type": "text"}, [1, 2], "holds 1 in row 0 .*which is not text"),
    ],
)
def test_values_of_another_type_raise(column, values, message):
    dictionary = only(x=column, y={"type": "number"})
    with pytest.raises(ValueError, match=message):
        dictionary.check(pd.DataFrame({"x": values, "y": 1.0}))


def test_codes_ignore_what_clients_declare():
    """Two clients with other levels and orders have the codes of the dictionary."""
    dictionary = only(y={"type": "category", "levels": ["c", "a", "b"]})
    tables = [
        pd.DataFrame({"y": pd.Categorical(["a", "b"], ["b", "a"])}),
        pd.DataFrame({"y": ["c"]}),
        polars.DataFrame({"y": polars.Series(["b"], dtype=polars.Categorical)}),
    ]
    data = FederatedData.from_clients(tables, dictionary=dictionary)
    assert data.rows["y"].tolist() == [1, 2, 0, 2] and data.coding == {"y": ("c", "a", "b")}
    assert "y: int32 (as declared: 0 'c', 1 'a', 2 'b')" in repr(data)


def test_columns_and_roles_are_arguments_of_one_table(dictionary):
    table = pd.concat([pd.DataFrame(BERN), pd.DataFrame(BASEL)]).assign(extra=1)
    data = FederatedData.from_dataframe(table, columns=["age", "pain"], dictionary=dictionary)
    rows = row_values(data.rows)
    assert sorted(rows) == ["age", "pain"]
    with pytest.raises(ValueError, match=r"client is the column 'arm', and in the dictionary it"):
        FederatedData.from_dataframe(table, client="arm", dictionary=dictionary)
    with pytest.raises(ValueError, match=r"columns has 'note', which is no column of rows"):
        FederatedData.from_dataframe(table, columns=["note"], dictionary=dictionary)
    with pytest.raises(TypeError, match=r"client must name the column"):
        FederatedData.from_dataframe(table)
    plain = only(age={"type": "number"}, ward={"type": "text"})
    wards = pd.DataFrame({"age": [1.0, 2, 3], "ward": ["u", "v", "u"]})
    data = FederatedData.from_dataframe(wards, client="ward", dictionary=plain)
    assert data.labels == ("u", "v") and data.rows["age"].tolist() == [1, 3, 2]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('outcome = "readmitted"', 'outcom = "y"', "has 'outcom', which is unknown. Is 'outcome'"),
        ("range = [18, 110]", "rang = [18, 110]", "Column 'age' has 'rang'.* Is 'range' meant"),
        ("range = [18, 110]", "range = [110, 18]", "Column 'age': range must be the smallest and"),
        ("range = [18, 110]", "range = [18]", "range must be the smallest and"),
        ('type = "number"', 'type = "nunber"', "Column 'age': type has 'nunber'.* Is 'number'"),
        ('{ type = "time", unit = "days" }', '{ unit = "days" }', "Column 'stay' has no type"),
        ('type = "event" }', 'type = "event", range = [0, 1] }', "range is for the types number"),
        ('type = "event" }', 'type = "event", levels = ["a"] }', "needs? at least two levels"),
        ('"ordered", levels = ["none", "mild", "severe"]', '"ordered"', "'ordered' needs levels"),
        ('"none", "mild"', '"mild", "mild"', "must differ, got 'mild' twice"),
        ('"none", "mild"', '"mild ", "mild"', "differ only in white space"),
        ('"none", "mild"', '1, "mild"', "must be a list of texts in their order"),
        ("max_missing = 0.5", "max_missing = 50", "max_missing must be a fraction from 0 to 1"),
        ("min_events = 1", "min_event = 1", "rules has 'min_event'.* Is 'min_events' meant"),
        ("min_events = 1", "min_rows = 0", "min_rows must be a whole number of at least 1, got 0"),
        ("[1, 2]", "[2, 1]", "sites must give each site's number of rows.*'Basel'"),
        ('outcome = "readmitted"', 'outcome = "readmited"', "outcome has .* Is 'readmitted' meant"),
        ('outcome = "readmitted"', 'outcome = "age"', "no outcome has the type 'event'"),
        ('outcome = "readmitted"', 'outcome = "note"', "outcome 'note' is not a value of the rows"),
        ('group = "patient"', 'group = "age"', "names each row's group.* its type must be one of"),
        ("[columns]", "[column]", "has 'column', which is unknown. Is 'columns' meant"),
        ("[columns]", "[columns", "is not a valid TOML file"),
    ],
)
def test_a_file_that_is_no_dictionary_is_refused(tmp_path, old, new, message):
    path = tmp_path / "study.toml"
    assert old in STUDY
    path.write_text(STUDY.replace(old, new))
    with pytest.raises(ValueError, match=message) as caught:
        Dictionary.read(path)
    assert str(path) in str(caught.value)


def test_a_dictionary_needs_a_column_of_rows():
    with pytest.raises(ValueError, match=r"no column of rows, only clients, groups and text"):
        only(note={"type": "text"})


def test_groups_and_clients_are_never_missing():
    dictionary = Dictionary(
        {"x": {"type": "number"}, "ward": {"type": "text"}, "site": {"type": "text"}},
        client="site",
        group="ward",
        rules={"max_missing": 0.9},
    )
    rows = {"x": [None, 1.0], "ward": ["u", "v"], "site": ["A", "A"]}
    dictionary.check(rows, "A")
    for name in ("ward", "site"):
        with pytest.raises(ValueError, match=f"'{name}' of client 'A' has 1 missing value.*none"):
            dictionary.check(rows | {name: ["A", None]}, "A")


@pytest.mark.parametrize("values", [[True, None, False], [1, None, 0]])
def test_missing_events_keep_their_rows(values):
    dictionary = only(x={"type": "event", "max_missing": 0.5}, y={"type": "number"})
    for table in (
        pd.DataFrame({"x": values, "y": 1.0}),
        pd.DataFrame({"x": values, "y": 1.0}).convert_dtypes(),
        polars.DataFrame({"x": values, "y": [1.0] * 3}),
    ):
        dictionary.check(table)
        with pytest.raises(ValueError, match=r"'x' has no value in row 1"):
            dictionary.code(table)
        assert dictionary.code(table[2:])["x"].tolist() == [0]


def test_wide_floats_are_kept_if_jax_has_them():
    with jax.enable_x64(True):
        dictionary = only(x={"type": "number"}, n={"type": "integer"})
        coded = dictionary.code({"x": [0.1], "n": [2**40]})
        assert coded["x"][0] == 0.1 and coded["n"][0] == 2**40


def severity(values, levels):
    return pd.DataFrame({"y": pd.Categorical(values, categories=levels, ordered=True)})


SEVERITY = {
    "A": severity(["mild"] * 9 + ["severe"] * 3, ["mild", "severe"]),
    "B": severity(["mild"] * 4 + ["moderate"] * 6 + ["severe"] * 8, ["mild", "moderate", "severe"]),
}
"""Client A has no moderate case, and does not declare the level."""


def ordinal(y=None):
    transform = dist.transforms.SimplexToOrderedTransform(0.0)
    cut = numpyro.sample(
        "cut", dist.TransformedDistribution(dist.Dirichlet(jnp.ones(3)), transform)
    )
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.OrderedLogistic(0.0, cut), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("has_dictionary", [False, True])
def test_an_ordinal_outcome_has_the_posterior_of_all_rows(has_dictionary):
    """The prior of the probabilities is uniform, so the posterior is a Dirichlet distribution."""
    levels = ["mild", "moderate", "severe"]
    dictionary = only(y={"type": "ordered", "levels": levels}) if has_dictionary else None
    tables = SEVERITY
    if has_dictionary:  # text in any order at a site is enough
        tables = {name: table.astype(str)[::-1] for name, table in SEVERITY.items()}
    data = FederatedData.from_clients(tables, dictionary=dictionary)
    assert data.coding == {"y": tuple(levels)} and data.orders == {"y": "ordered"}
    fitted = fedmcmc.fit(ordinal, data, rng_key=jax.random.key(0), progress=False)
    cuts = np.asarray(fitted.samples.constrained["cut"]).reshape(-1, 2)
    draws = np.diff(1 / (1 + np.exp(-cuts)), axis=1, prepend=0, append=1)
    exact = scipy.stats.dirichlet([14, 7, 12])
    assert fitted.verdict.startswith("passed")
    errors = (draws.mean(axis=0) - exact.mean()) / np.sqrt(exact.var())
    assert np.abs(errors).max() < 0.1
    np.testing.assert_allclose(draws.std(axis=0), np.sqrt(exact.var()), rtol=0.1)
