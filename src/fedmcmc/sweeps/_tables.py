"""Summaries of a sweep over its seeds, and their figure."""

import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from fedmcmc._types import ArrayTree
from fedmcmc.diagnostics import worst
from fedmcmc.records import named_leaves

__all__ = ["Statistics", "default_statistics", "draw_table", "tabulate_seeds"]

Statistics = Callable[[ArrayTree], Mapping[str, float]]

MOST_PANELS = 12


def default_statistics(draws: ArrayTree) -> dict[str, float]:
    """Return mean and sd of every coordinate; of several chains also R-hat and sample size.

    `draws` has leaves ``[num_chains, num_draws, *event]``.
    """
    moments: dict[str, dict[str, float]] = {"mean": {}, "sd": {}}
    num_chains = 1
    for name, leaf in named_leaves(draws).items():
        num_chains = leaf.shape[0]
        values = np.asarray(leaf, float).reshape(-1, *leaf.shape[2:])
        for index in np.ndindex(values.shape[1:]):
            one = values[(slice(None), *index)]
            full = name + (f"[{', '.join(map(str, index))}]" if index else "")
            moments["mean"][full], moments["sd"][full] = float(one.mean()), float(one.std())
    found = {f"{kind} of {name}": v for kind in moments for name, v in moments[kind].items()}
    if num_chains > 1:
        found["largest R-hat"], found["smallest ESS"] = worst(draws)
    return found


def tabulate_seeds(
    points: Sequence[tuple[Mapping[str, Any], Sequence[Mapping[str, float]]]],
) -> list[dict[str, Any]]:
    """Return one row a point and statistic, from every point's statistics of every seed."""
    names = list(dict.fromkeys(name for _, found in points for seed in found for name in seed))
    rows = []
    for point, found in points:
        for name in names:
            values = np.asarray([seed[name] for seed in found if name in seed], float)
            rows.append(
                {
                    **point,
                    "statistic": name,
                    "mean": float(values.mean()) if len(values) else math.nan,
                    "sd": float(values.std(ddof=1)) if len(values) > 1 else math.nan,
                    "seeds": len(values),
                }
            )
    return rows


def draw_table(rows: Sequence[Mapping[str, Any]], names: Sequence[str], x: str | None) -> Any:
    """Return a figure of rows of `tabulate_seeds`, whose points are told by `names`."""
    try:
        figure_module = import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError('plot needs matplotlib: pip install "fedmcmc[plots]".') from error
    if x is None:
        numeric = [n for n in names if all(isinstance(row[n], int | float) for row in rows)]
        x = next(iter([*numeric, *names]), None)
    elif x not in names:
        raise ValueError(f"x must be a name of the grid, one of {', '.join(names)}; got {x!r}.")
    statistics = list(dict.fromkeys(row["statistic"] for row in rows))[:MOST_PANELS]
    columns = max(min(len(statistics), 3), 1)
    height = max(-(-len(statistics) // columns), 1)
    figure = figure_module.Figure(figsize=(4 * columns, 3 * height), layout="constrained")
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
            at = [row[x] for row in line] if x else [""]
            panel.errorbar(
                at,
                [row["mean"] for row in line],
                [0.0 if math.isnan(row["sd"]) else row["sd"] for row in line],
                label=label or None,
                marker="o",
                markersize=3,
                capsize=2,
            )
            _set_scale(panel, at)
        panel.set(xlabel=x or "", title=name)
        if len(lines) > 1:
            panel.legend(fontsize="small")
    return figure


def _set_scale(panel: Any, at: Sequence[Any]) -> None:
    if not all(isinstance(v, int | float) for v in at):
        return
    if min(at) > 0 and max(at) >= 10 * min(at):  # step sizes and the like, spaced by factors
        panel.set_xscale("log")
    else:
        panel.locator_params(axis="x", nbins=4)
        panel.ticklabel_format(axis="x", scilimits=(-2, 4))
