"""Errors over the number of local steps, one line for each kind of surrogates."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.figures import COLORS, figure, floor, points

__all__ = ["draw"]

NOISE = {"error of the mean": "its Monte Carlo error", "error of sds": "theirs"}
MARKS = "sD^ovP*"
PALETTE = [COLORS[c] for c in ("blue", "red", "green", "orange", "pink", "sky", "black")]


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figure; return its name."""
    names = list(dict.fromkeys(row["surrogates"] for row in metrics["table"]))
    with figure(out / "refresh.png", 1, 2) as (fig, axes):
        for panel, (kind, noise) in zip(axes[0], NOISE.items(), strict=True):
            panel.set(xscale="log", yscale="log", xlabel="local steps", ylabel=kind)
            for i, name in enumerate(names[1:]):
                rows = [r for r in metrics["table"] if r["surrogates"] == name and r[kind]]
                shifted = np.array([r["local steps"] for r in rows]) * 1.03 ** (i - 3)
                points(
                    panel,
                    shifted,
                    [r[kind] for r in rows],
                    [r[noise] for r in rows],
                    color=PALETTE[i % len(PALETTE)],
                    fmt=f"{MARKS[i % len(MARKS)]}-",
                    label=name,
                    ms=3,
                    lw=1,
                )
            floor(panel, metrics["table"][0][kind], names[0])
            steps = metrics["local_steps"]
            panel.set_xlim(0.6 * min(steps), 1.6 * max(steps))
        fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return [{"file": "refresh.png"}]
