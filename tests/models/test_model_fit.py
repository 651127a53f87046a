"""Tables, predictions and effects of formula models equal independent computations."""

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit, logit
from scipy.stats import norm

from tests.models.stand_in import CENTERS, HOSPITALS, make_fit

NEW = pd.DataFrame({"age": [40.0, 55.0, 70.0], "trt": ["A", "B", "B"]})
X = np.array([[40.0, 0.0], [55.0, 1.0], [70.0, 1.0]])


@pytest.fixture(scope="module")
def fit():
    return make_fit()


@pytest.fixture(scope="module")
def slopes_fit():
    return make_fit("gaussian", slopes=True, chains=2)


def sites(fit):
    """Return draws of all sites, chains merged."""
    draws = fit.samples.constrained
    return {name: np.float64(x).reshape(-1, *x.shape[2:]) for name, x in draws.items()}


def linear_predictor(fit, x=X):
    """Return the linear predictor without effects, with a row per draw."""
    values = sites(fit)
    return values["Intercept"][:, None] + values["b"] @ (x - CENTERS).T


def test_the_intercept_refers_to_the_columns_of_the_user(fit):
    values, table = sites(fit), fit.summary(prob=0.8)
    intercept = values["Intercept"] - values["b"] @ CENTERS
    assert table.loc["Intercept", "mean"] == pytest.approx(intercept.mean())
    assert table.loc["Intercept", "10 %"] == pytest.approx(np.quantile(intercept, 0.1))
    assert table.loc["trt[B]", "sd"] == pytest.approx(values["b"][:, 1].std())
    assert table.loc["trt[B]", "P(>0)"] == (values["b"][:, 1] > 0).mean()
    assert list(table.index) == ["Intercept", "age", "trt[B]", "sd_hospital"]
    assert (table["k-hat"] == 0.1).all() and (table["ESS"] == 350).all()


def test_draws_are_exponentiated_before_they_are_summarized(fit):
    table, ratio = fit.summary(exponentiate=True), np.exp(sites(fit)["b"][:, 1])
    row = table.loc["trt[B]"]
    assert row["mean"] == pytest.approx(ratio.mean()) and row["sd"] == pytest.approx(ratio.std())
    assert row["P(>1)"] == (ratio > 1).mean()
    assert "sd_hospital" not in table.index


def test_a_link_without_ratios_is_not_exponentiated(slopes_fit):
    with pytest.raises(ValueError, match="has the link 'identity'"):
        slopes_fit.summary(exponentiate=True)


def test_spreads_and_correlations_come_from_the_sites(slopes_fit):
    table, values = slopes_fit.varcorr(), sites(slopes_fit)
    factor = values["cor_hospital"]
    assert table["mean"][0] == pytest.approx(values["sd_hospital"][:, 0].mean())
    assert table["mean"][1] == pytest.approx(values["sd_hospital"][:, 1].mean())
    assert table["mean"][2] == pytest.approx(factor[:, 1, 0].mean())
    assert list(table["kind"]) == ["sd", "sd", "correlation"]
    summary = slopes_fit.summary()
    assert summary.loc["cor_hospital[Intercept, age]", "R-hat"] < 1.05
    assert summary.loc["sigma", "mean"] == pytest.approx(values["sigma"].mean())


def test_predictions_at_average_effects_are_conditional(fit):
    expected = expit(linear_predictor(fit))
    table = fit.predict(NEW, client=None)
    np.testing.assert_allclose(table["mean"], expected.mean(0), rtol=1e-5)
    np.testing.assert_allclose(table["95 %"], np.quantile(expected, 0.95, 0), rtol=1e-5)


def test_the_mean_of_a_new_hospital_integrates_over_its_effect(fit):
    """The reference is a sum over a fine grid of effects."""
    eta, tau = linear_predictor(fit), sites(fit)["sd_hospital"]
    grid = np.linspace(-6, 6, 2001)
    density = norm.pdf(grid) / norm.pdf(grid).sum()
    expected = sum(w * expit(eta + tau * x) for x, w in zip(grid, density, strict=True)).mean(0)
    np.testing.assert_allclose(fit.predict(NEW)["mean"], expected, rtol=2e-6)
    conditional = fit.predict(NEW, client=None)["mean"]
    assert (abs(logit(conditional)) > abs(logit(expected))).all()  # attenuation


def test_slopes_of_a_new_hospital_vary_with_the_covariate(slopes_fit):
    values, draws = sites(slopes_fit), slopes_fit.predict(NEW, summary=False)
    factor = values["sd_hospital"][:, :, None] * values["cor_hospital"]
    covariance = factor @ np.swapaxes(factor, 1, 2)
    z = np.stack([np.ones(3), X[:, 0]], 1)
    variance = np.einsum("rk,skj,rj->sr", z, covariance, z)
    gap = draws - linear_predictor(slopes_fit)
    standard = gap / np.sqrt(variance)
    num = len(standard)
    assert (abs(standard.mean(0)) < 5 / np.sqrt(num)).all()
    assert (abs(standard.var(0) - 1) < 5 * np.sqrt(2 / num)).all()
    # All rows have the same hospital.
    assert np.corrcoef(standard.T)[1, 2] > 0.9


def test_a_new_hospital_of_equal_hospitals_is_the_conditional_mean():
    fit = make_fit(tau=1e-5)
    new, conditional = (fit.predict(NEW, client=client) for client in ("new", None))
    np.testing.assert_allclose(new["mean"], conditional["mean"], atol=1e-6)
    np.testing.assert_allclose(new["5 %"], conditional["5 %"], atol=1e-4)


def test_a_hospital_of_the_study_has_its_effect(fit):
    effects = fit.effect_draws.latents.draws["effect_hospital"][0, :, 1, 0]
    expected = expit(linear_predictor(fit) + effects)
    draws = fit.predict(NEW, client="Chur", summary=False)
    np.testing.assert_allclose(draws, expected, rtol=1e-4)
    outcomes = fit.predict(NEW, client="Chur", kind="outcome", summary=False)
    assert set(np.unique(outcomes)) == {0, 1}
    error = np.sqrt(0.25 / len(draws))
    assert (abs(outcomes.mean(0) - expected.mean(0)) < 5 * error).all()


def test_effects_are_means_over_the_pooled_rows(fit):
    """G-computation of all patients in one table is what the sums over hospitals give."""
    pooled = pd.concat(fit.tables.values())
    latents = fit.effect_draws.latents.draws["effect_hospital"][0, :, :, 0, 0]
    sizes = [len(table) for table in fit.tables.values()]
    effect = np.repeat(latents, sizes, axis=1)
    risks = {}
    for arm in (0.0, 1.0):
        x = np.stack([pooled["age"], np.full(len(pooled), arm)], 1)
        risks[arm] = expit(linear_predictor(fit, x) + effect).mean(1)
    table = fit.effects("trt")
    assert table.loc["trt=B", "mean"] == pytest.approx(risks[1].mean(), rel=1e-5)
    difference, ratio = risks[1] - risks[0], risks[1] / risks[0]
    assert table.loc["B - A", "mean"] == pytest.approx(difference.mean(), rel=1e-4)
    assert table.loc["B - A", "5 %"] == pytest.approx(np.quantile(difference, 0.05), rel=1e-3)
    row = fit.effects("trt", contrast="ratio").loc["B / A"]
    assert row["mean"] == pytest.approx(ratio.mean(), rel=1e-5)
    assert row["P(>1)"] == (ratio > 1).mean()


def test_effects_of_polars_tables_and_numbers():
    import polars as pl

    fit = make_fit("gaussian")
    expected = fit.effects("age", values=[50, 60]).loc["60 - 50"]
    slope = fit.samples.constrained["b"][..., 0]
    assert expected["mean"] == pytest.approx(10 * slope.mean(), rel=1e-4)
    table = fit.effects("trt").loc["B - A"]
    assert table["mean"] == pytest.approx(fit.samples.constrained["b"][..., 1].mean(), rel=1e-4)
    with pytest.raises(ValueError, match="'trt', 'age'; got 'sex'"):
        fit.effects("sex", values=["f", "m"])
    with pytest.raises(ValueError, match="two or more values, got \\['B'\\]"):
        fit.effects("trt", values=["B"])
    with pytest.raises(ValueError, match="contrast must be"):
        fit.effects("trt", contrast="odds")
    from fedmcmc.models._effects import set_column

    frame = pl.DataFrame(fit.tables["Bern"].to_dict("list"))
    changed = set_column(frame, "trt", "B")
    assert isinstance(changed, pl.DataFrame) and set(changed["trt"]) == {"B"}
    frame = frame.with_columns(trt=pl.lit(None, pl.String))
    assert set_column(frame, "trt", "B")["trt"].null_count() == len(frame)
    categories = fit.tables["Bern"].assign(trt=pd.Categorical(fit.tables["Bern"]["trt"]))
    assert set(set_column(categories, "trt", "B")["trt"]) == {"B"}


def test_probabilities_of_ordered_categories_sum_to_one():
    fit = make_fit("ordinal")
    table = fit.predict(NEW)
    assert list(table["row"]) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    np.testing.assert_allclose(table.groupby("row")["mean"].sum(), 1, rtol=1e-6)
    values = sites(fit)
    first = expit(values["cutpoints"][:, :1] - linear_predictor(fit))
    lowest = fit.predict(NEW, client=None)
    np.testing.assert_allclose(lowest["mean"][lowest["category"] == 0], first.mean(0), rtol=1e-5)
    assert "B - A, category 2" in fit.effects("trt").index


def test_effects_of_hospitals_are_listed(slopes_fit):
    table = slopes_fit.ranef()
    assert list(table["client"]) == [x for x in HOSPITALS for _ in range(2)]
    draws = slopes_fit.effect_draws.latents.draws["effect_hospital"]
    assert table["mean"][3] == pytest.approx(draws[0, :, 1, 0, 1].mean(), rel=1e-5)


def test_the_forest_shows_each_hospital_the_population_and_a_new_hospital(slopes_fit):
    forest = slopes_fit.forest("age")
    table, values = forest.table, sites(slopes_fit)
    population = table[table["kind"] == "population"].iloc[0]
    assert population["mean"] == pytest.approx(values["b"][:, 0].mean(), rel=1e-5)
    new = table[table["kind"] == "new group"].iloc[0]
    sd = np.hypot(values["b"][:, 0].std(), np.sqrt((values["sd_hospital"][:, 1] ** 2).mean()))
    assert new["sd"] == pytest.approx(sd, rel=0.15)
    pooled = table[table["kind"] == "with all groups"].set_index("group")
    effects = slopes_fit.effect_draws.latents.draws["effect_hospital"][0, :, 0, 0, 1]
    assert pooled.loc["Bern", "mean"] == pytest.approx((values["b"][:, 0] + effects).mean())
    assert len(forest.figure.axes[0].get_yticks()) == 5
    # The intercept is the line at average covariates.
    table = slopes_fit.forest().table
    population = table[table["kind"] == "population"].iloc[0]
    assert population["mean"] == pytest.approx(values["Intercept"].mean(), rel=1e-5)
    with pytest.raises(ValueError, match="'Intercept', 'age'"):
        slopes_fit.forest("sex")


def test_bad_arguments_raise(fit):
    for call, message in (
        (lambda: fit.predict(NEW, client="Basel"), "'Bern', 'Chur', 'Zug'; got 'Basel'"),
        (lambda: fit.predict(NEW, kind="draws"), "kind must be"),
        (lambda: fit.summary(prob=90), "prob must lie between 0 and 1, got 90"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_report_has_odds_ratios_with_their_direction(fit, tmp_path):
    page = fit.report.save(tmp_path / "report.html").read_text()
    row = fit.summary(exponentiate=True).loc["trt[B]"]
    assert f"{row['median']:.3g} ({row['5 %']:.3g} to {row['95 %']:.3g})" in page
    assert "higher odds; P(ratio &gt; 1) = " in page
    assert "Odds ratios" in page and "<td class='text'>trt[B]</td>" in page
    assert "HalfNormal(1)" in page and "passed" in page


def test_a_report_of_a_linear_model_has_differences(slopes_fit, tmp_path):
    page = slopes_fit.report.save(tmp_path / "report.html").read_text()
    assert "higher outcome; P(difference &gt; 0) = " in page and "Differences" in page
    assert "cor_hospital[Intercept, age]" in page and "b[0]" not in page


def test_the_text_for_a_paper_has_model_versions_priors_and_verdict(fit):
    text = fit.methods_text()
    for part in (fit.formula, "62 rows of 3 sites", "fedmcmc 0.", "Normal(0, 2.5)", "k-hat 0.10"):
        assert part in text
    assert fit.formula in repr(fit) and "trt[B]" in repr(fit)
