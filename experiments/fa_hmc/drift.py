"""What the errors with exact gradients in Figure 1(a) are made of: bias of local steps, or not."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments.fa_hmc import logistic
from experiments.figures import COLORS, figure, floor, label_ticks, points
from fedmcmc.metrics import marginal_error

__all__ = ["Config", "METHODS", "draw", "has_law", "run"]

METHODS = ("FA-LD", "FA-LD, control variate", "FA-HMC", "FA-HMC, control variate")
STYLES = {  # colour, dashes, marker
    "FA-LD": ("orange", "-", "s"),
    "FA-LD, control variate": ("pink", "--", "D"),
    "FA-HMC": ("blue", "-", "o"),
    "FA-HMC, control variate": ("green", "--", "^"),
}
MOST = 512  # dimensions that `predict_bias` takes
LEFT = 0.05  # of the start's distance after the burn-in, above which a law is not yet stationary


@dataclass(frozen=True)
class Config:
    """Settings, as far as they go those of `fa_hmc/logistic_small`, but for the step sizes.

    These lie closer where trajectories are short, as their length by the paper's rule jumps there.
    Above `MOST` dimensions the law is not computed.
    """

    seed: int = 0
    dim: int = 200
    num_rows: int = 1000
    num_clients: int = 20
    prior_precision: float = 1.0
    scaled_steps: tuple[float, ...] = (0.05, 0.1, 0.2, 0.35, 0.4, 0.5, 0.6, 0.75, 0.9, 1.05)
    num_local_steps: int = 2
    num_rounds: int = 300
    num_burnin: int = 100
    num_chains: int = 8
    reference_warmup: int = 500
    reference_draws: int = 2000
    reference_thinning: int = 1

    def __post_init__(self) -> None:
        self.of_figure()

    def of_figure(self) -> logistic.Config:
        """Return the settings of Figure 1 that these are."""
        return logistic.Config(**asdict(self))


def run(config: Config, out: Path) -> dict[str, Any]:
    """Measure and predict the errors; write the figure."""
    settings = config.of_figure()
    given = logistic.problem(settings)
    surrogates = _expansions(given) if config.dim <= MOST else None
    table = []
    for scaled in config.scaled_steps:
        line: dict[str, Any] = {"step size": scaled * given.scale}
        for name in METHODS:
            length = 1 if name.startswith("FA-LD") else logistic.length_of(scaled)
            corrected = "control variate" in name
            (found,) = logistic.errors(
                settings,
                given,
                leapfrog=length,
                noise=0.0,
                scaled=[scaled],
                control_variate=corrected,
            )
            line |= {f"L, {name}": length, name: found[0], f"s.e. {name}": found[1]}
            if surrogates is None:
                continue
            kernel = fedmcmc.fa_hmc(
                given.posterior,
                step_size=scaled * given.scale,
                num_integration_steps=length,
                num_local_steps=config.num_local_steps,
                gradients="reuse",
                control_variate=corrected,
            )
            law = fedmcmc.predict_bias(kernel, given.data, surrogates)
            line[f"predicted, {name}"] = _expected(config, law, len(given.reference))
            line[f"bias of means, {name}"] = float(np.sqrt((law.bias**2).mean()))
            line[f"sd over the posterior's, {name}"] = float(law.spread.mean())
        table.append(line)
    num_draws = config.num_chains * (config.num_rounds - config.num_burnin)
    metrics = {
        "table": table,
        "floor": logistic.perfect(settings, given, num_draws),
        "reference": given.diagnostics,
        "dim": config.dim,
        "num_local_steps": config.num_local_steps,
    }
    return metrics | {"figures": draw(metrics, out)}


def _expansions(given: logistic.Problem) -> Any:
    """Return second-order expansions of the clients' likelihoods at the posterior's mode."""
    start = jnp.zeros(given.reference.shape[1])
    mode = fedmcmc.surrogates.mode(given.posterior, given.data, start).position
    return fedmcmc.surrogates.taylor(given.posterior, given.data, mode)


def has_law(metrics: Mapping[str, Any]) -> bool:
    """Return whether a run computed the stationary law."""
    return f"bias of means, {METHODS[0]}" in metrics["table"][0]


def _expected(
    config: Config, law: fedmcmc.tuning.Prediction, num_reference: int, num_repeats: int = 3
) -> float | None:
    """Return the marginal error of as many chains that have the predicted law.

    Coordinates are taken as normal, autoregressive chains of order one with the law's rounds per
    effective draw. ``None`` where chains are still on their way after the burn-in.
    """
    if law.spectral_radius**config.num_burnin > LEFT:
        return None
    rng = np.random.default_rng(config.seed)
    times = law.rounds_per_draw
    keep, shape = (times - 1) / (times + 1), (config.num_chains, config.dim)
    found = []
    for _ in range(num_repeats):
        chains = [rng.normal(size=shape)]
        for _ in range(config.num_rounds - config.num_burnin - 1):
            fresh = np.sqrt(1 - keep**2) * rng.normal(size=shape)
            chains.append(keep * chains[-1] + fresh)
        draws = law.bias + law.spread * np.concatenate(chains)
        reference = rng.normal(size=(num_reference, config.dim))
        found.append(marginal_error(draws.astype(np.float32), reference.astype(np.float32)))
    return float(np.mean(jax.device_get(found)))


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figure of a run; return its file and caption."""
    table, law = metrics["table"], has_law(metrics)
    steps = [row["step size"] for row in table]
    with figure(out / "drift.png", 1, 1 + law, (4.8, 3.9)) as (fig, axes):
        left = axes[0, 0]
        left.set(xscale="log", yscale="log")
        for name, (color, dashes, marker) in STYLES.items():
            shade = COLORS[color]
            error, deviation = _column(table, name), _column(table, f"s.e. {name}")
            style = dict(color=shade, marker=marker, ls=dashes, ms=4, label=name)
            points(left, steps, error, deviation, **style)
            if law:
                expected = _column(table, f"predicted, {name}")
                left.plot(steps, expected, "x", color=shade, ms=7, mew=1.5, zorder=5)
                axes[0, 1].plot(steps, _column(table, f"bias of means, {name}"), **style)
        if law:
            left.plot([], [], "x", color=COLORS["black"], ms=7, mew=1.5, label="predicted")
        floor(left, metrics["floor"], "floor of a perfect sampler")
        left.set(xlabel="leapfrog step", ylabel="marginal error")
        if law:
            axes[0, 1].set(
                xscale="log", xlabel="leapfrog step", ylabel="bias of means, posterior sds"
            )
        for place in axes[0]:
            label_ticks(place.xaxis)
        fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2 + law)
        label_ticks(left.yaxis)
    caption = (
        f"Exact gradients, dimension {metrics['dim']}, {metrics['num_local_steps']} trajectories "
        "per round; marginal errors (bars: two standard errors, a jackknife over chains)."
    )
    if law:
        caption += (
            " Left: beside them, as crosses, those that the stationary law of `predict_bias` "
            "gives; none where chains are still on their way after the burn-in, as FA-LD's are at "
            "small step sizes. Right: root mean square over coordinates of the predicted error of "
            "the mean, in posterior standard deviations."
        )
    return [{"file": "drift.png", "caption": caption}]


def _column(table: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([row[name] for row in table], float)
