"""Table 6 and Figure 7 of Guo et al. (2023): EMNIST-62, or a smaller MNIST by dominant label."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from experiments import checks, spreading
from experiments.fed_ep import federations, image_runs, methods
from experiments.fed_ep.image_figures import draw
from fedmcmc import Placement

__all__ = ["Config", "draw", "run"]

COVARIANCE = 5e-3  # the paper's


@dataclass(frozen=True)
class Config(image_runs.Settings):
    """Settings; the defaults are the paper's.

    Attributes
    ----------
    dataset
        ``"emnist62"``, the published federation by writer, or ``"mnist"``, as `num_clients`
        clients of which each is dominated by a label.
    proportion
        Of MNIST's clients, of the dominant label.
    """

    dataset: str = "emnist62"
    proportion: float = 0.5
    model: str = "emnist_cnn"
    cohort_size: int = 100
    num_burnin: int = 200
    num_rounds: int = 500
    num_epochs: int = 20
    pa_burnin: int = 10
    weight_decay: float = 0.0
    covariance: float = COVARIANCE
    scale: float = 1.0
    checkpoints: tuple[int, ...] = (300, 500)
    thresholds: tuple[float, ...] = (86.0, 86.5)
    methods: tuple[str, ...] = tuple(m for m in methods.METHODS if not m.startswith("FedEP "))

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require(
            self.dataset in ("emnist62", "mnist"),
            "dataset must be 'emnist62' or 'mnist'",
            self.dataset,
        )
        checks.require(0 <= self.proportion <= 1, "proportion must lie in [0, 1]", self.proportion)


def run(config: Config, out: Path, placement: Placement = spreading.ONE_DEVICE) -> dict[str, Any]:
    """Run all methods; write the curves' figure."""
    if config.dataset == "emnist62":
        federation = federations.emnist62()
    else:
        federation = federations.mnist(
            jax.random.key(config.seed),
            config.num_clients,
            config.num_rows,
            config.num_test,
            proportion=config.proportion,
        )
    return image_runs.execute(config, federation, out, placement)
