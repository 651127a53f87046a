"""Section 3.3, Figure 4 (middle, right) of Guo et al. (2023): linear models on CIFAR."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments import checks, output, spreading
from experiments.fed_ep import cifar, federations, findings, image_runs
from experiments.fed_ep.image_figures import draw
from fedmcmc import Placement

__all__ = ["COMMENT_ON_ALL", "PAPER", "TITLE", "Config", "commentary", "draw", "run"]

TITLE = "Figure 4 (middle, right): linear models on CIFAR"
COMMENT_ON_ALL = True
PAPER = """
Why a scaled identity suffices for networks: on CIFAR-100 a "small" linear model on 100 principal
components (10.1 thousand parameters), where natural-gradient variational inference converges faster
than a scaled identity, and a "large" one on all pixels (172.9 thousand), where it does not.
"""
METHODS = ("FedAvg", "FedEP (I)", "FedEP (V)")


@dataclass(frozen=True)
class Config(cifar.Config):
    """Settings; the defaults are the paper's for networks, as it states no others.

    Attributes
    ----------
    num_components
        Principal components; zero for all pixels.
    """

    num_components: int = 100
    model: str = "linear"
    methods: tuple[str, ...] = METHODS

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.at_least(0, self, "num_components")


def run(config: Config, out: Path, placement: Placement = spreading.ONE_DEVICE) -> dict[str, Any]:
    """Run all methods; write the curves' figure."""
    federation = cifar.federation(config)
    if config.num_components:
        federation = federations.with_pca(federation, config.num_components)
    return image_runs.execute(config, federation, out, placement)


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
    parts = (text, ahead, output.markdown_table(rows), _verdict(metrics), findings.trouble(metrics))
    return "\n\n".join(x for x in parts if x)


def _verdict(metrics: dict[str, Any]) -> str:
    """Say whether natural gradients are ahead of a scaled identity, early and at their best."""
    settings = metrics["settings"]
    first, window = settings["num_burnin"], settings["window"]
    curves = [metrics["by_round"].get(name) for name in METHODS[1:]]
    if any(curve is None or len(curve) < first + window for curve in curves):
        return ""
    sums = [np.convolve(curve, np.ones(window) / window, mode="valid") for curve in curves]
    lead = [float(sums[1][first] - sums[0][first]), float(sums[1].max() - sums[0].max())]
    noise = [
        100 * np.sqrt(2 * rate * (1 - rate) / settings["num_test"])
        for rate in (sums[0][first] / 100, sums[0].max() / 100)
    ]
    told = [
        f"{d:+.1f} ({'beyond' if abs(d) > findings.TIMES * s else 'within'} the noise)"
        for d, s in zip(lead, noise, strict=True)
    ]
    return (
        f"V over I, in points of accuracy: {told[0]} in the first {window} rounds after the "
        f"burn-in, {told[1]} at their best. Noise: {findings.TIMES:g} standard errors that "
        "independent test sets of this size would give such a difference."
        + (
            " Why natural gradients have no lead is unexplained; whether more of their epochs give "
            "them one is tried under Figure 6."
            if abs(lead[0]) <= findings.TIMES * noise[0]
            else ""
        )
    )
