"""A study dictionary is the same file for simulations and for real sites."""

import csv
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import polars
import pytest

import fedmcmc
from fedmcmc import FederatedData, deploy
from fedmcmc.__main__ import main as fedmcmc_command
from fedmcmc.data import STUDY_KEYS, Dictionary
from fedmcmc.deploy._account import describe_files
from fedmcmc.deploy._approval import Approval
from fedmcmc.deploy._columns import DICTIONARY_KEYS
from fedmcmc.deploy._config import open_configured_site, read_rows, site_settings

MODEL = """
import jax.numpy as jnp
import fedmcmc


def posterior(settings):
    return fedmcmc.Posterior(
        lambda t: -0.5 * jnp.sum(t**2) / 9,
        lambda t, rows: -0.5 * ((rows["y"] - t[rows["arm"]]) / 0.1) ** 2,
        init_fn=lambda key: jnp.zeros(3),
    )
"""
STUDY = """
name = "arms"
posterior = "model.py:posterior"
asks = ["Evaluations", "Expansions", "HamiltonianMonteCarlo", "Natural"]
outcome = "y"
client = "site"
[sites]
A = 30
B = 20
[columns]
site = { type = "text" }
arm = { type = "category", levels = ["drug", "placebo", "surgery"], description = "As assigned" }
grade = { type = "ordered", levels = ["1", "2", "3"] }
age = { type = "integer", unit = "years", range = [18, 110] }
y = { type = "number", max_missing = 0.05 }
died = { type = "event", levels = ["no", "yes"] }
"""
MEANS = {"drug": 0.0, "placebo": 1.0, "surgery": 3.0}
ARMS = {"A": ["drug", "placebo", "surgery"] * 10, "B": ["drug", "surgery"] * 10}


def study_in(folder, text=STUDY):
    folder.mkdir(exist_ok=True)
    (folder / "model.py").write_text(MODEL)
    (folder / "study.toml").write_text(text)
    return deploy.Study.read(folder / "study.toml")


def tables():
    """Return a table per site; site B has no patient with placebo, and other inferred levels."""
    rng = np.random.default_rng(0)
    return {
        name: pd.DataFrame(
            {
                "site": name,
                "arm": arms,
                "grade": rng.choice(["3", "1"], len(arms)),
                "age": rng.integers(20, 90, len(arms)),
                "y": [MEANS[arm] + 0.1 * rng.normal() for arm in arms],
                "died": rng.choice(["no", "yes"], len(arms)),
            }
        )
        for name, arms in ARMS.items()
    }


def open_site(study, folder, rows, name="B", **limits):
    return deploy.Site(study, name, rows, folder=folder / name, **limits)


def rows_of(site):
    size = int(site.client.size)
    return jax.tree.map(lambda leaf: np.asarray(leaf[:size]), site.client.rows)


def write_files(table, folder):
    """Return files of all kinds with the same table."""
    table.to_csv(folder / "rows.csv", index=False)
    polars.from_dict({name: table[name].to_list() for name in table}).write_parquet(
        folder / "rows.parquet"
    )
    arrays = {name: np.array(table[name].to_list()) for name in table}
    np.savez(folder / "rows.npz", **arrays)
    return [folder / name for name in ("rows.csv", "rows.parquet", "rows.npz")]


def test_a_simulation_and_sites_have_the_same_rows(tmp_path):
    study, frames = study_in(tmp_path), tables()
    dictionary = Dictionary.read(tmp_path / "study.toml")
    assert dictionary == study.dictionary
    simulated = FederatedData.from_clients(frames, dictionary=dictionary)
    pooled = FederatedData.from_dataframe(pd.concat(frames.values()), dictionary=dictionary)
    for i, (name, frame) in enumerate(frames.items()):
        expected = simulated.client_rows(i)
        assert expected["arm"].tolist() == [list(MEANS).index(arm) for arm in ARMS[name]]
        for path in write_files(frame, tmp_path):
            site = open_site(study, tmp_path, read_rows(path, study), name)
            for rows in (rows_of(site), pooled.client_rows(i)):
                for column, values in expected.items():
                    np.testing.assert_array_equal(rows[column], values)
                    assert rows[column].dtype == values.dtype == study.rows[column].dtype


@pytest.mark.slow
def test_sites_with_other_levels_have_the_posterior_of_all_rows(tmp_path):
    study, local = study_in(tmp_path), deploy.LocalTransport()
    for name, frame in tables().items():
        local.join(open_site(study, tmp_path, frame, name))
    sites = deploy.Sites(study, local)
    fitted = fedmcmc.fit(study.model, sites, rng_key=jax.random.key(0), progress=False)
    sites.close()
    frame = pd.concat(tables().values())
    groups = frame.groupby("arm")["y"]
    variance = 1 / (groups.size() / 0.01 + 1 / 9)
    mean = variance * groups.sum() / 0.01  # conjugate
    draws = np.asarray(fitted.samples.draws).reshape(-1, 3)
    errors = (draws.mean(axis=0) - mean[list(MEANS)].to_numpy()) / np.sqrt(variance.to_numpy())
    assert fitted.verdict.startswith("passed") and np.abs(errors).max() < 0.1


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("arm", "Surgery", "'arm' of client 'B' holds 'Surgery' in row 3, which is none of"),
        (
            "age",
            230,
            "'age' of client 'B' holds 230 in row 3, outside of the range 18 to 110 y",
        ),
        ("age", 23.5, "'age' of client 'B' holds 23.5 in row 3, which is not a whole number"),
        ("age", None, "'age' of client 'B' has 1 missing value in 20 rows, the first in row 3"),
        ("died", "maybe", "'died' of client 'B' holds 'maybe' in row 3"),
        ("site", "A", "'site' of client 'B' holds 'A' in row 3, and must hold the client's name"),
    ],
)
def test_a_site_refuses_rows_that_differ_from_the_dictionary(tmp_path, column, value, message):
    study, frame = study_in(tmp_path), tables()["B"].astype(object)
    frame.loc[3, column] = value
    with pytest.raises(ValueError, match=message):
        open_site(study, tmp_path, frame)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(ValueError, match=message):
        open_site(study, tmp_path, read_rows(tmp_path / "rows.csv", study))


def test_missing_values_that_the_dictionary_allows_become_nan(tmp_path):
    study, frame = study_in(tmp_path), tables()["B"]
    frame.loc[7, "y"] = None
    frame.to_csv(tmp_path / "rows.csv", index=False, na_rep="NA")
    for rows in (frame, read_rows(tmp_path / "rows.csv", study)):
        y = rows_of(open_site(study, tmp_path, rows))["y"]
        assert np.flatnonzero(np.isnan(y)).tolist() == [7]
    frame.loc[8, "y"] = None
    with pytest.raises(ValueError, match=r"2 missing values.* at most a fraction of 0.05"):
        open_site(study, tmp_path, frame)


def test_a_csv_file_is_read_by_the_dictionary_alone(tmp_path):
    dictionary = Dictionary(
        {
            "code": {"type": "category", "levels": ["01", "1", "NA"]},
            "dose": {"type": "number"},
            "count": {"type": "integer", "max_missing": 0.5},
            "name": {"type": "text", "max_missing": 0.5},
        }
    )
    with open(tmp_path / "a.csv", "w", newline="", encoding="utf-8-sig") as file:
        rows = [["dose", "code", "count", "name"], [" 1e-3", "01", "2", 'Zoë, "x"\ny']]
        csv.writer(file).writerows([*rows, ["-.5", "NA", "", "NA"]])
    table = dictionary.read_table(tmp_path / "a.csv")
    assert table["name"].tolist() == ['Zoë, "x"\ny', None]
    coded = dictionary.code(table, "B")
    assert coded["code"].tolist() == [0, 2] and coded["dose"].tolist() == [
        np.float32(1e-3),
        -0.5,
    ]
    assert coded["count"][0] == 2 and np.isnan(coded["count"][1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x,y\n1,2\n3\n", r"Row 1 of .*a.csv has 1 values, and the file has 2 columns"),
        (b"x,x\n1,2\n", "several columns with the name 'x'"),
        (b"", "is empty: the first line must hold the names"),
        (b"\xff\xfe", "is not a CSV file in UTF-8"),
        (b"x\n1,5\n", r"has 2 values, and the file has 1 columns \('x'\). Separate"),
        (b'x\n"1,5"\n', "'x' of client 'B' holds '1,5' in row 0, which is not a number"),
        (b"x\n1_0\n", "holds '1_0' in row 0, which is not a number"),
        (b"x;y\n1;2\n", "has the column 'x;y', which the dictionary does not list"),
        (b"x\n", "The client|has 0 rows"),
    ],
)
def test_a_damaged_csv_file_is_refused(tmp_path, content, message):
    dictionary = Dictionary({"x": {"type": "number"}})
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        dictionary.code(dictionary.read_table(tmp_path / "a.csv"), "B")


def test_files_of_other_kinds_are_refused(tmp_path):
    dictionary = Dictionary({"x": {"type": "number"}})
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"cannot be read as a Parquet file"):
        dictionary.read_table(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"must be a \.csv or a \.parquet file"):
        dictionary.read_table(tmp_path / "a.xlsx")
    (tmp_path / "a.csv").write_text("x\n1\n")
    with pytest.raises(ValueError, match=r"CSV and Parquet files need \[columns\] in study.toml"):
        read_rows(tmp_path / "a.csv")


def test_owners_approve_the_dictionary(tmp_path):
    study = study_in(tmp_path / "old")
    changed = study_in(tmp_path / "new", STUDY.replace("[18, 110]", "[18, 120]"))
    assert changed.digest != study.digest
    (difference,) = Approval.of(study, "B").differences(changed)
    assert difference == "dictionary.columns.age.range: [18, 110] when it was approved, now " + (
        "[18, 120]"
    )
    text = " ".join(describe_files(study, "B").split())
    assert "age: integer, 18 to 110, years." in text and "arm: category, 'drug', " in text
    assert "As assigned." in text and "min_rows 1" in text


def test_a_site_starts_with_a_csv_file(tmp_path, capsys):
    study_in(tmp_path)
    frame = tables()["B"]
    frame.to_csv(tmp_path / "rows.csv", index=False)
    (tmp_path / "site.toml").write_text(
        'name = "B"\nstudy = "study.toml"\nrows = "rows.csv"\nfolder = "state"\n'
        'approval = "approval.json"\n'
    )
    approve = ["deploy", "approve", "--settings", str(tmp_path / "site.toml"), "--yes"]
    assert not fedmcmc_command(approve)
    text = " ".join(capsys.readouterr().out.split())
    assert "fit the study" in text and "pain" not in text and "arm: category, 'drug'," in text
    settings, base = site_settings(tmp_path / "site.toml", dials=False)
    with open_configured_site(settings, base) as site:
        assert rows_of(site)["arm"].tolist() == [0, 2] * 10
    frame.assign(age=7).to_csv(tmp_path / "rows.csv", index=False)
    message = r"'age' of client 'B' holds 7 in row 0 .and 19 more values"
    with pytest.raises(ValueError, match=message), open_configured_site(settings, base):
        pass
    fedmcmc_command(approve)
    text = " ".join(capsys.readouterr().out.split())
    assert "do not fit the study: Column 'age' of client 'B' holds 7 in row 0" in text


def test_rules_of_the_study_hold_when_a_run_begins(tmp_path):
    study = study_in(tmp_path, STUDY + "[rules]\nmin_rows_per_parameter = 7\n")
    site = open_site(study, tmp_path, tables()["B"])
    kernel = fedmcmc.lsd(study.model, step_size=0.1)
    with pytest.raises(deploy.Refused, match=r"B' has 20 rows, .* needs at least 21 by the rules"):
        site.limits.check_run(kernel, study, "B", jnp.zeros(3))
    relaxed = study_in(tmp_path, STUDY + "[rules]\nmin_rows_per_parameter = 6\n")
    site.limits.check_run(kernel, relaxed, "B", jnp.zeros(3))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[columns]", "[rows]\nx = { dtype = 'int32' }\n[columns]", "holds rows, which is unknown"),
        ("[columns]", "[rules]\nmin_row = 3\n[columns]", "rules has 'min_row'.*'min_rows' meant"),
        ('outcome = "y"', 'outcom = "y"', "holds outcom, which is unknown. Is outcome meant"),
        ('type = "number"', 'typ = "number"', "Column 'y' has 'typ', which is unknown"),
        ('client = "site"', 'group = "site"', "has groups of rows .* at real sites each site is"),
        ('"As assigned"', r'"As\nassigned"', "must be printable text"),
    ],
)
def test_a_study_with_another_dictionary_is_refused(tmp_path, old, new, message):
    assert old in STUDY
    with pytest.raises(ValueError, match=message):
        study_in(tmp_path, STUDY.replace(old, new))


def test_keys_of_the_study_file_are_those_of_both_readers():
    fields = {field.name for field in dataclasses.fields(deploy.Study)}
    assert {*STUDY_KEYS} == fields - {"sites", "folder", "levels", "dictionary", "row_ranges"}
    fields = {field.name for field in dataclasses.fields(Dictionary)}
    assert {*DICTIONARY_KEYS} == fields - {"columns", "sites"} | {"model"}


def test_a_formula_in_the_file_is_for_simulations(tmp_path):
    study = study_in(tmp_path / "with", STUDY + '[model]\nformula = "y ~ age"\n')
    assert study.digest == study_in(tmp_path / "without").digest
    assert study.dictionary == Dictionary.read(tmp_path / "with" / "study.toml")


def test_nested_arrays_are_columns_with_dots(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    columns = {"blood.iron": {"type": "number", "range": [0, np.inf]}}
    dictionary = Dictionary(columns)
    study = deploy.Study(
        "a", "model.py:posterior", {"B": 20}, dictionary=dictionary, folder=tmp_path
    )
    np.savez(tmp_path / "rows.npz", **{"blood.iron": np.arange(20.0)})
    site = deploy.Site(study, "B", read_rows(tmp_path / "rows.npz"), folder=tmp_path / "B")
    assert rows_of(site)["blood.iron"].tolist() == list(range(20))


def test_a_study_has_a_dictionary_or_rows(tmp_path):
    study = study_in(tmp_path)
    assert dataclasses.replace(study, reproducible=True).rows == study.rows
    for columns in ({"rows": jax.ShapeDtypeStruct((), jnp.int32)}, {"levels": {"arm": ("a", "b")}}):
        with pytest.raises(ValueError, match=r"either a dictionary .columns., or rows and levels"):
            deploy.Study(
                study.name, study.posterior, study.sites, **columns, dictionary=study.dictionary
            )
    with pytest.raises(ValueError, match=r"rows must hold the shape"):
        deploy.Study(study.name, study.posterior, study.sites)
