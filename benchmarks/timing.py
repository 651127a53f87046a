"""Paired timing: alternatives take turns, so that drifts in speed affect all of them."""

import statistics
import time
from collections.abc import Callable

import jax


def compare(work: dict[str, Callable[[], object]], repeats: int = 7) -> dict[str, float]:
    """Return the median seconds of each alternative, after one call that is not timed."""
    for fn in work.values():
        jax.block_until_ready(fn())
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, fn in work.items():
            start_time = time.perf_counter()
            jax.block_until_ready(fn())
            times[name].append(time.perf_counter() - start_time)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def row(name: str, rate: float, unit: str, ratio: float, goal: str) -> str:
    return f"{name:<44}{rate:>12,.0f} {unit:<16}{ratio:>8.2f}   {goal}"
