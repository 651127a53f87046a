"""Warnings of `whiten` about a misleading mode: ``python -m benchmarks whitening``.

The program makes 7 simulated data sets of each kind. For some kinds `whiten` should warn, for
others not. To check this, the program also prints the range of `fed_ep`'s sds relative to NUTS on
the first three data sets.
"""

import warnings
from functools import partial
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import fedmcmc
from benchmarks.federations import flat, logistic, poisson, truth

SEEDS, COMPARED = 7, 3


def scale(y):
    mean = numpyro.sample("mean", dist.Normal(0, 10))
    sd = numpyro.sample("sd", dist.HalfCauchy(5))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(mean, sd), obs=y)


def normals(num_rows: int, seed: int) -> dict[str, Any]:
    return {"y": (2 + 3 * np.random.default_rng(seed).normal(size=num_rows)).astype(np.float32)}


def regression(model: Any, num_rows: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x = np.stack([np.ones(num_rows), rng.normal(size=num_rows)], 1)
    eta = x @ [-0.5, 1.0]
    y = rng.random(num_rows) < 1 / (1 + np.exp(-eta)) if model is logistic else None
    y = rng.poisson(np.exp(eta)) if y is None else y.astype(np.int32)
    return {"x": x.astype(np.float32), "y": y}


def bench() -> None:
    kinds = {
        **{f"mean and sd of {n} rows": (scale, partial(normals, n)) for n in (6, 9, 20)},
        "logistic, 30 rows": (logistic, partial(regression, logistic, 30)),
        "Poisson, 30 rows": (poisson, partial(regression, poisson, 30)),
    }
    print(f"Data sets with a warning of `whiten`; sds of `fed_ep` over NUTS in {COMPARED} of them:")
    for name, (model, make_rows) in kinds.items():
        num_warned, spreads, posterior = 0, [], None
        for seed in range(SEEDS):
            rows = make_rows(seed)
            ids = np.arange(len(rows["y"])) % 3
            data = fedmcmc.FederatedData.from_arrays(rows, ids)
            posterior = posterior or fedmcmc.from_numpyro(model, example=data)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                white = fedmcmc.whiten(posterior, data)
            num_warned += any("no guide" in str(w.message) for w in caught)
            if seed >= COMPARED:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                samples = fedmcmc.sample(
                    jax.random.key(0),
                    fedmcmc.fed_ep(white.posterior),
                    data,
                    white.position,
                    num_rounds=20,
                    num_chains=4,
                    progress=False,
                )
            exact = truth(posterior, data, white.posterior.position_fn(white.position))
            spreads.append(flat(samples.final_draws).std(0) / exact.std(0))
        low, high = np.min(spreads), np.max(spreads)
        print(f"  {name}: {num_warned} of {SEEDS}; {low:.2f} to {high:.2f}", flush=True)


if __name__ == "__main__":
    bench()
