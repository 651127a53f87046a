"""Seconds of the first and the second call of functions, and programs compiled by the second.

The second call gets the model and the settings again, with other data of the same shapes, as in a
loop over data sets. ``python -m benchmarks.calls`` measures loops and `QUICK` in about three
minutes, ``python -m benchmarks.calls all`` all calls in seven, and ``python -m benchmarks.calls loo
fit`` the calls whose names contain one of these words. Before each first call, JAX forgets its
programs and the model is a new function.
"""

import logging
import sys
import time
import warnings

import jax
import numpy as np

import fedmcmc
from benchmarks.call_list import CALLS, Case, draw_cases, draw_prior
from benchmarks.timing import count_programs
from fedmcmc import criticism

NUM_FIRST, NUM_NEXT, NUM_ALL = 5, 15, 200
"""Numbers of simulated data sets: fitted before others, timed alone, and of the extrapolation."""
QUICK = (
    "fit, NumPyro model",
    "fit, Posterior",
    "fit, random effects",
    "correct",
    "whiten and sample, fsgld",
    "sample, lsd",
    "sample, qlsd_pp",
    "sample, fa_hmc",
    "sample, hmc",
    "sample, fed_ep",
    "sweep",
    "tune",
    "predict_bias",
    "estimate_smoothness",
    "criticism.loo",
    "criticism.predictive_check",
    "local_draws",
    "hierarchy.new_group",
    "real sites, fit",
    "metrics.potential",
)
TRUTH = {"coefficients": np.array([-1.5, -0.7, 0.5], np.float32)}


def measure(call):
    """Return the seconds of the first and the second call, and the programs of the second."""
    cases, seconds = draw_cases(), []
    jax.clear_caches()
    for case in cases:
        start_time = time.perf_counter()
        with count_programs() as programs:
            jax.block_until_ready(jax.tree.leaves(call(case)))
        seconds.append(time.perf_counter() - start_time)
    return *seconds, programs


def bench_loops():
    """Time loops over simulated data sets in one process, as users write them.

    The first data sets compile the programs of all stages that data sets need.
    """
    case, _ = draw_cases()
    posterior = case.posterior
    redraw = jax.jit(posterior.resample_fn)

    def fit_simulated(seeds):
        for seed in seeds:
            key = jax.random.key(seed)
            tables = [
                redraw(jax.random.fold_in(key, i), TRUTH, case.data.client_rows(i))
                for i in range(case.data.num_clients)
            ]
            data = fedmcmc.FederatedData.from_clients(tables)
            fedmcmc.fit(case.logistic, data, rng_key=key, progress=False)

    def calibrate(seeds):
        def fit(key, data):
            return fedmcmc.fit(posterior, data, rng_key=key, progress=False)

        key, settings = jax.random.key(seeds[0]), dict(num_repetitions=len(seeds))
        criticism.calibrate(key, posterior, case.data, fit, draw_prior, **settings)

    def leave_out(seeds):
        for seed in seeds:
            other = Case(seed, case.logistic)
            settings = dict(surrogates=other.surrogates, prior=other.prior)
            criticism.leave_out(other.posterior, other.data, other.draws, **settings)

    loops = {"fit": fit_simulated, "criticism.calibrate": calibrate, "leave_out": leave_out}
    print(f"| loop | first {NUM_FIRST}, s | all {NUM_ALL} (extrapolated), s |\n|---|---|---|")
    for name, loop in loops.items():
        jax.clear_caches()
        times = []
        for seeds in (range(NUM_FIRST), range(NUM_FIRST, NUM_FIRST + NUM_NEXT)):
            start_time = time.perf_counter()
            loop(seeds)
            times.append(time.perf_counter() - start_time)
        total = times[0] + (NUM_ALL - NUM_FIRST) / NUM_NEXT * times[1]
        print(f"| `{name}` | {times[0]:.1f} | {total:.0f} |", flush=True)


def bench(words=()):
    logging.getLogger("fedmcmc").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not words or "loops" in words or "all" in words:
            bench_loops()
    print("| call | first, s | second, s | programs compiled by the second |")
    print("|---|---|---|---|")
    for name, call in CALLS.items():
        is_named = "all" in words or any(word in name for word in words)
        if not (is_named if words else name in QUICK):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first, second, programs = measure(call)
        print(f"| `{name}` | {first:.2f} | {second:.2f} | {len(programs)} |", flush=True)


if __name__ == "__main__":
    bench(sys.argv[1:])
