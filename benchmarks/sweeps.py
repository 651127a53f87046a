"""Seconds of 30 seeds x 8 step sizes of FSGLD's toy: separate processes, sequential, vmapped.

Times are for whole processes, including imports and compilation. Only `NUM_TIMED` of the 240
processes with one point and one seed are run; their total is extrapolated from the median.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from benchmarks import toy
from benchmarks.timing import compare

SEEDS, ROUNDS, NUM_TIMED, REPEATS = 30, 2000, 5, 3
MODES = ("sequential", "vmapped")
SIZES, CLASSES = ((0, 10, 200), (0, 784, 50), (0, 3200, 10), (20, 50, 100), (32, 784, 10)), 10
STEPS = tuple(float(s) for s in np.geomspace(1e-5, 8e-5, 8))


def sweep(mode: str, steps=STEPS, seeds: int = SEEDS):
    x = toy.rows()
    data = fedmcmc.FederatedData.from_clients(list(x))
    surrogates = fedmcmc.Gaussian.from_moments(
        jnp.asarray(x.mean(axis=1)), variance=jnp.full(len(x), 1 / toy.ROWS)
    )

    def kernel_fn(step_size):
        return fedmcmc.fsgld(
            toy.POSTERIOR,
            surrogates,
            step_size=step_size,
            num_local_steps=toy.LOCAL,
            batch_size=toy.BATCH,
        )

    return fedmcmc.sweep(
        jax.random.key(0),
        kernel_fn,
        {"step_size": steps},
        data,
        jnp.zeros(toy.DIM),
        num_seeds=seeds,
        num_rounds=ROUNDS,
        thinning=10,
        mode=mode,
        progress=False,
    ).dataset


def single() -> None:
    x = toy.rows()
    toy.ours(x, ROUNDS)()


def bench() -> None:
    total = len(STEPS) * SEEDS
    with tempfile.TemporaryDirectory() as cache:
        _process("single", cache)  # fills the cache
        times: dict[str, list[float]] = {}
        for i in range(max(NUM_TIMED, REPEATS)):
            if i < NUM_TIMED:
                times.setdefault("single", []).append(_process("single"))
                times.setdefault("single, cached", []).append(_process("single", cache))
            if i < REPEATS:
                for mode in MODES:
                    times.setdefault(mode, []).append(_process(mode))
    seconds = {name: statistics.median(runs) for name, runs in times.items()}
    best = seconds["vmapped"]
    print(f"{len(STEPS)} step sizes x {SEEDS} seeds of the toy, {ROUNDS} rounds, whole processes:")
    for name, label in (
        ("single", f"{total} processes, extrapolated from {NUM_TIMED}"),
        ("single, cached", f"the same with a cache on disk, extrapolated from {NUM_TIMED}"),
        ("sequential", "one process, one after another"),
        ("vmapped", "one process, vmapped"),
    ):
        estimate = seconds[name] * (total if name.startswith("single") else 1)
        print(f"{label:<54}{estimate:>10,.1f} s   {estimate / best:>8.1f} times vmapped")
    warm = compare({mode: lambda m=mode: sweep(m) for mode in MODES}, REPEATS)
    print(
        f"{'without start-up and compilation':<54}"
        f"{warm['sequential']:>10.2f} s one after another, {warm['vmapped']:.2f} s vmapped: "
        f"{warm['sequential'] / warm['vmapped']:.1f}"
    )
    bench_sizes()


def bench_sizes() -> None:
    """Time small and large models with 4 step sizes x 2 seeds, without compilation."""
    rng = np.random.default_rng(0)
    steps = {"step_size": [1e-6, 2e-6, 4e-6, 8e-6]}
    for width, dim, rounds in SIZES:
        x = rng.normal(size=(20, 50, dim)).astype(np.float32) / np.sqrt(dim)
        data = fedmcmc.FederatedData.from_clients(
            [{"x": rows, "y": rng.integers(0, CLASSES, 50)} for rows in x]
        )
        sizes = [dim, width, CLASSES] if width else [dim, CLASSES]
        start = [rng.normal(size=s) / np.sqrt(s[0]) for s in pairwise(sizes)]
        bytes_ = sum(4 * leaf.size for leaf in start)
        model = "network" if width else "softmax regression"
        for name, kernel_fn, factor in (("LSD", _lsd, 4), ("FA-LD", _fa_ld, 1)):

            def run(mode, kernel_fn=kernel_fn, data=data, start=start, rounds=rounds * factor):
                return fedmcmc.sweep(
                    jax.random.key(0),
                    kernel_fn,
                    steps,
                    data,
                    start,
                    num_seeds=2,
                    num_rounds=rounds,
                    thinning=rounds,
                    mode=mode,
                    progress=False,
                ).modes

            seconds = compare({m: lambda m=m, run=run: run(m) for m in MODES}, REPEATS)
            sequential, vmapped = (seconds[mode] for mode in MODES)
            times = f"{sequential:.2f} s one after another, {vmapped:.2f} s vmapped"
            ratio, chosen = sequential / vmapped, run("auto")[0]
            title = f"{name}, {model}, {bytes_ / 1000:,.0f} kB"
            print(f"{title:<40}{times}: {ratio:.1f} ({chosen})")


def _lsd(step_size):
    return fedmcmc.lsd(MODEL, step_size=step_size, batch_size=20)


def _fa_ld(step_size):
    return fedmcmc.fa_ld(MODEL, step_size=step_size, num_local_steps=5)


def _loglikelihood(theta, rows):
    values = rows["x"]
    for weight in theta[:-1]:
        values = jax.nn.relu(values @ weight)
    logits = jax.nn.log_softmax(values @ theta[-1])
    return jnp.take_along_axis(logits, rows["y"][:, None], axis=-1)[:, 0]


MODEL = fedmcmc.Posterior(
    lambda theta: -0.5 * sum(jnp.sum(leaf**2) for leaf in theta), _loglikelihood
)


def _process(task: str, cache: str | None = None) -> float:
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    if cache is not None:
        env["JAX_COMPILATION_CACHE_DIR"] = cache
    start_time = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.sweeps", task]
    subprocess.run(command, check=True, env=env, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start_time


if __name__ == "__main__":
    if sys.argv[1] == "single":
        single()
    elif sys.argv[1] == "sizes":
        bench_sizes()
    else:
        sweep(sys.argv[1])
