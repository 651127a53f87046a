"""Section 3.3, Figure 4 (middle, right) of Guo et al. (2023): linear models on CIFAR."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments import checks, spreading
from experiments.fed_ep import cifar, federations, image_runs
from experiments.fed_ep.image_figures import draw
from experiments.fed_ep.methods import Federation
from fedmcmc import Placement

__all__ = ["Config", "draw", "run"]

METHODS = ("FedAvg", "FedEP (I)", "FedEP (V)")


@dataclass(frozen=True)
class Config(cifar.Config):
    """Settings; the defaults are the paper's for networks, as it states no others.

    Attributes
    ----------
    num_components
        Principal components; zero for all pixels.
    scaled
        Whether the components' coordinates are scaled to variance one.
    """

    num_components: int = 100
    scaled: bool = False
    model: str = "linear"
    methods: tuple[str, ...] = METHODS

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.at_least(0, self, "num_components")


def run(config: Config, out: Path, placement: Placement = spreading.ONE_DEVICE) -> dict[str, Any]:
    """Run all methods; write the curves' figure."""
    federation = cifar.federation(config)
    if config.num_components:
        federation = federations.with_pca(federation, config.num_components, scaled=config.scaled)
    found = image_runs.execute(config, federation, out, placement)
    return found | {"information": _spread(federation)}


def _spread(federation: Federation) -> float:
    """Return how unlike the weights' diagonal Fisher informations are at zero weights.

    There the information about a weight is the sum of its feature's squares, up to a factor that
    all weights share. Returned is the 90 % quantile over the 10 % quantile.
    """
    features = np.asarray(federation.data.rows.features, np.float64)
    low, high = np.quantile((features**2).mean(axis=0).ravel(), [0.1, 0.9])
    return float(high / low)
