"""Speed of clients on all devices of a CPU over one device, by the operations of a round.

`fedmcmc.sample` spreads the clients of a chain over devices if a round has at least
`MIN_OPERATIONS` operations.
"""

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from benchmarks.timing import compare, row
from fedmcmc.placement._choice import MIN_OPERATIONS
from fedmcmc.pytrees import num_operations

CLIENTS, ROWS = 20, 50


def problem(dim: int, num_local_steps: int) -> tuple:
    """Return a kernel and data of a logistic regression with `dim` coefficients."""
    rng = np.random.default_rng(0)
    rows = {
        "x": rng.normal(size=(CLIENTS * ROWS, dim)).astype(np.float32) / np.sqrt(dim),
        "y": rng.integers(0, 2, CLIENTS * ROWS).astype(np.float32),
    }
    data = fedmcmc.FederatedData.from_arrays(rows, np.repeat(np.arange(CLIENTS), ROWS))
    posterior = fedmcmc.Posterior(
        lambda theta: -0.5 * jnp.sum(theta**2),
        lambda theta, b: -jax.nn.softplus(-(2 * b["y"] - 1) * (b["x"] @ theta)),
    )
    if num_local_steps == 1:
        return fedmcmc.lsd(posterior, step_size=1e-5), data
    return fedmcmc.fa_ld(posterior, step_size=1e-3, num_local_steps=num_local_steps), data


def bench() -> None:
    """Print the rows, for a process with one device per core."""
    mesh = jax.make_mesh((jax.device_count(),), ("clients",))
    places = {
        "one": fedmcmc.Placement(),
        "all": fedmcmc.Placement(mesh=mesh, totals="psum"),
    }
    for dim, steps in ((10, 1), (100, 1), (1000, 1), (5000, 1), (30, 10), (100, 10), (1000, 10)):
        kernel, data = problem(dim, steps)
        init, step = fedmcmc.simulate(kernel, data)
        state = init(jnp.zeros(dim), jax.random.key(0))
        number = num_operations(jax.make_jaxpr(step)(jax.random.key(0), state))
        rounds = int(min(max(2e9 / number, 50), 10_000))
        work = {
            name: lambda kernel=kernel, data=data, dim=dim, rounds=rounds, place=place: (
                fedmcmc.sample(
                    jax.random.key(0),
                    kernel,
                    data,
                    jnp.zeros(dim),
                    num_rounds=rounds,
                    thinning=rounds,
                    progress=False,
                    placement=place,
                ).draws
            )
            for name, place in places.items()
        }
        seconds = compare(work, repeats=3)
        name = f"{dim} coefficients, {steps} local steps, {number:.1e} operations"
        chosen = "spread" if number >= MIN_OPERATIONS else "one device"
        print(
            row(name, rounds / seconds["all"], "rounds/s", seconds["one"] / seconds["all"], chosen)
        )


if __name__ == "__main__":
    fedmcmc.use_all_cores()
    bench()
