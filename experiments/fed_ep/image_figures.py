"""Figure 2: accuracy over rounds."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.fed_ep.findings import seeds
from experiments.figures import COLORS, figure

__all__ = ["color_of", "draw"]

LETTERS = {"(I)": "blue", "(M)": "sky", "(L)": "green", "(V)": "red"}


def color_of(method: str) -> str:
    """Return a method's colour, the same for a way of inference in both families."""
    return COLORS[{"FedAvg": "black", "FedPA": "orange"}.get(method) or LETTERS[method[-3:]]]


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figure, a panel for each family that was run; return name and caption."""
    settings = metrics["settings"]
    window = settings["window"]
    families = [
        family
        for family in ("FedEP", "FedSEP")
        if any(name.startswith(f"{family} ") for name in metrics["by_round"])
    ] or ["Averaging"]
    with figure(out / "rounds.png", 1, len(families), sharey=True) as (_, axes):
        for panel, family in zip(axes[0], families, strict=True):
            for name, values in metrics["by_round"].items():
                if name not in ("FedAvg", "FedPA") and not name.startswith(f"{family} "):
                    continue
                smooth = np.convolve(values, np.ones(window) / window, mode="valid")
                rounds = np.arange(window, len(values) + 1)
                panel.plot(rounds, smooth, color=color_of(name), label=name, lw=1.2)
            panel.axvline(settings["num_burnin"], color="0.6", lw=0.8, ls=":")
            panel.set(xlabel="rounds", title=family)
            if panel.get_legend_handles_labels()[0]:
                panel.legend()
        axes[0, 0].set(ylabel="test accuracy (%)")
    caption = (
        f"Test accuracy of the point estimate, running means of {window} rounds averaged over "
        f"{seeds(settings)}; all methods go on from the same {settings['num_burnin']} "
        "rounds of FedAvg (dotted line)."
    )
    return [{"file": "rounds.png", "caption": caption}]
