"""Run benchmarks: ``python -m benchmarks`` measures speed, ``python -m benchmarks NAME...`` others.

``python -m benchmarks --list`` prints the names.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from benchmarks import (
    alarms,
    calls,
    convolution,
    costs,
    deployed,
    exact,
    first_call,
    memory,
    peers,
    predictions,
    settings,
    sweeps,
    visits,
    whitening,
    wire,
)


def in_new_process(module: str) -> None:
    # The number of devices is fixed when JAX starts, and a child's peak memory includes its
    # parent's memory.
    subprocess.run([sys.executable, "-m", module], check=True)


def in_two_processes(module: str) -> None:
    # On the CPU, because each of two processes would reserve the whole GPU.
    subprocess.run(
        [sys.executable, "-m", "experiments.launch", "-n", "2", "-m", module],
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


class Benchmark(NamedTuple):
    """Function that prints a table, and what the table means for a user."""

    run: Callable[[], Any]
    meaning: str


SPEED = {
    "first_call": Benchmark(first_call.bench, "how long you wait for the first result"),
    "calls": Benchmark(
        calls.bench, "loops over data sets are fast: a second call compiles nothing again"
    ),
    "toy": Benchmark(
        partial(in_new_process, "benchmarks.toy"),
        "for the smallest models a program of your own would save the missing share",
    ),
    "qlsd": Benchmark(
        partial(in_new_process, "benchmarks.qlsd"),
        "what quantized rounds cost beside such a program",
    ),
    "fa_hmc": Benchmark(
        partial(in_new_process, "benchmarks.fa_hmc"), "what trajectories cost beside such a program"
    ),
    "fed_ep": Benchmark(
        partial(in_new_process, "benchmarks.fed_ep"), "the same for expectation propagation"
    ),
    "peers": Benchmark(
        peers.bench,
        "one client alone, small and large batches",
    ),
    "costs": Benchmark(
        costs.bench,
        "how seconds grow with clients, rows, parameters and chains",
    ),
    "large": Benchmark(
        partial(in_new_process, "benchmarks.large"), "memory and seconds that a large study needs"
    ),
}
"""Benchmarks of speed, which together take at most a quarter of an hour on two idle cores."""
OTHERS = {
    "fed_avg": Benchmark(
        partial(in_new_process, "benchmarks.fed_avg"),
        "federated averaging, and FedJAX if installed",
    ),
    "memory": Benchmark(memory.bench, "peak memory of many clients and of long runs"),
    "sweeps": Benchmark(sweeps.bench, "use one vmapped sweep rather than many processes"),
    "scaling": Benchmark(
        partial(in_new_process, "benchmarks.scaling"), "what a second device is worth"
    ),
    "devices": Benchmark(
        partial(in_new_process, "benchmarks.devices"), "when clients or chains use several devices"
    ),
    "processes": Benchmark(
        partial(in_two_processes, "benchmarks.processes"), "what a second process is worth"
    ),
    "deploy": Benchmark(deployed.bench, "milliseconds per round between real sites"),
    "wire": Benchmark(wire.bench, "bits of messages, and the speed of codes"),
    "convolution": Benchmark(convolution.bench, "convolutional networks on a CPU"),
    "exact": Benchmark(exact.bench, "rounds, bits and seconds until draws are accurate"),
    "settings": Benchmark(settings.bench, "one set of settings on many federations"),
    "alarms": Benchmark(alarms.bench, "false alarms of the diagnosis"),
    "visits": Benchmark(visits.bench, "step sizes that `tune` chooses for visits"),
    "whitening": Benchmark(whitening.bench, "warnings of `whiten`"),
    "predictions": Benchmark(predictions.bench, "errors of `predict_bias`"),
}


def main(names: list[str]) -> None:
    """Run benchmarks, by default all benchmarks of speed."""
    benchmarks = SPEED | OTHERS
    if names == ["--list"]:
        print(*(f"{name:<12} {x.meaning}" for name, x in benchmarks.items()), sep="\n")
        return
    unknown = [name for name in names if name not in benchmarks]
    if unknown:
        sys.exit(f"Unknown benchmark {unknown[0]!r}; there are: {', '.join(benchmarks)}.")
    for name in names or SPEED:
        print(f"\n## {name}: {benchmarks[name].meaning}", flush=True)
        start = time.perf_counter()
        benchmarks[name].run()
        print(f"({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
