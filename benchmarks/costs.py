"""Seconds per round against clients, rows, parameters and chains: ``python -m benchmarks costs``.

``python docs/figures/costs.py`` draws them. Clients have rows of a linear regression. Two kernels
are compared: FSGLD visits one client per round, with ten local steps on minibatches of ten rows;
LSD computes the gradient of all rows of all clients.
"""

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from benchmarks import toy
from benchmarks.timing import compare, row

BASE = {"clients": 20, "rows per client": 100, "parameters": 10, "chains": 1}
VALUES = {
    "clients": (2, 20, 200, 2_000),
    "rows per client": (10, 100, 1_000, 10_000),
    "parameters": (2, 10, 100, 1_000),
    "chains": (1, 4, 16, 64),
}
KERNELS = ("fsgld", "lsd")
MIN_ROUNDS, MAX_ROUNDS, WORK = 200, 5_000, 2e8
"""Bounds of the number of rounds, and numbers of rows that all rounds together read."""
NUM_STEPS, BATCH_SIZE = 10, 10
VISITED_ROWS = NUM_STEPS * BATCH_SIZE


def logprior(position):
    return -0.5 * jnp.sum(position**2)


def loglikelihood(position, rows):
    return -0.5 * (rows["y"] - rows["x"] @ position) ** 2


POSTERIOR = fedmcmc.Posterior(logprior, loglikelihood)


def num_rounds(name, sizes):
    """Return a number of rounds that takes about as long for all sizes."""
    num_clients, num_rows, size, num_chains = sizes.values()
    rows = VISITED_ROWS if name == "fsgld" else num_clients * num_rows
    return int(np.clip(WORK / (rows * size * num_chains), MIN_ROUNDS, MAX_ROUNDS))


def make_run(name, sizes):
    """Return a function that samples rounds of the kernel `name`."""
    num_clients, num_rows, size, num_chains = sizes.values()
    rng = np.random.default_rng(0)
    total = num_clients * num_rows
    x = rng.normal(size=(total, size)).astype(np.float32)
    rows = {"x": x, "y": rng.normal(size=total).astype(np.float32)}
    data = fedmcmc.FederatedData.from_arrays(rows, np.arange(total) // num_rows)
    step_size = 1e-4 / total  # small: draws are not looked at
    if name == "fsgld":
        means, variances = jnp.zeros((num_clients, size)), jnp.ones((num_clients, size)) / num_rows
        surrogates = fedmcmc.Gaussian.from_moments(means, variance=variances)
        settings = dict(step_size=step_size, num_local_steps=NUM_STEPS, batch_size=BATCH_SIZE)
        kernel = fedmcmc.fsgld(POSTERIOR, surrogates, **settings)
    else:
        kernel = fedmcmc.lsd(POSTERIOR, step_size=step_size)
    start = jnp.zeros(size)

    def run():
        num = num_rounds(name, sizes)
        counts = dict(num_rounds=num, num_chains=num_chains, num_burnin=num - 1)
        key = jax.random.key(0)
        return fedmcmc.sample(key, kernel, data, start, progress=False, **counts).draws

    return run


def measure():
    """Return microseconds per round by axis, kernel and value."""
    results = {}
    for axis, values in VALUES.items():
        for value in values:
            sizes = BASE | {axis: value}
            seconds = compare({name: make_run(name, sizes) for name in KERNELS}, repeats=3)
            for name in KERNELS:
                results[axis, name, value] = 1e6 * seconds[name] / num_rounds(name, sizes)
    return results


def bench():
    base = ", ".join(f"{value:,} {axis}" for axis, value in BASE.items())
    print(f"microseconds per round; unless another number is given: {base}")
    results = measure()
    for axis, values in VALUES.items():
        print(f"{axis:<20}" + "".join(f"{value:>12,}" for value in values))
        for name in KERNELS:
            print(f"  {name:<18}" + "".join(f"{results[axis, name, x]:>12,.0f}" for x in values))
    bench_clients()


def bench_clients():
    """Visit one client per round of the toy, among few and among many clients."""
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
