"""FedEP and FedSEP on a network of 100,000 parameters, and programs for this workload alone.

500 clients of 50 to 150 rows, 20 per round. A client takes three epochs of SGD in minibatches of 20
rows along likelihood times cavity, and the mean of the last two iterates is the tilted mean. Sites
have scaled-identity precisions. The fused programs draw all orders of rows of a round at once, have
handwritten gradients, and compute clients one after the other on each device.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

import fedmcmc

DIM, HIDDEN, CLASSES = 784, 126, 10
COHORT, BATCH, EPOCHS, BURNIN = 20, 20, 3, 1
SMALLEST, LARGEST = 50, 150
RATE, ROW_PRECISION, FIRST_PRECISION = 0.05, 1e-3, 1e-3
STEPS = -(-LARGEST // BATCH)  # per epoch of the largest client


def federation(num_clients: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return all rows, and the sizes of the clients."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(SMALLEST, LARGEST + 1, num_clients)
    return {
        "x": rng.normal(size=(sizes.sum(), DIM)).astype(np.float32),
        "y": rng.integers(0, CLASSES, sizes.sum()).astype(np.int32),
    }, sizes


def start() -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    position = {
        "w1": rng.normal(size=(DIM, HIDDEN)) / np.sqrt(DIM),
        "b1": np.zeros(HIDDEN),
        "w2": rng.normal(size=(HIDDEN, CLASSES)) / np.sqrt(HIDDEN),
        "b2": np.zeros(CLASSES),
    }
    return {name: jnp.asarray(leaf, jnp.float32) for name, leaf in position.items()}


def _loglikelihood(theta, rows):
    hidden = jax.nn.relu(rows["x"] @ theta["w1"] + theta["b1"])
    logits = jax.nn.log_softmax(hidden @ theta["w2"] + theta["b2"])
    return jnp.take_along_axis(logits, rows["y"][:, None], axis=-1)[:, 0]


def ours(method: str, num_clients: int, num_rounds: int, num_chains: int, **settings):
    """Return a function that runs `sample`; `method` is ``"fed_ep"`` or ``"fed_sep"``."""
    rows, sizes = federation(num_clients)
    data = fedmcmc.FederatedData.from_arrays(rows, np.repeat(np.arange(num_clients), sizes))
    mean = fedmcmc.inference.sgd_mean(
        optax.sgd(RATE), num_samples=EPOCHS - BURNIN, num_burnin=BURNIN, batch_size=BATCH
    )
    kernel = getattr(fedmcmc, method)(
        fedmcmc.Posterior(lambda theta: jnp.zeros(()), _loglikelihood),
        inference=fedmcmc.inference.scaled_identity(mean, precision_per_row=ROW_PRECISION),
        cohort_size=COHORT,
        damping=0.5,
        structure="scaled_identity",
        initial_precision=FIRST_PRECISION,
    )
    position = start()
    return lambda: (
        fedmcmc.sample(
            jax.random.key(0),
            kernel,
            data,
            position,
            num_rounds=num_rounds,
            thinning=num_rounds,
            num_chains=num_chains,
            progress=False,
            **settings,
        ).state.broadcast.position
    )


def _descent(x, rows, labels, mask, eta, precision, num_rows):
    """Return the gradient of minus the tilted log density per row."""
    before = rows @ x["w1"] + x["b1"]
    hidden = jnp.maximum(before, 0)
    error = jax.nn.softmax(hidden @ x["w2"] + x["b2"]) - jax.nn.one_hot(labels, CLASSES)
    error = error * (mask / mask.sum())[:, None]
    back = jnp.where(before > 0, error @ x["w2"].T, 0)
    gradient = {"w1": rows.T @ back, "b1": back.sum(0), "w2": hidden.T @ error, "b2": error.sum(0)}
    return jax.tree.map(lambda g, e, t: g - (e - precision * t) / num_rows, gradient, eta, x)


def fused(
    method: str,
    num_clients: int,
    num_rounds: int,
    num_chains: int,
    num_devices: int,
    axis: str = "clients",
):
    """Return a function that runs the fused program with clients or chains over devices.

    All devices have all rows. With FedEP and clients over devices, every device also has all sites.
    """
    keeps_sites = method == "fed_ep"
    rows, sizes = federation(num_clients)
    starts = np.cumsum(sizes) - sizes
    padded = STEPS * BATCH
    here = COHORT // num_devices if axis == "clients" else COHORT
    damping = 0.5
    add = functools.partial(jax.tree.map, jnp.add)

    def fit(x, eta, precision, start_, size, order, store):
        """Return the tilted mean of one client."""
        steps = (size + BATCH - 1) // BATCH

        def step(i, x):
            place = jax.lax.dynamic_slice_in_dim(order[i // steps], (i % steps) * BATCH, BATCH)
            mask = (place < size).astype(jnp.float32)
            index = start_ + jnp.minimum(place, size - 1)
            descent = _descent(x, store["x"][index], store["y"][index], mask, eta, precision, size)
            return jax.tree.map(lambda t, g: t - RATE * g, x, descent)

        x = jax.lax.fori_loop(0, BURNIN * steps, step, x)
        total = jax.tree.map(jnp.zeros_like, x)
        for epoch in range(BURNIN, EPOCHS):
            x = jax.lax.fori_loop(epoch * steps, (epoch + 1) * steps, step, x)
            total = add(total, x)
        return jax.tree.map(lambda t: t / (EPOCHS - BURNIN), total)

    def chain(key, position, store, start_of, size_of):
        number = jnp.float32(FIRST_PRECISION)
        first = size_of.astype(jnp.float32) * number
        table = jax.tree.map(lambda t: first.reshape(-1, *[1] * t.ndim) * t, position)
        q_eta, q_precision = jax.tree.map(lambda t: t * first.sum(), position), first.sum()
        sites = (table, first) if keeps_sites else ()
        count = jnp.float32(num_clients)

        def one_round(r, carry):
            q_eta, q_precision, sites = carry
            cohort_key, order_key = jax.random.split(jax.random.fold_in(key, r))
            ids = jax.random.permutation(cohort_key, num_clients)[:COHORT]
            words = jax.random.uniform(order_key, (COHORT, EPOCHS, padded))
            words = jnp.where(jnp.arange(padded) < size_of[ids, None, None], words, 2.0)
            orders = jnp.argsort(words, axis=-1)
            mean = jax.tree.map(lambda t: t / q_precision, q_eta)
            begin = jax.lax.axis_index("devices") * here if axis == "clients" else 0
            if keeps_sites:
                old = jax.tree.map(lambda leaf: leaf[ids], sites)

            def client(total, entry):
                k = begin + entry
                i = ids[k]
                if keeps_sites:
                    site_eta, site_precision = jax.tree.map(lambda leaf: leaf[k], old)
                else:
                    site_eta = jax.tree.map(lambda t: t / count, q_eta)
                    site_precision = q_precision / count
                eta = jax.tree.map(jnp.subtract, q_eta, site_eta)
                precision = q_precision - site_precision
                size = size_of[i]
                found = fit(mean, eta, precision, start_of[i], size, orders[k], store)
                tilted = precision + ROW_PRECISION * size
                change = jax.tree.map(lambda t, q: tilted * t - q, found, q_eta)
                change = change, tilted - q_precision
                return add(total, change), change if keeps_sites else ()

            zero = jax.tree.map(jnp.zeros_like, (q_eta, q_precision))
            total, changes = jax.lax.scan(client, zero, jnp.arange(here))
            if axis == "clients" and num_devices > 1:
                total = jax.lax.psum(total, "devices")
                changes = jax.lax.all_gather(changes, "devices", tiled=True)
            if keeps_sites:
                new = jax.tree.map(lambda t, c: t + damping * c, old, changes)
                sites = jax.tree.map(lambda t, leaf: t.at[ids].set(leaf), sites, new)
            move = jax.tree.map(lambda t, c: t + damping * c, (q_eta, q_precision), total)
            return *move, sites

        carry = (q_eta, q_precision, sites)
        q_eta, q_precision, sites = jax.lax.fori_loop(0, num_rounds, one_round, carry)
        return jax.tree.map(lambda t: t / q_precision, q_eta), sites

    def program(keys, *arguments):
        return jax.lax.map(lambda key: chain(key, *arguments), keys)

    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("devices",))
    over = PartitionSpec("devices") if axis == "chains" else PartitionSpec()
    mapped = jax.jit(
        jax.shard_map(
            program,
            mesh=mesh,
            in_specs=(over, *[PartitionSpec()] * 4),
            out_specs=over,
            check_vma=False,
        )
    )
    keys = jax.random.split(jax.random.key(1), num_chains)
    arguments = jax.device_put(
        (start(), rows, starts.astype(np.int32), sizes.astype(np.int32)),
        jax.sharding.NamedSharding(mesh, PartitionSpec()),
    )
    return lambda: mapped(keys, *arguments)[0]
