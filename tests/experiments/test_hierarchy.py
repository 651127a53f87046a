"""Hierarchical models of real data: the table, the quadrature, and the funnel's grid."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.hierarchy import contraception, funnel, methods, radon, studies

RECORDS = Path(__file__).parents[2] / "docs" / "results" / "runs" / "hierarchy"
TINY = dict(num_reference=300, num_draws=400, num_rounds=300, num_burnin=100)


@pytest.mark.slow
def test_a_table_beside_pooled_nuts(tmp_path):
    settings = contraception.Config(methods=("gibbs",), nodes=(1, 5), **TINY)
    found = contraception.run(settings, tmp_path)
    (row,) = found["table"]
    assert row["method"] == "`fed_gibbs`" and row["rounds"] == 300 and row["Mbit"] > 0
    assert row["error of effects"] < 1
    laplace, five = (line["error of the log likelihood"] for line in found["quadrature"])
    assert -0.5 < laplace < -0.01 and abs(five) < 1e-3  # Laplace is off by about a tenth of a nat
    assert "`fed_gibbs`" in contraception.commentary(found)
    assert "60 groups" in contraception.about({**settings.__dict__}, found)


@pytest.mark.slow
def test_the_funnel_runs(tmp_path):
    settings = funnel.Config(step_sizes=(0.002,), num_chains=4, num_rounds=400, num_burnin=100)
    found = funnel.run(settings, tmp_path)
    assert [row["diverged"] for row in found["table"]] == ["0%"] * 6
    assert "4 hospitals of 25 simulated rows" in funnel.commentary(found)


def test_the_grid_of_the_funnel_is_bayes_rule():
    """Many rows of hospitals that differ much: `mu` and `tau` are those of the effects."""
    rng = np.random.default_rng(0)
    effects = rng.normal(0.4, 0.5, 200)
    mean, sd = funnel.exact([{"y": np.full(400, effect)} for effect in effects])
    np.testing.assert_allclose(mean, [effects.mean(), np.log(effects.std())], atol=0.01)
    np.testing.assert_allclose(sd, [effects.std() / 200**0.5, 1 / 400**0.5], rtol=0.03)


def test_every_study_knows_its_data():
    study = studies.load("immunization")
    assert study.data.num_clients == 161 and study.rows["group"].max() == 160
    assert study.shared[:2] == ("mu", "tau") and "sigma" not in study.shared


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(data="contraception"), "data must be one of radon, exam, schools"),
        (dict(methods=("gibs",)), "methods must be some of fit"),
        (dict(num_rounds=350), "num_rounds must exceed num_burnin"),
        (dict(num_chains=1), "num_chains must be at least 2"),
    ],
)
def test_settings_out_of_range(wrong, message):
    with pytest.raises(ValueError, match=message):
        radon.Config(**wrong)
    assert set(radon.Config().methods) == set(methods.METHODS)


@pytest.mark.parametrize("method", ["`mala` on `marginal`", "`fed_gibbs`"])
def test_radon_by_county_is_what_pooled_nuts_has(method):
    """In the record of the whole run: `make test` has no time for it."""
    record = json.loads((RECORDS / "radon.json").read_text())
    (row,) = [row for row in record["metrics"]["table"] if row["method"] == method]
    assert row["error of means"] < 0.1
    assert 0.95 < row["sds, least"] <= row["sds, most"] < 1.05
