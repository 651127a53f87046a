"""Figure 1: two clients and where methods end; Figure 4 (left): distance over rounds."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.figures import COLORS, figure

__all__ = ["draw"]

METHODS = {
    "FedAvg": (COLORS["orange"], "s-", 10.0),
    "FedPA": (COLORS["red"], "D-", 10.0),
    "FedEP": (COLORS["blue"], "o-", 4.0),
    "FedEP, scaled identity": (COLORS["green"], "^-", 4.0),
}
"""Color, mark and its size."""


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figure; return its file name."""
    with figure(out / "toy.png", 1, 2) as (_, axes):
        left, right = axes[0]
        angles = np.linspace(0, 2 * np.pi, 200)
        circle = np.stack([np.cos(angles), np.sin(angles)])
        clients = metrics["clients"]
        for mean, covariance in zip(clients["means"], clients["covariances"], strict=True):
            for size in (1, 2):
                x, y = np.array(mean)[:, None] + size * np.linalg.cholesky(covariance) @ circle
                left.plot(x, y, color="0.7", lw=1)
        for name, (color, mark, size) in METHODS.items():
            path = np.array(metrics["paths"][name])
            # Those that stand still are larger and hollow, below the others.
            left.plot(*path.T, mark, color=color, ms=size, mfc="none", label=name)
        left.plot(*metrics["exact"], "*", color=COLORS["black"], ms=9, label="global mean")
        left.set(xlabel="first coordinate", ylabel="second", title="clients of Figure 1")
        left.legend()
        rounds = np.arange(1, metrics["num_rounds"] + 1)
        for name, (color, *_) in METHODS.items():
            right.plot(rounds, metrics["by_round"][name], color=color, label=name)
        right.set(xscale="log", yscale="log", xlabel="rounds", ylabel="distance from global mean")
        right.legend()
    return [{"file": "toy.png"}]
