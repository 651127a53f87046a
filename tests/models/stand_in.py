"""A mixed model with made-up draws, written by hand, for tests that need no fit."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd

import fedmcmc
from fedmcmc import fitting
from fedmcmc.diagnostics import Verdict
from fedmcmc.models import Family
from fedmcmc.models._model_fit import ModelFit
from fedmcmc.records import Samples
from fedmcmc.types import Broadcast, FederatedState

HOSPITALS = ("Bern", "Chur", "Zug")
CENTERS = np.array([50.0, 0.4])


@dataclass(frozen=True)
class Design:
    """Design of ``y ~ age + trt + (1 + age | hospital)`` or ``(1 | hospital)``."""

    slopes: bool = False
    names: tuple = ("age", "trt[B]")
    has_intercept: bool = True
    centers: np.ndarray = field(default_factory=lambda: CENTERS)

    @property
    def formula(self):
        return SimpleNamespace(covariates=("age", "trt"), trials=None)

    @property
    def schema(self):
        return SimpleNamespace(levels={"trt": ("A", "B")}, numbers={"age": None}, clients=HOSPITALS)

    @property
    def terms(self):
        names = ("Intercept", "age") if self.slopes else ("Intercept",)
        return (
            SimpleNamespace(
                label="hospital", names=names, correlated=True, kind="client", levels=HOSPITALS
            ),
        )

    def rows(self, table, client, *, outcome=True):
        age = table["age"].to_numpy(np.float64)
        x = np.stack([age, (table["trt"] == "B").to_numpy(np.float64)], 1) - CENTERS
        z = np.stack([np.ones_like(age), age], 1)[:, : 1 + self.slopes]
        rows = {"x": np.float32(x), "z_hospital": np.float32(z)}
        return rows | ({"y": table["y"].to_numpy(np.float32)} if outcome else {})

    def data(self, tables):
        rows = {name: self.rows(table, name) for name, table in tables.items()}
        return fedmcmc.FederatedData.from_clients(rows)


@dataclass(frozen=True)
class Model:
    family: Family
    k: int = 1

    def __call__(self, x, z_hospital, y=None):
        intercept = numpyro.sample("Intercept", dist.Normal(0, 2.5))
        b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
        sd = numpyro.sample("sd_hospital", dist.HalfNormal(1).expand([self.k]).to_event(1))
        scale = jnp.diag(sd)
        if self.k > 1:
            scale = sd[:, None] * numpyro.sample("cor_hospital", dist.LKJCholesky(self.k, 2.0))
        population = dist.MultivariateNormal(jnp.zeros(self.k), scale_tril=scale)
        effect = numpyro.sample("effect_hospital", population, infer={"local": True})
        parameters = {}
        if "sigma" in self.family.parameters:
            parameters["sigma"] = numpyro.sample("sigma", dist.Exponential(1.0))
        if "cutpoints" in self.family.parameters:
            normal = dist.Normal(0, 2).expand([2])
            ordered = dist.TransformedDistribution(normal, dist.transforms.OrderedTransform())
            parameters["cutpoints"] = numpyro.sample("cutpoints", ordered)
        eta = intercept + x @ b + jnp.sum(z_hospital * effect, -1)
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", self.family.distribution(eta, parameters), obs=y)


def make_tables(seed=0, sizes=(30, 12, 20), outcome="binary"):
    """Return a table per hospital."""
    rng = np.random.default_rng(seed)
    tables = {}
    for name, size in zip(HOSPITALS, sizes, strict=True):
        age = rng.normal(50, 8, size)
        trt = rng.choice(["A", "B"], size)
        eta = rng.normal() + 0.05 * (age - 50) + 0.8 * (trt == "B")
        y = {
            "binary": lambda eta: rng.random(len(eta)) < 1 / (1 + np.exp(-eta)),
            "real": lambda eta: eta + rng.normal(size=len(eta)),
            "category": lambda eta: (eta > -0.5) * 1 + (eta > 1) * 1,
        }[outcome](eta)
        tables[name] = pd.DataFrame({"age": age, "trt": trt, "y": y.astype(float)})
    return tables


def make_fit(family="bernoulli", *, slopes=False, tau=0.8, num=400, chains=1, seed=1):
    """Return a fit whose draws are made up around fixed parameters."""
    outcome = {"bernoulli": "binary", "gaussian": "real", "ordinal": "category"}[family]
    family = Family(family, {"gaussian": "identity"}.get(family, "logit"))
    design, tables = Design(slopes), make_tables(outcome=outcome)
    data = design.data(tables)
    model = Model(family, 1 + slopes)
    posterior = fedmcmc.from_numpyro(model, example=data)
    rng = np.random.default_rng(seed)

    def normal(mean, sd):
        mean = np.asarray(mean, np.float64)
        return np.float32(mean + sd * rng.normal(size=(chains, num, *mean.shape)))

    draws = {
        "Intercept": normal(0.3, 0.2),
        "b": normal([0.05, 0.8], [0.01, 0.3]),
        "sd_hospital": normal(np.log(tau / np.array([1.0, 50.0])[: 1 + slopes]), 0.05),
    }
    if slopes:
        draws["cor_hospital"] = normal([-0.4], 0.1)
    if family.name == "gaussian":
        draws["sigma"] = normal(0.0, 0.1)
    if family.name == "ordinal":
        draws["cutpoints"] = normal([-0.5, 0.3], 0.1)
    fitted = make_fitted(posterior, draws, data)
    term = "(1 + age | hospital)" if slopes else "(1 | hospital)"
    priors = {
        "Intercept": dist.Normal(0, 2.5),
        "age": dist.Normal(0, 1),
        "trt[B]": dist.Normal(0, 1),
    }
    priors["sd_hospital"] = dist.HalfNormal(1)
    return ModelFit(
        fitted, model, posterior, data, design, family, priors, f"y ~ age + trt + {term}", tables
    )


def make_fitted(posterior, draws, data):
    """Return a result of `fedmcmc.fit` with made-up draws."""
    num_chains, num = jax.tree.leaves(draws)[0].shape[:2]
    position = {name: x[:, -1] for name, x in draws.items()}
    state = FederatedState(Broadcast(np.zeros(num_chains, np.int32), position), (), ())
    info = {"draw": np.tile(np.arange(num), (num_chains, 1))}
    totals = {name: np.zeros(num_chains) for name in ("rounds", "bits_up", "bits_down")}
    verdict = Verdict("passed", "importance", k_hat=0.1, ess=350.0, error=0.02, sd_error=0.02)
    settings = dict(stopped={"verdict": verdict}, versions={"fedmcmc": "0.2.0"})
    samples = Samples(draws, info, state, totals, posterior.constrain_fn, **settings)
    stages = (fitting.StageReport("correction", "mixture at the modes", 13, 1e6, 1e6, k_hat=0.1),)
    about = {"clients": data.num_clients, "rows": data.num_rows, "parameters": len(draws)}
    report = fitting.Report(stages, verdict, {}, about)
    sampled = posterior if posterior.local is None else fedmcmc.marginal(posterior)
    return fitting.Fitted(samples, verdict, -30.0, 0.1, report, sampled)


def make_specified_fit(specification, num=300, seed=0):
    """Return a fit of the model of `models.specify` or `models.survival` with made-up draws."""
    posterior = fedmcmc.from_numpyro(specification.model, example=specification.data)
    shapes = jax.eval_shape(posterior.init_fn, jax.random.key(0))
    rng = np.random.default_rng(seed)
    draws = {
        name: np.float32(0.3 * rng.normal(size=(1, num, *x.shape))) for name, x in shapes.items()
    }
    return ModelFit(
        make_fitted(posterior, draws, specification.data),
        specification.model,
        posterior,
        specification.data,
        specification.design,
        specification.family,
        specification.priors,
        specification.formula.text,
        specification.tables,
    )
