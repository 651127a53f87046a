"""Figure 3: micro and macro F1 over rounds."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.fed_ep.image_figures import smooth, style_of
from experiments.figures import band, figure

__all__ = ["WINDOW", "draw"]

WINDOW = 10  # rounds, of the running means that are drawn


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figure; return its name."""
    settings = metrics["settings"]
    window = min(settings["best_window"], WINDOW)
    with figure(out / "rounds.png", 1, 2) as (_, axes):
        for panel, kind in zip(axes[0], ("micro F1", "macro F1"), strict=True):
            for name, rates in metrics["by_round"].items():
                rounds = np.arange(window, len(rates[kind]) + 1)
                spread = metrics["by_round_sd"][name][kind]
                band(panel, rounds, smooth(rates[kind], window), spread, **style_of(name))
            panel.axvline(settings["num_burnin"], color="0.6", lw=0.8, ls=":")
            panel.set(xlabel="rounds", ylabel=f"{kind} (%)")
        axes[0, 0].legend()
    return [{"file": "rounds.png"}]
