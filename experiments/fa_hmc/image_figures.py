"""Figures of the experiments on images: scores against rounds of communication and gradients."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.fa_hmc.image_sweep import SCORES
from experiments.figures import COLORS, band, figure

__all__ = ["TITLES", "draw"]

TITLES = {"accuracy": "accuracy", "brier": "Brier score", "ece": "ECE", "nnll": "NLL"}
PALETTE = [COLORS[c] for c in ("black", "blue", "red", "green", "orange", "pink", "sky")]
LATER = (
    ", in the last row over the later half to three quarters of them (half where their number is "
    "a power of two, where lines jump), with the best step sizes for these"
)
WHAT = {"L": "leapfrog steps L", "T": "local trajectories T"}


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Draw a figure a sweep: a panel a score and a cost, a line a value of ``L`` or ``T``.

    In a run that scores the later samples alone, a third row of panels has these.

    Reads the keys ``results`` (each with `sweeps`, ``L``, ``T``, `gradients` of a client and the
    `scores` of `experiments.fa_hmc.image_tuning.tuned`) and ``rounds``, those of each sample.
    """
    return [_sweep(out, varied, metrics) for varied in WHAT]


def _sweep(out: Path, varied: str, metrics: dict[str, Any]) -> dict[str, str]:
    name, fixed = f"curves_{varied}.png", "T" if varied == "L" else "L"
    results = [result for result in metrics["results"] if varied in result["sweeps"]]
    shown = sorted(results, key=lambda result: result[varied])
    rounds = np.array(metrics["rounds"])
    later = all("later" in result["scores"][score] for result in shown for score in SCORES)
    grid = dict(sharex="row", sharey="col")
    with figure(out / name, 2 + later, 4, (2.7, 2.3), **grid) as (_, axes):
        for (above, below, *last), score in zip(axes.T, SCORES, strict=True):
            for i, result in enumerate(shown):
                found = result["scores"][score]
                gradients = rounds * result["gradients"] / metrics["settings"]["num_rounds"]
                panels = [(above, rounds, found), (below, gradients, found)]
                panels += [(axis, rounds, found["later"]) for axis in last]
                for axis, cost, one in panels:
                    if one["curve"] is None:
                        continue
                    label = f"{varied} = {result[varied]}, step {one['step']:g}"
                    style = dict(color=PALETTE[i % len(PALETTE)], label=label)
                    band(axis, cost, one["curve"], one["curve_sd"], **style)
            above.set(title=TITLES[score], xlabel="rounds")
            below.set(xlabel="gradients per client", xscale="log")
            for axis in last:
                axis.set(xlabel="rounds, later samples alone")
            # Each score has its own best step sizes.
            for axis in (above, *last):
                axis.legend(fontsize=6)
    several = any(r["scores"][s]["curve_sd"] is not None for r in shown for s in SCORES)
    return {
        "file": name,
        "caption": f"Scores on the test images against rounds of communication and against a "
        f"client's minibatch gradients, by {WHAT[varied]} with {fixed} = {shown[0][fixed]}, each "
        "with the step size (in the legend, a multiple of the largest stable one) that is best for "
        "the score at the end; predictions are averaged over all samples so far"
        + (LATER if later else "")
        + ". "
        + (
            "Means over chains, and bands of one standard deviation."
            if several
            else "One chain, so no bands."
        ),
    }
