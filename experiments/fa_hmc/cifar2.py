"""Section 5.5 of Liang et al. (2024): logistic regression on two classes of CIFAR-10 (CF2)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.fa_hmc import image_findings, image_sweeps
from experiments.fa_hmc.image_figures import draw
from experiments.fa_hmc.image_findings import LOST_ABOVE, LOST_ONE

__all__ = ["PAPER", "TITLE", "Config", "commentary", "draw", "run"]

TITLE = "Section 5.5: logistic regression on two classes of CIFAR-10"

PAPER = f"""
Logistic regression of airplanes against automobiles (CF2), batches of 1000, `L` in 1, 10, 50, 100
and `T` in 1, 10, 50. The paper finds `L = 10` best in accuracy and Brier score and a larger one in
ECE, never `L = 1` (FA-LD), and `T` {LOST_ABOVE} better than "the
standard baseline" {LOST_ONE} but for accuracy. Negative log likelihoods are ours. The model has a
vector of weights a class, whose difference is that of the binary model with twice the prior
variance.
{image_findings.AS_BEFORE}
"""

FINDINGS = {
    "L": {
        "accuracy": "10 best",
        "brier": "10 best",
        "ece": "above 10 best",
    },
    "T": {
        "accuracy": "above 1 (lost) not better than 1 (lost)",
        "brier": "above 1 (lost) better than 1 (lost)",
        "ece": "above 1 (lost) better than 1 (lost)",
    },
}


@dataclass(frozen=True)
class Config(image_sweeps.Settings):
    """Settings; see `experiments.fa_hmc.image_sweeps.Settings`."""

    dataset: str = "cifar2"
    local_steps: tuple[int, ...] = (1, 10, 50)


def run(config: Config, out: Path) -> dict[str, Any]:
    """Run both sweeps; write curves and figures."""
    return image_sweeps.execute(config, out)


def commentary(metrics: dict[str, Any]) -> str:
    """Return what a run says about the paper's conclusions, for the report."""
    return image_findings.commentary(metrics, FINDINGS)
