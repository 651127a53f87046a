"""Section 5.5 of Liang et al. (2024): logistic regression on KMNIST."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.fa_hmc import image_findings, image_sweeps
from experiments.fa_hmc.image_figures import draw
from experiments.fa_hmc.image_findings import LOST_ABOVE, LOST_ONE

__all__ = ["PAPER", "TITLE", "Config", "commentary", "draw", "run"]

TITLE = "Section 5.5: logistic regression on KMNIST"

PAPER = f"""
Multinomial logistic regression, batches of 1000, `L` in 1, 10, 50, 100 and `T` in 1, 10, 50. The
paper finds that the best `L` differs between scores and is never 1 (FA-LD), and that `T`
{LOST_ABOVE} is better than "the standard baseline"
{LOST_ONE} in all scores. Negative log likelihoods are ours. Where KMNIST's training images are not
to be had, its 10000 test images are split into 8000 to learn from and 2000 to test on; the run says
which it used.
{image_findings.AS_BEFORE}
"""

FINDINGS = {
    "L": dict.fromkeys(("accuracy", "brier", "ece"), "above 1 best"),
    "T": dict.fromkeys(("accuracy", "brier", "ece"), "above 1 (lost) better than 1 (lost)"),
}


@dataclass(frozen=True)
class Config(image_sweeps.Settings):
    """Settings; see `experiments.fa_hmc.image_sweeps.Settings`."""

    dataset: str = "kmnist"
    local_steps: tuple[int, ...] = (1, 10, 50)


def run(config: Config, out: Path) -> dict[str, Any]:
    """Run both sweeps; write curves and figures."""
    return image_sweeps.execute(config, out)


def commentary(metrics: dict[str, Any]) -> str:
    """Return what a run says about the paper's conclusions, for the report."""
    return image_findings.commentary(metrics, FINDINGS)
