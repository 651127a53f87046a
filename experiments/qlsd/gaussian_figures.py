"""The figures of the Gaussian experiment."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from experiments.figures import COLORS, band, figure, floor, label_ticks, points
from experiments.qlsd import federations

__all__ = ["draw", "rows_of_clients"]

PALETTE = [COLORS[c] for c in ("orange", "red", "sky", "blue", "green", "black", "pink")]
LINES = ("-", "-", "-", "--", "-.", ":")
"""QLSD* and LSD* lie on each other against rounds: dashes show all."""


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write all figures of a run into `out` and return their files and captions."""
    return [each(out, metrics) for each in (_data, _clients, _errors, _squares, _budget)]


def rows_of_clients(metrics: Mapping[str, Any]) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the clients' rows and the posterior mean, which the settings of a run determine."""
    sizes = np.asarray(metrics["sizes"])
    made = federations.gaussian(len(sizes), metrics["dim"])
    if not np.array_equal(made.data.sizes, sizes):
        raise ValueError("this record is of clients of other sizes than the experiment draws now.")
    rows = [np.asarray(made.data.client_rows(i)) for i in range(len(sizes))]
    return rows, made.mean


def _data(out: Path, metrics: dict[str, Any]) -> dict[str, str]:
    name = "data.png"
    rows, mean = rows_of_clients(metrics)
    shades = matplotlib.colormaps["tab20"](np.arange(len(rows)) % 20)
    with figure(out / name, size=(4.8, 3.9)) as (_, axes):
        for own, shade in zip(rows, shades, strict=True):
            axes[0, 0].plot(own[:, 0], own[:, 1], ".", color=shade, ms=2.5)
        axes[0, 0].plot(*mean[:2], "*", color="black", ms=10, label="posterior mean")
        axes[0, 0].set(xlabel="first coordinate", ylabel="second coordinate")
        axes[0, 0].legend()
    caption = (
        f"Figure 1, top row: the rows of the {len(rows)} clients, one color per client, in the "
        f"first two of {metrics['dim']} coordinates."
    )
    return {"file": name, "caption": caption}


def _clients(out: Path, metrics: dict[str, Any]) -> dict[str, str]:
    name, sizes = "clients.png", np.asarray(metrics["sizes"])
    with figure(out / name, size=(4.8, 2.4)) as (_, axes):
        axes[0, 0].bar(np.arange(1, len(sizes) + 1), sizes, color=COLORS["blue"])
        axes[0, 0].set(xlabel="client", ylabel="rows", xticks=np.arange(1, len(sizes) + 1))
        axes[0, 0].grid(axis="x", visible=False)
    return {"file": name, "caption": "Figure S1: rows of each client."}


def _errors(out: Path, metrics: dict[str, Any]) -> dict[str, str]:
    name = "mse.png"
    with figure(out / name, columns=2, sharey=True) as (_, axes):
        for axis in axes[0]:
            axis.set(xscale="log", yscale="log")
        for color, line, (label, curve) in zip(
            PALETTE * 2, LINES * 2, metrics["curves"].items(), strict=False
        ):
            spread = 2 * np.array(curve["error_sd"])
            for axis, x in zip(axes[0], ("bits", "rounds"), strict=True):
                style = dict(color=color, ls=line, label=label)
                band(axis, curve[x], curve["error"], spread, **style)
                axis.plot(curve[x], curve["expected"], color="grey", lw=0.6)
        axes[0, 0].set(xlabel="bits that a client has sent since burn-in", ylabel="squared error")
        axes[0, 1].set(xlabel="rounds since burn-in")
        axes[0, 1].legend()
    return {
        "file": name,
        "caption": "Figure 1, bottom row: squared error of the average of the rounds so far, mean "
        f"over {metrics['num_chains']} runs and two standard errors, against bits counted (left) "
        "and rounds (right); thin grey: the law.",
    }


def _squares(out: Path, metrics: dict[str, Any]) -> dict[str, str]:
    name, right = "squares.png", metrics["dim"] * metrics["posterior_variance"]
    with figure(out / name, size=(4.8, 3.9)) as (fig, axes):
        axis = axes[0, 0]
        axis.set(xscale="log", yscale="log")
        for color, line, (label, curve) in zip(
            PALETTE * 2, LINES * 2, metrics["curves"].items(), strict=False
        ):
            mean, error = (np.array(curve[k]) / right for k in ("square", "square_sd"))
            band(axis, curve["rounds"], mean, 2 * error, color=color, ls=line, label=label)
        floor(axis, 1.0, "posterior")
        axis.set(
            xlabel="rounds since burn-in",
            ylabel=r"average of $|\theta - \mu|^2$ over the posterior's",
        )
        label_ticks(axis.yaxis)
        fig.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return {
        "file": name,
        "caption": "The test function that shows a bias: the average of the squared distance from "
        "the posterior mean, over its expectation under the posterior; mean over "
        f"{metrics['num_chains']} runs and two standard errors.",
    }


def _budget(out: Path, metrics: dict[str, Any]) -> dict[str, str]:
    name, budget = "budget.png", metrics["budget"]
    errors, spreads = np.array(budget["error"]), np.array(budget["error_sd"])
    with figure(out / name) as (_, axes):
        axes[0, 0].set(xscale="log", yscale="log")
        shades = matplotlib.colormaps["viridis"](np.linspace(0.9, 0.0, len(budget["factors"])))
        for j, (shade, factor) in enumerate(zip(shades, budget["factors"], strict=True)):
            points(
                axes[0, 0],
                budget["levels"],
                errors[:, j],
                spreads[:, j],
                color=shade,
                label=f"{factor:g} / L",
            )
        axes[0, 0].set(xlabel="levels s of QLSD*", ylabel="squared error")
        axes[0, 0].legend(title="step size", ncols=2)
    return {
        "file": name,
        "caption": "Figure S2: squared error of the average of all rounds that "
        f"{budget['budget']:g} bits per client pay for, counted in real messages, by levels and "
        f"step size; mean over {metrics['num_chains']} runs and two standard errors.",
    }
