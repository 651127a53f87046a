"""FA-HMC in one process and in two, a device each: strong and weak scaling, and what a round costs.

To be run in two processes (``python -m benchmarks processes``). They take turns with the first one
alone, which has no mesh then; the other waits.
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
        raise SystemExit("To be run by two processes with a device each.")
    # A round of one local step of one client per process: what is left is the exchange.
    light = dict(local=1, at=1)
    seconds = compare(
        {
            "one process": alone(ours(ROUNDS, at=1)),
            "two processes": together(ours(ROUNDS, at=1, mesh=mesh)),
            "two processes, totals by psum": together(ours(ROUNDS, at=1, mesh=mesh, totals="psum")),
            "two processes, twice the clients": together(
                ours(ROUNDS, at=1, mesh=mesh, clients=2 * CLIENTS)
            ),
            "light, one": alone(ours(LIGHT_ROUNDS, clients=1, **light)),
            "light, two": together(ours(LIGHT_ROUNDS, clients=2, mesh=mesh, **light)),
        },
        repeats=5,
    )
    if not distributed.is_first():
        return
    exchange = (seconds.pop("light, two") - seconds.pop("light, one")) / LIGHT_ROUNDS
    print(f"FA-HMC, {CLIENTS} clients, {DIM} coefficients, clients one by one: over one process")
    for name, took in seconds.items():
        ideal = "ideal: 1" if "twice" in name or "one" in name else "ideal: 2"
        print(row(f"  {name}", ROUNDS / took, "rounds/s", seconds["one process"] / took, ideal))
    print(f"{'what two processes add to a round':<44}{1e3 * exchange:>12.2f} ms")


if __name__ == "__main__":
    bench()
