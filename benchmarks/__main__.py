"""Run all benchmarks, or those that are named: ``python -m benchmarks toy clients``."""

import os
import subprocess
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from benchmarks import (
    alarms,
    convolution,
    deployed,
    exact,
    memory,
    predictions,
    settings,
    sweeps,
    toy,
    visits,
    whitening,
    wire,
)
from benchmarks.timing import compare, row


def bench_blackjax() -> None:
    x = toy.rows(1)
    rounds, steps = 8192, 40960
    single_client = fedmcmc.FederatedData.from_clients(list(x))
    surrogates = fedmcmc.Gaussian.from_moments(jnp.asarray(x.mean(1)), variance=jnp.ones(1) / 200)
    kernel = fedmcmc.fsgld(
        toy.POSTERIOR, surrogates, step_size=toy.STEP, num_local_steps=100, batch_size=10
    )
    seconds = compare(
        {
            "fedmcmc": lambda: _draws(kernel, single_client, jnp.zeros(2), rounds),
            "blackjax": toy.blackjax_sgld(
                toy.POSTERIOR, jnp.asarray(x[0]), jnp.zeros(2), 10, toy.STEP, steps
            ),
        }
    )
    ours, peer = rounds * 100 / seconds["fedmcmc"], steps / seconds["blackjax"]
    print(row("one client, toy: steps over blackjax.sgld", ours, "steps/s", ours / peer, "goal: 5"))

    rng = np.random.default_rng(0)
    rows = {
        "x": rng.normal(size=(20000, 500)).astype(np.float32),
        "y": rng.integers(0, 2, 20000).astype(np.float32),
    }
    posterior = fedmcmc.Posterior(
        lambda theta: -0.5 * jnp.sum(theta**2),
        lambda theta, b: -jax.nn.softplus(-(2 * b["y"] - 1) * (b["x"] @ theta)),
    )
    kernel = fedmcmc.dsgld(posterior, step_size=1e-6, num_local_steps=100, batch_size=1000)
    data = fedmcmc.FederatedData.from_clients([rows])
    start, steps = jnp.zeros(500), 500
    store = jax.tree.map(jnp.asarray, rows)
    seconds = compare(
        {
            "fedmcmc": lambda: _draws(kernel, data, start, steps // 100),
            "blackjax": toy.blackjax_sgld(posterior, store, start, 1000, 1e-6, steps),
        },
        repeats=5,
    )
    ratio = seconds["blackjax"] / seconds["fedmcmc"]
    print(
        row(
            "one client, 1000 x 500 batches: over blackjax",
            steps / seconds["fedmcmc"],
            "steps/s",
            ratio,
            "goal: 1",
        )
    )


def bench_compile() -> None:
    x = toy.rows()
    data, kernel = fedmcmc.FederatedData.from_clients(list(x)), toy.kernel(x)
    jax.clear_caches()
    start_time = time.perf_counter()
    _draws(kernel, data, jnp.zeros(2), 1)
    seconds = time.perf_counter() - start_time
    print(f"{'first call of a new process, toy':<44}{seconds:>12.2f} s   goal: 5")


def bench_clients() -> None:
    rounds, work = 8192, {}
    for num_clients in (10, 1_000, 100_000):
        rng = np.random.default_rng(0)
        store = rng.normal(size=(num_clients * 20, 2)).astype(np.float32)
        data = fedmcmc.FederatedData.from_arrays(store, np.arange(len(store)) // 20)
        surrogates = fedmcmc.Gaussian.from_moments(
            jnp.zeros((num_clients, 2)), variance=jnp.full(num_clients, 1 / 20)
        )
        kernel = fedmcmc.fsgld(
            toy.POSTERIOR,
            surrogates,
            step_size=0.1 / (20 * num_clients),
            num_local_steps=100,
            batch_size=10,
        )
        work[f"{num_clients:,} clients"] = lambda kernel=kernel, data=data: _draws(
            kernel, data, jnp.zeros(2), rounds
        )
    seconds = compare(work)
    base = seconds["10 clients"]
    for name, s in seconds.items():
        print(row(f"same rows per client, {name}", rounds / s, "rounds/s", s / base, "goal: 1.1"))


def _draws(kernel, data, start, rounds):
    return fedmcmc.sample(
        jax.random.key(0), kernel, data, start, num_rounds=rounds, thinning=1, progress=False
    ).draws


def on_all_cores(module: str) -> None:
    # A process of its own, because the number of devices is fixed when JAX starts.
    subprocess.run([sys.executable, "-m", module], check=True)


def in_two_processes(module: str) -> None:
    # On the CPU, because each of two processes would reserve the whole GPU.
    subprocess.run(
        [sys.executable, "-m", "experiments.launch", "-n", "2", "-m", module],
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


BENCHMARKS = {
    "toy": partial(on_all_cores, "benchmarks.toy"),
    "blackjax": bench_blackjax,
    "compile": bench_compile,
    "clients": bench_clients,
    "qlsd": partial(on_all_cores, "benchmarks.qlsd"),
    "fa_hmc": partial(on_all_cores, "benchmarks.fa_hmc"),
    "fed_avg": partial(on_all_cores, "benchmarks.fed_avg"),
    "fed_ep": partial(on_all_cores, "benchmarks.fed_ep"),
    "memory": memory.bench,
    "wire": wire.bench,
    "convolution": convolution.bench,
    "alarms": alarms.bench,
    "settings": settings.bench,
    "deploy": deployed.bench,
    "visits": visits.bench,
    "whitening": whitening.bench,
    "exact": exact.bench,
    "predictions": predictions.bench,
    "sweeps": sweeps.bench,
    "scaling": partial(on_all_cores, "benchmarks.scaling"),
    "devices": partial(on_all_cores, "benchmarks.devices"),
    "processes": partial(in_two_processes, "benchmarks.processes"),
}

if __name__ == "__main__":
    unknown = [name for name in sys.argv[1:] if name not in BENCHMARKS]
    if unknown:
        sys.exit(f"Unknown benchmark {unknown[0]!r}; there are: {', '.join(BENCHMARKS)}.")
    for name in sys.argv[1:] or BENCHMARKS:
        BENCHMARKS[name]()
