"""The figures of the Gaussian experiment: Figures 1 to 4 of the paper, with the exact laws."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from experiments.figures import COLORS, covariance_ellipse, figure
from experiments.special.fsgld_gaussian import coin_gradients

__all__ = ["draw"]

DSGLD_COLORS = ("#F2B33D", "#DE7400", "#A83800", "#561A00")
FSGLD_COLORS = ("#8CCBF0", "#3A9AD9", "#0B62A4", "#052F57")
SHARD_COLORS = (
    "#8dd3c7", "#fdb462", "#bebada", "#fb8072", "#80b1d3",
    "#b3de69", "#fccde5", "#bc80bd", "#ccebc5", "#ffed6f",
)  # fmt: skip
POSTERIOR = COLORS["pink"]
STATIONARY = COLORS["blue"]


def draw(
    out: Path,
    config: Any,
    shards: np.ndarray,
    results: list[Any],
    mean: np.ndarray,
    variance: float,
    constants: dict[str, np.ndarray],
) -> list[dict[str, str]]:
    """Write all figures into `out` and return their files and captions."""
    return [
        _gradients(out),
        _draws(out, config, shards, results, mean, variance),
        _mse(out, config, shards, results, mean, variance),
        _constants(out, constants),
    ]


def _cloud(axes: Axes, shards: np.ndarray, limit: float) -> None:
    for s, rows in enumerate(shards):
        axes.plot(*rows.T, ".", ms=2, color=SHARD_COLORS[s % len(SHARD_COLORS)], zorder=1)
    axes.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal")


def _inset(axes: Axes, shards: np.ndarray, mean: np.ndarray, half_width: float) -> Axes:
    """Return an inset around `mean`, in the corner where it covers the fewest rows."""
    low, high = axes.get_xlim()
    rows = (shards.reshape(-1, 2) - low) / (high - low)
    size, near = 0.3, 0.02
    places = (near, 1 - near - size)

    def covered(corner: tuple[float, float]) -> int:
        return int(((rows > corner) & (rows < np.add(corner, size))).all(axis=1).sum())

    corner = min(((x, y) for x in places for y in places), key=covered)
    inset = axes.inset_axes((*corner, size, size))
    inset.set(
        xlim=(mean[0] - half_width, mean[0] + half_width),
        ylim=(mean[1] - half_width, mean[1] + half_width),
        xticks=[],
        yticks=[],
        aspect="equal",
    )
    inset.spines[:].set_visible(True)
    axes.indicate_inset_zoom(inset, edgecolor="black", alpha=0.8)
    return inset


def _ellipses(
    axes: Axes, mean: np.ndarray, variance: float, law: tuple[np.ndarray, np.ndarray] | None
) -> None:
    posterior = variance * np.eye(2)
    covariance_ellipse(axes, mean, posterior, color=POSTERIOR, lw=1.8, zorder=4)
    if law is not None:
        covariance_ellipse(axes, *law, color=STATIONARY, lw=1.5, ls="--", zorder=4)


def _draws(
    out: Path,
    config: Any,
    shards: np.ndarray,
    results: list[Any],
    mean: np.ndarray,
    variance: float,
) -> dict[str, str]:
    columns = len(config.num_local_steps)
    limit = config.spread + 4
    with figure(out / "draws.png", 2, columns, (2.7, 2.8), sharex=True, sharey=True) as (fig, axes):
        for result, ax in zip(results, axes.flat, strict=True):
            law = result.law.moments(result.visit.times)
            _cloud(ax, shards, limit)
            points = result.draws[0].T
            ax.plot(*points, ".", ms=2.5, color="black", alpha=0.6, mew=0, zorder=3)
            _ellipses(ax, mean, variance, law)
            if result.method == "dsgld":
                ax.plot(*mean, "+", ms=10, mew=1.8, color=POSTERIOR, zorder=5)
            else:
                inset = _inset(ax, shards, mean, 4.5 * float(np.sqrt(np.trace(law[1]) / 2)))
                inset.plot(*points, ".", ms=2, color="black", alpha=0.35, mew=0)
                _ellipses(inset, mean, variance, law)
            ax.set_title(f"{result.method.upper()} ({result.num_local_steps})")
        for ax in axes[-1]:
            ax.set_xlabel(r"$\theta_1$")
        for ax in axes[:, 0]:
            ax.set_ylabel(r"$\theta_2$")
        handles = [
            axes[0, 0].plot([], [], ".", color="black", ms=6)[0],
            axes[0, 0].plot([], [], "+", ms=10, mew=1.8, color=POSTERIOR)[0],
            axes[0, 0].plot([], [], color=POSTERIOR)[0],
            axes[0, 0].plot([], [], color=STATIONARY, ls="--")[0],
        ]
        names = ["draws of one chain", "posterior mean", "posterior, 2 sd"]
        names.append("exact mean and covariance of the chain's law, 2 sd")
        fig.legend(handles, names, loc="outside lower center", ncols=4)
    return {
        "file": "draws.png",
        "caption": "Figure 2: draws of one chain (black) over the shards' rows (one colour a "
        "shard), by local updates T (in parentheses). The insets magnify around the posterior. "
        "DSGLD's law is not Gaussian; the dashed ellipse shows its covariance.",
    }


def _mse(
    out: Path,
    config: Any,
    shards: np.ndarray,
    results: list[Any],
    mean: np.ndarray,
    variance: float,
) -> dict[str, str]:
    rng = np.random.default_rng(config.seed + 1)
    exact = mean + np.sqrt(variance) * rng.standard_normal((config.num_draws, 2))
    with figure(out / "mse.png", 1, 2, (4.6, 4.0)) as (fig, axes):
        left, right = axes[0]
        _cloud(left, shards, config.spread + 4)
        left.plot(*exact.T, ".", ms=2.5, color="black", mew=0, zorder=3)
        inset = _inset(left, shards, mean, 4.5 * float(np.sqrt(variance)))
        inset.plot(*exact.T, ".", ms=2, color="black", alpha=0.5, mew=0)
        _ellipses(inset, mean, variance, None)
        left.set(title="(a) analytic posterior", xlabel=r"$\theta_1$", ylabel=r"$\theta_2$")
        seen = {"dsgld": 0, "fsgld": 0}
        for result in results:
            palette = DSGLD_COLORS if result.method == "dsgld" else FSGLD_COLORS
            color = palette[seen[result.method] % len(palette)]
            seen[result.method] += 1
            _mse_curve(right, result, mean, color)
        right.plot([], [], color="black", ls=":", lw=1.2, label="exact law")
        right.set(
            xscale="log",
            yscale="log",
            title="(b) error of the average",
            xlabel="number of samples kept",
            ylabel=r"MSE $|\hat\mu - \bar\mu|^2$",
        )
        fig.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return {
        "file": "mse.png",
        "caption": "Figure 3: (a) draws of the analytic posterior; (b) squared error of the "
        "average of the samples so far, mean over the repetitions (band: mean plus and minus two "
        "standard errors) and its exact expectation (dotted).",
    }


def _mse_curve(axes: Axes, result: Any, mean: np.ndarray, color: str) -> None:
    visit = result.visit
    per_round = len(visit.times)
    count = np.arange(1, result.draws.shape[1] + 1)
    averages = np.cumsum(result.draws, axis=1) / count[:, None]
    squared = ((averages - mean) ** 2).sum(axis=-1)[:, per_round - 1 :: per_round]
    count = count[per_round - 1 :: per_round]
    centre, error = squared.mean(axis=0), squared.std(axis=0, ddof=1) / np.sqrt(len(squared))
    law_mean, covariance = result.law.average(visit.times, visit.rounds_apart, visit.num_rounds)
    bias = law_mean - mean
    label = f"{result.method.upper()} ({result.num_local_steps})"
    axes.plot(count, centre, color=color, label=label)
    low = np.maximum(centre - 2 * error, centre / 10)
    axes.fill_between(count, low, centre + 2 * error, color=color, alpha=0.2, lw=0)
    exact = bias @ bias + np.trace(covariance, axis1=1, axis2=2)
    axes.plot(count, exact, color="black", ls=":", lw=1.2, zorder=5)


def _constants(out: Path, constants: dict[str, np.ndarray]) -> dict[str, str]:
    place = np.arange(len(constants["gamma_squared"]))
    with figure(out / "constants.png", size=(5.2, 3.0)) as (_, axes):
        ax = axes[0, 0]
        for shift, name, label, color in (
            (-0.2, "gamma_squared", r"$\gamma_s^2$ (DSGLD)", COLORS["red"]),
            (0.2, "eps_squared", r"$\epsilon_s^2$ (FSGLD)", COLORS["blue"]),
        ):
            ax.bar(place + shift, constants[name], 0.4, label=label, color=color)
        ax.set(yscale="log", xlabel="shard $s$", ylabel="constant of the bound", xticks=place)
        ax.set_ylim(0.5, constants["gamma_squared"].max() * 6)
        ax.legend(ncols=2, loc="upper right")
        ax.grid(axis="x", visible=False)
    return {
        "file": "constants.png",
        "caption": "Figure 4: the constants in the bounds of DSGLD (Theorem 1) and FSGLD "
        "(Theorem 2), largest value over a grid on the square of the shards' means; by their "
        "definitions that of DSGLD is of the worst row, that of FSGLD of the average row.",
    }


def _gradients(out: Path) -> dict[str, str]:
    theta, found = coin_gradients()
    with figure(out / "gradients.png", size=(5.2, 3.2)) as (_, axes):
        ax = axes[0, 0]
        for name, (middle, deviation) in found.items():
            offset, color = (0.006, "blue") if name == "SGLD" else (-0.006, "red")
            ax.errorbar(
                theta + offset,
                middle,
                deviation,
                fmt="o",
                ms=3.5,
                color=COLORS[color],
                label=name,
            )
        ax.set(xlabel=r"$\theta$", ylabel="gradient of the log posterior")
        ax.legend()
    return {
        "file": "gradients.png",
        "caption": "Figure 1: exact mean and one standard deviation of the two gradient "
        "estimators, 5 of 30 tosses of a coin; DSGLD sees one of three shards with 1, 5 and 9 "
        "heads in 10 (the smallest mean is misprinted as negative in the paper).",
    }
