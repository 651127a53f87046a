"""Errors over the number of local steps, one line for each kind of surrogates."""

from pathlib import Path
from typing import Any

from experiments.figures import figure

__all__ = ["draw"]


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figure; return its name and caption."""
    names = list(dict.fromkeys(row["surrogates"] for row in metrics["table"]))
    with figure(out / "refresh.png", 1, 2) as (_, axes):
        for panel, kind in zip(axes[0], ("error of the mean", "error of sds"), strict=True):
            for name in names[1:]:
                rows = [r for r in metrics["table"] if r["surrogates"] == name and r[kind]]
                panel.plot(
                    [r["local steps"] for r in rows],
                    [r[kind] for r in rows],
                    "o-",
                    label=name,
                    ms=3,
                )
            floor = metrics["table"][0][kind]
            panel.axhline(floor, color="0.5", lw=0.8, ls=":", label=names[0])
            panel.set(xscale="log", yscale="log", xlabel="local steps", ylabel=kind)
        axes[0, 0].legend(fontsize=6)
    caption = (
        "Errors against NUTS in posterior standard deviations, root mean squares over "
        f"{metrics['dim']} coefficients, over the number of local steps a visit."
    )
    return [{"file": "refresh.png", "caption": caption}]
