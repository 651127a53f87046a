"""The command ``fedmcmc fit`` writes files that R and a browser read."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedmcmc.__main__ import main
from fedmcmc.data import Dictionary
from fedmcmc.models import parse
from fedmcmc.models._command import draws_table, parse_prior, read_model, read_sites
from tests.models.stand_in import make_tables

STUDY = """
client = "hospital"

[columns]
hospital = { type = "text" }
age = { type = "number", unit = "years", range = [0, 120] }
trt = { type = "category", levels = ["A", "B"] }
y = { type = "event" }

[model]
formula = "y ~ age + trt"
family = "bernoulli"
method = "approximate"
priors = { "trt[B]" = "Normal(0, 1)" }
settings = { num_draws = 200, progress = false }
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "study.toml").write_text(STUDY)
    sites = tmp_path / "sites"
    sites.mkdir()
    for name, table in make_tables().items():
        table = table.assign(age=table["age"].round(), y=table["y"].astype(int), hospital=name)
        table.to_csv(sites / f"{name}.csv", index=False)
    (sites / "notes.txt").write_text("not a table")
    return tmp_path


def run(folder):
    arguments = ["fit", str(folder / "study.toml"), "--sites", str(folder / "sites")]
    return main([*arguments, "--out", str(folder / "out")])


def test_a_study_is_fitted(folder, capsys):
    assert run(folder) == 0
    out = folder / "out"
    draws = pd.read_csv(out / "draws.csv")
    assert list(draws.columns) == [".chain", ".iteration", ".draw", "Intercept", "age", "trt[B]"]
    assert draws[".draw"].tolist() == list(range(1, 201))
    summary = pd.read_csv(out / "summary.csv", index_col="parameter")
    np.testing.assert_allclose(summary["mean"], draws.iloc[:, 3:].mean(), rtol=1e-6)
    schema = json.loads((out / "schema.json").read_text())
    assert schema["rows"] == 62 and schema["clients"] == ["Bern", "Chur", "Zug"]
    assert "Odds ratios" in (out / "report.html").read_text()
    assert "draws.csv" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("formula", "formulas", "needs a table [model] with a formula"),
        ('family = "b', 'famly = "b', "'famly', which is unknown"),
        ("Normal(0, 1)", "__import__('os')", "A prior is a distribution"),
        ("[0, 120]", "[0, 40]", "Column 'age' of client 'Bern' holds"),
        ('["A", "B"]', '["A", "C"]', "'B'"),
    ],
)
def test_mistakes_are_named(folder, capsys, before, after, message):
    (folder / "study.toml").write_text(STUDY.replace(before, after))
    assert run(folder) == 1
    assert message in capsys.readouterr().err


def test_tables_need_no_dictionary(folder):
    pytest.importorskip("polars")
    expected = read_sites(folder / "sites")["Bern"]
    dictionary = Dictionary.from_dict(tomllib.loads(STUDY))
    table = read_sites(folder / "sites", dictionary)["Bern"]
    pd.testing.assert_frame_equal(table, expected, check_dtype=False)
    import polars as pl

    (folder / "sites" / "Bern.csv").unlink()
    pl.DataFrame(expected.to_dict("list")).write_parquet(folder / "sites" / "Bern.parquet")
    table = read_sites(folder / "sites", dictionary)["Bern"]
    assert table["trt"].to_list() == expected["trt"].to_list()


def test_a_folder_without_tables_is_an_error(folder, capsys):
    for path in (folder / "sites").glob("*.csv"):
        path.unlink()
    assert run(folder) == 1
    assert "no file with the ending .csv or .parquet" in capsys.readouterr().err


def test_draws_are_numbered_as_in_r():
    table = draws_table({"a": np.arange(6.0).reshape(2, 3)})
    assert table[".chain"].tolist() == [1, 1, 1, 2, 2, 2]
    assert table[".iteration"].tolist() == [1, 2, 3, 1, 2, 3]
    assert table[".draw"].tolist() == [1, 2, 3, 4, 5, 6] and table["a"].tolist() == [*range(6)]


def test_the_study_of_the_page_for_r_is_valid(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "guides" / "r.md").read_text()
    content = tomllib.loads(page.split("```toml\n")[1].split("```")[0])
    model = read_model(content.pop("model"), tmp_path)
    assert parse(model["formula"]).factors == ("hospital",)
    assert Dictionary.from_dict(content).columns["arm"].levels == ("placebo", "drug")


def test_priors_are_read_from_text():
    prior = parse_prior("StudentT(4, loc=0.0, scale=2.5)")
    assert prior.df == 4 and prior.scale == 2.5
    for text in ("Normal(0, x)", "Norml(0, 1)", "constraints.real", "Normal"):
        with pytest.raises(ValueError, match="such as 'Normal"):
            parse_prior(text)
