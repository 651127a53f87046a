"""Section 5.3 of Liang et al. (2024): logistic regression on Fashion-MNIST."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.fa_hmc import image_sweeps
from experiments.fa_hmc.image_figures import draw

__all__ = ["Config", "draw", "run"]


@dataclass(frozen=True)
class Config(image_sweeps.Settings):
    """Settings; see `experiments.fa_hmc.image_sweeps.Settings`."""


def run(config: Config, out: Path) -> dict[str, Any]:
    """Run both sweeps; write curves and figures."""
    return image_sweeps.execute(config, out)
