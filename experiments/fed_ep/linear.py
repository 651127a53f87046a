"""Section 3.3, Figure 4 (middle, right) of Guo et al. (2023): linear models on CIFAR."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments import checks, output, spreading
from experiments.fed_ep import cifar, federations, findings, image_runs
from experiments.fed_ep.differences import PARTS, difference, margin
from experiments.fed_ep.image_figures import draw
from experiments.fed_ep.methods import Federation
from fedmcmc import Placement

__all__ = ["PAPER", "TITLE", "Config", "commentary", "draw", "run"]

TITLE = "Figure 4 (middle, right): linear models on CIFAR"
PAPER = """
Why a scaled identity suffices for networks: on CIFAR-100 a "small" linear model on principal
components (10.1 thousand parameters, which is 100 components), where natural-gradient variational
inference converges faster than a scaled identity, and a "large" one on all pixels (172.9 thousand),
where it does not. The paper's reason is that covariances become harder to estimate as the model
grows. CIFAR-10's linear models here are both smaller than its small one, so that nothing is said of
size.

The paper says "PCA'ed features" and not whether they are scaled. The more a component varies, the
more the rows say about its weights, which a diagonal (V) can hold and a scaled identity (I) cannot.
`cifar10_components_raw_small` keeps the variances, as principal components do and as `linear` does;
`cifar10_components_small` scales them, which leaves all weights about as well known as each other.
Step sizes, `covariance` and clipping are those for networks (the paper states no others), `scale`
is 1, as in Eq. 4, where full size has that of the released code, and neither method is tuned.
"""
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


def commentary(metrics: dict[str, Any]) -> str:
    """Return our figures, and which inference is ahead how long after the burn-in."""
    settings = metrics["settings"]
    first, window = settings["num_burnin"], settings["window"]
    rows = []
    for name, values in metrics["by_round"].items():
        row: dict[str, Any] = {"method": name}
        for after in (window, 2 * window, 4 * window):
            if first + after <= len(values):
                part = values[first + after - window : first + after]
                row[f"{after} rounds after the burn-in"] = sum(part) / window
        rows.append(row)
    text = findings.introduction(metrics)
    ahead = f"Test accuracy (%), means of {window} rounds:"
    parts = (
        text,
        ahead,
        output.markdown_table(rows),
        _verdict(metrics),
        findings.fallen(metrics),
        findings.trouble(metrics),
    )
    return "\n\n".join(x for x in parts if x)


def _verdict(metrics: dict[str, Any]) -> str:
    """Say whether natural gradients are ahead of a scaled identity, early and at their best."""
    settings = metrics["settings"]
    if not {METHODS[1], METHODS[2]} <= {row["method"] for row in metrics["table"]}:
        return ""
    early, best, end = (difference(metrics, METHODS[2], METHODS[1], part) for part in PARTS)
    window = settings["window"]
    text = (
        f"V over I, in points of accuracy: {early} in the first {window} rounds after the burn-in, "
        f"{best} at their best, {end} in the last {window} rounds"
    )
    if early.error is not None:
        num = settings["num_seeds"]
        text += (
            "; standard errors are those of differences within seeds, which all have the same "
            f"clients and test images. With {num} seeds a difference counts beyond "
            f"{margin(num):.1f} of them (95 %, by Student's law)"
        )
    if "information" in metrics:
        text += (
            ". At weights of zero the Fisher informations of the middle 80 % of the weights lie "
            f"within a factor of {metrics['information']:.3g} of one another"
        )
    return f"{text}."
