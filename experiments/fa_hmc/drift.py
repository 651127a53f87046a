"""What the errors with exact gradients in Figure 1(a) are made of: bias of local steps, or not."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import output
from experiments.fa_hmc import logistic
from experiments.fa_hmc.logistic_findings import federation_of, said
from experiments.fa_hmc.logistic_judging import Best, best, gain
from experiments.figures import COLORS, figure, floor, label_ticks, points
from fedmcmc.metrics import marginal_error

__all__ = [
    "AFTER",
    "PAPER",
    "TITLE",
    "Config",
    "METHODS",
    "about",
    "against",
    "agreement",
    "commentary",
    "compared",
    "decomposed",
    "draw",
    "drift_share",
    "ends",
    "excess",
    "has_law",
    "run",
    "share_told",
]

TITLE = "Figure 1(a), continued: what the errors with exact gradients are made of"
AFTER = "fa_hmc/logistic"
PAPER = """
A study of ours. Between two communications every client follows its own posterior, and the longer
its trajectories the further it drifts towards its own mode. `predict_bias` computes the stationary
law of each sampler on second-order expansions of the clients' likelihoods; beside the measured
errors are those that as many draws of chains with the predicted law have. It takes at most 512
dimensions; above them errors are measured only. With `control_variate=True` clients correct their
gradients by the difference to the mean of all clients' gradients, so that the drift has no bias to
first order. Section 6 of the paper proposes a correction after Karimireddy et al. (2020) as future
work, and does not try it; its formula is lost in our copy, and Algorithm B.2 of its supplement, so
that ours need not be the same. It takes one more exchange per round, and errors are compared at
equal rounds, not at equal exchanges or gradients. A marginal error is that of Figure 1.
"""
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


def agreement(metrics: dict[str, Any]) -> tuple[float, float]:
    """Return least and largest of predicted over measured errors."""
    ratios = [
        row[f"predicted, {name}"] / row[name]
        for row in metrics["table"]
        for name in METHODS
        if row[f"predicted, {name}"] is not None
    ]
    return min(ratios), max(ratios)


def compared(metrics: Mapping[str, Any], name: str, base: str = "FA-LD") -> str:
    """Return by which share a method's best error is smaller than another's, in words.

    FA-HMC's is that of step sizes with more than one leapfrog step.
    """
    found = against(metrics, name, base)
    return "not to be said" if found is None else said(*found)


def against(metrics: Mapping[str, Any], name: str, base: str) -> tuple[float, float] | None:
    """Return by which share a method's best error is smaller than another's, and its error."""
    ours, theirs = (_best(metrics, method) for method in (name, base))
    return None if ours is None or theirs is None else gain(ours, theirs)


def ends(metrics: dict[str, Any]) -> str:
    """Return whose best step size is an end of those tried, as a sentence; empty if nobody's."""
    listed = [
        f"the {found.edge} for {name}"
        for name in METHODS
        if (found := _best(metrics, name)) is not None and found.edge
    ]
    if not listed:
        return ""
    return (
        " A best step size is an end of those tried, so that others may do better: "
        f"{', '.join(listed)}."
    )


def _best(metrics: Mapping[str, Any], name: str) -> Best | None:
    return best([row for row in metrics["table"] if _counts(row, name)], name)


def about(config: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """Return what was run, as far as the table does not show it."""
    return (
        f"{federation_of(config)}{config['num_chains']} chains of {config['num_rounds']:,} rounds "
        f"from zero, the first {config['num_burnin']:,} left out; T = {metrics['num_local_steps']}."
    )


def commentary(metrics: dict[str, Any]) -> str:
    """Return what remains of the difference, and whether the law explains it."""
    rows, law, lines = metrics["table"], has_law(metrics), []
    for name in METHODS:
        line = {
            "method": name,
            "best error": _told(metrics, name),
            "against FA-LD's": "-" if name == METHODS[0] else compared(metrics, name),
            "against FA-LD's, control variate": "-"
            if name == METHODS[1]
            else compared(metrics, name, METHODS[1]),
        }
        if law:
            bias, spread = (
                [row[f"{what}, {name}"] for row in rows if _counts(row, name)]
                for what in ("bias of means", "sd over the posterior's")
            )
            line["means off by the law, in sds"] = f"{min(bias):.2f} to {max(bias):.2f}"
            line["sds by the law over the posterior's"] = f"{min(spread):.3f} to {max(spread):.3f}"
        lines.append(line)
    text = output.markdown_table(lines) + "\n\n" + decomposed(metrics)
    return text + (_by_law(metrics) if law else "") + ends(metrics)


def _told(metrics: Mapping[str, Any], name: str) -> str:
    found = _best(metrics, name)
    if found is None:
        return "not to be said"
    (length,) = {row[f"L, {name}"] for row in metrics["table"] if row["step size"] == found.step}
    return f"{found.error:.3g} (s.e. {found.deviation:.1g}; step {found.step:.3g}, L = {length})"


def decomposed(metrics: Mapping[str, Any]) -> str:
    """Return how much of FA-HMC's best error control variates take away, as a sentence.

    Of what lies above the error of a perfect sampler with as many draws.
    """
    found = _above_floor(metrics)
    if found is None:
        return "Chains of FA-HMC were lost at every step size."
    above, left = found
    return (
        f"A perfect sampler's draws, as many, have an error of {metrics['floor']:.3g}. FA-HMC's "
        f"best error is {above:.3g} above it, with control variates and their own best step size "
        f"{left:.3g}, {100 * (1 - left / above):.0f} % less. At FA-HMC's own best step size and "
        f"`L` they take away {share_told(metrics)} of the excess, which is drift's share of it."
    )


def drift_share(metrics: Mapping[str, Any]) -> float:
    """Return how much of FA-HMC's excess over a perfect sampler control variates take away.

    At FA-HMC's own best step size and ``L``, so that nothing else changes; not a number where
    chains were lost there.
    """
    found = _best(metrics, METHODS[2])
    rows = [row for row in metrics["table"] if found is not None and row["step size"] == found.step]
    if not rows or rows[0][METHODS[3]] is None:
        return math.nan
    plain, corrected = (rows[0][name] - metrics["floor"] for name in METHODS[2:])
    return float(1 - corrected / plain)


def share_told(metrics: Mapping[str, Any]) -> str:
    """Return drift's share in words."""
    share = drift_share(metrics)
    return "a share that is not known" if math.isnan(share) else f"{100 * share:.0f} %"


def excess(metrics: Mapping[str, Any]) -> str:
    """Return drift's share of what FA-HMC's best error has above a perfect sampler's."""
    if _above_floor(metrics) is None:
        return ""
    return (
        f"; at FA-HMC's best step size without them they take away {share_told(metrics)} of what "
        "is above a perfect sampler"
    )


def _above_floor(metrics: Mapping[str, Any]) -> tuple[float, float] | None:
    plain, corrected = (_best(metrics, name) for name in METHODS[2:])
    if plain is None or corrected is None:
        return None
    return plain.error - metrics["floor"], corrected.error - metrics["floor"]


def _by_law(metrics: dict[str, Any]) -> str:
    low, high = agreement(metrics)
    listed = ", ".join(
        f"{row['step size'] * row['L, FA-HMC']:.3g} (L = {row['L, FA-HMC']}): "
        f"{row['bias of means, FA-HMC']:.2g}"
        for row in metrics["table"]
        if _counts(row, METHODS[2])
    )
    return (
        f" Predicted errors are {low:.2f} to {high:.2f} times the measured ones, wherever chains "
        "have arrived at the end of the burn-in. The means of FA-HMC without control variates are "
        "off by so many standard deviations, by the length of the trajectory, `L` times the "
        f"leapfrog step, which the rule for `L` does not keep constant: {listed}."
    )


def _counts(row: dict[str, Any], name: str) -> bool:
    """Return whether a line counts for a method: FA-HMC's have more than one leapfrog step."""
    return not name.startswith("FA-HMC") or bool(row[f"L, {name}"] > 1)


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
