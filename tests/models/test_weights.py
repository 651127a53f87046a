"""Sampling weights and robust intervals, against sandwich estimates in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.optimize
from numpyro import distributions as dist
from numpyro.distributions import constraints

import fedmcmc
from fedmcmc import models
from fedmcmc.models._weights import robust_samples, sandwich

FLAT = dist.ImproperUniform(constraints.real, (), ())
PRIORS = {"Intercept": FLAT, "x": FLAT}
POSITIVE = dist.ImproperUniform(constraints.positive, (), ())


def make_table(num=200, seed=0):
    """Return rows whose errors grow with `x`, with unequal weights."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, 4, num)
    table = pd.DataFrame({"x": x, "site": rng.choice(["a", "b", "c"], num)})
    table["y"] = 2 + x + rng.normal(size=num) * (0.3 + 0.5 * x)
    table["died"] = (rng.random(num) < 1 / (1 + np.exp(2 - x))).astype(float)
    table["count"] = rng.poisson(np.exp(0.4 * x) * rng.gamma(1, 1, num))
    table["copies"] = rng.integers(1, 4, num).astype(float)
    table["w"] = np.exp(rng.normal(size=num) + 0.3 * x)
    return table


def by_numpy(table, outcome, family, weights, squared):
    """Return estimates and the HC0 covariance of intercept and slope."""
    x = np.stack([np.ones(len(table)), table.x], 1)
    y = table[outcome].to_numpy(np.float64)
    if family == "gaussian":
        beta = np.linalg.solve((x.T * weights) @ x, (x.T * weights) @ y)
        curvature, residual = np.ones(len(y)), y - x @ beta
    else:
        mean_fn = {"bernoulli": lambda e: 1 / (1 + np.exp(-e)), "poisson": np.exp}[family]
        beta = scipy.optimize.root(lambda b: x.T @ (weights * (y - mean_fn(x @ b))), [0.0, 0.1]).x
        mean = mean_fn(x @ beta)
        curvature = mean * (1 - mean) if family == "bernoulli" else mean
        residual = y - mean
    bread = np.linalg.inv((x.T * (weights * curvature)) @ x)
    meat = (x.T * (squared * residual**2)) @ x
    return beta, bread @ meat @ bread


def specify(outcome, family, **settings):
    priors = PRIORS | ({"sigma": POSITIVE} if family == "gaussian" else {})
    return models.specify(
        f"{outcome} ~ x", make_table(), client="site", family=family, priors=priors, **settings
    )


@pytest.mark.parametrize("kind", ["sampling_weights", "weights", None])
@pytest.mark.parametrize(
    ("outcome", "family"), [("y", "gaussian"), ("died", "bernoulli"), ("count", "poisson")]
)
def test_the_sandwich_is_that_of_weighted_regression(outcome, family, kind):
    table = make_table()
    column = {"sampling_weights": "w", "weights": "copies", None: None}[kind]
    specification = specify(outcome, family, **({kind: column} if kind else {}))
    weights = np.ones(200) if column is None else table[column].to_numpy()
    squared = weights**2 if kind == "sampling_weights" else weights  # equal rows are independent
    beta, exact = by_numpy(table, outcome, family, weights, squared)
    posterior = fedmcmc.from_numpyro(specification.model, example=specification.data)
    center, sd = specification.design.centers[0], specification.priors.units["x"][1]
    location, scale = specification.priors.units["Intercept"]
    position = {
        "Intercept": jnp.float32((beta[0] + beta[1] * center - location) / scale),
        "b": jnp.float32(beta[1:] / sd),
    }
    if family == "gaussian":
        position["sigma"] = jnp.zeros(())
    covariance = sandwich(posterior, specification.data, position, is_frequency=kind == "weights")
    to_user = np.array([[scale, -center * sd], [0, sd]])
    np.testing.assert_allclose(to_user @ covariance[:2, :2] @ to_user.T, exact, rtol=2e-3)


def test_the_curvature_of_the_sandwich_includes_the_prior():
    table = make_table()
    priors = {"x": dist.Normal(0, 0.1)}
    specification = models.specify(
        "died ~ x", table, client="site", family="bernoulli", priors=priors
    )
    posterior = fedmcmc.from_numpyro(specification.model, example=specification.data)
    position = {"Intercept": jnp.zeros(()), "b": jnp.zeros(1)}  # all probabilities are 1/2
    sds = np.array([specification.priors.units[name][1] for name in ("Intercept", "x")])
    columns = np.stack([np.ones(200), table.x - table.x.mean()], 1) * sds
    products = columns.T @ columns / 4
    inverse = np.linalg.inv(products + np.diag((sds / [2.5, 0.1]) ** 2))
    covariance = sandwich(posterior, specification.data, position)
    np.testing.assert_allclose(covariance, inverse @ products @ inverse, rtol=1e-4, atol=1e-8)


def test_a_fit_with_sampling_weights_has_means_and_sandwich_intervals():
    table = make_table()
    settings = {"client": "site", "priors": PRIORS | {"sigma": POSITIVE}, "progress": False}
    fit = models.glm("y ~ x", table, sampling_weights="w", **settings)
    weights = table.w.to_numpy()
    beta, covariance = by_numpy(table, "y", "gaussian", weights, weights**2)
    summary, sds = fit.summary(), np.sqrt(np.diag(covariance))
    assert np.abs((summary["mean"][["Intercept", "x"]] - beta) / sds).max() < 0.05
    np.testing.assert_allclose(summary["sd"][["Intercept", "x"]], sds, rtol=0.02)
    naive = models.glm("y ~ x", table, **settings)
    beta, covariance = by_numpy(table, "y", "gaussian", np.ones(200), np.ones(200))
    sds = np.sqrt(np.diag(covariance))
    robust = naive.summary(robust=True)
    assert np.abs((robust["mean"][["Intercept", "x"]] - beta) / sds).max() < 0.05
    np.testing.assert_allclose(robust["sd"][["Intercept", "x"]], sds, rtol=0.02)
    assert abs(naive.summary()["sd"]["Intercept"] / sds[0] - 1) > 0.3
    # The sandwich of draws that have its spread is the same.
    arguments = fit.samples, fit.posterior, fit.data, fit.design.formula
    again = jax.tree.leaves(robust_samples(*arguments).draws)
    for x, y in zip(again, jax.tree.leaves(fit.samples.draws), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_the_unit_of_sampling_weights_does_not_matter():
    table = make_table()
    specifications = [
        models.specify("y ~ x", table.assign(w=table.w * unit), client="site", sampling_weights="w")
        for unit in (1.0, 1e-6, 3e5)
    ]
    for specification in specifications:
        weights = np.asarray(specification.data.rows["weights"])
        np.testing.assert_allclose(weights.sum(), 200, rtol=1e-5)
        number = specification.design.schema.numbers["x"]
        mean = np.average(table.x, weights=table.w)
        np.testing.assert_allclose(number.mean, mean, rtol=1e-9)
        sd = np.sqrt(np.average((table.x - mean) ** 2, weights=table.w) * 200 / 199)
        np.testing.assert_allclose(number.sd, sd, rtol=1e-9)


@pytest.mark.parametrize(
    ("formula", "settings", "message"),
    [
        ("y ~ x", {"weights": "copies"}, "cannot be combined with weights 'copies'"),
        ("y | weights(copies) ~ x", {}, "cannot be combined with weights 'copies'"),
        ("y ~ x + (1 | site)", {}, "cannot be combined with random effects"),
    ],
)
def test_combinations_of_weights_are_refused(formula, settings, message):
    with pytest.raises(ValueError, match=message):
        models.specify(formula, make_table(), client="site", sampling_weights="w", **settings)


def test_impossible_weights_are_refused():
    table = make_table()
    for values, message in (
        (-1.0, "'w' of client 'a' in row .* is -1; it must be at least 0"),
        (np.inf, "'w' of client 'a' holds inf"),
    ):
        bad = table.assign(w=table.w.where(table.site != "a", values))
        with pytest.raises(ValueError, match=message):
            models.specify("y ~ x", bad, client="site", sampling_weights="w")


def test_robust_intervals_need_independent_rows():
    table = make_table()
    specification = models.specify("y ~ x + (1 | site)", table, client="site")
    with pytest.raises(ValueError, match="Robust intervals need independent rows"):
        robust_samples(None, None, None, specification.formula)
