"""A run with checkpoints, for tests that kill it.

``python -m tests.support.killed_run DIRECTORY KIND`` makes a file ``started`` once it
samples, and writes all that it found to ``result.npz`` at its end. The kind ``processes`` is for
``python -m experiments.launch``, or one process.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from fedmcmc import distributed, inference, streaming

NUM_ROUNDS = 40_000
RECORD = {"streams", "keep_draws", "draws_to"}


def posterior():
    return fedmcmc.Posterior(
        lambda theta: -0.5 * jnp.sum(theta**2),
        lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2, axis=-1),
    )


def data():
    rng = np.random.default_rng(0)
    return fedmcmc.FederatedData.from_clients(
        [rng.normal(i, 1, size=(4 + i, 3)).astype(np.float32) for i in range(6)]
    )


def _stored(folder):
    return fedmcmc.Placement(client_store=fedmcmc.HostStore(folder))


def settings(kind, folder):
    """Return the kernel, what else `sample` is given, and what of it is for its `Record`."""
    record = {}
    if kind == "store":
        kernel = fedmcmc.fed_ep(posterior(), inference=inference.exact_gaussian(), cohort_size=2)
        given = dict(num_rounds=600, placement=_stored(folder / "sites"))
    else:
        common = dict(
            step_size=1e-3, batch_size=2, refresh_every=10, participation=fedmcmc.uniform(3)
        )
        if kind == "coded":
            kernel = fedmcmc.qlsd_pp(posterior(), compressor=fedmcmc.quantize(4), **common)
        else:
            kernel = fedmcmc.lsd_pp(posterior(), **common)
        given = dict(num_rounds=NUM_ROUNDS, num_burnin=1_001, thinning=3, num_chains=2)
        record["streams"] = {"m": streaming.moments(), "r": streaming.reservoir(16)}
    if kind == "processes":
        given |= dict(num_rounds=4_000)
    if kind in ("zarr", "processes"):
        record["draws_to"] = folder / "draws.zarr"
    return kernel, given, record


def run(kind, folder, checkpoint=None, **changed):
    kernel, given, record = settings(kind, Path(folder))
    record |= {name: changed.pop(name) for name in RECORD & changed.keys()}
    if kind == "processes":
        mesh = distributed.mesh() if jax.process_count() > 1 else None
        given["placement"] = fedmcmc.Placement(mesh=mesh, clients_at_a_time=1)
    return fedmcmc.sample(
        jax.random.key(7),
        kernel,
        data(),
        jnp.zeros(3),
        progress=False,
        checkpoint=checkpoint,
        record=fedmcmc.Record(**record),
        **(given | changed),
    )


def numbers(samples):
    """Return everything that a run gave, as arrays."""
    parts = (samples.draws, dict(samples.info), samples.totals, samples.streams, samples.state)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(parts)]


def assert_same(one, other):
    """Compare the `numbers` of two runs."""
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(a, b)


if __name__ == "__main__":
    distributed.initialize()
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    every = dict(every_rounds=50) if kind == "store" else dict(every_seconds=0.0)
    checkpoint = fedmcmc.Checkpoint(folder / "checkpoint", **every)
    (folder / "started").touch()
    found = run(kind, folder, checkpoint)
    if distributed.is_first():
        np.savez(folder / "result.partial.npz", *numbers(found))
        (folder / "result.partial.npz").rename(folder / "result.npz")
