"""Table 2 and section S4 of Vono et al. (2022): asymptotic bias, by the law on Gaussian clients."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments import checks, output
from experiments.checks import require
from experiments.figures import COLORS, figure
from experiments.qlsd import federations
from experiments.qlsd.gaussian_law import stationary_variance

__all__ = ["PAPER", "TITLE", "Config", "commentary", "draw", "power", "run"]

TITLE = "Table 2 and section S4: the bias after many rounds, by the law"
PAPER = """
How the asymptotic bias depends on the step size, on compression and on how much clients differ
(Table 2), and as rows grow, with a step size of a tenth over the number of rows and minibatches of
one row (section S4 as we read it; its symbols are lost): that of QLSD does not vanish, those of
QLSD* and QLSD++ do. Our copy of the paper lacks the entries of the table. Here the bias is the
2-Wasserstein distance of the stationary law from the posterior on the federation of Figure 1, whose
mean is right for both algorithms; the variance solves one equation (exact without compression, else
up to a mean over directions by simulation). Powers are those of the squared distance, between the
two ends of a range.
"""
ALGORITHMS = {"QLSD": False, "QLSD*": True}


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
    step_factors, level_factors, spreads
        What is varied besides, each alone: multiples of the step size, of the levels (the bound
        ``omega`` falls as they grow), and the standard deviation of the clients' means.
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
    spreads: tuple[float, ...] = (0.0, 1.0, 5.0, 25.0)

    def __post_init__(self) -> None:
        checks.at_least(1, self, "num_clients", "dim", "batch_rows", "levels")
        checks.between(0, 2, self, "step_size_factor", why=", where the chains are stable")
        for name in ("row_factors", "step_factors", "level_factors", "spreads"):
            values = getattr(self, name)
            increase = len(values) > 1 and list(values) == sorted(set(values))
            require(increase, f"{name} must be two or more that increase", values)


@dataclass(frozen=True)
class Point:
    """A setting of the law: multiples of rows, step size and levels, and the clients' spread."""

    rows: int = 1
    step: float = 1.0
    levels: int = 1
    spread: float = 5.0


def squared_bias(config: Config, centred: bool, at: Point) -> tuple[float, float]:
    """Return the squared distance from the posterior, and the posterior's mean squared length."""
    federation = federations.gaussian(
        config.num_clients, config.dim, spread=at.spread, times=at.rows
    )
    variance = stationary_variance(
        federation,
        step_size=at.step * config.step_size_factor / federation.precision,
        batch_fraction=1.0,
        batch_rows=config.batch_rows,
        num_levels=config.levels * at.levels,
        centred=centred,
        seed=config.seed,
    )
    right = 1 / federation.precision
    return config.dim * float((variance**0.5 - right**0.5) ** 2), config.dim * right


def run(config: Config, out: Path) -> dict[str, Any]:
    """Compute the laws; write the figure."""
    varied = {
        "rows": [Point(rows=value) for value in config.row_factors],
        "step": [Point(step=value) for value in config.step_factors],
        "levels": [Point(levels=value) for value in config.level_factors],
        "spread": [Point(spread=value) for value in config.spreads],
    }
    table = []
    for name, points in varied.items():
        for point in points:
            row: dict[str, Any] = {"varied": name, "value": float(getattr(point, name))}
            for algorithm, centred in ALGORITHMS.items():
                found, scale = squared_bias(config, centred, point)
                row[algorithm] = found
                row[f"{algorithm}, relative"] = found / scale
            table.append(row)
    metrics = {"table": table, "levels": config.levels, "batch_rows": config.batch_rows}
    return metrics | {"figures": draw(metrics, out)}


def power(metrics: dict[str, Any], varied: str, algorithm: str) -> float:
    """Return the power of what is varied that the squared distance has, from end to end."""
    rows = [r for r in metrics["table"] if r["varied"] == varied and r["value"] > 0]
    change = np.log(rows[-1][algorithm] / rows[0][algorithm])
    return float(change / np.log(rows[-1]["value"] / rows[0]["value"]))


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figure of a run; return its file and caption."""
    titles = {
        "rows": "times the rows",
        "step": "times the step size",
        "levels": "times the levels",
        "spread": "spread of the clients",
    }
    with figure(out / "bias.png", 1, 4, (2.8, 2.8), sharey=True) as (_, axes):
        for place, (name, title) in zip(axes[0], titles.items(), strict=True):
            rows = [r for r in metrics["table"] if r["varied"] == name and r["value"] > 0]
            place.set(xscale="log", yscale="log", xlabel=title)
            for algorithm, color in zip(ALGORITHMS, ("red", "blue"), strict=True):
                place.plot(
                    [r["value"] for r in rows],
                    [r[algorithm] for r in rows],
                    "o-",
                    color=COLORS[color],
                    label=algorithm,
                )
        axes[0, 0].set_ylabel("squared distance from the posterior")
        axes[0, 0].legend()
    caption = (
        "Squared 2-Wasserstein distance of the stationary law from the posterior, each setting "
        f"varied alone from {metrics['levels']} levels, the rows of Figure 1 and minibatches of "
        f"{metrics['batch_rows']}."
    )
    return [{"file": "bias.png", "caption": caption}]


def commentary(metrics: dict[str, Any]) -> str:
    """Return the powers, and what they say."""
    lines = [
        {"squared distance as a power of": words}
        | {name: f"{power(metrics, varied, name):+.2f}" for name in ALGORITHMS}
        for varied, words in (
            ("rows", "the number of rows"),
            ("step", "the step size"),
            ("levels", "the number of levels"),
            ("spread", "the spread of the clients' means"),
        )
    ]
    first, last = ([r for r in metrics["table"] if r["varied"] == "rows"][i] for i in (0, -1))
    return (
        output.markdown_table(lines)
        + f"\n\nWith {last['value']:g} times the rows the posterior shrinks as much in variance. "
        "Over its size, the squared distance of QLSD's law grows from "
        f"{first['QLSD, relative']:.2g} to "
        f"{last['QLSD, relative']:.2g}, that of QLSD*'s goes from "
        f"{first['QLSD*, relative']:.2g} to "
        f"{last['QLSD*, relative']:.2g}."
    )
