"""Summaries of a sweep over its seeds, and their figure."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fedmcmc._checks import missing_extra_error
from fedmcmc.diagnostics import worst_mixing
from fedmcmc.pytrees import named_leaves
from fedmcmc.types import ArrayTree

if TYPE_CHECKING:
    import matplotlib.figure

Statistics = Callable[[ArrayTree], Mapping[str, float]]

MAX_PANELS = 12


def default_statistics(draws: ArrayTree) -> dict[str, float]:
    """Return mean and sd of each coordinate, and R-hat and sample size of several chains.

    `draws` has leaves ``[num_chains, num_draws, *event]``.
    """
    statistics = {}
    for kind, moment in (("mean", np.mean), ("sd", np.std)):
        for name, leaf in named_leaves(draws).items():
            values = moment(np.asarray(leaf, float), axis=(0, 1))
            for index in np.ndindex(values.shape):
                subscript = f"[{', '.join(map(str, index))}]" if index else ""
                statistics[f"{kind} of {name}{subscript}"] = float(values[index])
    if jax.tree.leaves(draws)[0].shape[0] > 1:
        statistics["largest R-hat"], statistics["smallest ESS"] = worst_mixing(draws)
    return statistics


def tabulate_seeds(
    points: Sequence[tuple[Mapping[str, Any], Sequence[Mapping[str, float]], str]],
) -> list[dict[str, Any]]:
    """Return one row per point and statistic, from settings, seeds' statistics and a warning."""
    names = dict.fromkeys(name for _, seeds, _ in points for seed in seeds for name in seed)
    rows = []
    for point, seeds, warning in points:
        for name in names:
            values = np.asarray([seed[name] for seed in seeds if name in seed], float)
            rows.append(
                {
                    **point,
                    "statistic": name,
                    "mean": float(values.mean()) if len(values) else math.nan,
                    "sd": float(values.std(ddof=1)) if len(values) > 1 else math.nan,
                    "seeds": len(values),
                    "warning": warning,
                }
            )
    return rows


def draw_table(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], x: str | None
) -> "matplotlib.figure.Figure":
    """Return a figure of rows of `tabulate_seeds`, with the settings `names`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra_error("plot needs matplotlib", "plots") from error
    if x is None:
        numeric = [n for n in names if all(isinstance(row[n], int | float) for row in rows)]
        x = next(iter([*numeric, *names]), None)
    elif x not in names:
        raise ValueError(f"x must be a name of the grid, one of {', '.join(names)}; got {x!r}.")
    statistics = list(dict.fromkeys(row["statistic"] for row in rows))[:MAX_PANELS]
    columns = max(min(len(statistics), 3), 1)
    height = max(-(-len(statistics) // columns), 1)
    figure = Figure(figsize=(4 * columns, 3 * height), layout="constrained")
    panels = figure.subplots(height, columns, squeeze=False).ravel()
    for panel in panels[len(statistics) :]:
        panel.set_visible(False)
    for panel, name in zip(panels, statistics, strict=False):
        lines: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            if row["statistic"] == name:
                label = ", ".join(f"{n}={row[n]}" for n in names if n != x)
                lines.setdefault(label, []).append(row)
        for label, line in lines.items():
            positions: list[Any] = [row[x] for row in line] if x else [""]
            panel.errorbar(
                positions,
                [row["mean"] for row in line],
                [0.0 if math.isnan(row["sd"]) else row["sd"] for row in line],
                label=label or None,
                marker="o",
                markersize=3,
                capsize=2,
            )
            if not all(isinstance(v, int | float) for v in positions):
                continue
            if min(positions) > 0 and max(positions) >= 10 * min(positions):
                panel.set_xscale("log")
            else:
                panel.locator_params(axis="x", nbins=4)
                panel.ticklabel_format(axis="x", scilimits=(-2, 4))
        panel.set(xlabel=x or "", title=name)
        if len(lines) > 1:
            panel.legend(fontsize="small")
    return figure
