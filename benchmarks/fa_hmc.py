"""FA-HMC on logistic regression in several styles, and NumPyro's HMC with one client.

`fused` is a program for this workload only and has no abstractions. It draws random numbers in
blocks, has handwritten gradients, and loops over the clients of each device.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from numpyro.infer import HMC, MCMC

import fedmcmc
from benchmarks.timing import compare, devices_dividing, print_over_fused, row

CLIENTS, ROWS, DIM, LEAPFROG, LOCAL = 20, 50, 1000, 10, 10
STEP, RHO = 0.05, 0.5


def rows(num_clients: int = CLIENTS) -> dict[str, np.ndarray]:
    """Return simulated rows, ``[num_clients, ROWS, ...]``."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_clients, ROWS, DIM)) / np.sqrt(DIM)
    return {
        "x": x.astype(np.float32),
        "y": rng.integers(0, 2, (num_clients, ROWS)).astype(np.float32),
    }


def _loglikelihood(theta, batch):
    return -jax.nn.softplus(-(2 * batch["y"] - 1) * (batch["x"] @ theta))


POSTERIOR = fedmcmc.Posterior(lambda theta: -0.5 * jnp.sum(theta**2), _loglikelihood)


def ours(
    num_rounds: int,
    num_chains: int = 1,
    *,
    clients: int = CLIENTS,
    local: int = LOCAL,
    **settings,
):
    """Return a function that runs `sample`; `settings` are arguments of a placement."""
    flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in rows(clients).items()}
    owners = np.repeat(np.arange(clients), ROWS)
    data = fedmcmc.FederatedData.from_arrays(flat, owners)
    placement = fedmcmc.Placement(**settings) if settings else None
    kernel = fedmcmc.fa_hmc(
        POSTERIOR,
        step_size=STEP,
        num_integration_steps=LEAPFROG,
        num_local_steps=local,
        rho=RHO,
    )

    def run():
        return fedmcmc.sample(
            jax.random.key(0),
            kernel,
            data,
            jnp.zeros(DIM),
            num_rounds=num_rounds,
            num_chains=num_chains,
            progress=False,
            placement=placement,
        ).draws

    return run


def fused(
    num_rounds: int, num_chains: int, num_devices: int = 1, axis: str = "clients", block: int = 5
):
    """Return a function that runs the fused program, with clients or chains over devices."""
    store = rows()
    weight = 1 / CLIENTS
    mesh = Mesh(np.array(jax.devices()[:num_devices]), (axis,))
    shared = num_devices > 1 and axis == "clients"  # devices share the clients of a chain
    here = num_chains if axis == "clients" else num_chains // num_devices

    def trajectory(theta, client_noise, shared_noise, x, y):
        def gradient(t):
            return (y - jax.nn.sigmoid(t @ x.T)) @ x / weight - t

        def leap(pair, _):
            t, v = pair
            v = v + STEP * gradient(t)
            return (t + STEP * v, v), None

        def local(t, drawn):
            p = jnp.sqrt(RHO) * drawn[1] + jnp.sqrt((1 - RHO) / weight) * drawn[0]
            v = p + STEP / 2 * gradient(t)
            return jax.lax.scan(leap, (t + STEP * v, v), length=LEAPFROG - 1)[0][0], None

        return jax.lax.scan(local, theta, (client_noise, shared_noise))[0]

    def program(keys, x, y, ids):
        key = keys[0]

        def prepare(r):
            client_noise = jax.vmap(
                lambda i: jax.random.normal(
                    jax.random.fold_in(jax.random.fold_in(key, r), i),
                    (LOCAL, here, DIM),
                )
            )(ids)
            shared_noise = jax.random.normal(
                jax.random.fold_in(jax.random.fold_in(key, r), CLIENTS), (LOCAL, here, DIM)
            )
            return client_noise, shared_noise

        def one_round(theta, drawn):
            client_noise, shared_noise = drawn

            def client(total, inputs):
                noise, client_x, client_y = inputs
                moved = trajectory(theta, noise, shared_noise, client_x, client_y)
                return total + weight * (moved - theta), None

            total, _ = jax.lax.scan(client, jnp.zeros_like(theta), (client_noise, x, y))
            theta = theta + (jax.lax.psum(total, axis) if shared else total)
            return theta, theta

        def one_block(theta, b):
            return jax.lax.scan(one_round, theta, jax.vmap(prepare)(b * block + jnp.arange(block)))

        start = jnp.zeros((here, DIM))
        return jax.lax.scan(one_block, start, jnp.arange(num_rounds // block))[1]

    replicated, spec = PartitionSpec(), PartitionSpec(axis)
    chains, clients = (replicated, spec) if axis == "clients" else (spec, replicated)
    mapped = jax.jit(
        jax.shard_map(
            program,
            mesh=mesh,
            in_specs=(chains, clients, clients, clients),
            out_specs=replicated if axis == "clients" else PartitionSpec(None, None, axis),
            check_vma=False,
        )
    )
    arguments = (
        jax.random.split(jax.random.key(1), num_devices),
        jnp.asarray(store["x"]),
        jnp.asarray(store["y"]),
        jnp.arange(CLIENTS),
    )
    return lambda: mapped(*arguments)


def numpyro_hmc(num_trajectories: int):
    """Return a function that runs NumPyro's HMC on one client's rows, with the same settings."""
    store = {name: jnp.asarray(x[0]) for name, x in rows(1).items()}

    def potential(theta):
        return 0.5 * jnp.sum(theta**2) - jnp.sum(_loglikelihood(theta, store))

    kernel = HMC(
        potential_fn=potential,
        step_size=STEP,
        num_steps=LEAPFROG,
        trajectory_length=None,
        adapt_step_size=False,
        adapt_mass_matrix=False,
    )
    mcmc = MCMC(kernel, num_warmup=0, num_samples=num_trajectories, progress_bar=False)

    def run():
        mcmc.run(jax.random.key(0), init_params=jnp.zeros(DIM))
        return mcmc.get_samples()

    return run


def bench() -> None:
    """Print the rows, for a process with one device per core."""
    for num_chains, num_rounds in ((1, 150), (30, 10)):
        run = functools.partial(fused, num_rounds, num_chains)
        work = {"fedmcmc": ours(num_rounds, num_chains), "fused": run()}
        work["fused, clients over devices"] = run(devices_dividing(CLIENTS))
        if num_chains > 1:
            work["fused, chains over devices"] = run(devices_dividing(num_chains), "chains")
        seconds = compare(work, repeats=3)
        print_over_fused("FA-HMC logistic", num_chains, num_rounds, seconds)
    num = 2000
    seconds = compare({"fedmcmc": ours(num // LOCAL, clients=1), "numpyro": numpyro_hmc(num)}, 5)
    ratio, rate = seconds["numpyro"] / seconds["fedmcmc"], num / seconds["fedmcmc"]
    print(row("one client: over NumPyro's HMC", rate, "trajectories/s", ratio, "goal: at least 3"))


if __name__ == "__main__":
    fedmcmc.use_all_cores()
    bench()
