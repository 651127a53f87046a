"""Large data: seconds, peak memory and accuracy of `fit` with many rows or many parameters.

Each case has its own process, because a process's peak never decreases. Another process writes the
rows and a reference to disk: a child process starts with its parent's peak, so the parent must stay
small. The memory of the runtime and of compiled programs is the peak of the same fit with few rows
(each site has at most a little more than one chunk of rows, so that the programs are the same).

References
- Linear regression has a Gaussian posterior, computed in float64.
- Logistic regression with a million rows: the mode, plus the third-order correction of the mean,
  and the curvature at the mode, in float64. The next terms of these expansions are smaller by
  another factor of (parameters / rows), so that errors are far below 0.001 sd.
- Logistic regression with five rows per parameter: Hamiltonian Monte Carlo on the pooled rows, 64
  chains in coordinates whitened at the mode.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

CHUNK = 2**16
MIB = 2**20
SITES = 20


class Case(NamedTuple):
    """Shape of a federation, and the sd of the coefficients' prior and of their true values."""

    model: str
    num_rows: int
    size: int
    scale: float

    def sizes(self, num_rows: int) -> np.ndarray:
        """Return unequal sizes of the sites, the largest ten times the smallest."""
        shares = np.geomspace(1, 10, SITES)
        sizes = np.maximum((shares / shares.sum() * num_rows).astype(int), 1)
        sizes[-1] += num_rows - sizes.sum()
        return sizes


CASES = {
    "rows": Case("logistic", 1_000_000, 20, 0.5),
    "linear": Case("linear", 5_000, 1_000, 0.1),
    "wide": Case("logistic", 5_000, 1_000, 0.1),
}
TINY_ROWS = 45_000
"""Number of rows with which the largest site has more than one chunk of rows."""
SOURCES = ("arrays", "mapped files", "Parquet files")
"""Rows in memory, and rows that `fedmcmc.ClientLoader` reads site by site."""


def write(folder: Path, name: str, num_rows: int) -> dict[str, Any]:
    """Write rows and the reference of a case, and return the bytes of the rows."""
    folder.mkdir(exist_ok=True)
    case, rng = CASES[name], np.random.default_rng(0)
    x = rng.standard_normal((num_rows, case.size), np.float32)
    x[:, 0] = 1
    truth = (case.scale * rng.standard_normal(case.size)).astype(np.float32)
    eta = x @ truth
    if case.model == "linear":
        y = (eta + rng.standard_normal(num_rows)).astype(np.float32)
        mean, covariance = linear_posterior(x, y)
    else:
        y = (rng.random(num_rows) < 1 / (1 + np.exp(-eta))).astype(np.int32)
        mean, covariance = laplace(x, y)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    sizes = case.sizes(num_rows)
    np.save(folder / "sizes.npy", sizes)
    if name == "rows":
        _write_parquet(folder, x, y, sizes)
    sds = np.sqrt(np.diagonal(covariance))
    if name == "wide":
        start_time = time.perf_counter()
        mean, sds, error = hmc_moments(x, y, mean, covariance)
        figures = {"reference seconds": time.perf_counter() - start_time, "reference error": error}
    else:
        figures = {}
    np.save(folder / "moments.npy", np.stack([mean, sds]))
    return {"bytes": x.nbytes + y.nbytes, **figures}


def _write_parquet(folder: Path, x: np.ndarray, y: np.ndarray, sizes: np.ndarray) -> None:
    """Write one Parquet file per site, with a column per covariate."""
    import polars as pl

    for i, (size, end) in enumerate(zip(sizes, np.cumsum(sizes), strict=True)):
        table = pl.DataFrame(x[end - size : end], [f"x{j}" for j in range(x.shape[1])])
        table.with_columns(y=y[end - size : end]).write_parquet(folder / f"site{i}.parquet")


def linear_posterior(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and covariance of coefficients with a standard normal prior and noise."""
    x64 = x.astype(np.float64)
    covariance = np.linalg.inv(np.eye(x.shape[1]) + x64.T @ x64)
    return covariance @ (x64.T @ y.astype(np.float64)), covariance


def laplace(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean to third order and the inverse curvature at the mode, for a normal prior."""
    num_rows, size = x.shape
    mode = np.zeros(size)

    def sums(with_third: np.ndarray | None = None) -> list[np.ndarray]:
        """Return gradient and curvature, and the contraction of third derivatives with a matrix."""
        totals = [-mode, np.eye(size), np.zeros(size)]
        for start in range(0, num_rows, CHUNK):
            part = x[start : start + CHUNK].astype(np.float64)
            p = 1 / (1 + np.exp(-(part @ mode)))
            totals[0] = totals[0] + (y[start : start + CHUNK] - p) @ part
            totals[1] = totals[1] + (part.T * (p * (1 - p))) @ part
            if with_third is not None:
                spread = np.einsum("ni,ni->n", part @ with_third, part)
                totals[2] = totals[2] - (p * (1 - p) * (1 - 2 * p) * spread) @ part
        return totals

    for _ in range(20):
        gradient, precision, _ = sums()
        step = np.linalg.solve(precision, gradient)
        mode = mode + step
        if gradient @ step < 1e-16:
            break
    covariance = np.linalg.inv(sums()[1])
    return mode + covariance @ sums(covariance)[2] / 2, covariance


def hmc_moments(
    x: np.ndarray, y: np.ndarray, mean: np.ndarray, covariance: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return means and sds by HMC on pooled rows, and the largest standard error in sds."""
    import jax
    import jax.numpy as jnp

    chains, warmup, draws, steps, step_size = 64, 40, 150, 4, 0.42
    root = np.linalg.cholesky(covariance)
    design = jnp.asarray(x @ root.astype(np.float32))
    offset, sign = jnp.asarray(x @ mean.astype(np.float32)), jnp.asarray(2 * y - 1, jnp.float32)
    prior_root, prior_mean = jnp.asarray(root, jnp.float32), jnp.asarray(mean, jnp.float32)

    def log_density(z: Any) -> Any:  # of all chains, [chains, d]
        terms = -jax.nn.softplus(-sign * (z @ design.T + offset)) + jax.nn.softplus(-sign * offset)
        position = prior_mean + z @ prior_root.T
        return terms.sum(1) - 0.5 * jnp.sum(position**2 - prior_mean**2, 1)

    def gradient(z: Any) -> Any:
        return jax.grad(lambda z: log_density(z).sum())(z)

    def trajectory(state: Any, key: Any) -> Any:
        z, total, squares, count = state
        momentum_key, length_key, accept_key = jax.random.split(key, 3)
        momentum = jax.random.normal(momentum_key, z.shape)
        step = step_size * jax.random.uniform(length_key, (), minval=0.8, maxval=1.2)
        start = log_density(z) - 0.5 * jnp.sum(momentum**2, 1)

        def leapfrog(_: int, moving: Any) -> Any:
            q, p = moving
            q = q + step * p
            return q, p + step * gradient(q)

        p = momentum + step / 2 * gradient(z)
        q, p = jax.lax.fori_loop(0, steps, leapfrog, (z, p))
        p = p - step / 2 * gradient(q)
        log_ratio = log_density(q) - 0.5 * jnp.sum(p**2, 1) - start
        accepted = jnp.log(jax.random.uniform(accept_key, log_ratio.shape)) < log_ratio
        z = jnp.where(accepted[:, None], q, z)
        position = z @ prior_root.T
        is_counted = count >= warmup
        return (
            z,
            total + is_counted * position,
            squares + is_counted * position**2,
            count + 1,
        ), accepted.mean()

    zeros = jnp.zeros((chains, x.shape[1]))
    starts = jax.random.normal(jax.random.key(1), zeros.shape)
    keys = jax.random.split(jax.random.key(2), warmup + draws)
    (_, total, squares, _), _ = jax.jit(lambda s, k: jax.lax.scan(trajectory, s, k))(
        (starts, zeros, zeros, 0), keys
    )
    total, squares = (np.asarray(leaf, np.float64) / draws for leaf in (total, squares))
    center = total.mean(0)
    sds = np.sqrt(squares.mean(0) - center**2)
    error = float((total.std(0) / np.sqrt(chains) / sds).max())
    return mean + center, sds, error


def fit(folder: Path, name: str, source: str) -> dict[str, Any]:
    """Fit a model to rows from disk, and return seconds, errors and peak memory [bytes]."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    import fedmcmc

    def logistic(x: Any, y: Any = None) -> None:
        b = numpyro.sample("b", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)

    def linear(x: Any, y: Any = None) -> None:
        b = numpyro.sample("b", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(x @ b, 1), obs=y)

    sizes = np.load(folder / "sizes.npy")
    ends = np.cumsum(sizes)
    mode = None if source == "arrays" else "r"
    rows = {key: np.load(folder / f"{key}.npy", mmap_mode=mode) for key in ("x", "y")}

    def load(client: int) -> dict[str, np.ndarray]:
        end = ends[client]
        return {key: leaf[end - sizes[client] : end] for key, leaf in rows.items()}

    def load_parquet(client: int) -> dict[str, np.ndarray]:
        import polars as pl

        table = pl.read_parquet(folder / f"site{client}.parquet")
        return {"x": table.drop("y").to_numpy(), "y": table["y"].to_numpy()}

    start_time = time.perf_counter()
    if source == "arrays":
        data = fedmcmc.FederatedData.from_clients([load(i) for i in range(len(sizes))])
    else:
        loader = fedmcmc.ClientLoader(sizes, load if source == "mapped files" else load_parquet)
        data = loader.load()
    jax.block_until_ready(data)
    seconds = {"build": time.perf_counter() - start_time}
    model = linear if CASES[name].model == "linear" else logistic
    start_time = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = fedmcmc.fit(model, data, rng_key=jax.random.key(1), progress=False)
    seconds["fit"] = time.perf_counter() - start_time
    peak_bytes = peak()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds["CPU"] = usage.ru_utime + usage.ru_stime
    mean, sds = np.load(folder / "moments.npy")
    draws = np.asarray(fitted.samples.draws["b"], np.float64).reshape(-1, len(mean))
    # Keep the caller's rows until the end, as a caller would.
    assert len(rows["y"]) == data.num_rows and jnp.isfinite(data.rows["x"][0, 0])
    return {
        "seconds": seconds,
        "peak": peak_bytes,
        "rounds": fitted.report.rounds,
        "megabits": (fitted.report.bits_up + fitted.report.bits_down) / 1e6,
        "verdict": str(fitted.verdict.kind),
        "mean error": float(np.abs((draws.mean(0) - mean) / sds).max()),
        "sd error": float(np.abs(draws.std(0) / sds - 1).max()),
        "stages": [
            f"{row.stage}: {row.method}, {row.verdict}, {row.seconds:.1f} s"
            for row in fitted.report.stages
        ],
    }


def peak() -> int:
    # `ru_maxrss` is in KiB on Linux and in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _child(task: str, folder: Path, *arguments: object) -> dict[str, Any]:
    argv = [sys.executable, "-m", "benchmarks.large", task, str(folder), *map(str, arguments)]
    process = subprocess.run(argv, check=True, stdout=subprocess.PIPE)
    return json.loads(process.stdout.splitlines()[-1])


def bench() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _child("write", folder / "tiny", "rows", TINY_ROWS)
        runtime = _child("fit", folder / "tiny", "rows", "arrays")["peak"]
        print(f"peak memory of the same programs with few rows: {runtime / MIB:,.0f} MiB")
        for case, shape in CASES.items():
            written = _child("write", folder / case, case, shape.num_rows)
            num_bytes = written.pop("bytes")
            sources = SOURCES if case == "rows" else SOURCES[:1]
            size = f"{shape.num_rows:,} rows, {shape.size:,} parameters, {num_bytes / MIB:,.0f} MiB"
            print(f"{shape.model} regression, {SITES} sites, {size}")
            for title, number in written.items():
                print(f"  {title}: {number:.3g}")
            for source in sources:
                _print_result(
                    source, _child("fit", folder / case, case, source), runtime, num_bytes
                )


def _print_result(source: str, result: dict[str, Any], runtime: int, num_bytes: int) -> None:
    seconds = ", ".join(f"{name} {number:.1f} s" for name, number in result["seconds"].items())
    extra = result["peak"] - runtime
    print(f"  rows from {source}: {seconds}")
    print(f"    peak memory {extra / MIB:,.0f} MiB, over that of the rows: {extra / num_bytes:.2f}")
    print(
        f"    {result['verdict']}, {result['rounds']:,} rounds, {result['megabits']:,.0f} Mbit, "
        f"means off by {result['mean error']:.3f} sd, sds by {result['sd error']:.1%}"
    )
    for stage in result["stages"]:
        print(f"    {stage}")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        bench()
    else:
        task, folder, name, argument = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4]
        fn = (
            partial(write, num_rows=int(argument))
            if task == "write"
            else partial(fit, source=argument)
        )
        print(json.dumps(fn(folder, name)))
