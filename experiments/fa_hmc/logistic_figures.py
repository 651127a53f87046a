"""Figure 1: marginal errors against step sizes, and rounds against local steps."""

from pathlib import Path
from typing import Any

from experiments.figures import COLORS, figure

__all__ = ["draw"]


def draw(metrics: dict[str, Any], local: list[dict[str, Any]], out: Path) -> list[dict[str, str]]:
    """Write the figure; return its file name and caption."""
    table, dim = metrics["table"], metrics["dim"]
    steps = [row["step size"] for row in table]
    with figure(out / "errors.png", 1, 3) as (_, axes):
        for place, kind in zip(axes[0], ("exact", "noisy"), strict=False):
            for name, colour in (("FA-LD", "orange"), ("FA-HMC", "blue")):
                curve = [row[f"{name}, {kind}"] for row in table]
                place.plot(steps, curve, "o-", color=COLORS[colour], label=name)
            place.axhline(metrics["floor"], color=COLORS["black"], ls=":", label="floor")
            place.set(
                xscale="log",
                yscale="log",
                xlabel="leapfrog step",
                ylabel="marginal error",
                title=f"{kind} gradients, d = {dim}",
            )
            place.legend()
        last = axes[0, 2]
        for line in local:
            rounds, error = zip(*line["curve"], strict=True)
            last.plot(rounds, error, label=f"T = {line['T']}")
        last.axhline(metrics["threshold"], color=COLORS["black"], ls=":")
        last.set(
            xscale="log",
            yscale="log",
            xlabel="communication rounds",
            ylabel="marginal error",
            title="local steps, noisy gradients",
        )
        last.legend(ncols=2)
    caption = (
        f"Marginal errors in dimension {dim} against the leapfrog step (left and middle), and "
        "against rounds for numbers of local steps T (right); dotted, the floor of a perfect "
        "sampler and the threshold."
    )
    return [{"file": "errors.png", "caption": caption}]
