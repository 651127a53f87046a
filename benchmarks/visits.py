"""Step sizes that `tune` chooses for a relay, and their errors: ``python -m benchmarks visits``.

This prints the rows of the table of docs/explanation/diagnostics.md. In these federations a visited
client's surrogate is inaccurate away from the mode. The reference is NUTS on the pooled rows. Radon
in all counties is read from ``FEDMCMC_DATA``.
"""

import warnings
from functools import partial

import jax
import numpy as np

import fedmcmc
from benchmarks.federations import (
    COUNTS_MANY,
    FEW_ROWS,
    LUNG,
    RADON,
    RADON_WHOLE,
    TICKS,
    WIDE,
    flat,
    whitened,
)

ROUNDS = {1: 10_000, 10: 20_000}


def relay(
    white: fedmcmc.surrogates.Whitened, num_local_steps: int, step_size: float
) -> fedmcmc.kernels.Relay:
    return fedmcmc.fsgld(
        white.posterior, white.surrogates, step_size=step_size, num_local_steps=num_local_steps
    )


def bench() -> None:
    columns = ("federation", "local steps", "without the check", "chosen", "mean off by, sds")
    print(f"| {' | '.join(columns)} | sds over NUTS | depth | warnings |\n|{'---|' * 8}")
    names = (TICKS, LUNG, COUNTS_MANY, FEW_ROWS, RADON, RADON_WHOLE, WIDE)
    for name, data, white, exact in whitened(*names):
        for num_local_steps, num_rounds in ROUNDS.items():
            build = partial(relay, white, num_local_steps)
            best = fedmcmc.tune(
                lambda step_size, build=build: build(step_size=step_size),
                white.posterior,
                data,
                white.surrogates,
            )
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
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
                f"{spread.max():.2f} | {samples.diagnosis.moments.depth:.1f} | "
                f"{len(caught) or 'none'} |",
                flush=True,
            )
            name = ""


if __name__ == "__main__":
    bench()
