"""The figure of the memory study."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.figures import COLORS, figure

__all__ = ["draw"]


def draw(out: Path, errors: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Write the figure into `out` and return its file and caption.

    `errors` has, for each algorithm, its `levels` (``None`` for none), whether with `memory`, and
    the `error` of each repetition.
    """
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
        ax.set_xticks(range(len(levels)), [f"s = {s}" for s in levels])
        ax.set(yscale="log", ylabel=r"$\|\mathrm{Var}_{MALA} - \mathrm{Var}\|$")
        ax.legend()
    return [
        {
            "file": name,
            "caption": "Figure S3: Euclidean norm of the errors of the coordinates' variances "
            "against MALA, by levels, over the repetitions; dashed: without compression.",
        }
    ]
