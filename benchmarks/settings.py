"""One set of settings on many federations: kernels on whitened coordinates against NUTS.

``python -m benchmarks settings`` prints the table of docs/choosing.md. Errors are those against
NUTS on the pooled rows, beside what the run said of itself.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

import fedmcmc
from experiments.data import folder


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


def simulated(
    model: Callable[..., None], num_clients: int, sizes: tuple[int, int], dim: int, seed: int
) -> fedmcmc.FederatedData:
    """Return clients of sizes that are uniform in their logarithms, whose covariates differ."""
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
    """Return UCI heart disease at four hospitals: 740 complete rows, six covariates.

    The file holds the UCI's ``processed.*.data`` (Janosi, Steinbrunn, Pfisterer and Detrano).
    """
    file = np.load(folder() / "heart_disease_4sites.npz")
    names = file["feature_names"].tolist()
    columns = [names.index(n) for n in ("age", "sex", "trestbps", "thalach", "exang", "oldpeak")]
    rows = file["flamby_complete"]
    x = file["x"][rows][:, columns]
    x = np.concatenate([np.ones((len(x), 1)), (x - x.mean(0)) / x.std(0)], 1)
    y = (file["y"][rows] > 0).astype(np.int32)
    return fedmcmc.FederatedData.from_arrays(
        {"x": x.astype(np.float32), "y": y}, file["site"][rows]
    )


def radon(num_counties: int | None = 85) -> fedmcmc.FederatedData:
    """Return radon in the first counties of posteriordb's ``radon_all``: floor and uranium."""
    file = np.load(folder() / "radon_all.npz")
    rows = np.isin(file["county"], np.unique(file["county"])[:num_counties])
    x = np.stack([np.ones(rows.sum()), file["floor"][rows], file["log_uppm"][rows]], 1)
    return fedmcmc.FederatedData.from_arrays(
        {"x": x.astype(np.float32), "y": file["log_radon"][rows]}, file["county"][rows]
    )


def kernels(white: fedmcmc.Whitened) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return each kernel and the length of its run."""
    model, until = white.posterior, dict(until=fedmcmc.at_rest(), max_rounds=60)
    return {
        "`fsgld`": (
            fedmcmc.fsgld(model, white.surrogates, step_size=0.05, num_local_steps=10),
            dict(num_rounds=2100, num_burnin=100),
        ),
        "`qlsd_pp`, 16 levels": (
            fedmcmc.qlsd_pp(
                model,
                step_size=0.1,
                batch_size=0.2,
                refresh_every=100,
                compressor=fedmcmc.quantize(16),
            ),
            dict(num_rounds=4100, num_burnin=100),
        ),
        "`fa_hmc`, control variates": (
            fedmcmc.fa_hmc(
                model,
                step_size=0.2,
                num_integration_steps=5,
                num_local_steps=1,
                control_variate=True,
            ),
            dict(num_rounds=1100, num_burnin=100),
        ),
        "`fed_ep`": (fedmcmc.fed_ep(model), until),
    }


def truth(posterior: fedmcmc.Posterior, data: fedmcmc.FederatedData, start: Any) -> np.ndarray:
    """Return draws of NUTS on the pooled rows, ``[num, d]``."""

    def potential(position: Any) -> jax.Array:
        terms = posterior.loglikelihood_fn(position, data.rows)
        return -posterior.logprior_fn(position) - jnp.sum(terms)

    mcmc = MCMC(
        NUTS(potential_fn=potential),
        num_warmup=1000,
        num_samples=4000,
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


def bench() -> None:
    federations: dict[str, tuple[Any, Any]] = {
        "logistic, 60 clients of 2 to 200 rows": (
            logistic,
            lambda: simulated(logistic, 60, (2, 200), 5, 0),
        ),
        "Poisson, 20 clients of 5 to 100": (
            poisson,
            lambda: simulated(poisson, 20, (5, 100), 4, 1),
        ),
        "linear, unknown sd, 160 clients of 2 to 50": (
            linear,
            lambda: simulated(linear, 160, (2, 50), 6, 2),
        ),
        "heart disease, 4 hospitals": (logistic, heart),
        "radon, 85 counties": (linear, radon),
    }
    print(
        "| federation | kernel | rounds | ESS | mean off by, sds | sds over NUTS | the run's own "
        "figures | warnings | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, (model, load) in federations.items():
        try:
            data = load()
        except FileNotFoundError as error:
            print(f"{name} is skipped: set FEDMCMC_DATA ({error}).")
            continue
        posterior = fedmcmc.from_numpyro(model, example=data)
        white = fedmcmc.whiten(posterior, data)
        exact = truth(posterior, data, white.posterior.position_fn(white.position))
        for title, (kernel, length) in kernels(white).items():
            begun = time.perf_counter()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                samples = fedmcmc.sample(
                    jax.random.key(1),
                    kernel,
                    data,
                    white.position,
                    num_chains=4,
                    progress=False,
                    **length,
                )
            seconds = time.perf_counter() - begun
            last = samples.draws if samples.final_draws is None else samples.final_draws
            draws, told = flat(last), samples.diagnosis
            bias = np.abs(draws.mean(0) - exact.mean(0)) / exact.std(0)
            spread, own = draws.std(0) / exact.std(0), told.moments
            print(
                f"| {name} | {title} | {samples.totals['rounds'][0]:,} | {told.ess:,.0f} | "
                f"{bias.max():.3f} | {spread.min():.2f} to {spread.max():.2f} | "
                f"{np.abs(own.bias).max():.3f}; {own.spread.min():.2f} to "
                f"{own.spread.max():.2f} | {len(caught) or 'none'} | {seconds:.1f} |",
                flush=True,
            )
            name = ""


if __name__ == "__main__":
    bench()
