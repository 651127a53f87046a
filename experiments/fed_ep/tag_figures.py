"""Figure 3: micro and macro F1 over rounds."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.fed_ep.findings import seeds
from experiments.fed_ep.image_figures import color_of
from experiments.figures import figure

__all__ = ["draw"]


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figure; return its name and caption."""
    settings = metrics["settings"]
    window = min(settings["best_window"], 10)
    with figure(out / "rounds.png", 1, 2) as (_, axes):
        for panel, kind in zip(axes[0], ("micro F1", "macro F1"), strict=True):
            for name, rates in metrics["by_round"].items():
                smooth = np.convolve(rates[kind], np.ones(window) / window, mode="valid")
                rounds = np.arange(window, len(rates[kind]) + 1)
                panel.plot(rounds, smooth, color=color_of(name), label=name, lw=1.2)
            panel.axvline(settings["num_burnin"], color="0.6", lw=0.8, ls=":")
            panel.set(xlabel="rounds", ylabel=f"{kind} (%)")
        axes[0, 0].legend()
    caption = (
        f"Test F1 of the point estimate, running means of {window} rounds averaged over "
        f"{seeds(settings)}; all methods go on from the same {settings['num_burnin']} "
        "rounds of FedAvg (dotted line)."
    )
    return [{"file": "rounds.png", "caption": caption}]
