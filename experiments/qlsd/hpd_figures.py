"""The figure of errors of highest-posterior-density regions."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.figures import COLORS, figure
from experiments.qlsd.hpd import PUBLISHED_ALPHA

__all__ = ["draw"]

PALETTE = [COLORS[c] for c in ("orange", "red", "sky", "blue", "green", "pink", "black", "yellow")]


def draw(
    out: Path,
    table: list[dict[str, Any]],
    curves: dict[str, dict[str, np.ndarray]],
    *,
    reference: str,
    floor: str | None = None,
) -> list[dict[str, str]]:
    """Write the figure into `out` and return its file and caption.

    `floor` names the curve that is drawn in grey, the distance of two runs of the reference.
    """
    name = "hpd.png"
    with figure(out / name, columns=2) as (fig, axes):
        left, right = axes[0]
        rows = {row["algorithm"]: row for row in table}
        for color, (label, curve) in zip(PALETTE, curves.items(), strict=False):
            style = dict(color="#999999", ls="--") if label == floor else dict(color=color)
            left.semilogy(curve["probability"], curve["error"], label=label, **style)
            row = rows[label]
            error = row["HPD error"], row["s.e."]
            right.errorbar(row["efficiency"], error[0], error[1], fmt="o", capsize=3, **style)
        left.axvline(1 - PUBLISHED_ALPHA, color="grey", lw=0.8, ls=":")
        left.axvline(0.99, color="grey", lw=0.8)
        left.set(xlabel=r"probability $1 - \alpha$", ylabel="relative HPD error")
        fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
        right.set(
            xscale="log", yscale="log", xlabel="efficiency, counted bits", ylabel="HPD error, 99 %"
        )
    grey = "" if floor is None else f"; grey: {floor}, another run of the reference itself"
    caption = (
        f"Relative error of the HPD threshold against {reference}{grey}. Left: by the region's "
        "probability, with 99 % (line) and the level that was published as 99 % (dotted). Right: "
        "at 99 %, with standard errors, against how many times fewer bits go up a round."
    )
    return [{"file": name, "caption": caption}]
