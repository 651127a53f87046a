"""Figure 2: accuracy over rounds."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.fed_ep.findings import seeds
from experiments.figures import COLORS, band, figure

__all__ = ["color_of", "deviations", "draw", "smooth"]

LETTERS = {"(I)": "blue", "(M)": "sky", "(L)": "green", "(V)": "red"}


def color_of(method: str) -> str:
    """Return a method's colour, the same for a way of inference in both families."""
    return COLORS[{"FedAvg": "black", "FedPA": "orange"}.get(method) or LETTERS[method[-3:]]]


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
    """Write the figure, a panel for each family that was run; return name and caption."""
    settings = metrics["settings"]
    window = settings["window"]
    families = [
        family
        for family in ("FedEP", "FedSEP")
        if any(name.startswith(f"{family} ") for name in metrics["by_round"])
    ] or ["Averaging"]
    scores = {"test accuracy (%)": (metrics["by_round"], metrics["by_round_sd"])}
    if "loss_by_round" in metrics:
        scores["test loss (nats)"] = (metrics["loss_by_round"], {})
    shape = len(scores), len(families)
    with figure(out / "rounds.png", *shape, sharey="row") as (_, axes):
        for line, (score, (curves, spreads)) in zip(axes, scores.items(), strict=True):
            for panel, family in zip(line, families, strict=True):
                for name, values in curves.items():
                    if name not in ("FedAvg", "FedPA") and not name.startswith(f"{family} "):
                        continue
                    rounds = np.arange(window, len(values) + 1)
                    style = dict(color=color_of(name), label=name, lw=1.2)
                    band(panel, rounds, smooth(values, window), spreads.get(name), **style)
                panel.axvline(settings["num_burnin"], color="0.6", lw=0.8, ls=":")
                panel.set(xlabel="rounds", title=family)
                if panel.get_legend_handles_labels()[0]:
                    panel.legend()
            line[0].set(ylabel=score)
    what = " and ".join(score.split(" (")[0] for score in scores).capitalize()
    caption = (
        f"{what} of the point estimate, running means of {window} rounds averaged over "
        f"{seeds(settings)} (bands: one standard deviation of accuracies over them, where there "
        f"are several); all methods go on from the same {settings['num_burnin']} rounds of "
        "FedAvg (dotted line)."
    )
    losses = metrics.get("loss_by_round", {}).values()
    if not all(np.isfinite(np.asarray(values, float)).all() for values in losses):
        caption += " A curve of losses ends where the loss of some seed is not finite."
    return [{"file": "rounds.png", "caption": caption}]
