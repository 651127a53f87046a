"""FSGLD's Gaussian toy (El Mekkaoui et al. 2021, section 5.1) in four styles.

The toy has 10 shards of 200 points in two dimensions, minibatches of 10, 100 local updates and
exact surrogates. `fused` is a program for this workload only, which draws random numbers in blocks
as `fedmcmc` does. `usual` splits a key and draws twice in every local step, as most samplers do.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import fedmcmc
from benchmarks.timing import compare, devices_dividing, print_over_fused

CLIENTS, ROWS, DIM, BATCH, LOCAL = 10, 200, 2, 10, 100
STEP = 5e-5


def rows(num_clients: int = CLIENTS) -> np.ndarray:
    rng = np.random.default_rng(0)
    means = rng.uniform(-6, 6, (num_clients, 1, DIM))
    return (means + rng.normal(size=(num_clients, ROWS, DIM))).astype(np.float32)


POSTERIOR = fedmcmc.Posterior(
    lambda theta: -0.5 * jnp.sum(theta**2),
    lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2, axis=-1),
)


def kernel(x: np.ndarray) -> fedmcmc.FederatedKernel:
    surrogates = fedmcmc.Gaussian.from_moments(
        jnp.asarray(x.mean(axis=1)), variance=jnp.full(len(x), 1 / ROWS)
    )
    return fedmcmc.fsgld(
        POSTERIOR, surrogates, step_size=STEP, num_local_steps=LOCAL, batch_size=BATCH
    )


def ours(x: np.ndarray, num_rounds: int, num_chains: int = 1, seed: int = 0):
    data = fedmcmc.FederatedData.from_clients(list(x))
    kernel_ = kernel(x)

    def run():
        return fedmcmc.sample(
            jax.random.key(seed),
            kernel_,
            data,
            jnp.zeros(DIM),
            num_rounds=num_rounds,
            num_chains=num_chains,
            thinning=10,
            progress=False,
        ).draws

    return run


def _drift(theta, s, batch, sums):
    precision = CLIENTS * ROWS
    gradient = -theta + CLIENTS * (ROWS / BATCH) * (batch - theta).sum(0)
    return gradient + sums.sum(0) - precision * theta - CLIENTS * (sums[s] - ROWS * theta)


@functools.partial(jax.jit, static_argnames=("num_blocks", "block"))
def _fused(key, x, theta, *, num_blocks, block):
    store, sums = x.reshape(-1, DIM), x.sum(1)

    def prepare(round_):
        key_round = jax.random.fold_in(key, round_)
        word = jax.random.bits(jax.random.fold_in(key_round, CLIENTS), (), jnp.uint32)
        s = (((word >> 16) * CLIENTS) >> 16).astype(jnp.int32)
        key_noise, key_rows = jax.random.split(jax.random.fold_in(key_round, s))
        words = jax.random.bits(key_rows, (LOCAL * BATCH,), jnp.uint32).reshape(LOCAL, BATCH)
        index = (((words >> 16) * ROWS) >> 16).astype(jnp.int32) + s * ROWS
        noise = jax.random.normal(key_noise, (LOCAL * DIM,)).reshape(LOCAL, DIM)
        return s, noise, store[index]

    def one_round(theta, drawn):
        s, noise, batches = drawn

        def local(theta, drawn_):
            z, batch = drawn_
            return theta + STEP * _drift(theta, s, batch, sums) + jnp.sqrt(2 * STEP) * z, None

        theta, _ = jax.lax.scan(local, theta, (noise, batches))
        return theta, theta

    def one_block(theta, b):
        drawn = jax.vmap(prepare)(b * block + jnp.arange(block))
        return jax.lax.scan(one_round, theta, drawn)

    return jax.lax.scan(one_block, theta, jnp.arange(num_blocks))[1]


@functools.partial(jax.jit, static_argnames=("num_rounds",))
def _usual(key, x, theta, *, num_rounds):
    store, sums = x.reshape(-1, DIM), x.sum(1)

    def one_round(carry, _):
        key, theta = carry
        key, key_client = jax.random.split(key)
        s = jax.random.randint(key_client, (), 0, CLIENTS)

        def local(carry, _):
            key, theta = carry
            key, key_rows, key_noise = jax.random.split(key, 3)
            batch = store[s * ROWS + jax.random.randint(key_rows, (BATCH,), 0, ROWS)]
            z = jax.random.normal(key_noise, (DIM,))
            return (
                key,
                theta + STEP * _drift(theta, s, batch, sums) + jnp.sqrt(2 * STEP) * z,
            ), None

        carry, _ = jax.lax.scan(local, (key, theta), None, length=LOCAL)
        return carry, carry[1]

    return jax.lax.scan(one_round, (key, theta), None, length=num_rounds)[1]


def fused(
    x: np.ndarray, num_rounds: int, num_chains: int = 1, num_devices: int = 1, block: int = 512
):
    """Return a function that runs the fused program, with chains over devices."""
    keys, start = jax.random.split(jax.random.key(1), num_chains), jnp.zeros((num_chains, DIM))
    block = max(block // num_chains, 1)
    run = functools.partial(_fused, num_blocks=num_rounds // block, block=block)
    if num_chains == 1:
        return lambda: run(keys[0], jnp.asarray(x), start[0])
    over, store = PartitionSpec("chains"), PartitionSpec()
    mapped = jax.jit(
        jax.shard_map(
            jax.vmap(run, in_axes=(0, None, 0)),
            mesh=Mesh(np.array(jax.devices()[:num_devices]), ("chains",)),
            in_specs=(over, store, over),
            out_specs=over,
            check_vma=False,
        )
    )
    return lambda: mapped(keys, jnp.asarray(x), start)


def usual(x: np.ndarray, num_rounds: int, num_chains: int = 1):
    keys, start = jax.random.split(jax.random.key(1), num_chains), jnp.zeros((num_chains, DIM))
    if num_chains == 1:
        return lambda: _usual(keys[0], jnp.asarray(x), start[0], num_rounds=num_rounds)
    mapped = jax.jit(
        jax.vmap(functools.partial(_usual, num_rounds=num_rounds), in_axes=(0, None, 0))
    )
    return lambda: mapped(keys, jnp.asarray(x), start)


def blackjax_sgld(posterior, x: jax.Array, start, batch_size: int, step_size: float, steps: int):
    """Return a function that runs `blackjax.sgld` on one client, with minibatches."""
    import blackjax  # its import starts JAX, before `use_all_cores`

    num_rows = jax.tree.leaves(x)[0].shape[0]
    estimator = blackjax.sgmcmc.gradients.grad_estimator(
        posterior.logprior_fn,
        lambda theta, row: posterior.loglikelihood_fn(
            theta, jax.tree.map(lambda leaf: leaf[None], row)
        )[0],
        num_rows,
    )
    algorithm = blackjax.sgld(estimator)

    @jax.jit
    def run(key, store):
        def step(position, key):
            key_rows, key_step = jax.random.split(key)
            index = jax.random.randint(key_rows, (batch_size,), 0, num_rows)
            batch = jax.tree.map(lambda leaf: leaf[index], store)
            position = algorithm.step(key_step, position, batch, step_size)
            return position, position

        return jax.lax.scan(step, start, jax.random.split(key, steps))[1]

    return lambda: run(jax.random.key(2), x)


def bench() -> None:
    """Print the rows, for a process with one device per core."""
    x = rows()
    for num_chains, num_rounds, num_usual in ((1, 65536, 256), (30, 4080, 30)):
        work = {
            "fedmcmc": ours(x, num_rounds, num_chains),
            "usual": usual(x, num_usual, num_chains),
            "fused": fused(x, num_rounds, num_chains),
        }
        if num_chains > 1:
            work["fused, chains over devices"] = fused(
                x, num_rounds, num_chains, devices_dividing(num_chains)
            )
        seconds = compare(work, repeats=5)
        seconds["usual"] *= num_rounds / num_usual
        print_over_fused("FSGLD toy", num_chains, num_rounds, seconds)


if __name__ == "__main__":
    fedmcmc.use_all_cores()
    bench()
