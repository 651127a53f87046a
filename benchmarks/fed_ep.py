"""Speed of FedEP on many toy problems, and of FedSEP with few and with many clients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedmcmc
from benchmarks import networks
from benchmarks.timing import compare, devices_dividing, print_over_fused, row
from experiments.special import fed_ep_toy

ROUNDS = 10


def a_problem_at_a_time(problems: fed_ep_toy.Pairs, num: int):
    """Return a function that runs the first `num` problems one by one, without jit."""
    precisions = jnp.asarray(np.linalg.inv(problems.covariances[:num]), jnp.float32)
    means = jnp.asarray(problems.means[:num], jnp.float32)

    def run():
        all_means = []
        for p in range(num):
            sites = [(jnp.zeros(2), jnp.zeros(2)) for _ in range(2)]
            for _ in range(ROUNDS):
                eta = sum(site[0] for site in sites)
                precision = sum(site[1] for site in sites)
                changes = []
                for k in range(2):
                    cavity = eta - sites[k][0], precision - sites[k][1]
                    covariance = jnp.linalg.inv(precisions[p, k] + jnp.diag(cavity[1]))
                    mean = covariance @ (precisions[p, k] @ means[p, k] + cavity[0])
                    tilted = 1 / jnp.diag(covariance)
                    changes.append((tilted * mean - eta, tilted - precision))
                sites = [
                    (site[0] + change[0], site[1] + change[1])
                    for site, change in zip(sites, changes, strict=True)
                ]
            all_means.append(sum(site[0] for site in sites) / sum(site[1] for site in sites))
        return jnp.stack(all_means)

    return run


def bench_toy() -> None:
    problems, num_looped = fed_ep_toy.draw_pairs(0, 200, degrees=7, scale=0.2), 4
    kernel = fed_ep_toy.kernels()["FedEP"]
    ours = lambda: fed_ep_toy.means_by_round(kernel, problems, ROUNDS)[:, -1]  # noqa: E731
    loop = a_problem_at_a_time(problems, num_looped)
    np.testing.assert_allclose(ours()[:num_looped], loop(), rtol=1e-3, atol=1e-3)
    seconds = compare({"fedmcmc": ours, "loop": loop})
    rate, loop_rate = len(problems.means) / seconds["fedmcmc"], num_looped / seconds["loop"]
    print(row("FedEP toy, problems of 10 rounds", rate, "problems/s", 1.0, ""))
    print(
        row("  over a problem at a time", loop_rate, "problems/s", rate / loop_rate, "goal: 1000")
    )


def bench_clients() -> None:
    """Time a cohort of 10 among 1,000 clients and among 342,477 (the users of StackOverflow)."""
    posterior = fedmcmc.Posterior(
        lambda theta: jnp.zeros(()),
        lambda theta, rows: -jax.nn.softplus(-rows["y"] * (rows["x"] @ theta)),
    )
    mean = fedmcmc.inference.sgd_mean(optax.sgd(0.1), num_samples=2, batch_size=10)
    block = fedmcmc.inference.scaled_identity(mean, precision_per_row=1e-6)
    rounds, work = 300, {}
    for num_clients in (1_000, 342_477):
        rng = np.random.default_rng(0)
        sizes = np.minimum(1 + rng.geometric(1 / 9, num_clients), 50)
        num_rows = int(sizes.sum())
        rows = {
            "x": rng.normal(size=(num_rows, 20)).astype(np.float32),
            "y": rng.choice([-1.0, 1.0], num_rows).astype(np.float32),
        }
        data = fedmcmc.FederatedData.from_arrays(rows, np.repeat(np.arange(num_clients), sizes))
        kernel = fedmcmc.fed_sep(
            posterior,
            inference=block,
            cohort_size=10,
            damping=0.5 / 10,
            initial_precision=1e-6,
        )
        work[f"{num_clients:,} clients"] = lambda data=data, kernel=kernel: (
            fedmcmc.sample(
                jax.random.key(0), kernel, data, jnp.zeros(20), num_rounds=rounds, progress=False
            ).draws
        )
    seconds = compare(work)
    base = seconds["1,000 clients"]
    for name, s in seconds.items():
        print(
            row(f"FedSEP, a cohort of 10 of {name}", rounds / s, "rounds/s", s / base, "goal: 1.1")
        )


def bench_network() -> None:
    """Compare a network with its fused programs; FedEP's thirty chains have fewer clients.

    The sites of 30 chains and 500 clients would need 6 GB.
    """
    for name, method in {"FedEP": "fed_ep", "FedSEP": "fed_sep"}.items():
        for num_chains, num_rounds in ((1, 120), (30, 4)):
            num_clients = 60 if (method, num_chains) == ("fed_ep", 30) else 500
            sizes = method, num_clients, num_rounds, num_chains
            axis, num = ("clients", networks.COHORT) if num_chains == 1 else ("chains", num_chains)
            fused = networks.fused(*sizes, devices_dividing(num), axis)
            work = {"fedmcmc": networks.ours(*sizes), f"fused, {axis} over devices": fused}
            seconds = compare(work, repeats=2)
            print_over_fused(f"{name} network", num_chains, num_rounds, seconds)


def bench() -> None:
    """Print the rows, for a process with one device per core."""
    bench_network()
    bench_toy()
    bench_clients()


if __name__ == "__main__":
    fedmcmc.use_all_cores()
    bench()
