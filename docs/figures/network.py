"""Draw docs/figures/network.png: calibration of the predictions in docs/tutorials/network.md."""

import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from fedmcmc import metrics

FOLDER = Path(__file__).parent
PREDICTIONS = {
    "FedAvg": "FedAvg",
    "wide, mean": "mean of the wide Gaussian",
    "wide, draws": "draws of the wide Gaussian",
}
MIN_ROWS = 10

page = (FOLDER.parent / "tutorials" / "network.md").read_text()
names = {}
for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
    exec(block, names)

plt.style.use(FOLDER.parents[1] / "experiments" / "figures.mplstyle")
figure, ax = plt.subplots(figsize=(4.6, 3.6))
ax.plot([0, 1], [0, 1], color="#888888", linewidth=1, label="calibrated")
for name, label in PREDICTIONS.items():
    bins = metrics.reliability(names["probabilities"][name], names["truth"], num_bins=10)
    enough = np.asarray(bins.num_rows) >= MIN_ROWS
    confidence, accuracy = np.asarray(bins.confidence), np.asarray(bins.accuracy)
    ax.plot(confidence[enough], accuracy[enough], "o-", label=label)
ax.set(xlabel="confidence", ylabel="accuracy", xlim=(0.2, 1.02), ylim=(0.0, 1.02))
ax.legend(loc="lower right")
plt.savefig(Path(__file__).with_suffix(".png"))
