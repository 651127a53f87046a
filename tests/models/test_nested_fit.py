"""Effects of groups in predictions: patients within hospitals, and regions of several hospitals."""

import jax
import numpy as np
import pandas as pd
import pytest
from scipy.special import expit
from scipy.stats import norm

from fedmcmc import models
from fedmcmc.models._draws import shared_effects
from fedmcmc.models._joint import joint_posterior
from tests.models.stand_in import make_specified_fit

HOSPITALS = ("Bern", "Chur", "Zug")


def make_visits(seed=0):
    """Return a table per hospital, with several visits per patient, and two regions."""
    rng = np.random.default_rng(seed)
    tables = {}
    for name, num in zip(HOSPITALS, (8, 5, 6), strict=True):
        patient = np.repeat(np.arange(num), 3)
        x = rng.normal(size=3 * num)
        y = 2 + x + rng.normal() + rng.normal(size=num)[patient] + rng.normal(size=3 * num)
        region = np.where(rng.random(3 * num) < 0.5, "north", "south")
        columns = {"patient": [f"p{i}" for i in patient], "region": region, "x": x, "y": y}
        tables[name] = pd.DataFrame(columns)
    return tables


@pytest.fixture(scope="module")
def fit():
    formula = "y ~ x + (1 | region) + (1 | hospital/patient)"
    return make_specified_fit(models.specify(formula, make_visits(), client="hospital"))


def terms_by_label(fit):
    return {term.label: term for term in fit.design.terms}


def fixed_part(fit, x):
    values = fit.effect_draws.values
    slope = np.float64(values["b"][:, 0])
    return np.float64(values["Intercept"])[:, None] + slope[:, None] * (x - fit.design.centers[0])


def test_a_patient_of_the_study_has_the_effects_of_patient_hospital_and_region(fit):
    terms, effects = terms_by_label(fit), fit.effect_draws
    assert [terms[x].kind for x in ("hospital", "hospital:patient", "region")] == [
        *("shared", "group", "shared")
    ]
    new = pd.DataFrame({"x": [0.0, 1.0], "patient": ["p3", "p3"], "region": ["south", "north"]})
    draws = fit.predict(new, client="Chur", summary=False)
    hospital = shared_effects(terms["hospital"], effects.values)
    hospital = hospital[:, terms["hospital"].levels.index("Chur"), 0]
    region = shared_effects(terms["region"], effects.values)[..., 0]
    region = region[:, [terms["region"].levels.index(x) for x in new["region"]]]
    patient = np.float64(effects.latents.draws["effect_hospital:patient"])[0, :, 1, 3, 0]
    expected = fixed_part(fit, new["x"].to_numpy()) + region + (hospital + patient)[:, None]
    np.testing.assert_allclose(draws, expected, rtol=1e-4, atol=1e-4)


def test_new_patients_and_hospitals_add_their_spread(fit):
    values = fit.effect_draws.values
    new = pd.DataFrame({"x": [0.0]})
    total = sum(np.float64(values[f"sd_{label}"][:, 0]) ** 2 for label in terms_by_label(fit))
    gap = fit.predict(new, summary=False)[:, 0] - fixed_part(fit, np.zeros(1))[:, 0]
    standard = gap / np.sqrt(total)
    assert abs(standard.var() - 1) < 5 * np.sqrt(2 / len(gap))
    # An unknown patient of a known hospital differs from its mean by the spread of patients.
    unknown = pd.DataFrame({"x": [0.0], "region": ["south"]})
    draws = fit.predict(unknown, client="Chur", summary=False)
    known = unknown.assign(patient="p3")
    assert draws.std() > fit.predict(known, client="Chur", summary=False).std()


def test_effects_and_checks_use_the_effects_of_all_groups(fit):
    effects, latents = fit.effect_draws, fit.effect_draws.latents
    table = fit.ranef()
    assert len(table) == 2 + 3 + 8 + 5 + 6
    patients = table[table["term"] == "hospital:patient"].set_index(["client", "group"])
    labels = [label for label, _ in patients.index]
    assert labels == ["Bern"] * 8 + ["Chur"] * 5 + ["Zug"] * 6
    draws = latents.draws["effect_hospital:patient"][0, :, 2, 4, 0]
    last = patients[patients.index.get_level_values(0) == "Zug"]["mean"].iloc[4]
    assert last == pytest.approx(draws.mean(), abs=1e-5)
    # Identity link: the average over rows has a difference equal to the slope.
    contrast = fit.effects("x", values=[0, 2]).loc["2 - 0"]
    assert contrast["mean"] == pytest.approx(2 * effects.values["b"][:, 0].mean(), rel=1e-4)
    # Averages contain the effects of groups: here of all rows in the north.
    values, terms = effects.values, terms_by_label(fit)
    eta = []
    for i, table in enumerate(fit.tables.values()):
        codes = [int(x[1:]) for x in table["patient"]]
        patient = np.float64(latents.draws["effect_hospital:patient"])[0, :, i, codes, 0].T
        hospital = shared_effects(terms["hospital"], values)[:, i]
        eta.append(fixed_part(fit, table["x"].to_numpy()) + patient + hospital)
    north = shared_effects(terms["region"], values)[:, 0]
    average = (np.concatenate(eta, 1) + north).mean()
    row = fit.effects("region").loc["region=north"]
    assert row["mean"] == pytest.approx(average, rel=1e-4, abs=1e-4)


def test_log_likelihoods_of_rows_have_the_effects_of_their_groups(fit):
    effects, terms = fit.effect_draws, terms_by_label(fit)
    posterior, data, draws = joint_posterior(fit.model, fit.data, effects)
    result = jax.vmap(lambda position: posterior.loglikelihood_fn(position, data.rows))(draws)
    expected = []
    for i, table in enumerate(fit.tables.values()):
        codes = [int(x[1:]) for x in table["patient"]]
        patient = np.float64(effects.latents.draws["effect_hospital:patient"])
        eta = fixed_part(fit, table["x"].to_numpy()) + patient[0, :, i, codes, 0].T
        eta += shared_effects(terms["hospital"], effects.values)[:, i]
        region = shared_effects(terms["region"], effects.values)[..., 0]
        eta += region[:, [terms["region"].levels.index(x) for x in table["region"]]]
        sigma = np.float64(effects.values["sigma"])[:, None]
        expected.append(norm.logpdf(table["y"].to_numpy(), eta, sigma))
    np.testing.assert_allclose(result, np.concatenate(expected, 1), rtol=1e-3, atol=1e-3)
    # Replicated outcomes have the mean and the spread of the model.
    redrawn = posterior.resample_fn(
        jax.random.key(0), jax.tree.map(lambda x: x[0], draws), data.rows
    )
    eta = fixed_part(fit, np.concatenate([table["x"] for table in fit.tables.values()]))[0]
    assert redrawn["y"].shape == eta.shape and (redrawn["x"] == data.rows["x"]).all()


def test_averages_are_weighted_by_trials_and_frequencies():
    rng = np.random.default_rng(0)
    tables = {
        name: pd.DataFrame(
            {
                "x": rng.normal(size=20),
                "n": rng.integers(1, 9, 20),
                "copies": rng.integers(1, 4, 20),
                "days": rng.uniform(1, 9, 20),
                "y": rng.integers(0, 2, 20),
            }
        )
        for name in HOSPITALS
    }
    pooled, new = pd.concat(tables.values()), pd.DataFrame({"x": [0.5], "days": [3.0]})

    def fit_of(formula, **settings):
        specification = models.specify(formula, tables, client="hospital", **settings)
        fit = make_specified_fit(specification)
        values, x = fit.effect_draws.values, 1 - fit.design.centers[0]
        at_one = np.float64(values["Intercept"] + values["b"][:, 0] * x)
        x = 0.5 - fit.design.centers[0]
        return fit, at_one[:, None], np.float64(values["Intercept"] + values["b"][:, 0] * x)

    fit, eta, at_half = fit_of("y | trials(n) ~ x", family="binomial")
    assert fit.effects("x").loc["x=1", "mean"] == pytest.approx(expit(eta).mean(), rel=1e-5)
    assert fit.predict(new)["mean"][0] == pytest.approx(expit(at_half).mean(), rel=1e-5)
    fit, eta, at_half = fit_of("y ~ x + offset(log(days))", family="poisson", weights="copies")
    days, copies = pooled["days"].to_numpy(), pooled["copies"].to_numpy()
    expected = (np.exp(eta) * days).mean(0) @ copies / copies.sum()
    assert fit.effects("x").loc["x=1", "mean"] == pytest.approx(expected, rel=1e-4)
    assert fit.predict(new)["mean"][0] == pytest.approx(3 * np.exp(at_half).mean(), rel=1e-5)
    with pytest.raises(ValueError, match="1 rows of the table have missing values"):
        fit.predict(pd.DataFrame({"x": [0.5, np.nan], "days": [3.0, 3.0]}))
    with pytest.raises(ValueError, match="one of 'Bern', 'Chur', 'Zug'; got 'Basel'"):
        fit.predict(new, client="Basel")


def test_trials_are_weights_of_an_average():
    """Rows with different predictors: a patient counts as often as it was tried."""
    tables = {"A": pd.DataFrame({"x": [-2.0, 2.0], "g": ["a", "b"], "n": [1, 9], "y": [0, 5]})}
    tables = {name: pd.concat([tables["A"]] * 3) for name in "AB"}
    fit = make_specified_fit(
        models.specify("y | trials(n) ~ x + g", tables, client="site", family="binomial")
    )
    values, centers = fit.effect_draws.values, fit.design.centers
    risks = [
        expit(np.float64(values["Intercept"] + values["b"] @ (np.array([x, 0.0]) - centers)))
        for x in (-2.0, 2.0)
    ]
    expected = (risks[0] + 9 * risks[1]) / 10
    assert fit.effects("g").loc["g=a", "mean"] == pytest.approx(expected.mean(), rel=1e-4)


@pytest.mark.parametrize("family", ["ordinal", "gaussian", "poisson"])
def test_models_without_covariates_have_tables(family):
    tables = {
        name: pd.DataFrame({"y": np.random.default_rng(i).integers(0, 3, 30)})
        for i, name in enumerate(HOSPITALS)
    }
    specification = models.specify(
        "y ~ 1 + (1 | hospital)", tables, family=family, client="hospital"
    )
    fit = make_specified_fit(specification)
    assert "sd_hospital" in fit.summary().index and fit.varcorr()["kind"].tolist() == ["sd"]
    assert "Methods" in str(fit.report.page())
    if family != "gaussian":
        assert len(fit.summary(exponentiate=True)) == (family == "poisson")
    assert len(fit.predict(pd.DataFrame({"z": [1, 2]}))) == (6 if family == "ordinal" else 2)
