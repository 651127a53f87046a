"""FA-HMC on logistic regression in several styles, and NumPyro's HMC with one client.

`fused` is a program for this workload only and has no abstractions. It draws random numbers in
blocks, has handwritten gradients, and loops over the clients of each of two devices (one per core).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from numpyro.infer import HMC, MCMC

import fedmcmc
from benchmarks.timing import compare, row

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
    devices: int = 1,
    clients_at_a_time: int | None = None,
    mesh: Mesh | None = None,
    **settings,
):
    """Return a function that runs `sample` over `devices` or a `mesh`.

    `clients_at_a_time` and `settings`, such as ``totals``, are arguments of its placement.
    """
    flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in rows(clients).items()}
    owners = np.repeat(np.arange(clients), ROWS)
    data = fedmcmc.FederatedData.from_arrays(flat, owners)
    if devices > 1:
        mesh = Mesh(np.array(jax.devices()[:devices]), ("clients",))
    placement = fedmcmc.Placement(mesh=mesh, clients_at_a_time=clients_at_a_time, **settings)
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


def fused(num_rounds: int, num_chains: int, num_devices: int = 2, block: int = 5):
    store = rows()
    weight = 1 / CLIENTS
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("clients",))

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

    def program(key, x, y, ids):
        def prepare(r):
            client_noise = jax.vmap(
                lambda i: jax.random.normal(
                    jax.random.fold_in(jax.random.fold_in(key, r), i),
                    (LOCAL, num_chains, DIM),
                )
            )(ids)
            shared_noise = jax.random.normal(
                jax.random.fold_in(jax.random.fold_in(key, r), CLIENTS), (LOCAL, num_chains, DIM)
            )
            return client_noise, shared_noise

        def one_round(theta, drawn):
            client_noise, shared_noise = drawn

            def client(total, inputs):
                noise, client_x, client_y = inputs
                moved = trajectory(theta, noise, shared_noise, client_x, client_y)
                return total + weight * (moved - theta), None

            total, _ = jax.lax.scan(client, jnp.zeros_like(theta), (client_noise, x, y))
            theta = theta + jax.lax.psum(total, "clients")
            return theta, theta

        def one_block(theta, b):
            return jax.lax.scan(one_round, theta, jax.vmap(prepare)(b * block + jnp.arange(block)))

        start = jnp.zeros((num_chains, DIM))
        return jax.lax.scan(one_block, start, jnp.arange(num_rounds // block))[1]

    spec = PartitionSpec("clients")
    mapped = jax.jit(
        jax.shard_map(
            program,
            mesh=mesh,
            in_specs=(PartitionSpec(), spec, spec, spec),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
    arguments = (
        jax.random.key(1),
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
    """Print the rows. The process needs two devices, which `python -m benchmarks fa_hmc` sets."""
    for num_chains, rounds in ((1, 150), (30, 10)):
        seconds = compare(
            {
                "fedmcmc, two devices": ours(rounds, num_chains, devices=2),
                "fused, two devices": fused(rounds, num_chains, 2),
                "fedmcmc, one device": ours(rounds, num_chains),
                "fedmcmc, one device, one by one": ours(rounds, num_chains, clients_at_a_time=1),
                "fused, one device": fused(rounds, num_chains, 1),
            },
            repeats=3,
        )
        base = seconds["fedmcmc, two devices"]
        name = f"FA-HMC logistic, {num_chains} chains, two devices"
        print(row(name, rounds * num_chains / base, "chain-rounds/s", 1.0, ""))
        for style in list(seconds)[1:]:
            goal = "goal: at least 0.8" if style == "fused, two devices" else ""
            rate = rounds * num_chains / seconds[style]
            print(row(f"  over {style}", rate, "chain-rounds/s", seconds[style] / base, goal))
    num = 2000
    seconds = compare(
        {
            "fedmcmc": ours(num // LOCAL, 1, clients=1),
            "numpyro": numpyro_hmc(num),
        },
        repeats=5,
    )
    ratio = seconds["numpyro"] / seconds["fedmcmc"]
    print(
        row(
            "one client: trajectories over NumPyro's HMC",
            num / seconds["fedmcmc"],
            "trajectories/s",
            ratio,
            "goal: at least 3",
        )
    )


if __name__ == "__main__":
    bench()
