"""The figures of the Gaussian experiment."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.figures import COLORS, figure

__all__ = ["draw"]

PALETTE = [COLORS[c] for c in ("orange", "red", "sky", "blue", "green", "black", "pink")]


def draw(
    out: Path, config: Any, results: list[Any], grid: dict[str, np.ndarray]
) -> list[dict[str, str]]:
    """Write all figures into `out` and return their files and captions."""
    return [_errors(out, config, results), _budget(out, config, grid)]


def _errors(out: Path, config: Any, results: list[Any]) -> dict[str, str]:
    name = "mse.png"
    with figure(out / name, columns=2, sharey=True) as (_, axes):
        for color, result in zip(PALETTE * 2, results, strict=False):
            bits = result.rounds * result.message_bits
            for axis, x in ((axes[0, 0], bits), (axes[0, 1], result.rounds)):
                axis.loglog(x, result.error, color=color, label=result.name)
                axis.loglog(x, result.expected, ":", color=color)
        axes[0, 0].set(xlabel="bits that a client has sent since burn-in", ylabel="squared error")
        axes[0, 1].set(xlabel="rounds since burn-in")
        axes[0, 1].legend()
    return {
        "file": name,
        "caption": f"Figure 1, bottom row: squared error of the average of the rounds so far, mean "
        f"over {config.num_chains} runs, against bits counted (left) and rounds (right); dotted: "
        "the law.",
    }


def _budget(out: Path, config: Any, grid: dict[str, np.ndarray]) -> dict[str, str]:
    name = "budget.png"
    with figure(out / name) as (_, axes):
        for color, factor, error in zip(
            (PALETTE * 2), config.budget_factors, grid["error"].T, strict=False
        ):
            axes[0, 0].loglog(grid["levels"], error, color=color, label=f"{factor:g} / L")
        axes[0, 0].set(xlabel="levels s of QLSD*", ylabel="squared error")
        axes[0, 0].legend(title="step size", ncols=2)
    return {
        "file": name,
        "caption": f"Figure S2: squared error of the average of all rounds that {config.budget:g} "
        "bits per client pay for (by the bound with log2), by levels and step size.",
    }
