"""Predictions, average effects and spreads of a fit equal those of NUTS on the pooled rows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from numpyro.infer import MCMC, NUTS
from scipy.special import expit

from fedmcmc import models

pytestmark = pytest.mark.slow
NEW = pd.DataFrame({"age": [45.0, 70.0], "trt": ["A", "B"]})


def make_tables():
    rng = np.random.default_rng(2)
    tables = {}
    for i in range(12):
        size = int(rng.integers(15, 60))
        age, trt = rng.normal(60, 10, size).round(), rng.choice(["A", "B"], size)
        eta = -0.5 + rng.normal(0, 0.7) + 0.04 * (age - 60) + 0.7 * (trt == "B")
        died = (rng.random(size) < expit(eta)).astype(int)
        tables[f"H{i:02}"] = pd.DataFrame({"age": age, "trt": trt, "died": died})
    return tables


def run_nuts(fit):
    """Return draws of the pooled model with the priors of the fit."""
    rows = [fit.design.rows(table, name) for name, table in fit.tables.items()]
    x = jnp.concatenate([part["x"] for part in rows])
    y = jnp.concatenate([part["y"] for part in rows])
    hospital = jnp.repeat(jnp.arange(len(rows)), jnp.array([len(part["y"]) for part in rows]))

    def pooled():
        intercept = numpyro.sample("intercept", fit.priors["Intercept"])
        b = jnp.stack([numpyro.sample(name, fit.priors[name]) for name in fit.design.names])
        tau = numpyro.sample("tau", fit.priors["sd_hospital"])
        z = numpyro.sample("z", dist.Normal(0, 1).expand([len(rows)]).to_event(1))
        eta = intercept + x @ b + tau * z[hospital]
        numpyro.sample("y", dist.Bernoulli(logits=eta).to_event(1), obs=y)

    mcmc = MCMC(NUTS(pooled), num_warmup=1000, num_samples=4000, num_chains=1, progress_bar=False)
    mcmc.run(jax.random.key(0))
    draws = {name: np.float64(x) for name, x in mcmc.get_samples().items()}
    draws["b"] = np.stack([draws[name] for name in fit.design.names], -1)
    return draws, np.asarray(hospital)


@pytest.fixture(scope="module")
def results():
    fit = models.glm(
        "died ~ age + trt + (1 | hospital)",
        make_tables(),
        family="bernoulli",
        client="hospital",
        progress=False,
    )
    return fit, *run_nuts(fit)


def check_moments(row, draws):
    """Means agree within 0.1 sd, and sds within 10 %."""
    assert abs(row["mean"] - draws.mean()) < 0.1 * draws.std()
    assert row["sd"] == pytest.approx(draws.std(), rel=0.1)


def test_the_verdict_passes_and_coefficients_agree(results):
    fit, draws, _ = results
    assert fit.verdict.kind == "passed"
    table = fit.summary()
    check_moments(table.loc["trt[B]"], draws["trt[B]"])
    check_moments(table.loc["Intercept"], draws["intercept"] - draws["b"] @ fit.design.centers)
    check_moments(table.loc["sd_hospital"], draws["tau"])
    check_moments(fit.summary(exponentiate=True).loc["trt[B]"], np.exp(draws["trt[B]"]))


def test_average_effects_agree(results):
    fit, draws, hospital = results
    pooled = pd.concat(fit.tables.values())
    effect = (draws["tau"][:, None] * draws["z"])[:, hospital]
    risks = []
    for arm in (0.0, 1.0):
        x = np.stack([pooled["age"], np.full(len(pooled), arm)], 1) - fit.design.centers
        risks.append(expit(draws["intercept"][:, None] + draws["b"] @ x.T + effect).mean(1))
    check_moments(fit.effects("trt").loc["B - A"], risks[1] - risks[0])
    check_moments(fit.effects("trt", contrast="ratio").loc["B / A"], risks[1] / risks[0])


def test_predictions_agree(results):
    fit, draws, _ = results
    x = np.array([[45.0, 0.0], [70.0, 1.0]]) - fit.design.centers
    eta = draws["intercept"][:, None] + draws["b"] @ x.T
    new = draws["tau"] * np.random.default_rng(0).standard_normal(len(eta))
    expected = {
        None: eta,
        "new": eta + new[:, None],
        "H03": eta + (draws["tau"] * draws["z"][:, 3])[:, None],
    }
    for client, predictor in expected.items():
        table = fit.predict(NEW, client=client)
        for i in range(2):
            check_moments(table.loc[i], expit(predictor)[:, i])


def test_effects_of_hospitals_and_groups_left_out_agree(results):
    fit, draws, _ = results
    table = fit.ranef()
    for i in range(12):
        check_moments(table.loc[i], draws["tau"] * draws["z"][:, i])
    rows, groups = fit.loo(), fit.loo(groups=True)
    assert groups.elpd < rows.elpd and groups.num_rows == 12
