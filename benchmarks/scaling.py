"""FA-HMC on one and on two devices: the same clients (strong scaling), and as many each (weak).

On the processor's cores: one device takes as many threads as XLA gives it, two take one each.
"""

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks.fa_hmc import CLIENTS, DIM, ours
from benchmarks.timing import compare, row

ROUNDS = 40


def bench() -> None:
    one, two = (Mesh(np.array(jax.devices()[:n]), ("clients",)) for n in (1, 2))
    alternatives = {
        "one device, no mesh": ours(ROUNDS, at=1),
        "one device": ours(ROUNDS, at=1, mesh=one),
        "two devices": ours(ROUNDS, at=1, mesh=two),
        "two devices, totals by psum": ours(ROUNDS, at=1, mesh=two, totals="psum"),
        "two devices, twice the clients": ours(ROUNDS, at=1, mesh=two, clients=2 * CLIENTS),
    }
    seconds = compare(alternatives, repeats=5)
    base = seconds["one device"]
    print(f"FA-HMC, {CLIENTS} clients, {DIM} coefficients, clients one by one: over one device")
    for name, took in seconds.items():
        ideal = "ideal: 1" if "twice" in name or "one" in name else "ideal: 2"
        print(row(f"  {name}", ROUNDS / took, "rounds/s", base / took, ideal))


if __name__ == "__main__":
    bench()
