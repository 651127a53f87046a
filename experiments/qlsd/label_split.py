"""Figure S4 of Vono et al. (2022): how the labels of MNIST are spread over the clients."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import checks, images
from experiments.figures import figure
from experiments.qlsd.image_federations import dominant_digits

__all__ = ["TITLE", "Config", "draw", "run", "shares"]

TITLE = "Figure S4: labels of the clients of MNIST"


@dataclass(frozen=True)
class Config:
    """Settings; those of `experiments.qlsd.mnist`.

    Attributes
    ----------
    num_clients
        Number of clients.
    proportion
        Of a client's images that are of its dominant label.
    """

    seed: int = 0
    num_clients: int = 20
    proportion: float = 0.8

    def __post_init__(self) -> None:
        checks.at_least(1, self, "num_clients")
        checks.between(0, 1, self, "proportion")


def run(config: Config, out: Path) -> dict[str, Any]:
    """Split the training images and count their labels; write the figure."""
    split_key = jax.random.split(jax.random.key(config.seed), 4)[0]  # as in the runs on MNIST
    digits = dominant_digits(split_key, images.mnist(), config.num_clients, config.proportion).data
    clients = [np.asarray(digits.client_rows(i).label) for i in range(config.num_clients)]
    counts = np.array([np.bincount(labels, minlength=10) for labels in clients])
    found = {"counts": counts.tolist(), "proportion": config.proportion}
    return found | {"figures": draw(found, out)}


def shares(metrics: dict[str, Any]) -> np.ndarray:
    """Return the share of each client's most frequent label."""
    counts = np.array(metrics["counts"])
    dominant: np.ndarray = counts.max(axis=1) / counts.sum(axis=1)
    return dominant


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Draw how many images of each label each client has."""
    name, counts = "labels.png", np.array(metrics["counts"])
    with figure(out / name, size=(5.6, 2.8)) as (fig, axes):
        axis = axes[0, 0]
        image = axis.imshow(counts.T, cmap="Blues", aspect="auto", origin="lower")
        axis.set(xlabel="client", ylabel="label", yticks=np.arange(10))
        axis.set_xticks(np.arange(len(counts)), np.arange(1, len(counts) + 1))
        axis.grid(visible=False)
        fig.colorbar(image, label="images")
    return [{"file": name, "caption": "Figure S4: images of each label that each client has."}]
