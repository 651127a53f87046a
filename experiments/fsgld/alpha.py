"""Remark 1 of El Mekkaoui et al. (2021): a multiple of the conducive gradient, by the exact law."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import checks
from experiments.checks import require
from experiments.figures import COLORS, figure
from experiments.fsgld import gaussian
from experiments.fsgld.gaussian_law import RelayLaw, relay_law

__all__ = [
    "NAME",
    "TITLE",
    "Config",
    "draw",
    "ends",
    "run",
]

NAME = "variance over the posterior's"

TITLE = "Remark 1: a multiple of the conducive gradient, by the law"


@dataclass(frozen=True)
class Config:
    """Settings; those of section 5.1 but for those listed here, which are ours.

    Attributes
    ----------
    alphas
        Multiples that are tried; zero is DSGLD.
    errors
        By how much the surrogates' means are off, over the standard deviation of the shards' means.
    num_draws_of_errors
        Draws of what the surrogates' means are off by, over which the law is averaged.
    num_rounds, num_chains
        Of the runs beside the law, at the largest of `errors` and the first draw of them, whose
        first tenth is burn-in.
    """

    seed: int = 0
    alphas: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)
    errors: tuple[float, ...] = (0.0, 0.1, 0.3, 1.0)
    num_draws_of_errors: int = 40
    num_clients: int = 10
    rows_per_client: int = 200
    step_size: float = 5e-5
    batch_size: int = 10
    num_local_steps: int = 100
    num_rounds: int = 1000
    num_chains: int = 30

    def __post_init__(self) -> None:
        checks.at_least(10, self, "num_rounds")
        checks.at_least(2, self, "num_draws_of_errors", "num_clients")
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
    shape = (config.num_draws_of_errors, *means.shape)
    noise = np.random.default_rng(config.seed + 1).standard_normal(shape)
    # With ``n - 1``, since the mean of the errors takes nothing from any visit, as the sum of the
    # surrogates takes it off again: so ``e`` is what the theory has.
    off = noise * means.std(axis=0, ddof=1)
    table, least = [], []
    for error in config.errors:
        rows = []
        for alpha in config.alphas:
            each = np.array([_width(config, shards, alpha, means + error * o) for o in off]) / right
            measured, its_error = None, None
            if error == max(config.errors):
                surrogates = means + error * off[0]
                measured, its_error = _measured(config, shards, alpha, surrogates, right)
            rows.append(
                {
                    "error of surrogates": error,
                    "alpha": alpha,
                    NAME: float(each.mean()),
                    "s.e. over draws": float(each.std(ddof=1) / len(each) ** 0.5) if error else 0.0,
                    "first draw": float(each[0]),
                    "measured": measured,
                    "s.e.": its_error,
                }
            )
        table += rows
        probes = [
            _width(config, shards, a, means + error * o) for a in (0.0, 0.5, 1.0) for o in off
        ]
        least.append({"error of surrogates": error} | _least(np.reshape(probes, (3, -1)), error))
    metrics = {"table": table, "least": least, "num_local_steps": config.num_local_steps}
    metrics["num_draws_of_errors"] = config.num_draws_of_errors
    return metrics | {"figures": draw(metrics, out)}


def _width(config: Config, shards: np.ndarray, alpha: float, surrogates: np.ndarray) -> float:
    """Return the variance a coordinate at the end of a visit, by the law."""
    _, covariance = _law(config, shards, alpha, surrogates).moments((config.num_local_steps,))
    return float(np.trace(covariance) / 2)


def _least(widths: np.ndarray, error: float) -> dict[str, float]:
    """Return where the average of the parabolas through 0, 1/2 and 1 is least, with its error.

    `widths` is ``[3, num_draws]``; the law is a parabola in `alpha` for every draw.
    """
    start, middle, end = widths
    curvature = 2 * (start - 2 * middle + end)
    slope = 4 * middle - 3 * start - end  # at zero
    best = -slope.mean() / (2 * curvature.mean())
    gap = slope + 2 * best * curvature  # of each draw, at the best of all
    single = -slope / (2 * curvature)
    return {
        "best alpha": float(best),
        "its s.e.": float(gap.std(ddof=1) / len(gap) ** 0.5 / (2 * curvature.mean())),
        "theory": 1 / (1 + error**2),
        "lowest of a draw": float(single.min()),
        "highest of a draw": float(single.max()),
    }


def _law(config: Config, shards: np.ndarray, alpha: float, surrogates: np.ndarray) -> RelayLaw:
    return relay_law(
        shards,
        step_size=config.step_size,
        batch_size=config.batch_size,
        num_local_steps=config.num_local_steps,
        alpha=alpha,
        surrogate_means=surrogates,
    )


def ends(settings: Mapping[str, Any]) -> dict[float, float]:
    """Return where visits end, by the law, for each multiple that a run with `settings` tried.

    As a share of the way from the mean of all shards to that of the shard visited, averaged over
    the shards; surrogates are right.
    """
    config = Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})
    shards = gaussian.simulate_shards(config.of_section())
    means = shards.mean(axis=1)
    found = {}
    for alpha in config.alphas:
        law = _law(config, shards, alpha, means)
        mean, _ = law.boundary
        factor, shift, _ = law.local_map(config.num_local_steps)
        way, gone = means - mean, factor[:, None] * mean + shift - mean
        found[alpha] = float((way * gone).sum() / (way**2).sum())
    return found


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


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figure of a run; return its file and caption."""
    table = metrics["table"]
    errors = list(dict.fromkeys(row["error of surrogates"] for row in table))
    shades = ("blue", "sky", "green", "orange", "red")
    tried = [row["alpha"] for row in table]
    fine = np.linspace(min(tried), max(tried), 301)
    with figure(out / "alpha.png", size=(6.4, 4.2)) as (fig, axes):
        place = axes[0, 0]
        for error, shade in zip(errors, shades, strict=False):
            rows = [row for row in table if row["error of surrogates"] == error]
            alphas = [row["alpha"] for row in rows]
            law, first = ([row[name] for row in rows] for name in (NAME, "first draw"))
            # The law is a parabola in alpha for every draw, and so is its average.
            parabola = np.polyfit(alphas, law, 2, w=1 / np.array(law))
            place.plot(fine, np.polyval(parabola, fine), "-", color=COLORS[shade])
            label = f"means off by {error:g} sd of the shards' means"
            place.plot(alphas, law, "o", ms=3, color=COLORS[shade], label=label)
            told = [row for row in rows if row["measured"] is not None]
            if told:
                parabola = np.polyfit(alphas, first, 2, w=1 / np.array(first))
                style = dict(color=COLORS["black"], label=f"one draw of errors of {error:g} sd")
                place.plot(fine, np.polyval(parabola, fine), ":", **style)
                place.errorbar(
                    [row["alpha"] for row in told],
                    [row["measured"] for row in told],
                    [2 * row["s.e."] for row in told],
                    fmt="x",
                    color=COLORS["black"],
                    label="measured with it",
                )
        place.set(yscale="log", xlabel="alpha", ylabel=NAME)
        fig.legend(loc="outside lower center", ncols=2)
    caption = (
        "Variance at the end of a visit over the posterior's, by the multiple of the conducive "
        "gradient, where the surrogates' means are off by multiples of the standard deviation of "
        "the shards' means (dots and lines: exact, averaged over draws of the errors; dotted and "
        "bars: exact and runs, with two standard errors, for the first draw of the largest errors)."
    )
    return [{"file": "alpha.png", "caption": caption}]
