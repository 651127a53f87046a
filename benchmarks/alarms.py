"""False alarms of the diagnosis on exact draws: ``python -m benchmarks alarms``.

The draws come from known densities and are correlated as in a chain, with 100 seeds per density.
"""

import jax.numpy as jnp
import numpy as np
from scipy import stats

import fedmcmc
from fedmcmc.diagnostics import diagnose

SEEDS, CHAINS, DRAWS, DIM = 100, 4, 1000, 5
COVARIANCE = 0.9 * np.ones((DIM, DIM)) + 0.1 * np.eye(DIM)
DATA = fedmcmc.FederatedData.from_clients([np.zeros((1, 1), np.float32)])


def funnel(z: np.ndarray) -> np.ndarray:
    v = 1.5 * z[..., :1]
    return np.concatenate([v, np.exp(v / 2) * z[..., 1:]], -1)


def cases():
    """Yield a name, a log density, and a function that maps standard normal draws to its draws."""
    factor = np.linalg.cholesky(COVARIANCE)
    precision = jnp.asarray(np.linalg.inv(COVARIANCE), jnp.float32)
    uniform = stats.norm.cdf
    yield "normal, correlations 0.9", lambda t: -t @ precision @ t / 2, lambda z: z @ factor.T
    for shape in (2.0, 0.5):
        yield (
            f"logarithm of gamma({shape:g})",
            lambda t, a=shape: jnp.sum(a * t - jnp.exp(t)),
            lambda z, a=shape: np.log(stats.gamma(a).ppf(uniform(z))),
        )
    for nu in (4.0, 2.0):
        yield (
            f"Student's t({nu:g})",
            lambda t, n=nu: -(n + 1) / 2 * jnp.sum(jnp.log1p(t**2 / n)),
            lambda z, n=nu: stats.t(n).ppf(uniform(z)),
        )
    yield (
        "funnel",
        lambda t: -((t[0] / 1.5) ** 2) / 2 - jnp.sum(t[1:] ** 2) * jnp.exp(-t[0]) / 2 - 2 * t[0],
        funnel,
    )


def bench() -> None:
    print(f"Runs of {CHAINS} chains of {DRAWS} exact draws that are flagged, of {SEEDS} seeds:")
    for name, log_density, draw in cases():
        posterior = fedmcmc.Posterior(log_density, lambda t, rows: jnp.zeros(rows.shape[0]))
        for correlation in (0.0, 0.5):
            num_wrong = num_short = 0
            for seed in range(SEEDS):
                noise = np.random.default_rng(seed).normal(size=(CHAINS, DRAWS, DIM))
                z = noise.copy()
                for t in range(1, DRAWS):
                    fresh = np.sqrt(1 - correlation**2) * noise[:, t]
                    z[:, t] = correlation * z[:, t - 1] + fresh
                findings = diagnose(draw(z).astype(np.float32), posterior, DATA).findings
                num_wrong += any("not the posterior's" in line for line in findings)
                num_short += any("too short" in line for line in findings)
            counts = f"{num_wrong} wrong, {num_short} too short"
            print(f"  {name}, correlation {correlation:g}: {counts}", flush=True)


if __name__ == "__main__":
    bench()
