"""Draw a predictive check and the shifts of the posterior without each clinic.

Runs the snippets of docs/guides/criticism.md that these need.
"""

import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).parents[2]
NEEDED = ("fitted = ", "check = ", "left_out = ")
page = (ROOT / "docs/guides/criticism.md").read_text()
names = {}
for snippet in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
    if any(f"\n{start}" in f"\n{snippet}" for start in NEEDED):
        exec(snippet, names)

check, left_out = names["check"], names["left_out"]
plt.style.use(ROOT / "experiments/figures.mplstyle")
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8))
j = check.names.index("dose squared of responders")
left.hist(check.replicated[:, j], bins=30, color="C5")
left.axvline(check.observed[j], color="C1", label="observed")
left.set_xlabel("sum of squared doses of responders")
left.set_ylabel("replicated sums")
left.set_title(f"predictive check, p = {check.p_values[j]:.2f}")
left.legend()
y = np.arange(len(left_out.labels))[::-1]
for k, (name, color) in enumerate(zip(("intercept", "slope"), ("C5", "C0"), strict=True)):
    right.barh(y + 0.18 - 0.36 * k, left_out.shift[:, k], 0.34, color=color, label=name)
right.axvline(0, color="black", linewidth=0.8)
right.set_yticks(y, left_out.labels)
right.set_xlabel("mean with minus mean without, posterior sds")
right.set_title("influence of each clinic")
right.legend(loc="center left")
plt.savefig(Path(__file__).with_suffix(".png"))
