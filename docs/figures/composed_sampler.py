"""Draw the correct and the wrong draws of the tutorial on composed samplers.

``python docs/figures/composed_sampler.py`` writes ``composed_sampler.png`` next to this file.
"""

import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

FOLDER = Path(__file__).parent
RADIUS = np.sqrt(-2 * np.log(0.05))
"""Mahalanobis distance within which lie 95 % of a normal distribution in two dimensions."""


def run_tutorial() -> dict[str, Any]:
    """Run the code of the tutorial up to the wrong draws; return what it defines."""
    text = (FOLDER.parent / "tutorials" / "composed_sampler.md").read_text()
    names: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", text.partition("## 6.")[0], re.DOTALL):
        exec(snippet, names)
    return names


def ellipse(mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """Return points on the ellipse that holds 95 % of a normal distribution, ``[2, 200]``."""
    angle = np.linspace(0, 2 * np.pi, 200)
    circle = RADIUS * np.stack([np.cos(angle), np.sin(angle)])
    return mean[:, None] + np.linalg.cholesky(covariance) @ circle


def main() -> None:
    """Run the tutorial and draw both clouds with the ellipses."""
    names = run_tutorial()
    mean = names["mean"]
    plt.style.use(FOLDER.parents[1] / "experiments" / "figures.mplstyle")
    figure, panels = plt.subplots(1, 2, figsize=(6.4, 3.3), sharex=True, sharey=True)
    titles = ("correct noise", "noise too small by the root of two")
    for panel, title, draws in zip(panels, titles, (names["draws"], names["wrong"]), strict=True):
        panel.scatter(*draws[:1_000].T, s=3, alpha=0.4, color="0.55", lw=0)
        panel.plot(*ellipse(mean, np.cov(draws.T)), label="draws (sample covariance)")
        panel.plot(*ellipse(mean, names["exact_covariance"]()), "--", label="exact distribution")
        posterior = np.linalg.inv(names["precision"])
        panel.plot(*ellipse(mean, posterior), color="black", lw=1.2, label="posterior")
        panel.set_title(title)
        panel.set_xlabel("first coefficient")
    panels[0].set_ylabel("second coefficient")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    plt.savefig(Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
