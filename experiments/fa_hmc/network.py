"""Section 5.4 of Liang et al. (2024): a network on Fashion-MNIST."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.fa_hmc import image_findings, image_sweeps
from experiments.fa_hmc.image_figures import draw
from experiments.fa_hmc.image_findings import LOST_ONE

__all__ = ["PAPER", "TITLE", "Config", "commentary", "draw", "run"]

TITLE = "Section 5.4: a two-layer network on Fashion-MNIST"

PAPER = f"""
A network with one hidden layer, 784 to 512 to 10, and rectifiers (the paper says two hidden layers;
its footnote on the widths gives two shapes, which we read as those of the weight matrices); one
chain, `L` in 1, 10, 50, 100 and `T` in 1, 10, 50. The paper finds an `L` above 1 notably better
than FA-LD (`L = 1`) in accuracy and ECE, FA-LD slightly better in Brier score, and one `T`
{LOST_ONE} the worst. Negative log likelihoods are ours.
{image_findings.AS_BEFORE}
"""

FINDINGS = {
    "L": {
        "accuracy": "above 1 best",
        "brier": "1 slightly best",
        "ece": "above 1 best",
    },
    "T": {
        "accuracy": f"one worst {LOST_ONE}",
        "brier": f"one worst {LOST_ONE}",
        "ece": f"one worst {LOST_ONE}",
    },
}


@dataclass(frozen=True)
class Config(image_sweeps.Settings):
    """Settings; see `experiments.fa_hmc.image_sweeps.Settings`."""

    model: str = "mlp"
    local_steps: tuple[int, ...] = (1, 10, 50)
    num_chains: int = 1


def run(config: Config, out: Path) -> dict[str, Any]:
    """Run both sweeps; write curves and figures."""
    return image_sweeps.execute(config, out)


def commentary(metrics: dict[str, Any]) -> str:
    """Return what a run says about the paper's conclusions, for the report."""
    return image_findings.commentary(metrics, FINDINGS)
