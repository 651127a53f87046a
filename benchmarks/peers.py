"""Single steps of one client, compared with `blackjax.sgld` in `jax.lax.scan`."""

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from benchmarks import toy
from benchmarks.timing import compare, row


def bench():
    x = toy.rows(1)
    rounds, steps = 8192, 40960
    single_client = fedmcmc.FederatedData.from_clients(list(x))
    surrogates = fedmcmc.Gaussian.from_moments(jnp.asarray(x.mean(1)), variance=jnp.ones(1) / 200)
    kernel = fedmcmc.fsgld(
        toy.POSTERIOR, surrogates, step_size=toy.STEP, num_local_steps=100, batch_size=10
    )
    seconds = compare(
        {
            "fedmcmc": lambda: _draws(kernel, single_client, jnp.zeros(2), rounds),
            "blackjax": toy.blackjax_sgld(
                toy.POSTERIOR, jnp.asarray(x[0]), jnp.zeros(2), 10, toy.STEP, steps
            ),
        }
    )
    ours, peer = rounds * 100 / seconds["fedmcmc"], steps / seconds["blackjax"]
    print(row("one client, toy: steps over blackjax.sgld", ours, "steps/s", ours / peer, "goal: 5"))

    rng = np.random.default_rng(0)
    rows = {
        "x": rng.normal(size=(20000, 500)).astype(np.float32),
        "y": rng.integers(0, 2, 20000).astype(np.float32),
    }
    posterior = fedmcmc.Posterior(
        lambda theta: -0.5 * jnp.sum(theta**2),
        lambda theta, b: -jax.nn.softplus(-(2 * b["y"] - 1) * (b["x"] @ theta)),
    )
    kernel = fedmcmc.dsgld(posterior, step_size=1e-6, num_local_steps=100, batch_size=1000)
    data = fedmcmc.FederatedData.from_clients([rows])
    start, steps = jnp.zeros(500), 500
    store = jax.tree.map(jnp.asarray, rows)
    seconds = compare(
        {
            "fedmcmc": lambda: _draws(kernel, data, start, steps // 100),
            "blackjax": toy.blackjax_sgld(posterior, store, start, 1000, 1e-6, steps),
        },
        repeats=5,
    )
    ratio = seconds["blackjax"] / seconds["fedmcmc"]
    print(
        row(
            "one client, 1000 x 500 batches: over blackjax",
            steps / seconds["fedmcmc"],
            "steps/s",
            ratio,
            "goal: 1",
        )
    )


def _draws(kernel, data, start, rounds):
    return fedmcmc.sample(
        jax.random.key(0), kernel, data, start, num_rounds=rounds, thinning=1, progress=False
    ).draws
