"""QLSD++ on multinomial logistic regression, and QLSD* on the Gaussian toy, in several styles.

`fused_logistic` and `fused_toy` are programs for one workload each, without any abstraction: draws
in blocks, gradients written out, ragged clients in groups of static size, and (logistic) clients on
two devices, one a core.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import fedmcmc
from benchmarks.timing import compare, row
from fedmcmc.compression import Quantized, message_bits

CLIENTS, DIM, CLASSES, FRACTION, REFRESH = 50, 784, 10, 0.1, 100
STEP, PRIOR = 1e-6, 100.0
GROUP = 5  # clients of a device computed together in the fused program


def digits_like(seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Rows as sparse as digits, and the sizes of the clients they belong to."""
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


def ours_logistic(num_levels: int, num_rounds: int, impl: str | None = None, buckets: int = 4):
    rows, sizes = digits_like()
    data = fedmcmc.FederatedData.from_arrays(rows, np.repeat(np.arange(CLIENTS), sizes))
    placement = fedmcmc.Placement(num_buckets=buckets)
    kernel = fedmcmc.qlsd_pp(
        fedmcmc.Posterior(_logprior, _loglikelihood),
        compressor=fedmcmc.quantize(num_levels),
        step_size=STEP,
        batch_size=FRACTION,
        refresh_every=REFRESH,
    )
    key = jax.random.key(0, impl=impl)

    def run():
        return fedmcmc.sample(
            key,
            kernel,
            data,
            jnp.zeros((DIM, CLASSES)),
            num_rounds=num_rounds,
            thinning=50,
            progress=False,
            placement=placement,
        ).draws

    return run


class _Layout:
    """Clients dealt to devices by size, in groups whose members have similar sizes."""

    def __init__(self, sizes: np.ndarray, num_devices: int) -> None:
        start = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        order = np.argsort(-sizes)
        per_device = order.reshape(-1, num_devices).T  # [num_devices, clients]
        self.groups = []
        for first in range(0, per_device.shape[1], GROUP):
            ids = per_device[:, first : first + GROUP]
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


def _quantise(v, words, s):
    norm = jnp.sqrt(jnp.sum(v * v))
    exact = jnp.minimum(jnp.abs(v) / jnp.where(norm > 0, norm, 1) * s, s)
    below = jnp.floor(exact)
    half = jnp.concatenate([words, (words << 16) | (words >> 16)]).reshape(v.shape)
    level = (below + (half < ((exact - below) * 2.0**32).astype(jnp.uint32))).astype(jnp.int32)
    level = jnp.where(v < 0, -level, level)
    return norm * (level / s), message_bits(Quantized(norm, level))


def fused_logistic(num_levels: int, num_rounds: int, num_devices: int = 2, block: int = 4):
    rows, sizes = digits_like()
    layout = _Layout(sizes, num_devices)
    size, s = DIM * CLASSES, float(num_levels)
    alpha = 1 / (1 + min(size / s**2, size**0.5 / s))
    x, y = jnp.asarray(rows["x"]), jax.nn.one_hot(rows["y"], CLASSES)
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("clients",))
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

    def full(theta, start, count, most):
        def client(start_, count_):
            place = jnp.arange(most)
            own = jnp.where(place < count_, start_ + place, start_)
            error = (y[own] - jax.nn.softmax(x[own] @ theta)) * (place < count_)[:, None]
            return x[own].T @ error

        return jax.vmap(client)(start, count)

    def group_step(theta, zeta, drawn, memory, known, count, m):
        index, words = drawn
        used = jnp.maximum(jnp.floor(count * (FRACTION + 1e-7)).astype(jnp.int32), 1)
        logits = x[index] @ jnp.concatenate([theta, zeta], axis=1)
        error = jax.nn.softmax(logits[..., CLASSES:]) - jax.nn.softmax(logits[..., :CLASSES])
        scale = jnp.where(jnp.arange(m) < used[:, None], (count / used)[:, None], 0)
        gradient = jnp.einsum("bmd,bmc->bdc", x[index], error * scale[..., None]) + known
        said, bits = jax.vmap(lambda v, w: _quantise(v, w, s))(gradient - memory, words)
        return said, bits.sum(), memory + alpha * said

    def program(key, theta, ids, starts, counts):
        ids, starts, counts = jax.tree.map(lambda leaf: leaf[0], (ids, starts, counts))
        zero = [jnp.zeros((len(i), DIM, CLASSES)) for i in ids]

        def one_round(carry, drawn):
            theta, zeta, eta, memory, known = carry
            r, noise, groups = drawn
            zeta = jnp.where(r % REFRESH == 0, theta, zeta)
            known = jax.lax.cond(
                r % REFRESH == 0,
                lambda: [full(theta, *g) for g in zip(starts, counts, largest, strict=True)],
                lambda: known,
            )
            out = [
                group_step(theta, zeta, *g)
                for g in zip(groups, memory, known, counts, batch, strict=True)
            ]
            local = functools.reduce(jnp.add, [said.sum(0) for said, _, _ in out])
            bits = functools.reduce(jnp.add, [bits for _, bits, _ in out])
            total, bits = jax.lax.psum((local, bits), "clients")
            gradient = eta + total - PRIOR * theta
            eta = eta + alpha * total
            theta = theta + STEP * gradient + jnp.sqrt(2 * STEP) * noise
            return (theta, zeta, eta, [o[2] for o in out], known), (theta[0, 0], bits)

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
        carry, kept = jax.lax.scan(one_block, carry, jnp.arange(num_rounds // block))
        return carry[0], kept

    spec = PartitionSpec("clients")
    mapped = jax.jit(
        jax.shard_map(
            program,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(), spec, spec, spec),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
    key, theta = jax.random.key(1), jnp.zeros((DIM, CLASSES))
    arguments = (key, theta, list(ids), list(starts), list(counts))
    return lambda: mapped(*arguments)


# The toy


def toy_rows() -> tuple[list[np.ndarray], np.ndarray]:
    sizes = np.random.RandomState(1994).randint(10, 200, 20)
    rng = np.random.default_rng(0)
    clients = [(rng.normal(0, 5, 50) + rng.normal(size=(n, 50))).astype(np.float32) for n in sizes]
    return clients, np.concatenate(clients).mean(0)


def ours_toy(num_levels: int, num_rounds: int, num_chains: int = 1):
    clients, centre = toy_rows()
    data = fedmcmc.FederatedData.from_clients(clients)
    posterior = fedmcmc.Posterior(
        lambda theta: jnp.zeros(()),
        lambda theta, rows: -0.5 * jnp.sum((rows - theta) ** 2, axis=-1),
    )
    kernel = fedmcmc.qlsd_star(
        posterior,
        jnp.asarray(centre),
        compressor=fedmcmc.quantize(num_levels),
        step_size=1 / data.num_rows,
        batch_size=FRACTION,
    )
    return lambda: (
        fedmcmc.sample(
            jax.random.key(0),
            kernel,
            data,
            jnp.asarray(centre),
            num_rounds=num_rounds,
            num_chains=num_chains,
            thinning=10,
            progress=False,
        ).draws
    )


def fused_toy(num_levels: int, num_rounds: int, num_chains: int = 1, block: int = 64):
    clients, centre = toy_rows()
    sizes = np.array([len(c) for c in clients])
    start, store = np.concatenate([[0], np.cumsum(sizes)[:-1]]), jnp.concatenate(clients)
    step, s, dim = 1 / sizes.sum(), float(num_levels), 50
    used = np.maximum(sizes // 10, 1)
    most, mean = int(used.max()), jnp.asarray(centre)
    mask = jnp.asarray(np.arange(most) < used[:, None], jnp.float32)
    scale = jnp.asarray(sizes / used, jnp.float32)
    first, count = jnp.asarray(start, jnp.int32), jnp.asarray(sizes, jnp.uint32)
    block = max(block // num_chains, 1)

    def prepare(key, r):
        def client(i, start_, count_):
            rows_key, words_key = jax.random.split(
                jax.random.fold_in(jax.random.fold_in(key, r), i)
            )
            words = jax.random.bits(rows_key, (most,), jnp.uint32)
            rows = store[start_ + (((words >> 16) * count_) >> 16).astype(jnp.int32)]
            return rows, jax.random.bits(words_key, (dim // 2,), jnp.uint32)

        noise = jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, r), 20), (dim,))
        return jax.vmap(client)(jnp.arange(20), first, count), noise

    def one_round(theta, drawn):
        (rows, words), noise = drawn
        # The rows enter both gradients, and the difference of the two.
        difference = (rows - theta) - (rows - mean)
        message = jnp.einsum("bm,bmd->bd", mask, difference) * scale[:, None]
        said, bits = jax.vmap(lambda v, w: _quantise(v, w, s))(message, words)
        theta = theta + step * said.sum(0) + jnp.sqrt(2 * step) * noise
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
    mapped = jax.jit(jax.vmap(chain))
    return lambda: mapped(keys)


def numpy_toy(num_levels: int, num_rounds: int):
    """QLSD* as a loop over clients in NumPy, as research code is usually written."""
    clients, centre = toy_rows()
    step, s = 1 / sum(map(len, clients)), num_levels

    def run():
        rng, theta, kept = np.random.default_rng(0), centre.copy(), []
        for _ in range(num_rounds):
            total = np.zeros_like(theta)
            for rows in clients:
                batch = rows[rng.integers(0, len(rows), max(len(rows) // 10, 1))]
                v = len(rows) * ((batch - theta).mean(0) - (batch - centre).mean(0))
                norm = np.linalg.norm(v)
                if norm > 0:
                    exact = s * np.abs(v) / norm
                    level = np.floor(exact)
                    level += rng.random(len(v)) < exact - level
                    total += norm * np.sign(v) * level / s
            theta = theta + step * total + np.sqrt(2 * step) * rng.standard_normal(len(theta))
            kept.append(theta)
        return np.array(kept)

    return run


def bench() -> None:
    """Print the rows; two devices must be there, as `python -m benchmarks qlsd` sees to."""
    for num_levels in (16, 256):
        rounds = 400
        seconds = compare(
            {
                "fedmcmc": ours_logistic(num_levels, rounds),
                "one bucket": ours_logistic(num_levels, rounds, buckets=1),
                "rbg keys": ours_logistic(num_levels, rounds, impl="rbg"),
                "fused, two devices": fused_logistic(num_levels, rounds, 2),
                "fused, one device": fused_logistic(num_levels, rounds, 1),
            },
            repeats=3,
        )
        ours = seconds["fedmcmc"]
        print(row(f"QLSD++ logistic, s = {num_levels}", rounds / ours, "rounds/s", 1.0, ""))
        for other in list(seconds)[1:]:
            goal = "goal: at least 0.8" if other == "fused, two devices" else ""
            rate, ratio = rounds / seconds[other], seconds[other] / ours
            print(row(f"  over {other}", rate, "rounds/s", ratio, goal))
    for num_chains, rounds, few in ((1, 16384, 400), (30, 1024, 400)):
        seconds = compare(
            {
                "fedmcmc": ours_toy(16, rounds, num_chains),
                "fused": fused_toy(16, rounds, num_chains),
                "NumPy": numpy_toy(16, few),
            },
            repeats=5,
        )
        rates = {name: rounds * num_chains / s for name, s in seconds.items()}
        rates["NumPy"] = few / seconds["NumPy"]
        ours = rates["fedmcmc"]
        print(row(f"QLSD* toy, {num_chains} chains", ours, "chain-rounds/s", 1.0, ""))
        for other, goal in (("fused", "goal: at least 0.8"), ("NumPy", "goal: at least 25")):
            ratio = ours / rates[other]
            print(row(f"  over {other}", rates[other], "chain-rounds/s", ratio, goal))


if __name__ == "__main__":
    bench()
