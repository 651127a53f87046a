"""Section 5.3 of Liang et al. (2024): logistic regression on Fashion-MNIST."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.fa_hmc import image_findings, image_sweeps
from experiments.fa_hmc.image_figures import draw
from experiments.fa_hmc.image_findings import LOST_ONE

__all__ = ["PAPER", "TITLE", "Config", "commentary", "draw", "run"]

TITLE = "Section 5.3: logistic regression on Fashion-MNIST"

PAPER = f"""
Multinomial logistic regression, several chains, `L` in 1, 10, 50, 100 and `T` in 1, 10, 20, 50,
100. The paper finds FA-LD (`L = 1`) the worst in Brier score, ECE and negative log likelihood (NLL)
and the second worst in accuracy, "under the same budgets of communication and computation". One `L`
is best in accuracy, Brier score and NLL (value lost; presumably 50, as that is called the best
choice). Its ECE is up to 26 % and its NLL up to 2 % better than those of another `L` {LOST_ONE}.
One `T` {LOST_ONE} is the worst in all four scores; `T = 50` is best in Brier score and `T = 20` in
NLL.
{image_findings.SETTINGS}
The batch size of this section is lost too; we take that of section 5.5, 1000.
"""

FINDINGS = {
    "L": {
        "accuracy": "50 (inferred) best, 1 second worst",
        "brier": "50 (inferred) best, 1 worst",
        "ece": "1 worst, 50 (inferred) up to 26 % better",
        "nnll": "50 (inferred) best, up to 2 % better, 1 worst",
    },
    "T": {
        "accuracy": f"one worst {LOST_ONE}",
        "brier": f"50 best, one worst {LOST_ONE}",
        "ece": f"one worst {LOST_ONE}",
        "nnll": f"20 best, one worst {LOST_ONE}",
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
