"""Figures of the experiments with networks, from what `curves` keeps of their predictions."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.figures import COLORS, figure, points, some
from fedmcmc import metrics

__all__ = ["calibration", "curves", "entropies", "entropies_in_out"]

STYLES = {
    "HMC": ("pink", "-"),
    "start": ("yellow", "--"),
    "SGLD": ("black", "-"),
    "pSGLD": ("black", "--"),
    "QLSD": ("sky", "-"),
    "QLSD PP": ("sky", "--"),
    "QLSD++": ("blue", "-"),
    "QLSD++ PP": ("blue", "--"),
    "FedBE-Gauss": ("orange", "-"),
    "FedBE-Dirichlet": ("red", "--"),
    "DG-SGLD": ("green", "-"),
    "FSGLD": ("green", "--"),
}
"""Color and line of every method, the same in all figures."""
FEW = 10  # images in a bin, below which its accuracy says nothing
EDGES = np.linspace(0, np.log(10), 31)  # of histograms of entropies


def _style(method: str) -> dict[str, str]:
    color, line = STYLES[method]
    return {"color": COLORS[color], "ls": line}


def curves(
    probabilities: list[np.ndarray], labels: np.ndarray, num_bins: int
) -> dict[str, dict[str, np.ndarray] | list[dict[str, np.ndarray]]]:
    """Return what the figures show of one method.

    Parameters
    ----------
    probabilities
        Of the test images, and of those out of distribution if there are any.
    labels
        Of the test images.
    num_bins
        Of confidence.
    """
    first = probabilities[0]
    credible = metrics.credibility_accuracy_curve(first, labels)
    threshold, accuracy = np.asarray(credible.threshold), np.asarray(credible.accuracy)
    confidence = np.asarray(first).max(axis=-1)
    kept = some(len(threshold), 50)
    bins = metrics.reliability(first, labels, num_bins)
    many = np.asarray(bins.num_rows) >= FEW
    return {
        "credibility": {
            "threshold": threshold[kept],
            "accuracy": accuracy[kept],
            "num_rows": (confidence >= threshold[kept][:, None]).sum(axis=1),
        },
        "reliability": {
            name: np.asarray(getattr(bins, name))[many]
            for name in ("confidence", "gap", "num_rows")
        },
        "entropy": [_entropy(part) for part in probabilities],
    }


def _entropy(probabilities: np.ndarray) -> dict[str, np.ndarray]:
    entropy = np.asarray(metrics.predictive_entropy(probabilities))
    return {
        "quantiles": np.quantile(entropy, np.linspace(0, 1, 51)),
        "density": np.histogram(entropy, EDGES, density=True)[0],
    }


def calibration(out: Path, found: dict[str, Any], num_bins: int) -> list[dict[str, str]]:
    """Draw accuracy against credibility, and accuracy minus confidence by bins of confidence.

    Methods that are right for less than half as many images as the best are named, not drawn.
    """
    name = "calibration.png"
    drawn, left_out = _learned(found)
    with figure(out / name, columns=2, size=(4.8, 3.8)) as (fig, axes):
        left, right = axes[0]
        for i, (method, kept) in enumerate(drawn.items()):
            credible, bins = kept["credibility"], kept["reliability"]
            accuracy = np.array(credible["accuracy"], float)
            spread = 2 * _binomial(accuracy, credible["num_rows"])
            at, style = credible["threshold"], _style(method)
            left.plot(at, accuracy, label=method, **style)
            if i == 0:  # they are all about as wide, and would hide each other
                low, high = accuracy - spread, np.minimum(accuracy + spread, 1)
                left.fill_between(at, low, high, color=style["color"], alpha=0.2, lw=0)
            gap, confidence = (np.array(bins[k], float) for k in ("gap", "confidence"))
            num = np.array(bins["num_rows"], float)
            right_share = ((gap + confidence) * num + 2) / (num + 4)  # after Agresti and Coull
            error = _binomial(np.clip(right_share, 0, 1), num + 4)
            shifted = confidence + 0.002 * (i - len(drawn) / 2)
            points(right, shifted, gap, error, marker=".", lw=1, **style)
        left.set(xlabel="least probability of the predicted class", ylabel="accuracy")
        right.axhline(0, color="grey", lw=1)
        right.set(xlabel="confidence", ylabel="accuracy - confidence")
        fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return [
        {
            "file": name,
            "caption": "Left: accuracy on the test images whose predicted class has at least some "
            "probability (band: two binomial standard errors of the first method). Right: accuracy "
            f"minus confidence in those of {num_bins} bins of confidence that hold at least {FEW} "
            "images, with two binomial standard errors (two right and two wrong images added to "
            "each "
            f"bin, so that none is zero); below zero predictions are overconfident.{left_out}",
        }
    ]


def _learned(found: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the methods that predict, and words on the others for a caption."""
    right_for = {method: kept["credibility"]["accuracy"][0] for method, kept in found.items()}
    lost = [m for m, accuracy in right_for.items() if accuracy < max(right_for.values()) / 2]
    told = " and ".join(f"{m} ({100 * right_for[m]:.0f} % right)" for m in lost)
    drawn = {method: kept for method, kept in found.items() if method not in lost}
    return drawn, f" Not drawn: {told}." if lost else ""


def _binomial(accuracy: np.ndarray, num_rows: Any) -> np.ndarray:
    return np.sqrt(accuracy * (1 - accuracy) / np.maximum(np.array(num_rows, float), 1))


def entropies_in_out(out: Path, found: dict[str, Any]) -> list[dict[str, str]]:
    """Draw histograms of the predictive entropy in and out of distribution, a panel a method."""
    name = "entropy.png"
    drawn, left_out = _learned(found)
    columns = min(5, len(drawn))
    rows = -(-len(drawn) // columns)
    with figure(out / name, rows, columns, (2.1, 1.9), sharex=True, sharey=True) as (_, axes):
        for axis, (method, kept) in zip(axes.flat, drawn.items(), strict=False):
            for part, color, of in zip(
                ("digits", "clothes"), ("blue", "red"), kept["entropy"], strict=True
            ):
                axis.stairs(
                    of["density"], EDGES, fill=True, color=COLORS[color], alpha=0.5, label=part
                )
            axis.set_title(method)
            axis.set_yscale("log")
        for axis in axes.flat[len(drawn) :]:
            axis.axis("off")
        for axis in axes[-1]:
            axis.set_xlabel("entropy (nats)")
        axes[0, 0].legend(loc="upper right")
    return [
        {
            "file": name,
            "caption": "Densities of the predictive entropy of digits (in distribution) and of "
            f"clothes (out of distribution).{left_out}",
        }
    ]


def entropies(out: Path, found: dict[str, Any]) -> list[dict[str, str]]:
    """Draw the share of test images whose predictive entropy is at most some value."""
    name = "entropy.png"
    with figure(out / name) as (_, axes):
        for method, kept in found.items():
            quantiles = np.array(kept["entropy"][0]["quantiles"], float)
            share = np.linspace(0, 1, len(quantiles))
            axes[0, 0].plot(quantiles, share, label=method, **_style(method))
        axes[0, 0].set(xlabel="predictive entropy (nats)", ylabel="share of test images")
        axes[0, 0].legend(ncols=2)
    return [
        {
            "file": name,
            "caption": "Share of the test images whose predictive entropy is at most so much.",
        }
    ]
