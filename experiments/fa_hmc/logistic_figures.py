"""Figure 1: marginal errors against step sizes, and rounds against local steps."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from experiments.figures import COLORS, figure, floor, label_ticks, points, threshold

__all__ = ["draw", "local_curves"]


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figure of a run; return its file name and caption."""
    table, dim = metrics["table"], metrics["dim"]
    steps = [row["step size"] for row in table]
    with figure(out / "errors.png", 1, 3) as (_, axes):
        for place, kind in zip(axes[0], ("exact", "noisy"), strict=False):
            place.set(xscale="log", yscale="log")
            for name, color, mark in (("FA-LD", "orange", "s-"), ("FA-HMC", "blue", "o-")):
                curve, error = (
                    np.array([row[f"{part}{name}, {kind}"] for row in table], float)
                    for part in ("", "s.e. ")
                )
                points(place, steps, curve, error, color=COLORS[color], fmt=mark, ms=4, label=name)
            floor(place, metrics["floor"], "floor of a perfect sampler")
            place.set(
                xlabel="leapfrog step",
                ylabel="marginal error",
                title=f"{kind} gradients, d = {dim}",
            )
            place.legend()
        local_curves(axes[0, 2], metrics["local_steps"], metrics["threshold"])
        for place in axes[0]:
            label_ticks(place.yaxis)
        for place in axes[0, :2]:
            label_ticks(place.xaxis)
    caption = (
        f"Marginal errors in dimension {dim} against the leapfrog step (left and middle; bars: two "
        "standard errors, a jackknife over chains), and against rounds for numbers of local steps "
        "T (right). Dotted: the floor of a perfect sampler with as many draws; dashed: the "
        "threshold; dots: the floor for the draws that a run had when it reached the threshold, "
        "where it did."
    )
    return [{"file": "errors.png", "caption": caption}]


def local_curves(axes: Axes, lines: list[dict[str, Any]], level: float) -> None:
    """Draw marginal errors against rounds, a curve for each number of local steps."""
    shades = np.linspace(0.1, 0.9, len(lines))
    for shade, line in zip(shades, lines, strict=True):
        rounds, error = zip(*line["curve"], strict=True)
        dot = "." if len(rounds) == 1 else ""  # a line of one point would not be seen
        axes.plot(rounds, error, marker=dot, color=_shade(shade), label=f"T = {line['T']}")
    threshold(axes, level)
    # The error of as many independent draws as a run had when it reached the threshold.
    there = [x for x in lines if x.get("rounds to threshold") is not None]
    ends, floors = ([x[k] for x in there] for k in ("rounds to threshold", "floor"))
    if there:
        axes.plot(ends, floors, "k.", ms=5, label="floor at threshold")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="communication rounds",
        ylabel="marginal error",
        title="local steps, noisy gradients",
    )
    lowest = min(error for line in lines for _, error in line["curve"] if error is not None)
    axes.set_ylim(bottom=min([*floors, level, lowest]) / 4)  # room for the legend
    axes.legend(ncols=2, fontsize=8, loc="lower left")


def _shade(share: float) -> str:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return to_hex(colormaps["viridis"](share))
