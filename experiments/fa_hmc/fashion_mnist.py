"""Section 5.3 of Liang et al. (2024): logistic regression on Fashion-MNIST."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.fa_hmc import image_findings, image_sweeps
from experiments.fa_hmc.image_figures import draw

__all__ = ["PAPER", "TITLE", "Config", "commentary", "draw", "run"]

TITLE = "Section 5.3: logistic regression on Fashion-MNIST"

PAPER = f"""
Multinomial logistic regression, several chains, `L` in 1, 10, 50, 100 and `T` in 1, 10, 20, 50,
100. The paper finds `L = 50` best in accuracy, Brier score and negative log likelihood (NLL), and
`L = 1` (FA-LD) worst in all but accuracy, "under the same budgets of communication and
computation": `L = 50` has an ECE up to 26 % and an NLL up to 2 % better than a value that our copy
has lost, presumably `L = 1`. `T = 1` (lost, too) is worst in all four, `T = 50` best in Brier score
and `T = 20` in NLL.
{image_findings.SETTINGS}
The batch size of this section is lost too; it is that of section 5.5, 1000.
"""

FINDINGS = {
    "L": {
        "accuracy": "50 best, 1 second worst",
        "brier": "50 best, 1 worst",
        "ece": "1 worst, 50 small (26 % better)",
        "nnll": "50 best (2 % better), 1 worst",
    },
    "T": {
        "accuracy": "1 worst",
        "brier": "50 best, 1 worst",
        "ece": "1 worst",
        "nnll": "20 best, 1 worst",
    },
}


@dataclass(frozen=True)
class Config(image_sweeps.Settings):
    """Settings; see `experiments.fa_hmc.image_sweeps.Settings`."""


def run(config: Config, out: Path) -> dict[str, Any]:
    """Run both sweeps; write curves and figures."""
    return image_sweeps.execute(config, out)


def commentary(metrics: dict[str, Any]) -> str:
    """Return what a run says about the paper's conclusions, for the report."""
    return image_findings.commentary(metrics, FINDINGS)
