"""Figures of the experiments on images: scores against rounds of communication and gradients."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.fa_hmc.image_sweep import SCORES
from experiments.figures import COLORS, band, figure

__all__ = ["TITLES", "draw"]

TITLES = {"accuracy": "accuracy", "brier": "Brier score", "ece": "ECE", "nnll": "NLL"}
PALETTE = [COLORS[c] for c in ("black", "blue", "red", "green", "orange", "pink", "sky")]
WHAT = {"L": "leapfrog steps L", "T": "local trajectories T"}


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Draw a figure a sweep: a panel a score and a cost, a line a value of ``L`` or ``T``.

    Reads the keys ``results`` (each with `sweeps`, ``L``, ``T``, `gradients` of a client and the
    `scores` of `experiments.fa_hmc.image_tuning.tuned`) and ``rounds``, those of each sample.
    """
    num_rounds = metrics["settings"]["num_rounds"]
    return [
        _sweep(out, varied, metrics["results"], metrics["rounds"], num_rounds) for varied in WHAT
    ]


def _sweep(
    out: Path, varied: str, results: list[dict[str, Any]], rounds: list[int], num_rounds: int
) -> dict[str, str]:
    name, fixed = f"curves_{varied}.png", "T" if varied == "L" else "L"
    shown = sorted((r for r in results if varied in r["sweeps"]), key=lambda r: r[varied])
    with figure(out / name, 2, 4, (2.7, 2.3), sharex="row", sharey="col") as (_, axes):
        for above, below, score in zip(*axes, SCORES, strict=True):
            for i, result in enumerate(shown):
                found, color = result["scores"][score], PALETTE[i % len(PALETTE)]
                if found["curve"] is None:
                    continue
                label = f"{varied} = {result[varied]}, step {found['step']:g}"
                spread = found["curve_sd"]
                gradients = np.array(rounds) * result["gradients"] / num_rounds
                for axis, cost in ((above, rounds), (below, gradients)):
                    band(axis, cost, found["curve"], spread, color=color, label=label)
            above.set(title=TITLES[score], xlabel="rounds")
            below.set(xlabel="gradients per client", xscale="log")
            # Each score has its own best step sizes.
            above.legend(fontsize=6)
    several = any(r["scores"][s]["curve_sd"] is not None for r in shown for s in SCORES)
    return {
        "file": name,
        "caption": f"Scores on the test images against rounds of communication and against a "
        f"client's minibatch gradients, by {WHAT[varied]} with {fixed} = {shown[0][fixed]}, each "
        "with the step size (in the legend, a multiple of the largest stable one) that is best for "
        "the score at the end; predictions are averaged over all samples so far. "
        + (
            "Means over chains, and bands of one standard deviation."
            if several
            else "One chain, so no bands."
        ),
    }
