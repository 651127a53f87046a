"""FA-HMC on one and on two devices: the same clients (strong scaling), and as many each (weak).

On the processor's cores: one device takes as many threads as XLA gives it, two take one each.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import fedmcmc
from benchmarks.fa_hmc import DIM, LEAPFROG, LOCAL, POSTERIOR, RHO, ROWS, STEP, rows
from benchmarks.timing import compare, row

CLIENTS, ROUNDS = 20, 40


def work(clients: int, devices: int, totals: str = "gather", spread: str = "mesh"):
    """Return a function that runs so many clients on so many devices."""
    flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in rows(clients).items()}
    data = fedmcmc.FederatedData.from_arrays(flat, np.repeat(np.arange(clients), ROWS)).chunked(1)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("clients",))
    given = dict(mesh=mesh, totals=totals) if spread == "mesh" else {}
    data = data.sharded(mesh) if spread == "sharded" else data
    kernel = fedmcmc.fa_hmc(
        POSTERIOR,
        step_size=STEP,
        num_integration_steps=LEAPFROG,
        num_local_steps=LOCAL,
        rho=RHO,
    )

    def run():
        return fedmcmc.sample(
            jax.random.key(0),
            kernel,
            data,
            jnp.zeros(DIM),
            num_rounds=ROUNDS,
            progress=False,
            **given,
        ).draws

    return run


def bench() -> None:
    alternatives = {
        "one device, no mesh": work(CLIENTS, 1, spread="none"),
        "one device": work(CLIENTS, 1),
        "two devices": work(CLIENTS, 2),
        "two devices, totals by psum": work(CLIENTS, 2, "psum"),
        "two devices, data.sharded": work(CLIENTS, 2, spread="sharded"),
        "two devices, twice the clients": work(2 * CLIENTS, 2),
    }
    seconds = compare(alternatives, repeats=5)
    base = seconds["one device"]
    print(f"FA-HMC, {CLIENTS} clients, {DIM} coefficients, clients one by one: over one device")
    for name, took in seconds.items():
        ideal = "ideal: 1" if "twice" in name or "one" in name else "ideal: 2"
        print(row(f"  {name}", ROUNDS / took, "rounds/s", base / took, ideal))


if __name__ == "__main__":
    bench()
