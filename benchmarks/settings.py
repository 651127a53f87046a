"""One set of settings on many federations: kernels on whitened coordinates against NUTS.

``python -m benchmarks settings`` prints the rows of the table of docs/explanation/choosing.md.
Errors are relative to NUTS on the pooled rows; the run's own estimates of them are printed too.
"""

import time
import warnings
from typing import Any

import jax
import numpy as np

import fedmcmc
from benchmarks.federations import (
    COUNTS,
    COUNTS_MANY,
    FEW_ROWS,
    HEART,
    MANY,
    RADON,
    RADON_WHOLE,
    RAGGED,
    WIDE,
    flat,
    whitened,
)

ALL = (RAGGED, COUNTS, MANY, HEART, RADON)
FOR_FSGLD = (FEW_ROWS, COUNTS_MANY, WIDE, RADON_WHOLE)
"""Federations with difficult surrogates: few rows per client, many clients or parameters."""


def kernels(white: fedmcmc.surrogates.Whitened) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return each kernel and the arguments that set the length of its run."""
    model, until = white.posterior, dict(until=fedmcmc.at_rest(), max_rounds=60)
    return {
        "`fsgld`": (
            fedmcmc.fsgld(model, white.surrogates, step_size=0.02, num_local_steps=10),
            dict(num_rounds=4100, num_burnin=100),
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


def bench() -> None:
    print(
        "| federation | kernel | rounds | ESS | mean off by, sds | sds over NUTS | the run's own "
        "figures | warnings | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, data, white, exact in whitened(*ALL, *FOR_FSGLD):
        is_for_fsgld = name in FOR_FSGLD
        for title, (kernel, length) in kernels(white).items():
            if is_for_fsgld and "fsgld" not in title:
                continue
            start_time = time.perf_counter()
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
            seconds = time.perf_counter() - start_time
            final = samples.draws if samples.final_draws is None else samples.final_draws
            draws, diagnosis = flat(final), samples.diagnosis
            bias = np.abs(draws.mean(0) - exact.mean(0)) / exact.std(0)
            spread, estimate = draws.std(0) / exact.std(0), diagnosis.moments
            print(
                f"| {name} | {title} | {samples.totals['rounds'][0]:,} | {diagnosis.ess:,.0f} | "
                f"{bias.max():.3f} | {spread.min():.2f} to {spread.max():.2f} | "
                f"{np.abs(estimate.bias).max():.3f}; {estimate.spread.min():.2f} to "
                f"{estimate.spread.max():.2f} | {len(caught) or 'none'} | {seconds:.1f} |",
                flush=True,
            )
            name = ""


if __name__ == "__main__":
    bench()
