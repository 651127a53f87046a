"""Paired timing: alternatives take turns, so that drifts in speed affect all of them."""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import jax.monitoring

import fedmcmc


def compare(work: dict[str, Callable[[], object]], repeats: int = 7) -> dict[str, float]:
    """Return the median seconds of each alternative, after one call that is not timed.

    Runs may warn that they are too short for their draws, which nobody looks at.
    """
    times: dict[str, list[float]] = {name: [] for name in work}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedmcmc.DiagnosisWarning)
        for fn in work.values():
            jax.block_until_ready(fn())
        for _ in range(repeats):
            for name, fn in work.items():
                start_time = time.perf_counter()
                jax.block_until_ready(fn())
                times[name].append(time.perf_counter() - start_time)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def devices_dividing(num: int) -> int:
    """Return the largest number of devices that divides `num`."""
    return max(n for n in range(1, jax.device_count() + 1) if num % n == 0)


def row(name: str, rate: float, unit: str, ratio: float, goal: str) -> str:
    return f"{name:<44}{rate:>12,.0f} {unit:<16}{ratio:>8.2f}   {goal}"


@contextmanager
def count_programs() -> Iterator[list[str]]:
    """Collect the name of each program that XLA compiles or that JAX loads from its disk cache."""
    programs: list[str] = []

    def listen(name: str, _: float, **details: object) -> None:
        if name.endswith("backend_compile_duration"):
            programs.append(str(details.get("fun_name", "")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield programs
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def print_over_fused(
    workload: str, num_chains: int, num_rounds: int, seconds: dict[str, float]
) -> None:
    """Print the rate of ``"fedmcmc"``, and its ratio to the others and to the fastest fused."""
    unit, total = "chain-rounds/s", num_chains * num_rounds
    ours = seconds["fedmcmc"]
    limit = min(s for name, s in seconds.items() if name.startswith("fused"))
    name = f"{workload}, {num_chains} chain{'s' * (num_chains > 1)}"
    print(row(name, total / ours, unit, limit / ours, "over the fastest fused; goal: 0.9"))
    for name, s in seconds.items():
        if name != "fedmcmc":
            print(row(f"  over {name}", total / s, unit, s / ours, ""))
