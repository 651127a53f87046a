"""Seconds per round against clients, rows, parameters and chains: ``python docs/figures/costs.py``.

It draws ``docs/figures/costs.png`` from ``python -m benchmarks costs``.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.costs import BASE, KERNELS, VALUES, measure  # noqa: E402

MARKERS = {"fsgld": "o", "lsd": "s"}


def main() -> None:
    """Measure, and draw one panel per axis."""
    results = measure()
    plt.style.use(ROOT / "experiments" / "figures.mplstyle")
    _, panels = plt.subplots(1, len(VALUES), figsize=(7.2, 2.4), sharey=True)
    for panel, (axis, values) in zip(panels, VALUES.items(), strict=True):
        for name in KERNELS:
            costs = [results[axis, name, value] for value in values]
            panel.loglog(values, costs, marker=MARKERS[name], label=name)
        panel.axvline(BASE[axis], color="black", linewidth=0.5)
        panel.set_xlabel(axis)
    panels[0].set_ylabel("microseconds per round")
    panels[0].legend()
    plt.savefig(Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
