"""The figure of the memory study."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.figures import COLORS, figure

__all__ = ["draw"]


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figure of a run into `out` and return its file and caption.

    Reads ``errors``: for each algorithm its `levels` (``None`` for none), whether with `memory`,
    and the `error` of each repetition.
    """
    errors = metrics["errors"]
    name = "memory.png"
    levels = [each["levels"] for each in errors if each["memory"]]
    with figure(out / name) as (_, axes):
        ax = axes[0, 0]
        for memory, color, label in ((False, "red", "no memory"), (True, "blue", "memory")):
            found = [e["error"] for e in errors if e["levels"] and e["memory"] == memory]
            place = np.arange(len(found)) + (0.18 if memory else -0.18)
            boxes = ax.boxplot(found, positions=place, widths=0.3, patch_artist=True)
            for box in boxes["boxes"]:
                box.set(facecolor=COLORS[color], alpha=0.6)
            for line in boxes["medians"]:
                line.set(color="black")
            ax.plot([], [], color=COLORS[color], lw=6, alpha=0.6, label=label)
        plain = np.mean([e["error"] for e in errors if e["levels"] is None])
        ax.axhline(plain, color="black", ls="--", lw=1, label="LSD++ (mean)")
        omega = {r["algorithm"]: r["omega"] for r in metrics["table"]}
        ax.set_xticks(
            range(len(levels)),
            [f"s = {s}\n$\\omega$ = {omega[f'QLSD++, s = {s}']:.2g}" for s in levels],
        )
        ax.set(yscale="log", ylabel=r"$\|\mathrm{Var}_{MALA} - \mathrm{Var}\|$")
        ax.legend()
    return [
        {
            "file": name,
            "caption": "Figure S3: Euclidean norm of the errors of the coordinates' variances "
            "against MALA, by levels, over the repetitions (boxes: quartiles and median; whiskers: "
            "within 1.5 times their distance; circles: repetitions beyond); dashed: without "
            "compression.",
        }
    ]
