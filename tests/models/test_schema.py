"""The schema equals summaries of all rows, although it is made of sums."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import polars as pl
import pytest

from fedmcmc.models._columns import read_rows
from fedmcmc.models._design import Design
from fedmcmc.models._formula import parse
from fedmcmc.models._schema import (
    NUM_BINS,
    Numbers,
    Schema,
    count_rows,
    exchange,
    sum_numbers,
    sum_squares,
)


def make_tables(seed=0, sizes=(50, 31, 77)):
    rng = np.random.default_rng(seed)
    tables = {}
    for client, num in zip(("A", "B", "C"), sizes, strict=True):
        tables[client] = pd.DataFrame(
            {
                "age": rng.normal(60, 10, num),
                "bmi": rng.gamma(5, 5, num),
                "sex": rng.choice(["f", "m"], num),
                "stage": rng.choice(["II", "I", "III"], num),
                "ecog": rng.integers(0, 4, num) * 5,
                "region": rng.choice(["north", "south"], num),
                "patient": rng.integers(0, 9, num),
                "y": rng.normal(size=num),
                "time": rng.exponential(1, num),
                "event": rng.integers(0, 2, num),
                "w": rng.integers(0, 4, num),
            }
        )
    return tables


def make_dictionary(**columns):
    empty = {"levels": (), "range": None, "type": "number"}
    entries = {name: SimpleNamespace(**empty | column) for name, column in columns.items()}
    return SimpleNamespace(columns=entries, rules=SimpleNamespace(min_rows=1))


def run(text, tables=None, **settings):
    settings = {"client": "hospital"} | settings
    return exchange(parse(text), make_tables() if tables is None else tables, **settings)


def test_moments_and_quantiles_are_those_of_all_rows():
    tables = make_tables()
    schema = run("y ~ age + bmi", tables)
    pooled = pd.concat(tables.values())
    for name in ("age", "bmi"):
        number = schema.numbers[name]
        np.testing.assert_allclose(number.mean, pooled[name].mean(), rtol=1e-13)
        np.testing.assert_allclose(number.sd, pooled[name].std(), rtol=1e-13)
        probability = np.linspace(0.02, 0.98, 33)
        width = np.ptp(pooled[name]) / NUM_BINS
        errors = number.quantile(probability) - np.quantile(
            pooled[name], probability, method="inverted_cdf"
        )
        assert np.abs(errors).max() <= width
        assert number.count == sum(number.histogram) == len(pooled)
        assert number.quantile([0, 1]).tolist() == [pooled[name].min(), pooled[name].max()]
    np.testing.assert_allclose(schema.outcome["y"].sd, pooled["y"].std(), rtol=1e-13)
    assert (schema.rows, schema.complete, schema.clients) == (158, 158, ("A", "B", "C"))
    assert schema.columns["age"].mean == schema.numbers["age"].mean


def test_moments_of_large_numbers_lose_no_digits():
    tables = {client: x.assign(year=2e9 + x["age"]) for client, x in make_tables().items()}
    schema = run("y ~ year", tables)
    np.testing.assert_allclose(
        schema.numbers["year"].sd, pd.concat(tables.values())["year"].std(), rtol=1e-9
    )


def test_quantiles_are_linear_within_occupied_bins():
    histogram = [0.0] * NUM_BINS
    histogram[1], histogram[2] = 1.0, 3.0
    number = Numbers(4.0, 0.0, 1.0, tuple(histogram), 0.0, 1024.0)
    assert number.quantile([0, 0.25, 0.625, 1]).tolist() == [1, 2, 2.5, 3]


def test_values_on_edges_of_bins_are_in_the_bin_above():
    tables = {client: x.assign(day=x["patient"] + 3) for client, x in make_tables().items()}
    dictionary = make_dictionary(day={"range": (0, NUM_BINS)})
    number = run("y ~ day", tables, dictionary=dictionary).numbers["day"]
    counts = pd.concat(tables.values())["day"].value_counts()
    assert {i: x for i, x in enumerate(number.histogram) if x} == counts.to_dict()
    assert number.quantile([0, 1]).tolist() == [3, 12]


def test_frequency_weights_are_repeated_rows():
    tables = make_tables()
    weighted = run("y | weights(w) ~ age + sex + s(bmi, 3)", tables)
    repeated = run(
        "y ~ age + sex + s(bmi, 3)",
        {client: x.loc[x.index.repeat(x["w"])] for client, x in tables.items()},
    )
    ranges = {name: (x.low, x.high) for name, x in repeated.numbers.items()}
    assert ranges == {name: (x.low, x.high) for name, x in weighted.numbers.items()}
    assert weighted.counts == repeated.counts
    for name in ("columns", "numbers", "outcome"):
        for key, number in getattr(repeated, name).items():
            other = getattr(weighted, name)[key]
            np.testing.assert_allclose(
                [other.count, other.mean, other.sd], [number.count, number.mean, number.sd]
            )
    negative = {client: x.assign(w=-1) for client, x in tables.items()}
    with pytest.raises(ValueError, match=r"'w' of client 'A' in row 0 is -1; .*weight"):
        run("y | weights(w) ~ age", negative)


def test_levels_without_a_dictionary():
    tables = make_tables()
    schema = run("y ~ stage + sex + C(ecog)", tables)
    assert schema.levels["stage"] == ("I", "II", "III")
    assert schema.levels["ecog"] == ("0", "5", "10", "15")
    pooled = pd.concat(tables.values())
    assert schema.counts["ecog"] == tuple((pooled["ecog"] == x).sum() for x in (0, 5, 10, 15))
    ordered = pd.CategoricalDtype(["III", "II", "I"], ordered=True)
    tables = {client: x.astype({"stage": ordered}) for client, x in tables.items()}
    assert run("y ~ stage", tables).levels["stage"] == ("III", "II", "I")
    tables["B"]["stage"] = tables["B"]["stage"].cat.reorder_categories(["I", "II", "III"])
    with pytest.raises(ValueError, match="contradict each other"):
        run("y ~ stage", tables)
    tables = make_tables()
    tables["B"]["sex"] = 1.0
    with pytest.raises(ValueError, match="'sex' of client 'B' holds numbers, and text at other"):
        run("y ~ sex", tables)


def test_levels_of_a_dictionary():
    tables = make_tables()
    dictionary = make_dictionary(
        sex={"levels": ("m", "f")}, ecog={"levels": ("15", "10", "5", "0")}
    )
    schema = run("y ~ sex + ecog", tables, dictionary=dictionary)
    assert schema.levels == {"sex": ("m", "f"), "ecog": ("15", "10", "5", "0")}
    tables["B"].loc[3, "sex"] = "x"
    with pytest.raises(
        ValueError,
        match="'sex' of client 'B' in row 3 is 'x'; it must be one of the levels 'm', 'f'",
    ):
        run("y ~ sex", tables, dictionary=dictionary)


def test_rows_are_counted_in_the_table_of_the_site():
    tables = make_tables()
    tables["B"].loc[1, "age"] = np.nan
    tables["B"].loc[3, "sex"] = "x"
    with pytest.raises(ValueError, match="'sex' of client 'B' in row 3 is 'x'"):
        run("y ~ age + sex", tables, dictionary=make_dictionary(sex={"levels": ("f", "m")}))


def test_rare_and_unobserved_levels():
    tables = make_tables()
    tables["B"].loc[3, "sex"] = "x"
    dictionary = make_dictionary(sex={"levels": ("z", "f", "m", "x")})
    with pytest.warns(UserWarning, match=r"fewer than 5 rows with 'z' \(0\), 'x' \(1\)"):
        schema = run("y ~ sex", tables, dictionary=dictionary)
    assert schema.levels["sex"] == ("f", "m", "x")
    assert schema.unobserved == {"sex": ("z",)}
    assert tuple(schema.columns) == ("sex[m]", "sex[x]")


def test_ranges_of_a_dictionary():
    dictionary = make_dictionary(age={"range": (0, 120)}, bmi={"range": (0, np.inf)})
    schema = run("y ~ age + bmi", dictionary=dictionary)
    assert (schema.numbers["age"].low, schema.numbers["age"].high) == (0, 120)
    assert schema.numbers["bmi"].high == max(x["bmi"].max() for x in make_tables().values())
    tables = make_tables()
    tables["C"].loc[7, "age"] = 610
    with pytest.raises(ValueError, match=r"'age' of client 'C' in row 7 is 610; .*from 0 to 120"):
        run("y ~ age", tables, dictionary=dictionary)
    dictionary.rules.min_rows = 40
    with pytest.raises(ValueError, match=r"Client 'B' has 31 complete rows, .* at least 40"):
        run("y ~ age", dictionary=dictionary)


def test_missing_values():
    tables = make_tables()
    tables["B"].loc[[1, 2], "age"] = np.nan
    tables["C"].loc[5, "sex"] = None
    tables["C"].loc[6, "y"] = np.nan
    tables["C"].loc[7, "bmi"] = np.nan  # not in the formula
    schema = run("y ~ age + sex", tables)
    assert (schema.rows, schema.complete) == (158, 154)
    assert schema.missing == {"y": 1, "age": 2, "sex": 1}
    np.testing.assert_allclose(
        schema.numbers["age"].mean,
        pd.concat(tables.values()).dropna(subset=["y", "age", "sex"])["age"].mean(),
    )
    message = r"4 of 158 rows .* max_missing = 0.02. Most are in column 'age' \(2\), and client 'B'"
    with pytest.raises(ValueError, match=message):
        run("y ~ age + sex", tables, max_missing=0.02)
    tables["B"]["age"] = np.nan
    with pytest.raises(ValueError, match=r"'B' has no complete row among 31. 'age' lacks 31"):
        run("y ~ age + sex", tables, max_missing=0.9)


@pytest.mark.parametrize("column", ["sex", "age"])
def test_a_column_may_be_constant_at_a_site_and_not_at_all_sites(column):
    tables = make_tables()
    tables["A"][column] = tables["A"][column].iloc[0]
    run(f"y ~ {column}", tables)
    for table in tables.values():
        table[column] = tables["A"][column].iloc[0]
    with pytest.raises(ValueError, match=f"'{column}' is .* in all rows of all sites"):
        run(f"y ~ {column}", tables)


def test_bad_values():
    tables = make_tables()
    tables["B"].loc[4, "age"] = np.inf
    with pytest.raises(ValueError, match="'age' of client 'B' holds inf in row 4"):
        run("y ~ age", tables)
    with pytest.raises(ValueError, match="client 'A' has no column 'weight'; its columns are age,"):
        run("y ~ weight")
    with pytest.raises(ValueError, match=r"neither numbers nor text.*for a date"):
        run("y ~ day", {"A": make_tables()["A"].assign(day=pd.Timestamp("2024-01-01"))})
    with pytest.raises(ValueError, match=r"'log\(y\)' of client 'A' in row \d+ is nan; .* finite"):
        run("log(y) ~ age")
    with pytest.raises(ValueError, match=r"client must name the column .*got 'hospital'"):
        run("y ~ age", make_tables()["A"])
    with pytest.raises(ValueError, match="data must be a table"):
        run("y ~ age", {"A": 3})


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("(1 | hospital)", {"hospital": ("client", 3)}),
        ("(1 | patient)", {"patient": ("shared", 9)}),
        ("(1 | region)", {"region": ("shared", 2)}),
        ("(1 | hospital/patient)", {"hospital": ("shared", 3), "hospital:patient": ("group", 27)}),
        ("(1 | hospital) + (1 | region)", {"hospital": ("client", 3), "region": ("shared", 2)}),
        ("(1 | ward)", {"ward": ("group", 6)}),
        ("(1 | hospital) + (1 | ward)", {"hospital": ("shared", 3), "ward": ("group", 6)}),
        ("(1 | region:patient)", {"region:patient": ("shared", 18)}),
    ],
)
def test_kinds_of_groups(text, kinds):
    tables = {
        client: x.assign(ward=[f"{client}{i % 2}" for i in range(len(x))])
        for client, x in make_tables().items()
    }
    groups = run(f"y ~ age + {text}", tables).groups
    assert {name: (x.kind, x.num_levels) for name, x in groups.items()} == kinds
    for group in groups.values():
        assert len(group.levels) == (0 if group.kind == "group" else group.num_levels)


def test_one_table_and_tables_of_polars():
    tables = make_tables()
    expected = run("y ~ age + stage + (1 | hospital)", tables)
    table = pd.concat([x.assign(hospital=client) for client, x in tables.items()])
    table = table.sample(frac=1, random_state=1)
    schema = run("y ~ age + stage + (1 | hospital)", table)
    assert schema.numbers["age"].histogram == expected.numbers["age"].histogram
    assert (schema.clients, schema.counts) == (expected.clients, expected.counts)
    assert run("y ~ age + stage + (1 | hospital)", pl.DataFrame(table.to_dict("list"))) == schema
    assert schema.groups["hospital"].levels == ("A", "B", "C")


def test_survival_outcomes():
    tables = make_tables()
    pooled = pd.concat(tables.values())
    schema = run("Surv(time, event == 1) ~ age", tables)
    assert schema.events == pytest.approx(pooled["event"].sum())
    times = schema.outcome["event_time"]
    events = pooled.loc[pooled["event"] == 1, "time"]
    np.testing.assert_allclose(times.mean, events.mean())
    assert abs(times.quantile(0.5) - events.quantile(0.5, "lower")) < 3 * np.ptp(events) / NUM_BINS
    for table in tables.values():
        table["end"] = table["time"] + 1
    tables["A"].loc[3, "end"] = np.nan  # censored
    schema = run('Surv(time, end, type="interval") ~ age', tables)
    assert (schema.complete, schema.outcome["event_time"].count) == (158, 157)


def test_covariates_that_may_be_missing():
    tables = make_tables()
    tables["B"].loc[[1, 2], "age"] = np.nan
    formula = replace(parse("y ~ age + sex"), missing=(("age", "1 + bmi"),))
    schema = exchange(formula, tables, client="hospital")
    pooled = pd.concat(tables.values())
    assert (schema.complete, schema.missing["age"]) == (158, 2)
    for number in (schema.numbers["age"], schema.columns["age"]):
        np.testing.assert_allclose([number.mean, number.sd], pooled["age"].agg(["mean", "std"]))
    names, means, sds = schema.covariates["age"]
    assert names == ("bmi",)
    np.testing.assert_allclose([*means, *sds], pooled["bmi"].agg(["mean", "std"]))
    assert Schema.from_dict(json.loads(json.dumps(schema.to_dict()))) == schema
    rows = Design(formula, schema).rows(tables["B"], "B")
    np.testing.assert_allclose(rows["x"][[1, 2], 0], 0, atol=1e-6)


def test_a_schema_survives_json():
    schema = run("y ~ age + sex + (1 | hospital/patient)")
    assert Schema.from_dict(json.loads(json.dumps(schema.to_dict()))) == schema


def test_parts_of_a_site_are_sums():
    """Their sizes do not depend on the number of rows, and they contain no label."""
    formula = parse("y ~ age + sex")
    parts = []
    for num in (50, 5000):
        table = make_tables(sizes=(num, 1, 1))["A"]
        site = read_rows(formula, table, "A", (), None)
        arrays = {"age": (site.columns["age"], np.ones(num))}
        edges = {"age": np.linspace(0, 200, NUM_BINS + 1)}
        parts.append(
            [
                count_rows(formula, site, {"sex": ("f", "m")}),
                sum_numbers(arrays, edges),
                sum_squares(arrays, {"age": 60.0}),
            ]
        )
    sizes = [str(pd.io.json.ujson_dumps(x, double_precision=0)).count(",") for x in parts]
    assert sizes[0] == sizes[1] < 1100


def test_an_expression_reads_numbers_of_a_column_with_levels():
    dictionary = make_dictionary(event={"levels": ("0", "1")})
    tables = make_tables()
    schema = run("Surv(time, event == 1) ~ age", tables, dictionary=dictionary)
    assert schema.events == pytest.approx(pd.concat(tables.values())["event"].sum())
    assert run("Surv(time, event) ~ age", tables, dictionary=dictionary).events == schema.events


def test_an_outcome_keeps_levels_without_rows():
    dictionary = make_dictionary(stage={"levels": ("0", "I", "II", "III")})
    schema = run("stage ~ age", dictionary=dictionary)
    assert schema.levels == {"stage": ("0", "I", "II", "III")}
    assert schema.counts["stage"][0] == 0
    assert schema.outcome["y"].low == 1.0
