"""Table 2 and section S4 of Vono et al. (2022): asymptotic bias, by the law on Gaussian clients."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments import checks
from experiments.checks import require
from experiments.figures import COLORS, figure
from experiments.qlsd import federations
from experiments.qlsd.gaussian_law import memory_variance, stationary_variance

__all__ = [
    "TITLE",
    "VARIED",
    "Config",
    "draw",
    "power",
    "power_of_added",
    "run",
]

TITLE = "Section 3, Table 2 and section S4: the bias after many rounds, by the law"
ALGORITHMS = {"QLSD": "red", "QLSD*": "blue", "QLSD++": "green"}
"""The algorithms and their colors."""
VARIED = {
    "rows": "the number of rows",
    "step": "the step size",
    "levels": "the number of levels",
    "batch": "the rows of a minibatch",
    "participation": "the clients' probability of taking part",
    "spread": "the spread of the clients' means",
}


@dataclass(frozen=True)
class Config:
    """Settings; the paper states none of these.

    Attributes
    ----------
    num_clients, dim
        The federation of the released notebook.
    step_size_factor
        The step size is this over the number of rows.
    batch_rows
        Rows per minibatch.
    levels
        ``s`` of the compressor.
    row_factors
        By how much clients have more rows than in Figure 1.
    step_factors, level_factors, batch_factors, participations, spreads
        What is varied besides, each alone: multiples of the step size, of the levels (the bound
        ``omega`` falls as they grow) and of a minibatch's rows (with the most levels), the
        probability with which a client takes part, and the standard deviation of the clients'
        means.
    """

    seed: int = 0
    num_clients: int = 20
    dim: int = 50
    step_size_factor: float = 0.1
    batch_rows: int = 1
    levels: int = 2
    row_factors: tuple[int, ...] = (1, 3, 10, 30, 100)
    step_factors: tuple[float, ...] = (0.1, 0.3, 1.0)
    level_factors: tuple[int, ...] = (1, 4, 16, 64)
    batch_factors: tuple[int, ...] = (1, 3, 10)
    participations: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0)
    spreads: tuple[float, ...] = (0.0, 1.0, 5.0, 25.0)

    def __post_init__(self) -> None:
        checks.at_least(1, self, "num_clients", "dim", "batch_rows", "levels")
        checks.between(0, 2, self, "step_size_factor", why=", where the chains are stable")
        for name in (
            "row_factors",
            "step_factors",
            "level_factors",
            "batch_factors",
            "participations",
            "spreads",
        ):
            values = getattr(self, name)
            increase = len(values) > 1 and list(values) == sorted(set(values))
            require(increase, f"{name} must be two or more that increase", values)
        shares = self.participations
        require(shares[0] > 0 and shares[-1] <= 1, "participations must lie in (0, 1]", shares)


@dataclass(frozen=True)
class Point:
    """A setting of the law: multiples of its numbers, who takes part, and the clients' spread."""

    rows: int = 1
    step: float = 1.0
    levels: int = 1
    batch: int = 1
    participation: float = 1.0
    spread: float = 5.0


def squared_bias(config: Config, algorithm: str, at: Point) -> tuple[float, float]:
    """Return the squared distance from the posterior, and the posterior's mean squared length."""
    federation = federations.gaussian(
        config.num_clients, config.dim, spread=at.spread, times=at.rows
    )
    settings: dict[str, Any] = {
        "step_size": at.step * config.step_size_factor / federation.precision,
        "num_levels": config.levels * at.levels,
        "participation": at.participation,
        "seed": config.seed,
    }
    if algorithm == "QLSD++":
        variance = memory_variance(np.asarray(federation.data.sizes), config.dim, **settings)
    else:
        variance = stationary_variance(
            federation,
            batch_fraction=1.0,
            batch_rows=config.batch_rows * at.batch,
            centred=algorithm == "QLSD*",
            **settings,
        )
    right = 1 / federation.precision
    return config.dim * float((variance**0.5 - right**0.5) ** 2), config.dim * right


def run(config: Config, out: Path) -> dict[str, Any]:
    """Compute the laws; write the figure."""
    varied = {
        "rows": [Point(rows=value) for value in config.row_factors],
        "step": [Point(step=value) for value in config.step_factors],
        "levels": [Point(levels=value) for value in config.level_factors],
        # With few levels the noise of compression would hide that of minibatches.
        "batch": [
            Point(batch=value, levels=config.level_factors[-1]) for value in config.batch_factors
        ],
        "participation": [Point(participation=value) for value in config.participations],
        "spread": [Point(spread=value) for value in config.spreads],
    }
    table = []
    for name, points in varied.items():
        for point in points:
            row: dict[str, Any] = {"varied": name, "value": float(getattr(point, name))}
            for algorithm in ALGORITHMS:
                found, scale = squared_bias(config, algorithm, point)
                row[algorithm] = found
                row[f"{algorithm}, relative"] = found / scale
            table.append(row)
    metrics = {
        "table": table,
        "added": added(config),
        "levels": config.levels,
        "batch_rows": config.batch_rows,
    }
    return metrics | {"figures": draw(metrics, out)}


def added(config: Config) -> list[dict[str, float]]:
    """Return what compression and absent clients add to QLSD's squared distance, by the spread."""
    rows = []
    for spread in config.spreads:
        fine = Point(levels=config.level_factors[-1], spread=spread)
        coarse, few = replace(fine, levels=1), replace(fine, participation=config.participations[0])
        bare, compressed, absent = (squared_bias(config, "QLSD", p)[0] for p in (fine, coarse, few))
        rows.append(
            {"spread": spread, "compression": compressed - bare, "participation": absent - bare}
        )
    return rows


def power_of_added(metrics: Mapping[str, Any], source: str) -> float:
    """Return the power of the spread that a row of `added` has, from end to end."""
    rows = [row for row in metrics["added"] if row["spread"] > 0]
    change = np.log(rows[-1][source] / rows[0][source])
    return float(change / np.log(rows[-1]["spread"] / rows[0]["spread"]))


def power(metrics: Mapping[str, Any], varied: str, algorithm: str) -> float:
    """Return the power of what is varied that the squared distance has, from end to end."""
    rows = [r for r in metrics["table"] if r["varied"] == varied and r["value"] > 0]
    change = np.log(rows[-1][algorithm] / rows[0][algorithm])
    return float(change / np.log(rows[-1]["value"] / rows[0]["value"]))


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figure of a run; return its file and caption."""
    with figure(out / "bias.png", 2, 3, (3.2, 2.8), sharey=True) as (_, axes):
        for place, (name, title) in zip(axes.flat, VARIED.items(), strict=True):
            rows = [r for r in metrics["table"] if r["varied"] == name and r["value"] > 0]
            times = "" if name in ("participation", "spread") else "times "
            place.set(xscale="log", yscale="log", xlabel=times + title)
            for algorithm, color in ALGORITHMS.items():
                place.plot(
                    [r["value"] for r in rows],
                    [r[algorithm] for r in rows],
                    "o--" if algorithm == "QLSD++" else "o-",
                    color=COLORS[color],
                    mfc="none" if algorithm == "QLSD++" else COLORS[color],
                    ms=7 if algorithm == "QLSD++" else 4,
                    label=algorithm,
                )
        for place in axes[:, 0]:
            place.set_ylabel("squared distance")
        axes[0, 0].legend()
    caption = (
        "Squared 2-Wasserstein distance of the stationary law from the posterior, each setting "
        f"varied alone from {metrics['levels']} levels, the rows of Figure 1, minibatches of "
        f"{metrics['batch_rows']} and all clients; minibatches with the most levels."
    )
    return [{"file": "bias.png", "caption": caption}]
