"""Figure 2: accuracy over rounds."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.figures import COLORS, band, figure

__all__ = ["deviations", "draw", "smooth", "style_of"]

LETTERS = {"(I)": "blue", "(M)": "sky", "(L)": "green", "(V)": "red"}
DASHED = ("(M)", "(V)")  # which lie on (I) and on (L) in places
COLLAPSED = 3.0  # points below where methods part; axes are those of the others


def style_of(method: str) -> dict[str, Any]:
    """Return a method's line, of one colour for a way of inference in both families."""
    color = {"FedAvg": "black", "FedPA": "orange"}.get(method) or LETTERS[method[-3:]]
    line = "--" if method[-3:] in DASHED else "-"
    return dict(color=COLORS[color], label=method, lw=1.2, ls=line)


def smooth(values: Any, window: int) -> np.ndarray:
    """Return running means over the last axis, shorter by `window` less one."""
    return np.apply_along_axis(
        np.convolve, -1, np.asarray(values, float), np.ones(window) / window, mode="valid"
    )


def deviations(values: np.ndarray, window: int) -> list[float] | None:
    """Return the standard deviation over seeds ``[num_seeds, num_rounds]`` of running means."""
    if len(values) < 2:
        return None
    return smooth(values, window).std(axis=0, ddof=1).tolist()


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figure, a panel for each family that was run; return its name.

    It begins shortly before methods part, and its axes are those of the methods that did not
    collapse, among which there would be nothing to see else.
    """
    settings = metrics["settings"]
    window, first = settings["window"], settings["num_burnin"]
    start = max(window, first - window)
    families = [
        family
        for family in ("FedEP", "FedSEP")
        if any(name.startswith(f"{family} ") for name in metrics["by_round"])
    ] or ["Averaging"]
    scores = {"test accuracy (%)": (metrics["by_round"], metrics["by_round_sd"])}
    if "loss_by_round" in metrics:
        spreads = metrics.get("loss_by_round_sd", {})
        scores["test loss (nats)"] = (metrics["loss_by_round"], spreads)
    collapsed = _collapsed(metrics)
    shape = len(scores), len(families)
    with figure(out / "rounds.png", *shape, sharey="row") as (_, axes):
        for line, (score, (curves, spreads)) in zip(axes, scores.items(), strict=True):
            shown = []
            for panel, family in zip(line, families, strict=True):
                for name, values in curves.items():
                    if name not in ("FedAvg", "FedPA") and not name.startswith(f"{family} "):
                        continue
                    rounds = np.arange(window, len(values) + 1)
                    kept, middle = rounds >= start, smooth(values, window)
                    spread = None if name in collapsed else spreads.get(name)
                    spread = None if spread is None else np.asarray(spread, float)[kept]
                    band(panel, rounds[kept], middle[kept], spread, **style_of(name))
                    if name not in collapsed:
                        wide = 0.0 if spread is None else spread
                        shown += [middle[kept] - wide, middle[kept] + wide]
                panel.axvline(first, color="0.6", lw=0.8, ls=":")
                panel.set(xlabel="rounds", title=family)
                if panel.get_legend_handles_labels()[0]:
                    panel.legend()
            line[0].set(ylabel=score)
            inside = np.concatenate(shown)
            inside = inside[np.isfinite(inside)]
            if inside.size and np.ptp(inside) > 0:
                margin = 0.05 * np.ptp(inside)
                line[0].set_ylim(inside.min() - margin, inside.max() + margin)
    return [{"file": "rounds.png"}]


def _collapsed(metrics: dict[str, Any]) -> set[str]:
    """Return the methods whose last accuracies are far below those where methods part."""
    window, first = metrics["settings"]["window"], metrics["settings"]["num_burnin"]
    names = set()
    for name, values in metrics["by_round"].items():
        before = np.mean(values[max(first - window, 0) : first])
        if not np.mean(values[-window:]) >= before - COLLAPSED:
            names.add(name)
    return names if len(names) < len(metrics["by_round"]) else set()
