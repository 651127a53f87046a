"""Scaling of FA-HMC from one process to two, and the time that a second process adds to a round.

``python -m benchmarks processes`` starts two processes with one device each. Runs of both processes
take turns with runs of the first process alone, which has no mesh; meanwhile the second one waits.
"""

from collections.abc import Callable

import jax

from benchmarks.fa_hmc import CLIENTS, DIM, ours
from benchmarks.timing import compare, row
from fedmcmc import distributed

ROUNDS, LIGHT_ROUNDS = 40, 400


def alone(run: Callable[[], object]) -> Callable[[], object]:
    return lambda: (
        run() if distributed.is_first() else None,
        distributed.broadcast_from_first(0.0),
    )


def together(run: Callable[[], object]) -> Callable[[], object]:
    return lambda: (run(), distributed.broadcast_from_first(0.0))


def bench() -> None:
    distributed.initialize()
    mesh = distributed.mesh()
    if (jax.process_count(), mesh.size) != (2, 2):
        raise SystemExit("Run this with two processes that have one device each.")
    # With one local step of one client per process, the exchange dominates a round.
    serial = dict(clients_at_a_time=1)
    light = dict(local=1, clients_at_a_time=1)
    seconds = compare(
        {
            "one process": alone(ours(ROUNDS, **serial)),
            "two processes": together(ours(ROUNDS, mesh=mesh, **serial)),
            "two processes, totals by psum": together(
                ours(ROUNDS, mesh=mesh, totals="psum", **serial)
            ),
            "two processes, twice the clients": together(
                ours(ROUNDS, mesh=mesh, clients=2 * CLIENTS, **serial)
            ),
            "light, one": alone(ours(LIGHT_ROUNDS, clients=1, **light)),
            "light, two": together(ours(LIGHT_ROUNDS, clients=2, mesh=mesh, **light)),
        },
        repeats=5,
    )
    if not distributed.is_first():
        return
    exchange = (seconds.pop("light, two") - seconds.pop("light, one")) / LIGHT_ROUNDS
    print(
        f"FA-HMC, {CLIENTS} clients, {DIM} coefficients, clients one by one: speed over one process"
    )
    for name, took in seconds.items():
        ideal = "ideal: 1" if "twice" in name or "one" in name else "ideal: 2"
        print(row(f"  {name}", ROUNDS / took, "rounds/s", seconds["one process"] / took, ideal))
    print(f"{'time that a second process adds to a round':<44}{1e3 * exchange:>12.2f} ms")


if __name__ == "__main__":
    bench()
