"""Speed of `sample` on a convolutional network, compared with loops written without it.

`straight` calls one compiled local step after another from Python. Its convolutions are in the
program's entry computation, where XLA runs them fastest. `looped` runs the kernel's rounds in one
`fori_loop`, as `sample` would without its special treatment of convolutions.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from benchmarks.timing import compare, row

CLIENTS, ROWS, SIDE, BATCH = 10, 128, 28, 32
STEP = 1e-6
SHAPES = {"first": (5, 5, 1, 6), "second": (5, 5, 6, 16), "dense": (256, 64), "last": (64, 10)}


def data() -> fedmcmc.FederatedData:
    rng = np.random.default_rng(0)
    return fedmcmc.FederatedData.from_clients(
        [
            {
                "x": rng.normal(size=(ROWS, SIDE, SIDE, 1)).astype(np.float32),
                "y": rng.integers(0, 10, ROWS),
            }
            for _ in range(CLIENTS)
        ]
    )


def start() -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    return {
        name: jnp.asarray(rng.normal(size=shape) / np.sqrt(np.prod(shape[:-1])), jnp.float32)
        for name, shape in SHAPES.items()
    }


def _block(x, weight):
    x = jax.lax.conv_general_dilated(
        x, weight, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    num, height, width, features = x.shape
    return jax.nn.relu(x).reshape(num, height // 2, 2, width // 2, 2, features).mean((2, 4))


def loglikelihood(position, rows):
    x = _block(_block(rows["x"], position["first"]), position["second"])
    hidden = jax.nn.relu(x.reshape(len(x), -1) @ position["dense"])
    scores = jax.nn.log_softmax(hidden @ position["last"])
    return jnp.take_along_axis(scores, rows["y"][:, None], axis=1)[:, 0]


POSTERIOR = fedmcmc.Posterior(
    lambda p: -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p)), loglikelihood
)


def kernel(num_local_steps: int = 1) -> fedmcmc.FederatedKernel:
    return fedmcmc.dsgld(
        POSTERIOR, step_size=STEP, num_local_steps=num_local_steps, batch_size=BATCH
    )


def ours(kernel_, data_, rounds: int, num_chains: int):
    return lambda: (
        fedmcmc.sample(
            jax.random.key(0),
            kernel_,
            data_,
            start(),
            num_rounds=rounds,
            thinning=rounds,
            num_chains=num_chains,
            progress=False,
        ).draws
    )


def straight(num_steps: int):
    x = jax.tree.map(lambda leaf: leaf[:ROWS], data().rows)

    @jax.jit
    def step(position, key):
        key_rows, key_noise = jax.random.split(key)
        batch = jax.random.randint(key_rows, (BATCH,), 0, ROWS)
        batch = jax.tree.map(lambda leaf: leaf[batch], x)

        def logdensity(position):
            terms = loglikelihood(position, batch)
            return POSTERIOR.logprior_fn(position) + CLIENTS * ROWS / BATCH * jnp.sum(terms)

        leaves, treedef = jax.tree.flatten(position)
        keys = jax.tree.unflatten(treedef, list(jax.random.split(key_noise, len(leaves))))
        return jax.tree.map(
            lambda p, g, k: p + STEP * g + np.sqrt(2 * STEP) * jax.random.normal(k, p.shape),
            position,
            jax.grad(logdensity)(position),
            keys,
        )

    keys = list(jax.random.split(jax.random.key(0), num_steps))

    def run():
        position = start()
        for key in keys:
            position = step(position, key)
        return position

    return run


def looped(kernel_, data_, rounds: int, num_chains: int):
    init, step = fedmcmc.simulate(kernel_, data_)

    def many(key):
        return jax.lax.fori_loop(0, rounds, lambda i, state: step(key, state)[0], init(start()))

    if num_chains == 1:
        return partial(jax.jit(many), jax.random.key(0))
    return partial(jax.jit(jax.vmap(many)), jax.random.split(jax.random.key(0), num_chains))


def bench() -> None:
    rows = data()
    for num_local_steps, num_chains, rounds in ((1, 1, 128), (8, 1, 16), (1, 4, 32)):
        arguments = kernel(num_local_steps), rows, rounds, num_chains
        seconds = compare(
            {
                "fedmcmc": ours(*arguments),
                "straight steps": straight(rounds * num_local_steps * num_chains),
                "plain loop": looped(*arguments),
            },
            repeats=5,
        )
        rate, unit = rounds * num_chains / seconds["fedmcmc"], "chain-rounds/s"
        name = f"CNN, {num_local_steps} local steps, {num_chains} chains"
        print(row(f"{name}, fedmcmc", rate, unit, 1.0, ""))
        for style, goal in (("straight steps", "goal: 0.8"), ("plain loop", "goal: 3")):
            ratio = seconds[style] / seconds["fedmcmc"]
            print(row(f"  over {style}", rate / ratio, unit, ratio, goal))
