"""Remark 1 of El Mekkaoui et al. (2021): a multiple of the conducive gradient, by the exact law."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import checks, output
from experiments.checks import require
from experiments.figures import COLORS, figure
from experiments.fsgld import gaussian
from experiments.fsgld.gaussian_law import RelayLaw, relay_law

__all__ = ["PAPER", "TITLE", "Config", "best", "commentary", "draw", "run"]

TITLE = "Remark 1: a multiple of the conducive gradient, by the law"
PAPER = """
The conducive gradient may be multiplied by `alpha > 0`, which controls how far a chain explores
beyond the shard that it visits (Remark 1); the paper tries `alpha = 1` alone. Here the shards are
those of section 5.1, where the law is known for every `alpha`, for surrogates that are right and
for such whose means are off, by a multiple of the spread of the shards' own means. Whatever the
surrogates, the mean of the law is the posterior's: only its variance depends on `alpha`.
"""


@dataclass(frozen=True)
class Config:
    """Settings; those of section 5.1 but for the first two, which are ours.

    Attributes
    ----------
    alphas
        Multiples that are tried; zero is DSGLD.
    errors
        By how much the surrogates' means are off, over the standard deviation of the shards' means.
    num_rounds, num_chains
        Of the runs beside the law, at the largest of `errors`, whose first tenth is burn-in.
    """

    seed: int = 0
    alphas: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)
    errors: tuple[float, ...] = (0.0, 0.1, 0.3, 1.0)
    num_clients: int = 10
    rows_per_client: int = 200
    step_size: float = 5e-5
    batch_size: int = 10
    num_local_steps: int = 100
    num_rounds: int = 1000
    num_chains: int = 30

    def __post_init__(self) -> None:
        checks.at_least(10, self, "num_rounds")
        checks.chains(self)
        for name in ("alphas", "errors"):
            values = getattr(self, name)
            require(
                len(values) > 1 and min(values) >= 0,
                f"{name} must be two or more that are not negative",
                values,
            )
        self.of_section()

    def of_section(self) -> gaussian.Config:
        """Return the settings of section 5.1 that these are."""
        return gaussian.Config(
            seed=self.seed,
            num_clients=self.num_clients,
            rows_per_client=self.rows_per_client,
            step_size=self.step_size,
            batch_size=self.batch_size,
        )


def run(config: Config, out: Path) -> dict[str, Any]:
    """Compute the laws, and run one row of them; write the figure."""
    shards = gaussian.simulate_shards(config.of_section())
    _, right = gaussian.exact_posterior(shards)
    means = shards.mean(axis=1)
    noise = np.random.default_rng(config.seed + 1).standard_normal(means.shape)
    off = noise * means.std(axis=0)
    table = []
    for error in config.errors:
        surrogates = means + error * off
        laws = {alpha: _law(config, shards, alpha, surrogates) for alpha in config.alphas}
        for alpha, law in laws.items():
            _, covariance = law.moments((config.num_local_steps,))
            row: dict[str, Any] = {"error of surrogates": error, "alpha": alpha}
            row["variance over the posterior's"] = float(np.trace(covariance) / 2 / right)
            measured, its_error = None, None
            if error == max(config.errors):
                measured, its_error = _measured(config, shards, alpha, surrogates, right)
            table.append(row | {"measured": measured, "s.e.": its_error})
    metrics = {"table": table, "num_local_steps": config.num_local_steps}
    return metrics | {"figures": draw(metrics, out)}


def _law(config: Config, shards: np.ndarray, alpha: float, surrogates: np.ndarray) -> RelayLaw:
    return relay_law(
        shards,
        step_size=config.step_size,
        batch_size=config.batch_size,
        num_local_steps=config.num_local_steps,
        alpha=alpha,
        surrogate_means=surrogates,
    )


def _measured(
    config: Config, shards: np.ndarray, alpha: float, surrogates: np.ndarray, right: float
) -> tuple[float, float]:
    """Return the variance of a run over the posterior's, and its standard error over chains."""
    kernel = fedmcmc.fsgld(
        fedmcmc.Posterior(gaussian.logprior_fn, gaussian.loglikelihood_fn),
        fedmcmc.Gaussian.from_moments(
            jnp.asarray(surrogates, jnp.float32),
            variance=jnp.full(len(shards), 1 / shards.shape[1]),
        ),
        step_size=config.step_size,
        num_local_steps=config.num_local_steps,
        batch_size=config.batch_size,
        alpha=alpha,
    )
    samples = fedmcmc.sample(
        jax.random.key(config.seed),
        kernel,
        fedmcmc.FederatedData.from_clients(list(shards.astype(np.float32))),
        jnp.zeros(2),
        num_rounds=config.num_rounds,
        num_burnin=config.num_rounds // 10,
        num_chains=config.num_chains,
        progress=False,
    )
    mean, _ = gaussian.exact_posterior(shards)
    squares = ((np.asarray(samples.draws, np.float64) - mean) ** 2).mean(axis=(1, 2)) / right
    return float(squares.mean()), float(squares.std(ddof=1) / len(squares) ** 0.5)


def best(metrics: dict[str, Any]) -> dict[float, dict[str, Any]]:
    """Return the row of the best `alpha` for each error of the surrogates."""
    found: dict[float, dict[str, Any]] = {}
    for row in metrics["table"]:
        old = found.get(row["error of surrogates"], row)
        name = "variance over the posterior's"
        found[row["error of surrogates"]] = row if row[name] < old[name] else old
    return found


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figure of a run; return its file and caption."""
    table = metrics["table"]
    errors = list(dict.fromkeys(row["error of surrogates"] for row in table))
    shades = ("blue", "sky", "green", "orange", "red")
    with figure(out / "alpha.png") as (_, axes):
        place = axes[0, 0]
        for error, shade in zip(errors, shades, strict=False):
            rows = [row for row in table if row["error of surrogates"] == error]
            alphas = [row["alpha"] for row in rows]
            law = [row["variance over the posterior's"] for row in rows]
            place.plot(alphas, law, "-", color=COLORS[shade], label=f"surrogates off by {error:g}")
            told = [row for row in rows if row["measured"] is not None]
            if told:
                place.errorbar(
                    [row["alpha"] for row in told],
                    [row["measured"] for row in told],
                    [2 * row["s.e."] for row in told],
                    fmt="x",
                    color=COLORS["black"],
                    label="measured",
                )
        place.set(yscale="log", xlabel="alpha", ylabel="variance over the posterior's")
        place.legend()
    caption = (
        f"Variance after a visit of {metrics['num_local_steps']} local steps over the posterior's, "
        "by the multiple of the conducive gradient, where the surrogates' means are off by so many "
        "standard deviations of the shards' means (lines: exact law; bars: two standard errors)."
    )
    return [{"file": "alpha.png", "caption": caption}]


def commentary(metrics: dict[str, Any]) -> str:
    """Return the best multiples, and how far runs are from the law."""
    name = "variance over the posterior's"
    rows = []
    for error, row in best(metrics).items():
        own = {r["alpha"]: r[name] for r in metrics["table"] if r["error of surrogates"] == error}
        rows.append(
            {
                "surrogates' means off by": f"{error:g}",
                "best alpha": f"{row['alpha']:g}",
                name: f"{row[name]:.3g}",
                "with alpha = 1": f"{own[1.0]:.3g}" if 1.0 in own else "-",
                "without surrogates": f"{own[0.0]:.3g}" if 0.0 in own else "-",
            }
        )
    away = [
        abs(row["measured"] - row[name]) / row["s.e."]
        for row in metrics["table"]
        if row["measured"] is not None
    ]
    return (
        output.markdown_table(rows)
        + f"\n\nRuns are at most {max(away):.1f} standard errors from the law. For shards of one "
        "curvature a local step's drift is off by `1 - alpha` times what the shard's own pull is "
        "off, and by `alpha` times what the surrogates are: the worse these are, the smaller the "
        "best `alpha`."
    )
