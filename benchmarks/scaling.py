"""Scaling of FA-HMC from one device to two, with the same and with twice as many clients.

The devices are cores of the processor. One device uses several threads; each of two uses one.
"""

import jax
import numpy as np
from jax.sharding import Mesh

import fedmcmc
from benchmarks.fa_hmc import CLIENTS, DIM, ours
from benchmarks.timing import compare, row

ROUNDS = 40


def bench() -> None:
    one_device, two_devices = (Mesh(np.array(jax.devices()[:n]), ("clients",)) for n in (1, 2))
    serial = dict(clients_at_a_time=1)
    alternatives = {
        "one device, no mesh": ours(ROUNDS, **serial),
        "one device": ours(ROUNDS, mesh=one_device, **serial),
        "two devices": ours(ROUNDS, mesh=two_devices, **serial),
        "two devices, totals by psum": ours(ROUNDS, mesh=two_devices, totals="psum", **serial),
        "two devices, twice the clients": ours(
            ROUNDS, mesh=two_devices, clients=2 * CLIENTS, **serial
        ),
    }
    seconds = compare(alternatives, repeats=5)
    base = seconds["one device"]
    print(
        f"FA-HMC, {CLIENTS} clients, {DIM} coefficients, clients one by one: speed over one device"
    )
    for name, took in seconds.items():
        ideal = "ideal: 1" if "twice" in name or "one" in name else "ideal: 2"
        print(row(f"  {name}", ROUNDS / took, "rounds/s", base / took, ideal))


if __name__ == "__main__":
    fedmcmc.use_all_cores()
    bench()
