"""Posteriors of mixed models against NUTS on the pooled rows of a model that is written out."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pandas as pd
import pytest
from numpyro import distributions as dist

from fedmcmc import models

pytestmark = pytest.mark.slow


def simulate(num_clients, num_rows, seed, patients=0):
    """Return rows of hospitals with an effect and a slope each, and effects of patients."""
    rng = np.random.default_rng(seed)
    hospital = np.sort(rng.integers(0, num_clients, num_rows))
    table = pd.DataFrame(
        {
            "hospital": [f"h{i:02}" for i in hospital],
            "age": rng.normal(60, 10, num_rows),
            "arm": rng.choice(["drug", "placebo"], num_rows),
        }
    )
    z = (table.age - 60) / 10
    eta = 0.5 * z - 0.6 * (table.arm == "placebo") + rng.normal(0, 0.7, num_clients)[hospital]
    eta += rng.normal(0, 0.4, num_clients)[hospital] * z
    if patients:
        number = table.groupby("hospital").cumcount() % patients
        table["patient"] = table.hospital + "-" + number.astype(str)
        codes = pd.factorize(table.patient)[0]
        eta += rng.normal(0, 0.8, codes.max() + 1)[codes]
    table["died"] = rng.binomial(1, 1 / (1 + np.exp(-eta)))
    table["count"] = rng.negative_binomial(3, 3 / (3 + np.exp(1 + eta)))
    table["pain"] = np.digitize(eta + rng.logistic(size=num_rows), [-1.0, 0.3, 1.5])
    table["score"] = 100 + 12 * eta + rng.normal(0, 10, num_rows)
    return table


def pooled_model(priors, table, effects, observe):
    """Sample all parameters with their names in `models`; `effects` lists groups and slopes."""

    def parameter(name):
        return numpyro.sample(name, priors[name])

    eta = jnp.zeros(len(table))
    age = jnp.array(table.age - table.age.mean())
    arm = jnp.array(table.arm.eq("placebo") - table.arm.eq("placebo").mean())
    if "Intercept" in priors:
        eta = eta + parameter("Intercept")
    eta = eta + parameter("age") * age + parameter("arm[placebo]") * arm
    for label, column, slope in effects:
        codes = pd.factorize(table[column])[0]
        names = [f"sd_{label}[Intercept]", f"sd_{label}[age]"] if slope else [f"sd_{label}"]
        sds = jnp.stack([parameter(name) for name in names])
        z = numpyro.sample(
            f"z_{label}", dist.Normal().expand([codes.max() + 1, len(names)]).to_event(2)
        )
        if slope:
            factor = numpyro.sample(f"cor_{label}", dist.LKJCholesky(2, 2.0))
            numpyro.deterministic(f"cor_{label}[Intercept, age]", factor[1, 0])
            z = z @ factor.T
        columns = jnp.stack([jnp.ones(len(table)), jnp.array(table.age)][: len(names)], 1)
        eta = eta + jnp.sum((z * sds)[codes] * columns, axis=1)
    observe(eta, parameter)


def binary(table):
    def observe(eta, parameter):
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=jnp.array(table.died))

    return observe


def counts(table):
    def observe(eta, parameter):
        mean = dist.NegativeBinomial2(jnp.exp(eta), parameter("shape"))
        numpyro.sample("y", mean, obs=jnp.array(table["count"]))

    return observe


def ordinal(table):
    def observe(eta, parameter):
        normal = dist.Normal(0, 2.5).expand([3])
        ordered = dist.transforms.OrderedTransform()
        cutpoints = numpyro.sample("cutpoints", dist.ImproperUniform(ordered.codomain, (), (3,)))
        numpyro.factor("prior", normal.log_prob(cutpoints).sum())
        numpyro.sample("y", dist.OrderedLogistic(eta, cutpoints), obs=jnp.array(table.pain))

    return observe


def gaussian(table):
    def observe(eta, parameter):
        numpyro.sample("y", dist.Normal(eta, parameter("sigma")), obs=jnp.array(table.score))

    return observe


CASES = {
    "binary": (
        "died ~ age + arm + (1 | hospital)",
        "bernoulli",
        simulate(8, 400, 1),
        [("hospital", "hospital", False)],
        binary,
    ),
    "counts": (
        "count ~ age + arm + (1 | hospital)",
        "negative_binomial",
        simulate(12, 300, 2),
        [("hospital", "hospital", False)],
        counts,
    ),
    "ordinal": (
        "pain ~ age + arm + (1 | hospital)",
        "ordinal",
        simulate(10, 300, 3),
        [("hospital", "hospital", False)],
        ordinal,
    ),
    "slopes": (
        "score ~ age + arm + (1 + age | hospital)",
        "gaussian",
        simulate(12, 300, 4).assign(age=lambda table: (table.age - 60) / 10),
        [("hospital", "hospital", True)],
        gaussian,
    ),
    "nested": (
        "died ~ age + arm + (1 | hospital/patient)",
        "bernoulli",
        simulate(5, 400, 5, patients=10),
        [("hospital", "hospital", False), ("hospital:patient", "patient", False)],
        binary,
    ),
    "crossed": (
        "count ~ age + arm + (1 | hospital) + (1 | surgeon)",
        "negative_binomial",
        simulate(10, 300, 6).assign(surgeon=[f"s{i % 4}" for i in range(300)]),
        [("hospital", "hospital", False), ("surgeon", "surgeon", False)],
        counts,
    ),
}


def run_nuts(model, *arguments):
    mcmc = numpyro.infer.MCMC(
        numpyro.infer.NUTS(model, target_accept_prob=0.9),
        num_warmup=1000,
        num_samples=1500,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), *arguments)
    return {name: np.asarray(x, np.float64) for name, x in mcmc.get_samples().items()}


@pytest.mark.parametrize("case", CASES)
def test_posteriors_are_those_of_pooled_nuts(case):
    formula, family, table, effects, observe = CASES[case]
    fit = models.glmm(formula, table, client="hospital", family=family, progress=False)
    truth = run_nuts(pooled_model, dict(fit.priors), table, effects, observe(table))
    # On unconstrained scales, on which posteriors are nearly normal.
    draws = {"b": fit.samples.constrained["b"][0]}
    names = {name: draws["b"][:, i] for i, name in enumerate(fit.design.names)}
    for site, values in fit.samples.constrained.items():
        values = np.asarray(values, np.float64).reshape(-1, *values.shape[2:])
        if site.startswith("sd_"):
            labels = [x for x in fit.priors if x == site or x.startswith(f"{site}[")]
            names |= dict(zip(labels, np.log(values).T, strict=True))
        elif site in ("sigma", "shape"):
            names[site] = np.log(values)
        elif site.startswith("cor_"):
            names[f"{site}[Intercept, age]"] = np.arctanh(values[:, 1, 0])
        elif site in ("Intercept", "cutpoints"):
            names[site] = values
    assert fit.verdict.kind == "passed", fit.verdict
    for name, values in names.items():
        exact = truth[name]
        if name.startswith("sd_") or name in ("sigma", "shape"):
            exact = np.log(exact)
        if name.startswith("cor_"):
            exact = np.arctanh(exact)
        gap = np.abs(values.mean(0) - exact.mean(0)) / exact.std(0)
        ratio = values.std(0) / exact.std(0)
        print(case, name, np.round(gap, 3), np.round(ratio, 3))
        assert np.all(gap < 0.1), (name, gap)
        assert np.all(np.abs(np.log(ratio)) < 0.1), (name, ratio)
