"""The figure of errors of highest-posterior-density regions."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.figures import COLORS, figure, label_ticks, points

__all__ = ["FEW", "PUBLISHED_ALPHA", "beyond", "draw", "table"]

PUBLISHED_ALPHA = 0.5025
"""What the released notebook evaluates as 99 %: element 99 of 200 from 0.01 to 0.99."""

FEW = 20
"""Draws beyond a threshold, below which a jackknife tells nothing of how far it is off."""

PALETTE = [COLORS[c] for c in ("orange", "red", "sky", "blue", "green", "pink", "black", "yellow")]


def beyond(metrics: Mapping[str, Any]) -> float:
    """Return how many of the reference's draws lie beyond its 99 % threshold.

    Records that do not say how many draws there are have many.
    """
    return 0.01 * float(metrics.get("num_draws", math.inf))


def table(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the table of a run, without standard errors that too few draws give it."""
    if beyond(metrics) >= FEW:
        return list(metrics["table"])
    return [row | {"s.e.": None} for row in metrics["table"]]


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figure of a run into `out` and return its file and caption.

    Reads the keys ``table``, ``curves``, ``compared_with`` (the name of the reference) and
    ``another_key`` (of the curve that is the distance of two runs of the reference, or ``None``).
    Errors of zero, which a logarithmic axis has no place for, are left out, and so are standard
    errors where ``num_draws`` is too small for them.
    """
    few = beyond(metrics) < FEW
    name, again = "hpd.png", metrics["another_key"]
    with figure(out / name, columns=2, size=(4.8, 3.8)) as (fig, axes):
        left, right = axes[0]
        for place in (left, right):
            place.set(xscale="log" if place is right else "linear", yscale="log")
        rows = {row["algorithm"]: row for row in metrics["table"]}
        for i, (label, curve) in enumerate(metrics["curves"].items()):
            # Curves that lie on each other differ by their dashes.
            style = dict(color=PALETTE[i % len(PALETTE)], ls=("-", "--", ":", "-.")[i % 4])
            if label == again:
                style = dict(color="#999999", ls="--")
            probability, error = (np.array(curve[k], float) for k in ("probability", "error"))
            error = np.where(error > 0, error, np.nan)
            left.plot(probability, error, marker=".", ms=3, lw=1.2, label=label, **style)
            row = rows[label]
            if row["HPD error"] > 0:
                at = row["efficiency"]
                errors = [0.0 if few else row["s.e."]]
                points(right, [at], [row["HPD error"]], errors, fmt="o", **style)
                right.annotate(
                    label.removeprefix("QLSD++, "),
                    (at, row["HPD error"]),
                    xytext=(4, 4),
                    textcoords="offset points",
                    fontsize=6,
                )
        left.axvline(1 - PUBLISHED_ALPHA, color="grey", lw=0.8, ls=":")
        left.axvline(0.99, color="grey", lw=0.8)
        left.set(xlabel=r"probability $1 - \alpha$", ylabel="relative HPD error")
        fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
        right.set(xlabel="efficiency, counted bits", ylabel="HPD error, 99 %")
        right.margins(x=0.2)
        label_ticks(right.xaxis)
    grey = "" if again is None else f"; grey: {again}, another run of the reference itself"
    caption = (
        f"Relative error of the HPD threshold against {metrics['compared_with']}{grey}. Left: by "
        "the region's probability, with 99 % (line) and the level that was published as 99 % "
        f"(dotted). Right: at 99 %, with {'no' if few else 'two'} standard errors"
        f"{' (few draws lie beyond the threshold)' if few else ''}, against how many times fewer "
        "bits go up a round. Errors of exactly zero are not drawn."
    )
    return [{"file": name, "caption": caption}]
