"""Figure 1(c) with many chains: rounds to a marginal error over numbers of local steps."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.fa_hmc import logistic
from experiments.fa_hmc.logistic import THRESHOLDS
from experiments.fa_hmc.logistic_figures import local_curves
from experiments.figures import COLORS, figure, label_ticks, points

__all__ = ["Config", "draw", "run"]

HUES = ("sky", "blue", "black")  # of thresholds, the largest first


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings: those of `fa_hmc/logistic` over local steps, with more chains."""

    seed: int = 0
    dim: int = 1000
    num_rows: int = 1000
    num_clients: int = 20
    prior_precision: float = 1.0
    gradient_noise: float = 5.0
    num_chains: int = 64
    local_steps: tuple[int, ...] = (1, 2, 5, 10, 20, 30, 50, 70, 100)
    local_step_size: float = 0.02
    local_leapfrog: int = 10
    local_gradients: int = 600_000
    local_rounds: int = 20_000
    threshold: float = 0.08
    reference_warmup: int = 1000
    reference_draws: int = 4000
    reference_thinning: int = 2

    def __post_init__(self) -> None:
        self.of_figure()

    def of_figure(self) -> logistic.Config:
        """Return the settings of Figure 1 that these are."""
        return logistic.Config(**dataclasses.asdict(self))


def run(config: Config, out: Path) -> dict[str, Any]:
    """Run every number of local steps until it has arrived; write the figure."""
    settings = config.of_figure()
    given = logistic.problem(settings)
    lines = logistic.over_local_steps(settings, given)
    metrics = {
        "table": [_row(line, config.threshold) for line in lines],
        "local_steps": lines,
        "threshold": config.threshold,
        "dim": config.dim,
        "num_chains": config.num_chains,
        "step_size": config.local_step_size * given.scale,
        "reference": given.diagnostics,
    }
    return metrics | {"figures": draw(metrics, out)}


def _row(line: Mapping[str, Any], threshold: float) -> dict[str, Any]:
    row, found = {"T": line["T"]}, {at["error"]: at for at in line["arrivals"]}
    for level in (times * threshold for times in THRESHOLDS):
        at = found.get(level, {"rounds": None, "s.e.": None})
        row |= {f"rounds to {level:.2g}": at["rounds"], f"s.e., {level:.2g}": at["s.e."]}
    return row | {"rounds run": line["rounds run"], "floor": line["floor"]}


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figure of a run; return its file and caption."""
    lines, levels = metrics["local_steps"], [times * metrics["threshold"] for times in THRESHOLDS]
    with figure(out / "rounds.png", 1, 2) as (_, axes):
        left, right = axes[0]
        local_curves(left, lines, metrics["threshold"])
        right.set(xscale="log", yscale="log", xlabel="local steps T", ylabel="rounds to the error")
        for level, hue in zip(levels, HUES, strict=True):
            found = {
                line["T"]: at
                for line in lines
                for at in line["arrivals"]
                if math.isclose(at["error"], level)
            }
            rounds, errors = (
                [math.nan if at[name] is None else at[name] for at in found.values()]
                for name in ("rounds", "s.e.")
            )
            style = dict(color=COLORS[hue], fmt="o-", ms=4, label=f"error {level:.2g}")
            points(right, list(found), rounds, errors, **style)
        late = [line for line in lines if line["rounds to threshold"] is None]
        if late:
            style = dict(color=COLORS["black"], ms=6, mfc="none", label="not yet there")
            right.plot([x["T"] for x in late], [x["rounds run"] for x in late], "^", **style)
        right.legend()
        for place in (left.yaxis, right.xaxis, right.yaxis):
            label_ticks(place)
    caption = (
        f"{metrics['num_chains']} chains in dimension {metrics['dim']}. Left: marginal errors "
        "against rounds; dashed: the threshold; dots: the error of as many draws of a perfect "
        "sampler as a run had there. Right: rounds to three errors over local steps (bars: two "
        "standard errors, a jackknife over chains); triangles: rounds that were run without "
        "coming to the smallest."
    )
    return [{"file": "rounds.png", "caption": caption}]
