"""Peak memory of FedSEP with 342,477 clients, and of a run that streams its draws.

FedSEP's peak is divided by the bytes of the rows (StackOverflow has this number of users). The peak
of the run that streams is compared between two numbers of rounds.

Each run has its own process, because a process's peak never decreases. Another process writes the
rows to disk: a child process starts with its parent's peak, so the parent must stay small.
"""

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.timing import row

CLIENTS, TINY, DIM, ROUNDS, COHORT = 342_477, 1_000, 64, 20, 10
STREAMED, STREAM_ROUNDS = 500_000, (20, 2_000)
MIB = 2**20


def write_rows(folder: Path, num_clients: int) -> dict[str, int]:
    """Write the rows of `num_clients` clients of different sizes, and return their bytes."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    sizes = np.minimum(1 + rng.geometric(1 / 9, num_clients), 50)
    num_rows = int(sizes.sum())
    rows = {
        "x": rng.standard_normal((num_rows, DIM), np.float32),
        "y": rng.choice(np.array([-1, 1], np.float32), num_rows),
    }
    for name, leaf in rows.items():
        np.save(folder / f"{name}.npy", leaf)
    np.save(folder / "sizes.npy", sizes)
    return {"written": sum(leaf.nbytes for leaf in rows.values())}


def run(folder: Path, mapped: bool | int) -> dict[str, int]:
    """Run FedSEP on rows from disk, and return peak memory [bytes] after each step."""
    import jax
    import jax.numpy as jnp
    import optax

    import fedmcmc

    mode = "r" if mapped else None
    rows = {name: np.load(folder / f"{name}.npy", mmap_mode=mode) for name in ("x", "y")}
    sizes = np.load(folder / "sizes.npy")
    peaks = {"load": _peak()}
    data = fedmcmc.FederatedData.from_arrays(rows, np.repeat(np.arange(len(sizes)), sizes))
    jax.block_until_ready(data)
    peaks["from_arrays"] = _peak()
    posterior = fedmcmc.Posterior(
        lambda theta: jnp.zeros(()),
        lambda theta, b: -jax.nn.softplus(-b["y"] * (b["x"] @ theta)),
    )
    mean = fedmcmc.inference.sgd_mean(optax.sgd(0.1), num_samples=2, batch_size=10)
    kernel = fedmcmc.fed_sep(
        posterior,
        inference=fedmcmc.inference.scaled_identity(mean, precision_per_row=1e-6),
        cohort_size=COHORT,
        damping=0.5 / COHORT,
        initial_precision=1e-6,
    )
    samples = fedmcmc.sample(
        jax.random.key(0), kernel, data, jnp.zeros(DIM), num_rounds=ROUNDS, progress=False
    )
    assert np.isfinite(samples.draws).all()
    # Keep the caller's rows until the end of the run, as a caller would.
    assert len(rows["y"]) == data.num_rows
    return peaks | {"sample": _peak()}


def stream(folder: Path, num_rounds: int) -> dict[str, int]:
    """Run a model of many parameters with moments for its draws, and return peak memory [bytes]."""
    import jax
    import jax.numpy as jnp

    import fedmcmc
    from fedmcmc import streaming

    posterior = fedmcmc.Posterior(
        lambda theta: -0.5 * jnp.sum(theta**2),
        lambda theta, x: -0.5 * jnp.sum((x - theta[0]) ** 2, axis=-1),
    )
    data = fedmcmc.FederatedData.from_clients([np.zeros((2, 1), np.float32)] * 2)
    samples = fedmcmc.sample(
        jax.random.key(0),
        fedmcmc.lsd(posterior, step_size=1e-3),
        data,
        jnp.zeros(STREAMED),
        num_rounds=num_rounds,
        progress=False,
        record=fedmcmc.Record(
            streams={"moments": streaming.moments(), "some": streaming.thinned(4)}, keep_draws=False
        ),
    )
    assert samples.streams["moments"].num_draws == num_rounds
    return {"sample": _peak()}


def _peak() -> int:
    # `ru_maxrss` is in KiB on Linux and in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _child(task: str, folder: Path, number: int) -> dict[str, int]:
    argv = [sys.executable, "-m", "benchmarks.memory", task, str(folder), str(int(number))]
    process = subprocess.run(argv, check=True, stdout=subprocess.PIPE)
    return json.loads(process.stdout.splitlines()[-1])


def bench() -> None:
    with tempfile.TemporaryDirectory() as name:
        large, tiny = Path(name, "large"), Path(name, "tiny")
        short, long = (_child("stream", tiny, n)["sample"] for n in STREAM_ROUNDS)
        print(f"LSD, {STREAMED:,} parameters, moments of the draws: {STREAM_ROUNDS[1]:,} rounds")
        ratio = long / short
        print(row("  peak memory", long / MIB, "MiB", ratio, f"over {STREAM_ROUNDS[0]} rounds"))
        written = _child("write", large, CLIENTS)["written"]
        _child("write", tiny, TINY)
        for mapped, how in ((False, "rows in NumPy arrays"), (True, "rows mapped from disk")):
            # The tiny run measures the memory of the runtime and of compiled programs.
            base, peaks = _child("run", tiny, mapped), _child("run", large, mapped)
            rows = f"{written / MIB:,.0f} MiB of {how}"
            print(f"FedSEP, {CLIENTS:,} clients, {rows}: peak memory over the rows' size")
            for step, peak in peaks.items():
                ratio = (peak - base["sample"]) / written
                goal = "goal: at most 2" if step == "sample" else ""
                print(row(f"  after {step}", peak / MIB, "MiB", ratio, goal))


if __name__ == "__main__":
    task, folder, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    print(json.dumps({"write": write_rows, "run": run, "stream": stream}[task](folder, number)))
