"""Seconds until the first result of a new process: imports, `fit`, a second `fit`, pooled NUTS.

Each measurement is a process of its own without a disk cache of programs, and alternatives take
turns. ``python -m benchmarks first_call`` prints medians of five, of three
for the model with random effects.
"""

import os
import statistics
import subprocess
import sys
import time

REPEATS, EFFECTS_REPEATS = 5, 3
WORKS = ("example", "NUTS", "effects")
GROUPS, ROWS = 85, 33
"""Groups, and rows per group, of the model with random effects: the size of the radon data."""


def import_all():
    """Import JAX, NumPyro and fedmcmc, and return the seconds that fedmcmc adds."""
    import jax  # noqa: F401
    import numpyro  # noqa: F401

    start = time.perf_counter()
    import fedmcmc  # noqa: F401

    return time.perf_counter() - start


def tables(seed):
    """Return the rows of the README's example, and of groups with effects of their own."""
    import numpy as np

    rng = np.random.default_rng(seed)
    xs = [rng.normal(size=n) for n in (80, 30, 5)]
    example = [{"x": x, "y": 0.7 * x + 0.5 * rng.normal(size=len(x))} for x in xs]
    groups = []
    for effect in 0.3 * rng.normal(size=GROUPS):
        x = rng.normal(size=ROWS)
        groups.append({"x": x, "y": effect + 0.7 * x + 0.8 * rng.normal(size=ROWS)})
    return example, groups


def models():
    """Return the models for these rows."""
    import numpyro
    import numpyro.distributions as dist

    def example(x, y=None):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(slope * x, noise), obs=y)

    def effects(x, y=None):
        mean = numpyro.sample("mean", dist.Normal(0.0, 3.0))
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        spread = numpyro.sample("spread", dist.HalfNormal(1.0))
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        effect = numpyro.sample("effect", dist.Normal(mean, spread), infer={"local": True})
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(effect + slope * x, noise), obs=y)

    return example, effects


def sample_pooled(model, rows):
    """Run NUTS on pooled rows, four chains of 1,000 draws after 1,000 warmup steps."""
    import jax
    import numpy as np
    from numpyro.infer import MCMC, NUTS

    mcmc = MCMC(
        NUTS(model),
        num_warmup=1000,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), *(np.concatenate([x[name] for x in rows]) for name in "xy"))
    jax.block_until_ready(mcmc.get_samples())


def measure(work):
    """Return the seconds of the import and of calls, in this process."""
    seconds = [import_all()]
    import jax

    import fedmcmc

    example, effects = models()
    for seed in range(1 if work == "NUTS" else 2):
        rows = tables(seed)
        start = time.perf_counter()
        if work == "NUTS":
            sample_pooled(example, rows[0])
        else:
            model, clients = (example, rows[0]) if work == "example" else (effects, rows[1])
            data = fedmcmc.FederatedData.from_clients(clients)
            fedmcmc.fit(model, data, rng_key=jax.random.key(seed), progress=False)
        seconds.append(time.perf_counter() - start)
    return seconds


def bench():
    hidden = ("JAX_COMPILATION_CACHE_DIR", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    environment = {name: x for name, x in os.environ.items() if name not in hidden}
    runs = {work: [] for work in WORKS}
    for number in range(REPEATS):
        for work, measured in runs.items():
            if work == "effects" and number >= EFFECTS_REPEATS:
                continue  # 16 seconds each
            command = [sys.executable, "-m", "benchmarks.first_call", work]
            output = subprocess.run(
                command, check=True, capture_output=True, text=True, env=environment
            )
            measured.append([float(x) for x in output.stdout.split()])
    medians = {
        work: [statistics.median(x) for x in zip(*measured, strict=True)]
        for work, measured in runs.items()
    }
    nuts = medians["NUTS"][1]
    print(
        f"{'seconds, medians of ' + str(REPEATS) + ' new processes':<52}{'s':>8}{'over NUTS':>12}"
    )
    print(f"{'import fedmcmc, after jax and numpyro':<52}{medians['example'][0]:>8.2f}")
    lines = {
        "fit, README's example, first call": medians["example"][1],
        "fit, other data of the same shapes": medians["example"][2],
        "pooled NUTS, README's example, first call": nuts,
        f"fit, effects of {GROUPS} groups, first call": medians["effects"][1],
        "fit, effects, other data of the same shapes": medians["effects"][2],
    }
    for name, seconds in lines.items():
        print(f"{name:<52}{seconds:>8.2f}{seconds / nuts:>12.2f}")


if __name__ == "__main__":
    print(*measure(sys.argv[1]))
