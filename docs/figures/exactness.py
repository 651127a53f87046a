"""Monte Carlo error falls with the number of rounds, bias does not.

``python docs/figures/exactness.py`` draws ``docs/figures/exactness.png`` for the three clinics of
docs/explanation/exactness.md. The exact sd comes from a grid.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

import fedmcmc

ROOT = Path(__file__).parents[2]
CHAINS, PER_RUN, BURN_IN, ROUNDS = 64, 4, 100, 10_000
LENGTHS = np.unique(np.geomspace(50, ROUNDS, 16).astype(int))


def model(x: Any, y: Any = None) -> None:
    """Logistic regression of one clinic; all clinics share ``b``."""
    b = numpyro.sample("b", dist.Normal(0, 2.5).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)


def clinics() -> Iterator[dict[str, np.ndarray]]:
    """Yield the rows of the three clinics of the page."""
    rng = np.random.default_rng(0)
    for size in (120, 60, 8):
        x = np.stack([np.ones(size), rng.normal(size=size)], 1)
        yield {"x": x, "y": (rng.random(size) < 1 / (1 + np.exp(-x[:, 1]))).astype(int)}


def moments_on_a_grid(
    posterior: fedmcmc.Posterior, data: fedmcmc.FederatedData, center: np.ndarray, sds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the posterior's mean and sds, from a grid of 201 x 201 points."""
    axes = [np.linspace(m - 7 * s, m + 7 * s, 201) for m, s in zip(center, sds, strict=True)]
    points = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)

    def log_density(b: jax.Array) -> jax.Array:
        terms = posterior.loglikelihood_fn({"b": b}, data.rows)
        return posterior.logprior_fn({"b": b}) + jnp.sum(terms)

    logs = np.asarray(jax.lax.map(log_density, jnp.asarray(points, jnp.float32), batch_size=1000))
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    mean = weights @ points
    return mean, np.sqrt(weights @ (points - mean) ** 2)


def sample_without_warnings(
    kernel: fedmcmc.FederatedKernel,
    data: fedmcmc.FederatedData,
    white: fedmcmc.surrogates.Whitened,
    **counts: int,
) -> np.ndarray:
    """Return draws of ``b``, ``[chains, draws, 2]``, of a kernel that may be biased."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedmcmc.SamplingWarning)
        samples = fedmcmc.sample(
            jax.random.key(0), kernel, data, white.position, progress=False, **counts
        )
    return np.asarray(samples.draws["b"], np.float64)


def main() -> None:
    """Sample with each kernel, and draw the figure."""
    data = fedmcmc.FederatedData.from_clients(list(clinics()))
    posterior = fedmcmc.from_numpyro(model, example=data)
    white = fedmcmc.whiten(posterior, data)
    kernels = {
        "hmc": fedmcmc.hmc(white.posterior, white.position),
        "lsd, step size 0.1": fedmcmc.lsd(white.posterior, step_size=0.1),
        "lsd, step size 0.4": fedmcmc.lsd(white.posterior, step_size=0.4),
        "fa_ld, step size 0.1, 5 local steps": fedmcmc.fa_ld(
            white.posterior, step_size=0.1, num_local_steps=5
        ),
    }
    draws = {}
    for name, kernel in kernels.items():
        counts = dict(num_rounds=BURN_IN + ROUNDS, num_burnin=BURN_IN, num_chains=CHAINS)
        draws[name] = sample_without_warnings(kernel, data, white, **counts)
    exact = draws["hmc"]
    mean, sds = moments_on_a_grid(posterior, data, exact.mean((0, 1)), exact.std((0, 1)))

    plt.style.use(ROOT / "experiments" / "figures.mplstyle")
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.0))
    for name, values in draws.items():
        runs = values.reshape(-1, PER_RUN, *values.shape[1:])
        off, wide = [], []
        for length in LENGTHS:
            part = runs[:, :, :length]
            off.append(np.sqrt((((part.mean((1, 2)) - mean) / sds) ** 2).mean()))
            wide.append(np.sqrt(((part.std((1, 2)) / sds - 1) ** 2).mean()))
        left.loglog(LENGTHS, off, label=name)
        right.loglog(LENGTHS, 100 * np.array(wide), label=name)
        print(f"{name}: mean off by {off[-1]:.4f} sd, sds off by {wide[-1]:.2%}")
    left.set(title="Error of means", ylabel="posterior sds", xlabel="rounds after burn-in")
    right.set(title="Error of sds", ylabel="percent", xlabel="rounds after burn-in")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    plt.savefig(Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
