"""Arrays of sites are the rows of the arrays of all rows, and equal independent computations."""

import pickle
from types import SimpleNamespace

import numpy as np
import pandas as pd
import polars as pl
import pytest
from scipy.interpolate import BSpline, CubicSpline

from fedmcmc.models._design import Design
from fedmcmc.models._formula import parse
from fedmcmc.models._schema import exchange
from tests.models.test_schema import make_tables


def make_design(text, tables=None, dictionary=None):
    formula = parse(text)
    tables = make_tables() if tables is None else tables
    return Design(formula, exchange(formula, tables, dictionary, client="hospital"))


def stack(design, tables, name="x"):
    """Return an array of all sites' rows, with the columns of the user."""
    arrays = [design.rows(table, client)[name] for client, table in tables.items()]
    centers = design.centers.astype(np.float32) if name == "x" else 0
    return np.concatenate(arrays) + centers


TERMS = [
    "age + bmi + sex + stage",
    "age * stage + sex:stage + age:bmi",
    "0 + sex + stage",
    "age / sex",
    "(age + bmi + sex)**2 - age:sex",
    "C(stage, contr.sum) + C(ecog, contr.poly) + C(sex, contr.helmert)",
    "C(stage, contr.treatment('II'))",
    "s(bmi, 4) + s(log(age), 3)",
    "bs(age, df=5) + bs(bmi, df=4, degree=2)",
    "bs(age, knots=[50, 60]):sex + cr(bmi, df=4)",
    "scale(age) + center(bmi) + standardize(log(bmi))",
    "poly(age, 3) + log(bmi) + I(age > 60) + np.sqrt(bmi) + I(age * bmi)",
    "1",
]


@pytest.mark.parametrize("terms", TERMS)
def test_rows_of_sites_are_rows_of_all_sites_to_the_last_bit(terms):
    tables = make_tables()
    design = make_design(
        f"y ~ {terms} + (1 + {terms if terms == 'age + bmi' else 'age'} | hospital)"
    )
    pooled = pd.concat(tables.values(), ignore_index=True)
    expected = design.rows(pooled, "A")
    for name in ("x", "y", "z_hospital"):
        parts = [design.rows(table, client)[name] for client, table in tables.items()]
        np.testing.assert_array_equal(np.concatenate(parts), expected[name])
    assert expected["x"].shape == (158, len(design.names))
    if design.has_intercept:
        np.testing.assert_allclose(expected["x"].mean(0) / design.scales, 0, atol=2e-6)
    np.testing.assert_allclose(expected["x"].std(0, ddof=1), design.scales, rtol=2e-6)


@pytest.mark.parametrize("terms", TERMS[:7])
def test_matrices_of_levels_equal_formulaics(terms):
    """The levels of all sites are those of the pooled rows, so that its matrix is the same."""
    import formulaic

    tables = make_tables()
    design = make_design(f"y ~ {terms}")
    pooled = pd.concat(tables.values(), ignore_index=True)
    expected = formulaic.Formula(terms).get_model_matrix(pooled)
    expected = expected[[x for x in expected.columns if x != "Intercept"]]
    assert len(design.names) == expected.shape[1]
    np.testing.assert_allclose(stack(design, tables), expected, rtol=1e-6, atol=1e-6)


def test_contrasts_and_interactions():
    tables = make_tables()
    design = make_design("y ~ stage * age + C(sex, contr.sum) + C(ecog)")
    assert design.names == (
        *("stage[II]", "stage[III]", "age", "sex[S.f]", "ecog[5]", "ecog[10]", "ecog[15]"),
        *("stage[II]:age", "stage[III]:age"),
    )
    pooled = pd.concat(tables.values(), ignore_index=True)
    age = pooled["age"].to_numpy()
    stages = [pooled["stage"] == x for x in ("II", "III")]
    columns = [*stages, age, np.where(pooled["sex"] == "f", 1, -1)]
    columns += [pooled["ecog"] == x for x in (5, 10, 15)] + [x * age for x in stages]
    np.testing.assert_allclose(stack(design, tables), np.stack(columns, 1), rtol=1e-6, atol=1e-6)


def test_the_reference_is_the_first_level_of_the_dictionary():
    column = SimpleNamespace(levels=("m", "f"), range=None, type="category")
    dictionary = SimpleNamespace(columns={"sex": column})
    assert make_design("y ~ sex + age:sex", dictionary=dictionary).names == (
        *("sex[f]", "age:sex[m]", "age:sex[f]"),
    )
    assert make_design("y ~ sex").names == ("sex[m]",)


def test_names_of_levels_with_brackets_and_colons():
    tables = make_tables()
    for table in tables.values():
        table["sex"] = table["sex"].map({"f": "f]:age", "m": "[m:age"})
    assert make_design("y ~ sex", tables).names == ("sex[f]:age]",)
    assert make_design("y ~ C(sex):age", tables).names == ("sex[[m:age]:age", "sex[f]:age]:age")


def test_splines_equal_scipys():
    tables = make_tables()
    design = make_design("y ~ s(bmi, 4) + bs(age, df=5)")
    assert design.names == (
        *(f"s(bmi, 4)[{i}]" for i in range(1, 5)),
        *(f"bs(age, df=5)[{i}]" for i in range(1, 6)),
    )
    values = stack(design, tables)
    pooled = pd.concat(tables.values())
    width = np.ptp(pooled["bmi"]) / 1024
    knots = design.schema.numbers["bmi"].quantile(np.linspace(0, 1, 5))
    np.testing.assert_allclose(
        knots, pooled["bmi"].quantile(np.linspace(0, 1, 5), "lower"), atol=3 * width
    )
    # The table of quantiles has 1,024 rows, so that its quantiles are not exactly these knots.
    state = design._fixed._spec.transform_state["s(bmi, 4)"]["knots"]
    np.testing.assert_allclose(state, knots, atol=2 * width)
    natural = CubicSpline(state, np.eye(5), bc_type="natural")(pooled["bmi"])
    np.testing.assert_allclose(values[:, :4], natural[:, 1:], atol=2e-6)
    state = design._fixed._spec.transform_state["bs(age, df=5)"]["knots"]
    assert len(state) == 2 * 4 + 2
    inner = design.schema.numbers["age"].quantile([1 / 3, 2 / 3])
    np.testing.assert_allclose(state[4:6], inner, atol=2 * np.ptp(pooled["age"]) / 1024)
    basis = BSpline.design_matrix(pooled["age"], state, 3).toarray()
    np.testing.assert_allclose(values[:, 4:], basis[:, 1:], atol=2e-6)


def test_scaled_columns_have_moments_of_all_rows():
    tables = make_tables()
    pooled = pd.concat(tables.values())
    for text, expected in (
        ("scale(age)", (pooled["age"] - pooled["age"].mean()) / pooled["age"].std()),
        ("standardize(age)", (pooled["age"] - pooled["age"].mean()) / pooled["age"].std(ddof=0)),
        ("center(age)", pooled["age"] - pooled["age"].mean()),
        (
            "scale(age, center=False)",
            pooled["age"] / np.sqrt((pooled["age"] ** 2).sum() / (len(pooled) - 1)),
        ),
    ):
        design = make_design(f"y ~ {text}")
        np.testing.assert_allclose(stack(design, tables)[:, 0], expected, rtol=1e-5, atol=1e-5)


def test_orthogonal_polynomials_span_the_powers():
    tables = make_tables()
    values = stack(make_design("y ~ poly(age, 2)"), tables).astype(float)
    age = pd.concat(tables.values())["age"].to_numpy()
    powers = np.stack([np.ones_like(age), age, age**2], 1)
    residuals = values - powers @ np.linalg.lstsq(powers, values, rcond=None)[0]
    assert np.abs(residuals).max() < 1e-6
    correlation = np.corrcoef(values.T)[0, 1]
    assert abs(correlation) < 0.05  # orthogonal up to the bins of the histogram


def test_bad_splines():
    tables = make_tables()
    with pytest.raises(
        ValueError, match=r"'s\(I\(age \* bmi\), 3\)' must be a function of a single"
    ):
        make_design("y ~ s(I(age * bmi), 3)")
    for table in tables.values():
        table["w"] = table["w"].clip(0, 1)
    with pytest.raises(ValueError, match=r"Knots of s\(w, 4\) coincide"):
        make_design("y ~ s(w, 4)", tables)
    design = make_design("y ~ bs(age, df=4)")
    with pytest.raises(ValueError, match=r"cannot be computed.*extend beyond"):
        design.rows(make_tables()["A"].assign(age=200.0), "A")


def test_random_terms():
    tables = make_tables()
    design = make_design("y ~ age + sex + (1 + age:sex || hospital) + (0 + sex | region)")
    hospital, region = design.terms
    assert hospital.names == ("Intercept", "age:sex[f]", "age:sex[m]")
    assert (hospital.kind, hospital.correlated, hospital.levels) == (
        "client",
        False,
        ("A", "B", "C"),
    )
    assert region.names == ("sex[f]", "sex[m]")
    assert (region.kind, region.correlated, region.num_levels) == ("shared", True, 2)
    rows, table = design.rows(tables["B"], "B"), tables["B"]
    is_m = (table["sex"] == "m").to_numpy(float)
    expected = np.stack([np.ones(len(table)), table["age"] * (1 - is_m), table["age"] * is_m], 1)
    np.testing.assert_allclose(rows["z_hospital"], expected, rtol=1e-6)
    np.testing.assert_array_equal(rows["z_region"], np.stack([1 - is_m, is_m], 1))
    np.testing.assert_array_equal(rows["index_region"], table["region"] == "south")
    assert rows["index_region"].dtype == np.int32
    assert "index_hospital" not in rows


def test_too_many_coefficients_of_a_group():
    with pytest.raises(
        ValueError, match=r"'hospital' have 4 coefficients \(Intercept, age, bmi, w"
    ):
        make_design("y ~ age + (1 + age + bmi + w | hospital)")
    make_design("y ~ age + (1 + age + bmi + w | region)")


def test_data_of_nested_groups():
    tables = make_tables()
    tables["C"].loc[3, "age"] = np.nan
    design = make_design("y ~ age + (1 | hospital/patient)", tables)
    data = design.data(tables)
    assert data.labels == ("A", "B", "C")
    assert data.sizes.tolist() == [50, 31, 76]
    assert data.group_labels[1] == tuple(f"B:{x}" for x in tables["B"]["patient"].unique())
    rows = data.client_rows(2)
    np.testing.assert_array_equal(rows["index_hospital"], 2)
    np.testing.assert_allclose(rows["y"], tables["C"].drop(3)["y"], rtol=1e-6)


def test_arrays_of_the_outcome():
    tables = make_tables()
    for table in tables.values():
        table["n"], table["use"] = 5, np.where(table["event"] == 1, "yes", "no")
    rows = make_design("use | trials(n) ~ age + offset(log(time) + 1)", tables).rows(
        tables["A"], "A"
    )
    np.testing.assert_array_equal(rows["y"], tables["A"]["event"])
    np.testing.assert_array_equal(rows["trials"], 5)
    np.testing.assert_allclose(rows["offset"], np.log(tables["A"]["time"]) + 1, rtol=1e-5)
    rows = make_design("C(ecog) ~ age").rows(tables["A"], "A")
    np.testing.assert_array_equal(rows["y"], tables["A"]["ecog"] / 5)
    rows = make_design("y | weights(w) ~ age").rows(tables["A"], "A")
    assert (rows["weights"] > 0).all()
    assert rows["weights"].sum() == tables["A"]["w"].sum()


def test_arrays_of_survival_outcomes():
    tables = make_tables()
    for table in tables.values():
        table["start"], table["end"] = table["time"] / 2, table["time"] + 1
    tables["A"].loc[3, "end"] = np.nan
    tables["A"].loc[4, "time"] = np.nan
    formula = 'Surv(time, end, type="interval") ~ age'
    design = make_design(formula, tables)
    rows = design.rows(tables["A"], "A")
    assert (rows["upper"][3], rows["time"][4]) == (np.inf, 0)
    assert design.data(tables).num_rows == 158
    tables["A"] = tables["A"].drop([3, 4]).reset_index(drop=True)
    text = "Surv(start, time, event) ~ age"
    rows = make_design(text, tables).rows(tables["A"], "A")
    np.testing.assert_allclose(rows["time"], tables["A"]["time"], rtol=1e-6)
    np.testing.assert_allclose(rows["start"], tables["A"]["start"], rtol=1e-6)
    for column, value, message in (
        ("event", 2, "'event' of client 'A' in row 7 is 2; it must be 0 or 1"),
        ("time", 0, "'time' of client 'A' in row 7 is 0; it must be positive"),
        ("start", 99, "'start' of client 'A' in row 7 is 99; .*before the stop"),
    ):
        bad = tables["A"].copy()
        bad.loc[7, column] = value
        with pytest.raises(ValueError, match=message):
            make_design(text, tables).rows(bad, "A")


def test_rows_of_predictions_need_no_outcome():
    tables = make_tables()
    design = make_design("y | weights(w) ~ age + sex + (1 | hospital/patient) + (1 | region)")
    new = pd.DataFrame({"age": [50.0, 60], "sex": ["f", "m"], "region": ["south", "east"]})
    rows = design.rows(new, "new", outcome=False)
    assert {*rows} == {"x", "z_hospital", "z_hospital:patient", "z_region", "index_region"}
    np.testing.assert_array_equal(rows["index_region"], [1, -1])
    rows = design.rows(new.assign(patient=[3, 4]), "B", outcome=False)
    np.testing.assert_array_equal(rows["index_hospital"], 1)
    assert rows["group_hospital:patient"].tolist() == ["B:3", "B:4"]
    np.testing.assert_allclose(rows["x"], [[50, 0], [60, 1]] - design.centers, rtol=1e-5)
    with pytest.raises(ValueError, match="'sex' of client 'new' in row 1 is 'x'"):
        design.rows(new.assign(sex=["f", "x"]), "new", outcome=False)
    with pytest.raises(
        ValueError, match=r"'region' of client 'A' in row 0 is 'east'; .*a group of"
    ):
        design.rows(tables["A"].assign(region="east"), "A")


def test_a_site_without_a_level_has_all_columns():
    tables = make_tables()
    tables["B"]["stage"] = "II"
    design = make_design("y ~ stage", tables)
    rows = design.rows(tables["B"], "B")["x"] + design.centers.astype(np.float32)
    np.testing.assert_allclose(rows, np.tile([1, 0], (31, 1)), atol=1e-6)


def test_a_design_can_be_pickled_and_takes_polars():
    tables = make_tables()
    design = make_design("y ~ s(age, 3) * sex + (1 | region)")
    expected = design.rows(tables["A"], "A")
    table = pl.DataFrame(tables["A"].to_dict("list"))
    for rows in (
        pickle.loads(pickle.dumps(design)).rows(tables["A"], "A"),
        design.rows(table, "A"),
    ):
        assert {*rows} == {*expected}
        for name, array in expected.items():
            np.testing.assert_array_equal(rows[name], array)


def test_a_model_without_an_intercept_is_not_centered():
    tables = make_tables()
    design = make_design("y ~ 0 + age")
    assert (design.has_intercept, design.centers.tolist()) == (False, [0.0])
    np.testing.assert_allclose(
        design.rows(tables["A"], "A")["x"][:, 0], tables["A"]["age"], rtol=1e-6
    )


def test_the_client_may_be_a_covariate_and_need_no_column():
    tables = dict(zip((3, 1, 2), make_tables().values(), strict=True))
    design = make_design("y ~ hospital + age", tables)
    assert design.names == ("hospital[2]", "hospital[3]", "age")
    np.testing.assert_allclose(
        design.rows(tables[3], 3)["x"][:, :2] + design.centers[:2],
        np.tile([0, 1], (50, 1)),
        atol=1e-6,
    )
    assert make_design("y ~ 1 + (1 | hospital)", tables).data(tables).labels == (3, 1, 2)


def test_booleans_and_nullable_integers_are_numbers():
    tables = make_tables()
    for table in tables.values():
        table["old"] = table["age"] > 60
        values = [None if i == 3 else i for i in range(len(table))]
        table["number"] = pd.array(values, dtype="Int64")
    design = make_design("old ~ old + number", tables)
    assert design.names == ("old", "number")
    rows = design.rows(tables["A"], "A")
    expected = tables["A"].drop(3)
    np.testing.assert_array_equal(rows["y"], expected["old"])
    np.testing.assert_allclose(rows["x"][:, 0] + design.centers[0], expected["old"], atol=1e-6)
    np.testing.assert_allclose(
        rows["x"][:, 1] + design.centers[1], expected["number"].astype(float), rtol=1e-5, atol=1e-5
    )
