"""Draw the posterior of the quickstart's odds ratio: all hospitals together, and each one alone.

``python docs/figures/quickstart.py`` writes ``quickstart.png`` next to this file.
"""

from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from arviz_stats.base import array_stats

import fedmcmc

FOLDER = Path(__file__).parent
TRUE_LOG_ODDS = -0.7


def simulate_hospitals() -> list[dict[str, np.ndarray]]:
    """Return the tables of the quickstart's hospitals, with 200, 80 and 25 patients."""
    rng = np.random.default_rng(0)
    hospitals = []
    for size in (200, 80, 25):
        age, treated = rng.normal(60, 10, size), rng.integers(0, 2, size)
        chance = 1 / (1 + np.exp(-(-1 + 0.03 * (age - 60) + TRUE_LOG_ODDS * treated)))
        died = (rng.random(size) < chance).astype(int)
        hospitals.append({"age": age, "arm": treated, "died": died})
    return hospitals


def model(age: jax.Array, arm: jax.Array, died: jax.Array | None = None) -> None:
    """Logistic regression of the quickstart, for the rows of one hospital."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 2.5))
    log_odds = numpyro.sample("log_odds", dist.Normal(0, 2.5))
    slope = numpyro.sample("slope", dist.Normal(0, 2.5))
    logits = intercept + log_odds * arm + slope * (age - 60) / 10
    with numpyro.plate("rows", len(age)):
        numpyro.sample("died", dist.Bernoulli(logits=logits), obs=died)


def draw_log_odds(hospitals: list[dict[str, np.ndarray]]) -> np.ndarray:
    """Return posterior draws of the log odds ratio, ``[num_draws]``."""
    data = fedmcmc.FederatedData.from_clients(hospitals)
    fitted = fedmcmc.fit(model, data, rng_key=jax.random.key(0), progress=False)
    return np.asarray(fitted.samples.constrained["log_odds"]).ravel()


def main() -> None:
    """Fit all hospitals and each one alone, and draw the densities."""
    hospitals = simulate_hospitals()
    plt.style.use(FOLDER.parents[1] / "experiments" / "figures.mplstyle")
    plt.figure(figsize=(6.4, 3.0))
    for hospital in hospitals:
        grid, density, _ = array_stats.kde(draw_log_odds([hospital]))
        plt.plot(np.exp(grid), density, lw=1.2, label=f"{len(hospital['age'])} patients alone")
    grid, density, _ = array_stats.kde(draw_log_odds(hospitals))
    plt.plot(np.exp(grid), density, color="black", lw=2.4, label="all three hospitals")
    plt.axvline(np.exp(TRUE_LOG_ODDS), color="gray", ls="--", lw=1, label="true value")
    plt.xscale("log")
    ticks = [0.05, 0.1, 0.2, 0.5, 1, 2, 5]
    plt.xticks(ticks, [f"{tick:g}" for tick in ticks])
    plt.minorticks_off()
    plt.xlim(0.04, 6)
    plt.ylim(bottom=0)
    plt.xlabel("odds ratio of the drug")
    plt.ylabel("posterior density of its logarithm")
    plt.legend()
    plt.savefig(Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
