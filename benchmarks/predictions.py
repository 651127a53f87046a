"""Predictions of `predict_bias` compared with long runs of the same kernels.

``python -m benchmarks predictions`` prints the rows of the table of
docs/explanation/diagnostics.md. Means and sds of each run are compared with NUTS on the pooled
rows, as in `settings`, but in the whitened coordinates of the predictions. Rounds per effective
draw refer to the mean of the slowest coordinate.
"""

import warnings
from importlib import import_module

import jax
import numpy as np
from jax.flatten_util import ravel_pytree

import fedmcmc
from benchmarks import federations
from benchmarks.federations import COUNTS, HEART, RAGGED

ROUNDS, BURN_IN, CHAINS = 20_000, 1_000, 8


def kernels(white: fedmcmc.surrogates.Whitened) -> dict[str, fedmcmc.FederatedKernel]:
    """Return one untuned kernel of every kind that `predict_bias` supports."""
    model, q = white.posterior, white.surrogates
    coarse, half = fedmcmc.quantize(1), fedmcmc.bernoulli(0.5)
    return {
        "`lsd`, whole batches": fedmcmc.lsd(model, step_size=0.1),
        "`lsd`, half of the rows": fedmcmc.lsd(model, step_size=0.1, batch_size=0.5),
        "`lsd`, half of the clients": fedmcmc.lsd(model, step_size=0.1, participation=half),
        "`fsgld`, a fifth of the rows": fedmcmc.fsgld(
            model, q, step_size=0.005, num_local_steps=10, batch_size=0.2
        ),
        "`fa_ld`, 5 local steps": fedmcmc.fa_ld(model, step_size=0.05, num_local_steps=5),
        "`qlsd`, one level, half of the clients": fedmcmc.qlsd(
            model, step_size=0.05, compressor=coarse, participation=half
        ),
        "`qlsd_pp`, one level, half of the clients": fedmcmc.qlsd_pp(
            model,
            step_size=0.05,
            batch_size=0.2,
            refresh_every=100,
            compressor=coarse,
            participation=half,
        ),
    }


def run(
    kernel: fedmcmc.FederatedKernel, data: fedmcmc.FederatedData, white: fedmcmc.surrogates.Whitened
) -> np.ndarray:
    """Return whitened positions of chains after burn-in, ``[CHAINS, ROUNDS, d]``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedmcmc.SamplingWarning)
        samples = fedmcmc.sample(
            jax.random.key(1),
            kernel,
            data,
            white.position,
            num_rounds=ROUNDS + BURN_IN,
            num_burnin=BURN_IN,
            num_chains=CHAINS,
            collect=lambda state, info: ravel_pytree(state.broadcast.position)[0],
            progress=False,
        )
    return np.asarray(samples.draws, np.float64)


def whitened(white: fedmcmc.surrogates.Whitened, draws: np.ndarray) -> np.ndarray:
    """Return the model's raveled draws ``[num, d]`` in whitened coordinates."""
    unravel = ravel_pytree(white.position)[1]

    def whiten_draw(flat: jax.Array) -> jax.Array:
        return ravel_pytree(white.whitened_position(unravel(flat)))[0]

    return np.asarray(jax.vmap(whiten_draw)(draws.astype(np.float32)), np.float64)


def rounds_per_draw(draws: np.ndarray) -> float:
    """Return the rounds per effective draw of the mean (ArviZ's effective sample size)."""
    ess = import_module("arviz_stats.base").array_stats.ess
    sizes = [
        ess(draws[..., i], method="mean", chain_axis=0, draw_axis=1) for i in range(draws.shape[-1])
    ]
    return draws.shape[0] * draws.shape[1] / float(np.min(sizes))


def bench() -> None:
    print(
        "| federation | kernel | distribution | mean off by, sds | the run | sds | the run | "
        "rounds per draw | the run |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, data, white, exact in federations.whitened(RAGGED, COUNTS, HEART):
        scores = fedmcmc.surrogates.score_covariance(white.posterior, data, white.position)
        exact = whitened(white, exact)
        for title, kernel in kernels(white).items():
            prediction = fedmcmc.predict_bias(kernel, data, white.surrogates, scores=scores)
            draws = run(kernel, data, white)
            bias = (draws.mean((0, 1)) - exact.mean(0)) / exact.std(0)
            spread = draws.std((0, 1)) / exact.std(0)
            source = "simulated" if prediction.simulated else "exact"
            print(
                f"| {name} | {title} | {source} | {np.abs(prediction.bias).max():.3f} | "
                f"{np.abs(bias).max():.3f} | {prediction.spread.min():.2f} to "
                f"{prediction.spread.max():.2f} | {spread.min():.2f} to {spread.max():.2f} | "
                f"{prediction.rounds_per_draw.max():.3g} | {rounds_per_draw(draws):.3g} |",
                flush=True,
            )
            name = ""


if __name__ == "__main__":
    bench()
