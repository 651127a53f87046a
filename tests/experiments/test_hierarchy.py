"""Hierarchical models of real data: the table, the quadrature, and the funnel's grid."""

import numpy as np
import pytest

from experiments import tidy
from experiments.claims import evaluate
from experiments.hierarchy import contraception, funnel, methods, radon, studies

TINY = dict(num_reference=300, num_draws=400, num_rounds=300, num_burnin=100)


@pytest.mark.slow
def test_a_table_beside_pooled_nuts(tmp_path):
    settings = contraception.Config(methods=("gibbs",), nodes=(1, 5), **TINY)
    found = contraception.run(settings, tmp_path)
    (row,) = found["table"]
    assert row["method"] == "fed_gibbs" and row["rounds"] == 300 and row["megabits"] > 0
    assert row["error_of_effects"] < 1
    laplace, five = (line["error_of_log_likelihood"] for line in found["quadrature"])
    assert -0.5 < laplace < -0.01 and abs(five) < 1e-3  # Laplace is off by about a tenth of a nat
    tidy.write("made/up", contraception.rows(found), {"config": {}}, tmp_path)
    assert evaluate('value("num_clients")', "made/up", tmp_path).value == 60
    assert evaluate('value("error_of_means", method="fed_gibbs")', "made/up", tmp_path).error > 0
    assert names_of(contraception.rows(found)) <= names_of(tidy.read("hierarchy/contraception"))


@pytest.mark.slow
def test_the_funnel_runs(tmp_path):
    settings = funnel.Config(step_sizes=(0.002,), num_chains=4, num_rounds=400, num_burnin=100)
    found = funnel.run(settings, tmp_path)
    assert [row["diverged"] for row in found["table"]] == [0] * 6
    assert names_of(funnel.rows(found)) <= names_of(tidy.read("hierarchy/funnel"))


def names_of(rows):
    return {(row.method, row.metric) for row in rows if "verdict" not in row.metric}


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


def test_rows_of_a_method_that_diverged_are_left_out():
    truth = {"mean": {"mu": 0.5}, "sd": {"mu": 1.0}, "ess": 900.0, "r_hat": 1.0, "gradients": 70}
    line = {"method": "lsd", "step_size": 0.1, **methods.row(None, None, None), "seconds": 2.0}
    found = methods.rows({"data": {"num_rows": 5}, "truth": truth, "table": [line]})
    assert tidy.Row("pooled NUTS", "mean", 0.5, {"parameter": "mu"}) in found
    assert [row for row in found if row.method == "lsd"] == [
        tidy.Row("lsd", "seconds", 2.0, {"step_size": 0.1})
    ]
