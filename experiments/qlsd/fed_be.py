"""What FedBE's accuracy in Table S2 of Vono et al. (2022) depends on: labels and rounds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.ticker import NullFormatter

from experiments import checks, images, spreading
from experiments.figures import COLORS, figure, points
from experiments.models import LeNet5
from experiments.qlsd import networks
from experiments.qlsd.federations import some_rows
from experiments.qlsd.image_federations import dominant_digits
from experiments.qlsd.network_methods import fed_be_kernel
from fedmcmc import Placement

__all__ = ["ENSEMBLES", "TITLE", "Config", "draw", "run"]

TITLE = "FedBE, rounds and dominant labels"
ENSEMBLES = ("gaussian", "dirichlet")
PAPERS = {"gaussian": "FedBE-Gauss", "dirichlet": "FedBE-Dirichlet"}  # names in Table S2


@dataclass(frozen=True)
class Config:
    """Settings; those of FedBE in Table S2 where the paper states them.

    Attributes
    ----------
    num_rows, num_test
        Training and test images, zero for all there are.
    shares
        Of a client's images that are of its dominant label.
    rounds
        After how many the predictions are scored.
    num_models, concentration
        Of the ensembles; not stated.
    """

    seed: int = 0
    num_clients: int = 20
    num_rows: int = 0
    num_test: int = 0
    shares: tuple[float, ...] = (0.5, 0.8, 0.95, 0.99)
    rounds: tuple[int, ...] = (2, 4, 10, 20, 40)
    num_local_steps: int = 250
    batch_size: int = 64
    learning_rate: float = 1e-2
    num_models: int = 10
    concentration: float = 0.5

    def __post_init__(self) -> None:
        checks.at_least(0, self, "num_rows", "num_test")
        checks.at_least(1, self, "num_clients", "num_local_steps", "batch_size", "num_models")
        checks.positive(self, "learning_rate", "concentration")
        inside = len(self.shares) > 0 and all(0 < share < 1 for share in self.shares)
        checks.require(inside, "shares must lie in (0, 1)", self.shares)
        rising = len(self.rounds) > 0 and list(self.rounds) == sorted(set(self.rounds))
        checks.require(rising and self.rounds[0] >= 2, "rounds must rise from 2", self.rounds)


def run(config: Config, out: Path, placement: Placement = spreading.ONE_DEVICE) -> dict[str, Any]:
    """Run both ensembles on every federation; write the figure."""
    split_key, test_key, start_key, run_key = jax.random.split(jax.random.key(config.seed), 4)
    digits = images.mnist()
    digits = digits._replace(x_train=digits.x_train[..., None], x_test=digits.x_test[..., None])
    chosen = some_rows(test_key, len(digits.y_test), config.num_test or None)
    table = []
    for share in config.shares:
        federation = dominant_digits(
            split_key, digits, config.num_clients, share, num_rows=config.num_rows or None
        )
        posterior, predict_fn = networks.make(LeNet5(method="banded"), federation.data, 1.0)
        start = posterior.init_fn(start_key)
        inputs, labels = federation.test.features[chosen], federation.test.label[chosen]
        for ensemble in ENSEMBLES:
            samples = spreading.sample(
                run_key,
                fed_be_kernel(
                    posterior,
                    learning_rate=config.learning_rate,
                    num_local_steps=config.num_local_steps,
                    ensemble=ensemble,
                    batch_size=config.batch_size,
                    concentration=config.concentration,
                    num_models=config.num_models,
                ),
                federation.data,
                start,
                num_rounds=config.rounds[-1],
                placement=placement,
                progress=False,
            )
            for num in config.rounds:
                kept = jax.tree.map(lambda leaf, n=num: leaf[:, n // 2 : n], samples.draws)
                predicted = networks.predict(predict_fn, kept, inputs).argmax(axis=1)
                rate = float(np.mean(predicted == labels))
                table.append(
                    {
                        "ensemble": ensemble,
                        "share": share,
                        "rounds": num,
                        "accuracy %": 100 * rate,
                        "s.e.": 100 * (rate * (1 - rate) / len(labels)) ** 0.5,
                    }
                )
    found = {"table": table, "num_rows": federation.data.num_rows, "num_test": len(labels)}
    return found | {"figures": draw(found, out)}


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Draw accuracies against rounds, a panel an ensemble, a line a share."""
    shares = sorted({row["share"] for row in metrics["table"]})
    shades = [COLORS[c] for c in ("black", "blue", "red", "green", "orange", "pink")]
    with figure(out / "rounds.png", 1, 2, (3.8, 2.9), sharey=True) as (_, axes):
        for panel, ensemble in zip(axes[0], ENSEMBLES, strict=True):
            for share, shade in zip(shares, shades, strict=False):
                rows = [
                    row
                    for row in metrics["table"]
                    if (row["ensemble"], row["share"]) == (ensemble, share)
                ]
                at, middle, error = (
                    [row[name] for row in rows] for name in ("rounds", "accuracy %", "s.e.")
                )
                points(panel, at, middle, error, color=shade, label=f"{100 * share:g} %", fmt="o-")
            panel.set(xscale="log", xlabel="rounds", title=PAPERS[ensemble])
            panel.set_xticks(at, [f"{rounds}" for rounds in at], minor=False)
            panel.xaxis.set_minor_formatter(NullFormatter())
        axes[0, 0].set_ylabel("accuracy (%)")
        axes[0, 0].legend(title="of one label")
    caption = (
        "Accuracy on the test images against rounds of FedBE, by the share of each client's "
        "dominant label; bars: two standard errors of the test images."
    )
    return [{"file": "rounds.png", "caption": caption}]
