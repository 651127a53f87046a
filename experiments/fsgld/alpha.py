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
from experiments.claims import Given
from experiments.figures import COLORS, figure
from experiments.fsgld import gaussian
from experiments.fsgld.gaussian_law import RelayLaw, relay_law

__all__ = [
    "NAME",
    "PAPER",
    "TITLE",
    "Config",
    "as_theory",
    "best",
    "commentary",
    "draw",
    "ends",
    "run",
]

NAME = "variance over the posterior's"
ROUNDING = 1e-3  # of a best multiple, where all draws agree

TITLE = "Remark 1: a multiple of the conducive gradient, by the law"
PAPER = """
The conducive gradient may be multiplied by `alpha > 0`, which controls how far a chain explores
beyond the shard that it visits (Remark 1); our copy of the paper shows only `alpha = 1`. Here
the shards are those of section 5.1, where the law is known for every `alpha`, for surrogates that
are right and for such whose means are off by draws of a Gaussian, whose standard deviation is `e`
times that of the shards' own means. Whatever the surrogates, the mean of the law is the
posterior's: only its variance depends on `alpha`. Which `alpha` is the best depends on the draw of
the errors, so the law is averaged over many.

In theory a visit to one of shards of the same curvature ends off by `1 - alpha` times how far its
shard's mean is from that of all, less `alpha` times how far the surrogates are off. The squares of
the two add up, on average over the errors, to `(1 - alpha)^2 + alpha^2 e^2` times the scatter of
the shards, which is least at `alpha = 1 / (1 + e^2)`.
"""


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


def ends(settings: Given) -> dict[float, float]:
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


def best(metrics: Given) -> dict[float, dict[str, Any]]:
    """Return the row of the best `alpha` tried for each error of the surrogates."""
    found: dict[float, dict[str, Any]] = {}
    for row in metrics["table"]:
        old = found.get(row["error of surrogates"], row)
        found[row["error of surrogates"]] = row if row[NAME] < old[NAME] else old
    return found


def as_theory(metrics: Given) -> bool:
    """Return whether each best `alpha` is within three standard errors of the theory's."""
    return all(
        abs(row["best alpha"] - row["theory"]) < 3 * row["its s.e."] + ROUNDING
        for row in metrics["least"]
    )


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
        f"Variance after a visit of {metrics['num_local_steps']} local steps over the posterior's, "
        "by the multiple of the conducive gradient, where the surrogates' means are off by so many "
        "standard deviations of the shards' means (dots, and lines between them: exact law, "
        f"averaged over {metrics['num_draws_of_errors']} draws of the errors; dotted and bars: law "
        "and runs, with two standard errors, for the first draw of the largest errors)."
    )
    return [{"file": "alpha.png", "caption": caption}]


def commentary(metrics: dict[str, Any]) -> str:
    """Return the best multiples beside the theory's, and how far runs are from the law."""
    tried, rows = best(metrics), []
    for row in metrics["least"]:
        error = row["error of surrogates"]
        own = {r["alpha"]: r[NAME] for r in metrics["table"] if r["error of surrogates"] == error}
        rows.append(
            {
                "surrogates' means off by e": f"{error:g}",
                "best alpha": f"{row['best alpha']:.3f} (s.e. {row['its s.e.']:.3f})",
                "theory, 1 / (1 + e^2)": f"{row['theory']:.3f}",
                "best of one draw": f"{row['lowest of a draw']:.2f} to "
                f"{row['highest of a draw']:.2f}",
                "best tried": f"{tried[error]['alpha']:g}",
                NAME: f"{tried[error][NAME]:.3g}",
                "with alpha = 1": f"{own[1.0]:.3g}" if 1.0 in own else "-",
                "without surrogates": f"{own[0.0]:.3g}" if 0.0 in own else "-",
            }
        )
    away = [
        abs(row["measured"] - row["first draw"]) / row["s.e."]
        for row in metrics["table"]
        if row["measured"] is not None
    ]
    errors = {row["error of surrogates"] for row in metrics["table"] if row["measured"] is not None}
    made = " and ".join(f"{error:g}" for error in sorted(errors))
    agrees = "as in theory" if as_theory(metrics) else "not as in theory, which is unexplained"
    return (
        output.markdown_table(rows) + f"\n\nThe best `alpha` is that of the law's average over "
        f"{metrics['num_draws_of_errors']} draws of the errors, {agrees}; the standard errors are "
        f"over draws. Runs with the first draw, which were made for e = {made} alone, are at most "
        f"{max(away):.1f} standard errors from its law."
    )
