"""Tables 2 and 5 and Figure 2 of Guo et al. (2023): CIFAR-100, or a smaller CIFAR-10."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax

from experiments import checks, spreading
from experiments.fed_ep import federations, image_runs
from experiments.fed_ep.image_figures import draw
from experiments.fed_ep.methods import Federation
from fedmcmc import Placement

__all__ = ["Config", "draw", "federation", "run"]


@dataclass(frozen=True)
class Config(image_runs.Settings):
    """Settings; the defaults are the paper's.

    Attributes
    ----------
    dataset
        ``"cifar100"``, the published federation of 500 clients, or ``"cifar10"``, as
        `num_clients` clients by label skew.
    concentration
        Of the label skew of CIFAR-10.
    """

    DATASETS: ClassVar[tuple[str, ...]] = ("cifar100", "cifar10")

    dataset: str = "cifar100"
    concentration: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        listed = " or ".join(repr(name) for name in self.DATASETS)
        checks.require(self.dataset in self.DATASETS, f"dataset must be {listed}", self.dataset)
        checks.positive(self, "concentration")


def run(config: Config, out: Path, placement: Placement = spreading.ONE_DEVICE) -> dict[str, Any]:
    """Run all methods; write the curves' figure."""
    return image_runs.execute(config, federation(config), out, placement)


def federation(config: Config) -> Federation:
    """Return the federation that the settings ask for."""
    key = jax.random.key(config.seed)
    if config.dataset == "cifar100":
        return federations.cifar100(key)
    return federations.cifar10(
        key,
        config.num_clients,
        config.num_rows,
        config.num_test,
        concentration=config.concentration,
    )
