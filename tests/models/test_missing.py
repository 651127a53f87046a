"""Covariates that are missing at random, against numerical integrals and joint normal densities."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pandas as pd
import polars as pl
import pytest
import scipy.optimize
from jax.flatten_util import ravel_pytree
from numpyro import distributions as dist
from numpyro.infer import MCMC, NUTS
from scipy import stats

import fedmcmc
from fedmcmc import models
from fedmcmc.models._families import find_family
from fedmcmc.models._missing import IntegratedOutcome, integrate
from tests.hierarchy.models import total

PARAMETERS = {
    "sigma": 0.6,
    "nu": 4.0,
    "shape": 2.0,
    "precision": 5.0,
    "cutpoints": np.array([-1.0, 0.5]),
    "zero_inflation": 0.2,
    "hurdle": 0.3,
}
OUTCOMES = {
    "gaussian": (-2.0, 1.0),
    "student": (-3.0, 0.5, 2.0),
    "binomial": (0, 3, 8),
    "ordinal": (0, 1, 2),
    "bernoulli": (0, 1),
    "gamma": (0.1, 2.0, 20.0),
    "beta": (0.1, 0.5, 0.99),
}
CASES = [(name, link) for name in models.FAMILIES for link in find_family(name).links]
Z = jnp.linspace(-12, 12, 4001)


def outcome(family, predictor, spread):
    family = find_family(*family)
    parameters = {name: jnp.asarray(PARAMETERS[name]) for name in family.parameters}
    trials = jnp.full(predictor.shape, 8.0) if family.name == "binomial" else None
    zeros = jnp.zeros_like(predictor)
    return IntegratedOutcome(predictor, spread, zeros, parameters, trials, family)


def by_trapezoids(fn, value):
    """Return the log density of an outcome by the trapezoidal rule."""
    terms = jax.vmap(lambda z: fn.at(z).log_prob(value) - z**2 / 2)(Z)
    return jax.scipy.special.logsumexp(terms, 0) + jnp.log((Z[1] - Z[0]) / jnp.sqrt(2 * jnp.pi))


@pytest.mark.parametrize("family", CASES)
def test_densities_and_gradients_are_integrals_over_the_predictor(family):
    pairs = [(s, y) for s in (0.0, 0.4, 1.2) for y in OUTCOMES.get(family[0], (0, 3, 40))]
    spread, value = (jnp.array(x, jnp.float32) for x in zip(*pairs, strict=True))

    def total(predictor, spread, exact):
        fn = outcome(family, predictor, spread)
        terms = by_trapezoids(fn, value) if exact else fn.log_prob(value)
        return jnp.sum(terms), terms

    predictor = jnp.full(value.shape, 0.3)
    gradient_fn = jax.jit(jax.grad(total, (0, 1), has_aux=True), static_argnums=2)
    (by_predictor, by_spread), terms = gradient_fn(predictor, spread, False)
    (exact_predictor, exact_spread), exact = gradient_fn(predictor, spread, True)
    np.testing.assert_allclose(terms, exact, atol=2e-3, rtol=2e-5)
    np.testing.assert_allclose(by_predictor, exact_predictor, atol=4e-3, rtol=1e-3)
    is_missing = spread > 0  # the derivative with respect to a spread of zero is never used
    np.testing.assert_allclose(
        by_spread[is_missing], exact_spread[is_missing], atol=8e-3, rtol=2e-3
    )


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0, 40.0])
def test_quadrature_has_the_closed_form_of_a_normal_outcome(spread):
    value = jnp.array([-30.0, 0.2, 9.0])
    fn = outcome(("gaussian", None), jnp.zeros(3), jnp.full(3, spread))
    exact = stats.norm.logpdf(value, 0, np.hypot(spread, 0.6))
    np.testing.assert_allclose(fn.log_prob(value), exact, rtol=1e-5)
    curve = fn.integrand(value)
    by_nodes = integrate(curve, curve, jnp.full(3, 1e3))
    np.testing.assert_allclose(by_nodes, exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "family", ["gaussian", "student", "bernoulli", "binomial", "ordinal", "hurdle_poisson"]
)
def test_draws_have_the_integrated_distribution(family):
    fn = outcome((family, None), jnp.array([0.3, -0.5]), jnp.array([0.9, 0.0]))
    draws = np.asarray(fn.sample(jax.random.key(0), (20000,)))
    assert draws.shape == (20000, 2)
    if family in ("gaussian", "student"):
        values = np.linspace(-3, 3, 7)
        grid = jnp.linspace(-200, 200, 40001)
        density = jnp.exp(jax.vmap(fn.log_prob)(jnp.stack([grid, grid], 1)))
        cdf = np.cumsum(np.asarray(density), 0) * float(grid[1] - grid[0])
        index = np.searchsorted(np.asarray(grid), values)
        frequencies = (draws[None] <= values[:, None, None]).mean(1)
        np.testing.assert_allclose(frequencies, cdf[index], atol=0.02)
    else:
        for y in range(4 if family != "ordinal" else 3):
            if family == "bernoulli" and y > 1:
                continue
            expected = np.exp(fn.log_prob(jnp.full(2, float(y))))
            np.testing.assert_allclose((draws == y).mean(0), expected, atol=0.015)


def make_table(num=240, seed=0, fraction=0.2, outcome="gaussian"):
    rng = np.random.default_rng(seed)
    table = pd.DataFrame(
        {
            "site": rng.choice(["a", "b", "c"], num),
            "age": rng.normal(50, 10, num),
            "sex": rng.choice(["F", "M"], num),
        }
    )
    table["bmi"] = 25 + 0.1 * (table.age - 50) + 1.5 * (table.sex == "M") + rng.normal(0, 3, num)
    eta = 0.3 + 0.25 * (table.bmi - 25) - 0.03 * (table.age - 50)
    if outcome == "gaussian":
        table["y"] = eta + rng.normal(0, 1, num)
    else:
        table["y"] = (rng.random(num) < 1 / (1 + np.exp(-eta))).astype(float)
    table["full"] = table.bmi
    table.loc[rng.random(num) < fraction, "bmi"] = np.nan
    return table


def specify(formula, table, **settings):
    return models.specify(formula, table, client="site", **settings)


def make_posterior(specification):
    return fedmcmc.from_numpyro(specification.model, example=specification.data)


@pytest.mark.parametrize("formula", ["y ~ age + bmi", "y ~ 0 + age + bmi"])
def test_the_likelihood_is_the_joint_normal_density_of_the_observed_values(formula):
    table = make_table()
    specification = specify(formula, table, missing={"bmi": "age + sex"}, max_missing=0.3)
    posterior = make_posterior(specification)
    position = posterior.init_fn(jax.random.key(1))
    sites = {x: np.asarray(v, np.float64) for x, v in posterior.constrain_fn(position).items()}
    design = specification.design
    age, bmi, y = (table[x].to_numpy() for x in ("age", "bmi", "y"))
    covariates = design.covariates[0]
    columns = np.stack([age, table.sex == "M"], 1) - covariates.centers
    mean_bmi = sites["Intercept_bmi"] + columns @ sites["b_bmi"]
    b_age, b_bmi = sites["b"]
    mean_y = sites.get("Intercept", 0) + b_age * (age - design.centers[0])
    mean_y = mean_y + b_bmi * (mean_bmi - design.centers[1])
    var_bmi, var_y = sites["sigma_bmi"] ** 2, sites["sigma"] ** 2
    cov = np.array([[var_bmi, b_bmi * var_bmi], [b_bmi * var_bmi, var_y + b_bmi**2 * var_bmi]])
    exact = 0.0
    for i in range(len(table)):
        observed = [1] if np.isnan(bmi[i]) else [0, 1]
        exact += stats.multivariate_normal.logpdf(
            np.array([bmi[i], y[i]])[observed],
            np.array([mean_bmi[i], mean_y[i]])[observed],
            cov[np.ix_(observed, observed)],
        )
    rows = specification.data.rows
    value = np.asarray(posterior.loglikelihood_fn(position, rows), np.float64).sum()
    np.testing.assert_allclose(value, exact, rtol=1e-4)


@pytest.mark.parametrize("family", ["gaussian", "bernoulli"])
def test_random_effects_are_integrated_out_around_missing_covariates(family):
    """Effects of sites use the same likelihood of rows, here by two nested trapezoidal rules."""
    table = make_table(12, fraction=0.4, outcome=family).assign(site="a")
    table["site"] = ["a"] * 6 + ["b"] * 6
    settings = {"family": family, "missing": {"bmi": "age"}, "max_missing": 0.9}
    specification = specify("y ~ bmi + (1 | site)", table, **settings)
    posterior = make_posterior(specification)
    position = posterior.init_fn(jax.random.key(1))
    integrated = fedmcmc.marginal(posterior, 9)
    value = float(total(integrated, specification.data)(position))
    sites = {x: np.asarray(v, np.float64) for x, v in posterior.constrain_fn(position).items()}
    center = specification.design.centers[0]
    grid = np.linspace(-8, 8, 401)
    weight = stats.norm.pdf(grid) * (grid[1] - grid[0])
    exact = 0.0
    for _, part in table.groupby("site"):
        likelihood = np.ones_like(grid)  # by the standardized effect of the site
        for _, row in part.iterrows():
            mean = sites["Intercept_bmi"] + sites["b_bmi"][0] * (row.age - table.age.mean())
            sd, z, w = sites["sigma_bmi"], grid, weight
            if not np.isnan(row.bmi):
                exact += stats.norm.logpdf(row.bmi, mean, sd)
                mean, sd, z, w = row.bmi, 0.0, np.zeros(1), np.ones(1)
            slope = sites["b"][0] * (mean + sd * z - center)
            eta = sites["Intercept"] + slope + np.ravel(sites["sd_site"])[0] * grid[:, None]
            if family == "gaussian":
                density = stats.norm.pdf(row.y, eta, sites["sigma"])
            else:
                density = 1 / (1 + np.exp(-(2 * row.y - 1) * eta))
            likelihood = likelihood * (density @ w)
        exact += np.log(likelihood @ weight)
    np.testing.assert_allclose(value, exact, rtol=2e-4)


def find_mode(specification):
    """Return the posterior mode by the names of the summary."""
    posterior, rows = make_posterior(specification), specification.data.rows
    flat, unravel = ravel_pytree(posterior.init_fn(jax.random.key(0)))

    @jax.jit
    @jax.value_and_grad
    def loss(x):
        position = unravel(x)
        return -posterior.logprior_fn(position) - posterior.loglikelihood_fn(position, rows).sum()

    result = scipy.optimize.minimize(loss, 0 * flat, jac=True, method="BFGS")
    sites = posterior.constrain_fn(unravel(jnp.asarray(result.x, flat.dtype)))
    return dict(zip(specification.design.names, np.asarray(sites["b"]).tolist(), strict=True))


@pytest.mark.parametrize(("family", "tolerance"), [("gaussian", 0.03), ("bernoulli", 0.02)])
def test_complete_cases_are_biased_and_the_model_is_not(family, tolerance):
    """High values of the outcome and old patients have missing values more often."""
    table = make_table(900, seed=3, outcome=family)
    rng = np.random.default_rng(0)
    chance = 1 / (1 + np.exp(-4 * (table.y - 0.3) - 0.1 * (table.age - 50)))
    if family == "bernoulli":  # odds ratios are biased if the two causes interact
        chance = np.where((table.y == 1) & (table.age > 50), 0.9, 0.1)
    table["bmi"] = np.where(rng.random(900) < chance, np.nan, table.full)
    settings = {"family": family, "max_missing": 0.9}
    full = find_mode(specify("y ~ age + full", table, **settings))
    integrated = find_mode(
        specify("y ~ age + bmi", table, missing={"bmi": "age + sex"}, **settings)
    )
    complete = find_mode(specify("y ~ age + bmi", table, **settings))
    biased = "bmi" if family == "gaussian" else "age"
    unbiased = full["full"] if family == "gaussian" else full["age"]
    assert abs(integrated[biased] - unbiased) < tolerance
    assert abs(complete[biased] - unbiased) > 3 * tolerance


def test_sites_agree_on_the_moments_of_observed_values():
    table = make_table()
    tables = {name: part.drop(columns="site") for name, part in table.groupby("site")}
    tables["c"] = tables["c"].assign(bmi=None)  # a site that did not measure it
    tables["b"] = pl.DataFrame({x: v.to_list() for x, v in tables["b"].items()})
    missing = {"bmi": "age + sex"}
    specification = models.specify("y ~ age + bmi", tables, missing=missing, max_missing=0.6)
    schema, design = specification.design.schema, specification.design
    observed = table.bmi[table.site != "c"].dropna()
    num_missing = len(table) - len(observed)
    assert (schema.rows, schema.complete, schema.missing["bmi"]) == (240, 240, num_missing)
    np.testing.assert_allclose(design.centers[1], observed.mean(), rtol=1e-12)
    np.testing.assert_allclose(design.scales[1], observed.std(), rtol=1e-12)
    mean, sd = observed.mean(), observed.std()
    assert repr(specification.priors).splitlines()[3:7] == [
        f"sigma          Exponential({1 / table.y.std():.4g})",
        f"bmi_Intercept  Normal({mean:.4g}, {2.5 * sd:.4g})",
        f"bmi_age        Normal(0, {2.5 * sd / table.age.std():.4g})",
        f"bmi_sex[M]     Normal(0, {2.5 * sd / table.sex.eq('M').std():.4g})",
    ]
    again = models.Schema.from_dict(schema.to_dict())
    assert again == schema
    rows = models.Design(design.formula, again).rows(tables["a"], "a")
    part = tables["a"]
    np.testing.assert_array_equal(rows["is_missing"][:, 0], part.bmi.isna())
    expected = np.where(part.bmi.isna(), 0, part.bmi - observed.mean())
    np.testing.assert_allclose(rows["x"][:, 1], expected, atol=1e-5)
    np.testing.assert_allclose(rows["w_bmi"][:, 0], part.age - table.age.mean(), atol=1e-4)
    new = pd.DataFrame({"age": [50.0], "bmi": [20.0]})  # predictions need no column of its model
    assert set(design.rows(new, "new", outcome=False)) == {"x"}


def test_several_covariates_may_be_missing_in_a_row():
    table = make_table()
    rng = np.random.default_rng(5)
    table["chol"] = np.where(rng.random(240) < 0.3, np.nan, 5 + rng.normal(size=240))
    missing = {"bmi": "age", "chol": "1"}
    specification = specify("y ~ bmi + chol", table, missing=missing, max_missing=0.5)
    posterior = make_posterior(specification)
    position = posterior.init_fn(jax.random.key(1))
    sites = posterior.constrain_fn(position)
    i = int(np.flatnonzero(table.bmi.isna() & table.chol.isna())[0])
    order = np.argsort(table.site, kind="stable").tolist().index(i)
    rows = jax.tree.map(lambda x: x[order : order + 1], specification.data.rows)
    centers = specification.design.centers
    age = table.age[i] - table.age.mean()
    means = sites["Intercept_bmi"] + sites["b_bmi"][0] * age, sites["Intercept_chol"]
    mean = sites["Intercept"] + sites["b"] @ (np.array(means) - centers)
    sds = np.array([sites["sigma_bmi"], sites["sigma_chol"]])
    sd = np.sqrt(sites["sigma"] ** 2 + ((sites["b"] * sds) ** 2).sum())
    value = posterior.loglikelihood_fn(position, rows)[0]
    np.testing.assert_allclose(value, stats.norm.logpdf(table.y[i], mean, sd), rtol=2e-4)


@pytest.mark.parametrize(
    ("formula", "missing", "message"),
    [
        ("y ~ age", {"bmi": "age"}, "'bmi' may be missing, so that its only term must be 'bmi'"),
        ("y ~ age * bmi", {"bmi": "age"}, r"functions and interactions; .* 'y ~ age \* bmi'"),
        ("y ~ bmi + log(bmi)", {"bmi": "age"}, "only term must be 'bmi'"),
        ("y ~ bmi + (1 + bmi | site)", {"bmi": "age"}, "only term must be 'bmi'"),
        ("y ~ bmi + offset(bmi)", {"bmi": "age"}, "only term must be 'bmi'"),
        ("y ~ bmi", {"bmi": "age + y"}, "other than the outcome; 'y' is not possible"),
        ("y ~ bmi + full", {"bmi": "full", "full": "1"}, "complete columns .*'full' is not"),
        ("y ~ bmi", {"bmi": "0 + age"}, "'0 \\+ age' of 'bmi' must have an intercept"),
        ("y ~ bmi", {"bmi": "agee"}, "no column 'agee'"),
        ("y ~ sex", {"sex": "age"}, "'sex' of missing= must be numbers, not text or a factor"),
        ("y ~ bmi", {"bmi": "age"}, r"'bmi' has \d+ missing values in 240 rows, more than 0.05"),
    ],
)
def test_impossible_models_are_refused(formula, missing, message):
    with pytest.raises(ValueError, match=message):
        specify(formula, make_table(), missing=missing, max_missing=0.05)


def test_a_fit_names_all_parameters_and_replicates_outcomes(tmp_path):
    table = make_table(60, outcome="bernoulli", fraction=0.1)
    missing = {"bmi": "age"}
    settings = {"client": "site", "family": "bernoulli", "progress": False}
    fit = models.glm("y ~ bmi", table, missing=missing, **settings)
    assert fit.verdict.kind == "passed"
    summary = fit.summary()
    assert list(summary.index) == ["Intercept", "bmi", "bmi_Intercept", "sigma_bmi", "bmi_age"]
    observed = table.dropna()
    slope, intercept = np.polyfit(observed.age, observed.bmi, 1)
    np.testing.assert_allclose(summary["mean"]["bmi_age"], slope, atol=0.02)
    sd = summary["sd"]["bmi_Intercept"]
    assert abs(summary["mean"]["bmi_Intercept"] - intercept) < 0.3 * sd
    check = fit.pp_check()
    assert 0.1 < check.p_values[0] < 0.9
    again = fedmcmc.load(fit.save(tmp_path / "fit.nc")).with_data(fit.tables)
    pd.testing.assert_frame_equal(again.summary(), summary)
    np.testing.assert_array_equal(again.data.rows["is_missing"], fit.data.rows["is_missing"])
    with pytest.raises(ValueError, match="Average effects need complete covariates"):
        fit.effects("bmi")


@pytest.mark.slow
def test_a_fit_has_the_posterior_of_pooled_nuts_with_latent_covariates():
    table = make_table(400, seed=2, fraction=0.3, outcome="bernoulli")
    settings = {"client": "site", "family": "bernoulli", "max_missing": 0.5}
    fit = models.glm("y ~ age + bmi", table, missing={"bmi": "age + sex"}, **settings)
    priors, design = fit.priors, fit.design
    age, bmi, y = (table[x].to_numpy() for x in ("age", "bmi", "y"))
    is_missing = np.isnan(bmi)
    columns = np.stack([age, table.sex == "M"], 1) - design.covariates[0].centers

    def model():
        intercept = numpyro.sample("Intercept", priors["Intercept"])
        b_age, b_bmi = (numpyro.sample(x, priors[x]) for x in ("age", "bmi"))
        mean = numpyro.sample("bmi_Intercept", priors["bmi_Intercept"])
        for i, name in enumerate(("bmi_age", "bmi_sex[M]")):
            mean = mean + columns[:, i] * numpyro.sample(name, priors[name])
        sigma = numpyro.sample("sigma_bmi", priors["sigma_bmi"])
        numpyro.sample("observed", dist.Normal(mean[~is_missing], sigma), obs=bmi[~is_missing])
        z = numpyro.sample("z", dist.Normal(0, 1).expand([int(is_missing.sum())]))
        value = jnp.asarray(bmi).at[is_missing].set(mean[is_missing] + sigma * z)
        eta = intercept + b_age * (age - design.centers[0]) + b_bmi * (value - design.centers[1])
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)

    mcmc = MCMC(NUTS(model), num_warmup=1000, num_samples=4000, progress_bar=False)
    mcmc.run(jax.random.key(0))
    reference = {x: np.asarray(v, np.float64) for x, v in mcmc.get_samples().items()}
    sites = fit.samples.constrained
    draws = dict(fit.draws) | {x: sites[x] for x in ("Intercept",)}
    draws["bmi_Intercept"] = sites["Intercept_bmi"]
    assert fit.verdict.kind == "passed"
    for name, values in reference.items():
        if name != "z":
            x = np.asarray(draws[name], np.float64)
            assert abs(x.mean() - values.mean()) < 0.1 * values.std(), name
            np.testing.assert_allclose(x.std(), values.std(), rtol=0.1, err_msg=name)
