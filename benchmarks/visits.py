"""Steps that `tune` takes for a relay, and what they sample: ``python -m benchmarks visits``.

The table of docs/choosing.md: federations where a visited client's surrogate errs away from the
mode, against NUTS on the pooled rows. Radon is read through ``FEDMCMC_DATA``.
"""

import warnings
from functools import partial

import jax
import numpy as np

import fedmcmc
from benchmarks.settings import flat, linear, logistic, poisson, radon, simulated, truth

ROUNDS = {1: 10_000, 10: 20_000}


def regression(dim: int, num_clients: int, num_rows: int, seed: int) -> fedmcmc.FederatedData:
    """Return logistic data of clients of one size."""
    rng = np.random.default_rng(seed)
    beta, clients = rng.normal(size=dim) / np.sqrt(dim), []
    for _ in range(num_clients):
        x = rng.normal(size=(num_rows // num_clients, dim))
        y = (rng.random(len(x)) < 1 / (1 + np.exp(-x @ beta))).astype(np.int32)
        clients.append({"x": x.astype(np.float32), "y": y})
    return fedmcmc.FederatedData.from_clients(clients)


def relay(white: fedmcmc.Whitened, num_local_steps: int, step_size: float) -> fedmcmc.kernels.Relay:
    return fedmcmc.fsgld(
        white.posterior, white.surrogates, step_size=step_size, num_local_steps=num_local_steps
    )


def bench() -> None:
    federations = {
        "radon, 85 counties": (linear, radon),
        "radon, 386 counties": (linear, partial(radon, None)),
        "Poisson, 100 clients of 3 to 40": (
            poisson,
            partial(simulated, poisson, 100, (3, 40), 4, 1),
        ),
        "logistic, 30 clients of 2 to 6": (
            logistic,
            partial(simulated, logistic, 30, (2, 7), 3, 0),
        ),
        "logistic, 100 parameters, 20 clients of 100": (
            logistic,
            partial(regression, 100, 20, 2000, 0),
        ),
    }
    print("| federation | local steps | by law alone | taken | mean off by, sds | sds over NUTS |")
    print("|---|---|---|---|---|---|")
    for name, (model, load) in federations.items():
        try:
            data = load()
        except FileNotFoundError as error:
            print(f"{name} is skipped: set FEDMCMC_DATA ({error}).")
            continue
        posterior = fedmcmc.from_numpyro(model, example=data)
        white = fedmcmc.whiten(posterior, data)
        exact = truth(posterior, data, white.posterior.position_fn(white.position))
        for num_local_steps, num_rounds in ROUNDS.items():
            build = partial(relay, white, num_local_steps)
            best = fedmcmc.tune(
                lambda step_size, build=build: build(step_size=step_size),
                white.posterior,
                data,
                white.surrogates,
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                samples = fedmcmc.sample(
                    jax.random.key(1),
                    best.kernel,
                    data,
                    white.position,
                    num_rounds=num_rounds,
                    num_burnin=100,
                    num_chains=4,
                    progress=False,
                )
            draws = flat(samples.draws)
            bias = np.abs(draws.mean(0) - exact.mean(0)) / exact.std(0)
            spread = draws.std(0) / exact.std(0)
            print(
                f"| {name} | {num_local_steps} | {2 * (1 - 1 / 1.02**2):.3f} | "
                f"{best.settings['step_size']:.3f} | {bias.max():.3f} | {spread.min():.2f} to "
                f"{spread.max():.2f} |",
                flush=True,
            )
            name = ""


if __name__ == "__main__":
    bench()
