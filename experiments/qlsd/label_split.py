"""Figure S4 of Vono et al. (2022): how the labels of MNIST are spread over the clients."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import checks, images
from experiments.figures import figure
from experiments.qlsd.image_federations import dominant_digits

__all__ = ["PAPER", "TITLE", "Config", "commentary", "draw", "run"]

TITLE = "Figure S4: labels of the clients of MNIST"
PAPER = """
Section S5.3 splits MNIST so that each client has a dominant label, and Figure S4 shows how many
images of each label a client has. Our copy of the paper lacks the share of the dominant label and
the number of clients: ours are 80 % and 20, the defaults of the runs on MNIST. The sentence may
also mean a share of all training images of that label; ours is a share of the client's images.
"""


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


def commentary(metrics: dict[str, Any]) -> str:
    """Return the clients' sizes and the shares of their dominant labels."""
    sizes, dominant = np.array(metrics["counts"]).sum(axis=1), shares(metrics)
    return (
        f"{sizes.sum():,} images of {len(sizes)} clients, at least {sizes.min():,} each; "
        f"{100 * dominant.min():.3g} to {100 * dominant.max():.3g} % of a client's images are of "
        "its most frequent label."
    )


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
