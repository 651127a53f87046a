"""Figure 2: accuracy over rounds."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.fed_ep.findings import seeds
from experiments.figures import COLORS, band, figure

__all__ = ["bands", "deviations", "draw", "smooth", "style_of"]

LETTERS = {"(I)": "blue", "(M)": "sky", "(L)": "green", "(V)": "red"}
DASHED = ("(M)", "(V)")  # which lie on (I) and on (L) in places
COLLAPSED = 3.0  # points below where methods part; axes are those of the others


def style_of(method: str) -> dict[str, Any]:
    """Return a method's line, of one colour for a way of inference in both families."""
    color = {"FedAvg": "black", "FedPA": "orange"}.get(method) or LETTERS[method[-3:]]
    line = "--" if method[-3:] in DASHED else "-"
    return dict(color=COLORS[color], label=method, lw=1.2, ls=line)


def bands(num_seeds: int, of: str) -> str:
    """Say what the bands are."""
    if num_seeds == 1:
        return "no bands, with one seed"
    return f"bands: one standard deviation of {of} over seeds, the paper's are two"


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
    """Write the figure, a panel for each family that was run; return name and caption.

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
    return [{"file": "rounds.png", "caption": _caption(metrics, list(scores), start, collapsed)}]


def _with_bands(metrics: dict[str, Any]) -> str:
    """Return what has bands: older records have none of losses."""
    return "both" if "loss_by_round_sd" in metrics else "accuracies"


def _collapsed(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the accuracies at the end of methods that end far below where methods part."""
    window, first = metrics["settings"]["window"], metrics["settings"]["num_burnin"]
    found = {}
    for name, values in metrics["by_round"].items():
        part = np.mean(values[max(first - window, 0) : first])
        end = float(np.mean(values[-window:]))
        if not end >= part - COLLAPSED:
            found[name] = end
    return found if len(found) < len(metrics["by_round"]) else {}


def _caption(
    metrics: dict[str, Any], scores: list[str], start: int, collapsed: dict[str, float]
) -> str:
    settings = metrics["settings"]
    what = " and ".join(score.split(" (")[0] for score in scores).capitalize()
    text = (
        f"{what} of the point estimate from round {start} on, running means of "
        f"{settings['window']} rounds averaged over {seeds(settings)} "
        f"({bands(settings['num_seeds'], _with_bands(metrics))}); all methods go on from the same "
        f"{settings['num_burnin']} rounds of FedAvg (dotted line)."
    )
    if collapsed:
        ends = ", ".join(f"{name} at {end:.1f} %" for name, end in collapsed.items())
        text += f" Below the axis, and without a band, end {ends}."
    losses = metrics.get("loss_by_round", {}).values()
    if not all(np.isfinite(np.asarray(values, float)).all() for values in losses):
        text += (
            " A curve of losses ends where some probability of some seed is rounded to 0, the loss "
            "then being infinite."
        )
    return text
