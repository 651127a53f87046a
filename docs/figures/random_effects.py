"""Draw intervals of each hospital's effect, with and without the other hospitals.

Runs the snippets of docs/tutorials/random_effects.md up to the figure.
"""

import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).parents[2]
page = (ROOT / "docs/tutorials/random_effects.md").read_text()
names = {}
for snippet in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
    if "hierarchy.forest" in snippet:
        snippet = snippet[: snippet.index("figure = hierarchy.forest")]
    exec(snippet, names)
    if "alone" in names:
        break

data = names["data"]
order = np.argsort(data.sizes)
plt.style.use(ROOT / "experiments/figures.mplstyle")
figure, ax = plt.subplots(figsize=(6, 4))
lines = (("alone", "its rows alone", "C1", 0.17), ("effects", "with all hospitals", "C0", -0.17))
for name, label, color, offset in lines:
    effect = names[name].draws["effect"][..., 0].reshape(-1, data.num_clients)[:, order]
    low, high = np.quantile(effect, [0.05, 0.95], axis=0)
    y = np.arange(data.num_clients) + offset
    ax.hlines(y, low, high, color=color)
    ax.plot(effect.mean(0), y, "o", color=color, markersize=3.5, label=label)
mean = names["fitted"].samples.constrained["mu"].mean()
ax.axvline(mean, color="black", linewidth=0.8, linestyle="--", label="posterior mean of mu")
ax.set_yticks(
    np.arange(data.num_clients), [f"{data.labels[i]} ({data.sizes[i]} rows)" for i in order]
)
ax.set_xlabel("effect, in log odds: mean and 90 % interval")
ax.legend(loc="upper left")
plt.savefig(Path(__file__).with_suffix(".png"))
