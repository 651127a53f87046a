"""Figures of the experiments with networks."""

from pathlib import Path

import numpy as np

from experiments.figures import COLORS, figure
from fedmcmc import metrics

__all__ = ["calibration", "entropies", "entropies_in_out"]

PALETTE = [COLORS[c] for c in ("black", "sky", "blue", "orange", "red", "pink", "green", "yellow")]
LINES = ("-", "--")


def _style(i: int) -> dict[str, str]:
    return {"color": PALETTE[i % len(PALETTE)], "ls": LINES[i // len(PALETTE) % 2]}


def calibration(
    out: Path, found: dict[str, list[np.ndarray]], labels: np.ndarray, num_bins: int
) -> list[dict[str, str]]:
    """Draw accuracy against credibility, and accuracy minus confidence by bins of confidence."""
    name = "calibration.png"
    with figure(out / name, columns=2) as (_, axes):
        for i, (method, (probabilities, *_rest)) in enumerate(found.items()):
            curve = metrics.credibility_accuracy_curve(probabilities, labels)
            axes[0, 0].plot(curve.threshold, curve.accuracy, label=method, **_style(i))
            bins = metrics.reliability(probabilities, labels, num_bins)
            filled = np.asarray(bins.num_rows) > 0
            axes[0, 1].plot(
                np.asarray(bins.confidence)[filled],
                np.asarray(bins.gap)[filled],
                marker=".",
                **_style(i),
            )
        axes[0, 0].set(xlabel="least probability of the predicted class", ylabel="accuracy")
        axes[0, 1].axhline(0, color="grey", lw=1)
        axes[0, 1].set(xlabel="confidence", ylabel="accuracy - confidence")
        axes[0, 0].legend(ncols=2)
    return [
        {
            "file": name,
            "caption": "Left: accuracy on the test images whose predicted class has at least some "
            f"probability. Right: accuracy minus confidence in {num_bins} bins of confidence "
            "(empty ones left out), below zero where predictions are overconfident.",
        }
    ]


def entropies_in_out(out: Path, found: dict[str, list[np.ndarray]]) -> list[dict[str, str]]:
    """Draw histograms of the predictive entropy in and out of distribution, a panel a method."""
    name = "entropy.png"
    columns = 5
    rows = -(-len(found) // columns)
    edges = np.linspace(0, np.log(10), 31)
    with figure(out / name, rows, columns, (2.1, 1.9), sharex=True) as (_, axes):
        for axis, (method, both) in zip(axes.flat, found.items(), strict=False):
            for part, color, probabilities in zip(
                ("in", "out"), ("blue", "red"), both, strict=True
            ):
                entropy = np.asarray(metrics.predictive_entropy(probabilities))
                axis.hist(entropy, edges, density=True, color=COLORS[color], alpha=0.5, label=part)
            axis.set_title(method)
            axis.set_yscale("log")
        for axis in axes.flat[len(found) :]:
            axis.axis("off")
        for axis in axes[-1]:
            axis.set_xlabel("entropy (nats)")
        axes[0, 0].legend()
    return [
        {
            "file": name,
            "caption": "Densities of the predictive entropy of digits (in distribution) and of "
            "clothes (out of distribution).",
        }
    ]


def entropies(out: Path, found: dict[str, list[np.ndarray]]) -> list[dict[str, str]]:
    """Draw the share of test images whose predictive entropy is at most some value."""
    name = "entropy.png"
    with figure(out / name) as (_, axes):
        for i, (method, (probabilities, *_rest)) in enumerate(found.items()):
            entropy = np.sort(np.asarray(metrics.predictive_entropy(probabilities)))
            share = np.arange(1, len(entropy) + 1) / len(entropy)
            axes[0, 0].plot(entropy, share, label=method, **_style(i))
        axes[0, 0].set(xlabel="predictive entropy (nats)", ylabel="share of test images")
        axes[0, 0].legend(ncols=2)
    return [
        {
            "file": name,
            "caption": "Share of the test images whose predictive entropy is at most so much.",
        }
    ]
