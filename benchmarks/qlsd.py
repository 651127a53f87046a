"""QLSD++ on multinomial logistic regression, and QLSD* on the Gaussian toy, in several styles.

`fused_logistic` and `fused_toy` are programs for one workload each, without abstractions. They draw
random numbers in blocks, have handwritten gradients, and compute ragged clients in groups of static
size.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import fedmcmc
from benchmarks.timing import compare, devices_dividing, print_over_fused
from fedmcmc.compression import Quantized, message_bits

CLIENTS, DIM, CLASSES, FRACTION, REFRESH = 50, 784, 10, 0.1, 100
STEP, PRIOR = 1e-6, 100.0
GROUP = 5  # number of clients that a device computes together in the fused program


def digits_like(seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return rows that are as sparse as images of digits, and the sizes of the clients."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(20, 380, CLIENTS)
    x = rng.random((sizes.sum(), DIM)) * (rng.random((sizes.sum(), DIM)) < 0.2)
    return {
        "x": x.astype(np.float32),
        "y": rng.integers(0, CLASSES, len(x)).astype(np.int32),
    }, sizes


def _logprior(theta):
    return -0.5 * PRIOR * jnp.sum(theta**2)


def _loglikelihood(theta, rows):
    logits = jax.nn.log_softmax(rows["x"] @ theta)
    return jnp.take_along_axis(logits, rows["y"][:, None], axis=1)[:, 0]


def ours_logistic(num_levels: int, num_rounds: int, num_chains: int = 1, **settings):
    rows, sizes = digits_like()
    data = fedmcmc.FederatedData.from_arrays(rows, np.repeat(np.arange(CLIENTS), sizes))
    kernel = fedmcmc.qlsd_pp(
        fedmcmc.Posterior(_logprior, _loglikelihood),
        compressor=fedmcmc.quantize(num_levels),
        step_size=STEP,
        batch_size=FRACTION,
        refresh_every=REFRESH,
    )

    def run():
        return fedmcmc.sample(
            jax.random.key(0),
            kernel,
            data,
            jnp.zeros((DIM, CLASSES)),
            num_rounds=num_rounds,
            num_chains=num_chains,
            thinning=min(num_rounds, 50),
            progress=False,
            **settings,
        ).draws

    return run


class _Layout:
    """Assignment of clients to devices, in groups of clients with similar sizes."""

    def __init__(self, sizes: np.ndarray, num_devices: int) -> None:
        start = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        order = np.argsort(-sizes)
        per_device = order.reshape(-1, num_devices).T  # [num_devices, clients]
        self.groups = []
        for offset in range(0, per_device.shape[1], GROUP):
            ids = per_device[:, offset : offset + GROUP]
            largest = int(sizes[ids].max())
            self.groups.append(
                (
                    jnp.asarray(ids, jnp.int32),
                    jnp.asarray(start[ids], jnp.int32),
                    jnp.asarray(sizes[ids], jnp.int32),
                    largest,
                    int(largest * FRACTION),
                )
            )


def _quantize(v, words, s):
    norm = jnp.sqrt(jnp.sum(v * v))
    exact = jnp.minimum(jnp.abs(v) / jnp.where(norm > 0, norm, 1) * s, s)
    below = jnp.floor(exact)
    half = jnp.concatenate([words, (words << 16) | (words >> 16)]).reshape(v.shape)
    level = (below + (half < ((exact - below) * 2.0**32).astype(jnp.uint32))).astype(jnp.int32)
    level = jnp.where(v < 0, -level, level)
    return norm * (level / s), message_bits(Quantized(norm, level))


def fused_logistic(
    num_levels: int,
    num_rounds: int,
    num_chains: int = 1,
    num_devices: int = 1,
    axis: str = "clients",
    block: int = 4,
):
    """Return a function that runs the fused program, with clients or chains over devices."""
    rows, sizes = digits_like()
    layout = _Layout(sizes, num_devices if axis == "clients" else 1)
    size, s = DIM * CLASSES, float(num_levels)
    alpha = 1 / (1 + min(size / s**2, size**0.5 / s))
    x, y = jnp.asarray(rows["x"]), jax.nn.one_hot(rows["y"], CLASSES)
    mesh = Mesh(np.array(jax.devices()[:num_devices]), (axis,))
    ids, starts, counts, largest, batch = zip(*layout.groups, strict=True)

    def prepare(key, r, ids_, start, count, m):
        def client(i, start_, count_):
            rows_key, words_key = jax.random.split(
                jax.random.fold_in(jax.random.fold_in(key, r), i)
            )
            words = jax.random.bits(rows_key, (m,), jnp.uint32)
            offsets = ((words >> 16) * count_.astype(jnp.uint32)) >> 16
            return start_ + offsets.astype(jnp.int32), jax.random.bits(words_key, (size // 2,))

        return jax.vmap(client)(ids_, start, count)

    def full(theta, start, count, max_count):
        def client(start_, count_):
            place = jnp.arange(max_count)
            index = jnp.where(place < count_, start_ + place, start_)
            error = (y[index] - jax.nn.softmax(x[index] @ theta)) * (place < count_)[:, None]
            return x[index].T @ error

        return jax.vmap(client)(start, count)

    def group_step(theta, zeta, drawn, memory, anchor_gradient, count, m):
        index, words = drawn
        used = jnp.maximum(jnp.floor(count * (FRACTION + 1e-7)).astype(jnp.int32), 1)
        logits = x[index] @ jnp.concatenate([theta, zeta], axis=1)
        error = jax.nn.softmax(logits[..., CLASSES:]) - jax.nn.softmax(logits[..., :CLASSES])
        scale = jnp.where(jnp.arange(m) < used[:, None], (count / used)[:, None], 0)
        gradient = jnp.einsum("bmd,bmc->bdc", x[index], error * scale[..., None])
        gradient = gradient + anchor_gradient
        message, bits = jax.vmap(lambda v, w: _quantize(v, w, s))(gradient - memory, words)
        return message, bits.sum(), memory + alpha * message

    def chain(key, theta, ids, starts, counts):
        ids, starts, counts = jax.tree.map(lambda leaf: leaf[0], (ids, starts, counts))
        zero = [jnp.zeros((len(i), DIM, CLASSES)) for i in ids]

        def one_round(carry, drawn):
            theta, zeta, eta, memory, anchor_gradients = carry
            r, noise, groups = drawn
            zeta = jnp.where(r % REFRESH == 0, theta, zeta)
            anchor_gradients = jax.lax.cond(
                r % REFRESH == 0,
                lambda: [full(theta, *g) for g in zip(starts, counts, largest, strict=True)],
                lambda: anchor_gradients,
            )
            out = [
                group_step(theta, zeta, *g)
                for g in zip(groups, memory, anchor_gradients, counts, batch, strict=True)
            ]
            local = functools.reduce(jnp.add, [message.sum(0) for message, _, _ in out])
            bits = functools.reduce(jnp.add, [bits for _, bits, _ in out])
            total = local
            if num_devices > 1 and axis == "clients":
                total, bits = jax.lax.psum((local, bits), axis)
            gradient = eta + total - PRIOR * theta
            eta = eta + alpha * total
            theta = theta + STEP * gradient + jnp.sqrt(2 * STEP) * noise
            carry = theta, zeta, eta, [o[2] for o in out], anchor_gradients
            return carry, (theta[0, 0], bits)

        def one_block(carry, b):
            r = b * block + jnp.arange(block)
            noise = jax.vmap(
                lambda k: jax.random.normal(
                    jax.random.fold_in(jax.random.fold_in(key, k), CLIENTS), (size,)
                ).reshape(DIM, CLASSES)
            )(r)
            groups = [
                jax.vmap(lambda k, g=g: prepare(key, k, *g))(r)
                for g in zip(ids, starts, counts, batch, strict=True)
            ]
            return jax.lax.scan(one_round, carry, (r, noise, groups))

        carry = (theta, theta, jnp.zeros_like(theta), zero, zero)
        carry, traces = jax.lax.scan(one_block, carry, jnp.arange(num_rounds // block))
        return carry[0], traces

    def program(keys, *arguments):
        if len(keys) == 1:
            return jax.tree.map(lambda leaf: leaf[None], chain(keys[0], *arguments))
        return jax.vmap(chain, in_axes=(0, *[None] * 4))(keys, *arguments)

    replicated, spec = PartitionSpec(), PartitionSpec(axis)
    chains, clients = (spec, replicated) if axis == "chains" else (replicated, spec)
    mapped = jax.jit(
        jax.shard_map(
            program,
            mesh=mesh,
            in_specs=(chains, replicated, clients, clients, clients),
            out_specs=chains,
            check_vma=False,
        )
    )
    keys, theta = jax.random.split(jax.random.key(1), num_chains), jnp.zeros((DIM, CLASSES))
    arguments = (keys, theta, list(ids), list(starts), list(counts))
    return lambda: mapped(*arguments)


# The toy


def toy_rows() -> tuple[list[np.ndarray], np.ndarray]:
    sizes = np.random.RandomState(1994).randint(10, 200, 20)
    rng = np.random.default_rng(0)
    clients = [(rng.normal(0, 5, 50) + rng.normal(size=(n, 50))).astype(np.float32) for n in sizes]
    return clients, np.concatenate(clients).mean(0)


def ours_toy(num_levels: int, num_rounds: int, num_chains: int = 1):
    clients, center = toy_rows()
    data = fedmcmc.FederatedData.from_clients(clients)
    posterior = fedmcmc.Posterior(
        lambda theta: jnp.zeros(()),
        lambda theta, rows: -0.5 * jnp.sum((rows - theta) ** 2, axis=-1),
    )
    kernel = fedmcmc.qlsd_star(
        posterior,
        jnp.asarray(center),
        compressor=fedmcmc.quantize(num_levels),
        step_size=1 / data.num_rows,
        batch_size=FRACTION,
    )
    return lambda: (
        fedmcmc.sample(
            jax.random.key(0),
            kernel,
            data,
            jnp.asarray(center),
            num_rounds=num_rounds,
            num_chains=num_chains,
            thinning=10,
            progress=False,
        ).draws
    )


def fused_toy(
    num_levels: int, num_rounds: int, num_chains: int = 1, num_devices: int = 1, block: int = 64
):
    """Return a function that runs the fused program, with chains over devices."""
    clients, center = toy_rows()
    sizes = np.array([len(c) for c in clients])
    start, store = np.concatenate([[0], np.cumsum(sizes)[:-1]]), jnp.concatenate(clients)
    step, s, dim = 1 / sizes.sum(), float(num_levels), 50
    used = np.maximum(sizes // 10, 1)
    max_used, mean = int(used.max()), jnp.asarray(center)
    mask = jnp.asarray(np.arange(max_used) < used[:, None], jnp.float32)
    scale = jnp.asarray(sizes / used, jnp.float32)
    starts, counts = jnp.asarray(start, jnp.int32), jnp.asarray(sizes, jnp.uint32)
    block = max(block // num_chains, 1)

    def prepare(key, r):
        def client(i, start_, count_):
            rows_key, words_key = jax.random.split(
                jax.random.fold_in(jax.random.fold_in(key, r), i)
            )
            words = jax.random.bits(rows_key, (max_used,), jnp.uint32)
            rows = store[start_ + (((words >> 16) * count_) >> 16).astype(jnp.int32)]
            return rows, jax.random.bits(words_key, (dim // 2,), jnp.uint32)

        noise = jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, r), 20), (dim,))
        return jax.vmap(client)(jnp.arange(20), starts, counts), noise

    def one_round(theta, drawn):
        (rows, words), noise = drawn
        # The message is the difference of the gradients of the same rows at `theta` and at `mean`.
        difference = (rows - theta) - (rows - mean)
        message = jnp.einsum("bm,bmd->bd", mask, difference) * scale[:, None]
        sent, bits = jax.vmap(lambda v, w: _quantize(v, w, s))(message, words)
        theta = theta + step * sent.sum(0) + jnp.sqrt(2 * step) * noise
        return theta, (theta, bits.sum())

    @jax.jit
    def chain(key):
        def one_block(theta, b):
            drawn = jax.vmap(lambda r: prepare(key, r))(b * block + jnp.arange(block))
            return jax.lax.scan(one_round, theta, drawn)

        return jax.lax.scan(one_block, mean, jnp.arange(num_rounds // block))[1]

    keys = jax.random.split(jax.random.key(1), num_chains)
    if num_chains == 1:
        return lambda: chain(keys[0])
    over = PartitionSpec("chains")
    mapped = jax.jit(
        jax.shard_map(
            jax.vmap(chain),
            mesh=Mesh(np.array(jax.devices()[:num_devices]), ("chains",)),
            in_specs=over,
            out_specs=over,
            check_vma=False,
        )
    )
    return lambda: mapped(keys)


def numpy_toy(num_levels: int, num_rounds: int):
    """Return a function that runs QLSD* in NumPy with a loop over clients, like research code."""
    clients, center = toy_rows()
    step, s = 1 / sum(map(len, clients)), num_levels

    def run():
        rng, theta, draws = np.random.default_rng(0), center.copy(), []
        for _ in range(num_rounds):
            total = np.zeros_like(theta)
            for rows in clients:
                batch = rows[rng.integers(0, len(rows), max(len(rows) // 10, 1))]
                v = len(rows) * ((batch - theta).mean(0) - (batch - center).mean(0))
                norm = np.linalg.norm(v)
                if norm > 0:
                    exact = s * np.abs(v) / norm
                    level = np.floor(exact)
                    level += rng.random(len(v)) < exact - level
                    total += norm * np.sign(v) * level / s
            theta = theta + step * total + np.sqrt(2 * step) * rng.standard_normal(len(theta))
            draws.append(theta)
        return np.array(draws)

    return run


def bench() -> None:
    """Print the rows, for a process with one device per core."""
    for num_chains, num_rounds in ((1, 200), (30, 12)):
        run = functools.partial(fused_logistic, 16, num_rounds, num_chains)
        work = {"fedmcmc": ours_logistic(16, num_rounds, num_chains), "fused": run()}
        work["fused, clients over devices"] = run(devices_dividing(CLIENTS))
        if num_chains > 1:
            work["fused, chains over devices"] = run(devices_dividing(num_chains), "chains")
        seconds = compare(work, repeats=2)
        print_over_fused("QLSD++ logistic, 16 levels", num_chains, num_rounds, seconds)
    for num_chains, num_rounds, num_numpy in ((1, 65536, 400), (30, 2048, 0)):
        run = functools.partial(fused_toy, 16, num_rounds, num_chains)
        work = {"fedmcmc": ours_toy(16, num_rounds, num_chains), "fused": run()}
        if num_chains > 1:
            work["fused, chains over devices"] = run(devices_dividing(num_chains))
        if num_numpy:
            work["NumPy"] = numpy_toy(16, num_numpy)
        seconds = compare(work, repeats=3)
        if num_numpy:
            seconds["NumPy"] *= num_rounds / num_numpy
        print_over_fused("QLSD* toy", num_chains, num_rounds, seconds)


if __name__ == "__main__":
    fedmcmc.use_all_cores()
    bench()
