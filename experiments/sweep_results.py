"""The metrics of a sweep's jobs side by side: one data set, one table, one figure."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray

from experiments import output
from fedmcmc.sweeps import draw_table, tabulate_seeds

__all__ = ["collect", "stem", "write"]

SEED = "seed"
Entries = dict[tuple[str, str], dict[str, Any]]


def write(
    out: Path,
    jobs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    *,
    name: str,
    command: str,
    failed: Sequence[str] = (),
) -> list[str]:
    """Write the numbers of all jobs into the folder `out` and return the names of the files.

    Parameters
    ----------
    jobs
        Settings given on the command line and what ``metrics.json`` holds, of each job.
    name
        What the files are called, see `stem`.
    command
        What was run.
    failed
        What to say of jobs that failed, a line each.
    """
    points = _swept([settings for settings, _ in jobs])
    data = collect(points, [record["metrics"] for _, record in jobs])
    data.attrs = {"command": command, "experiment": jobs[0][1]["experiment"]}
    dataset, table, figure = (f"{name}.{kind}" for kind in ("nc", "md", "png"))
    data.to_netcdf(out / dataset, engine="h5netcdf")
    names = [name for name in points[0] if name != SEED]
    rows = _summary(points, names, [scalars(record["metrics"]) for _, record in jobs])
    lines = [f"`{command}`", "", f"{len(jobs)} jobs; mean and sd are over seeds."]
    lines += ["", output.markdown_table(rows)] if rows else []
    lines += ["", "Failed:", "", *(f"- {line}" for line in failed)] if failed else []
    (out / table).write_text("\n".join(lines) + "\n")
    if not rows:
        return [dataset, table]
    draw_table(rows, names, None).savefig(out / figure, dpi=110)
    return [dataset, table, figure]


def stem(settings: Sequence[Mapping[str, Any]]) -> str:
    """Return what the files of a sweep are called: what was swept, and digits of all its settings.

    Another sweep of the same experiment is thus called otherwise, and the same one the same, also
    where not all jobs came to an end.

    Parameters
    ----------
    settings
        Those given on the command line, of each job that was asked for.
    """
    points = sorted(json.dumps(dict(s), sort_keys=True) for s in settings)
    digits = hashlib.sha256("\n".join(points).encode()).hexdigest()[:6]
    swept = (name.replace("/", ".") for name in _swept(settings)[0])
    return "-".join(["sweep", *swept, digits])


def collect(
    points: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]
) -> xarray.Dataset:
    """Return all numbers of all jobs, by the names of what was swept.

    Dimensions are those names, then those of the number itself: the rows of a table (by the
    columns before the first fraction), the axes of a list. What a job lacks is NaN; lists whose
    shapes differ between jobs are left out. A slash, which a file's names cannot hold, is ``over``.
    """
    names = list(points[0])
    values = {name: _sorted({point[name] for point in points}) for name in names}
    shape = tuple(len(v) for v in values.values())
    at = [tuple(values[name].index(point[name]) for name in names) for point in points]
    coords: dict[str, Any] = {name: _coordinate(v) for name, v in values.items()}
    kept: dict[str, Any] = {}
    for name in dict.fromkeys(name for m in metrics for name in arrays(m)):
        found = [arrays(m).get(name) for m in metrics]
        shapes = {leaf.shape for leaf in found if leaf is not None}
        if len(shapes) == 1:
            event = shapes.pop()
            whole = np.full(shape + event, np.nan)
            for place, leaf in zip(at, found, strict=True):
                if leaf is not None:
                    whole[place] = leaf
            dims = (*names, *(f"{_plain(name)}_dim_{i}" for i in range(len(event))))
            kept[_unused(_plain(name), coords)] = dims, whole
    for table in dict.fromkeys(name for m in metrics for name in tables(m)):
        entries = [tables(m).get(table, {}) for m in metrics]
        labels = list(dict.fromkeys(label for e in entries for label, _ in e))
        dim = _unused(_plain(table), coords)
        coords[dim] = labels
        for column in dict.fromkeys(column for e in entries for _, column in e):
            whole = np.full((*shape, len(labels)), np.nan)
            for place, of in zip(at, entries, strict=True):
                whole[place] = [of.get((label, column), math.nan) for label in labels]
            kept[f"{dim}.{_plain(column)}"] = (*names, dim), whole
    return xarray.Dataset(kept, coords)


def _unused(name: str, coords: Mapping[str, Any]) -> str:
    return f"{name}_" if name in coords else name


def _plain(name: str) -> str:
    return name.replace("/", "over")


def _sorted(values: set[Any]) -> list[Any]:
    try:
        return sorted(values)
    except TypeError:
        return sorted(values, key=str)


def _coordinate(values: list[Any]) -> list[Any]:
    return [str(v) for v in values] if len({isinstance(v, str) for v in values}) > 1 else values


def _swept(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings in which jobs differ; all of them if there are none (one job)."""
    names = list(dict.fromkeys(name for s in settings for name in s))
    varies = [n for n in names if len({str(s.get(n)) for s in settings}) > 1] or names
    return [{name: s.get(name, "") for name in varies} for s in settings]


def _summary(
    points: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    numbers: Sequence[Mapping[str, float]],
) -> list[dict[str, Any]]:
    grouped: dict[tuple, tuple[dict[str, Any], list[Mapping[str, float]]]] = {}
    for point, found in zip(points, numbers, strict=True):
        own = {name: point[name] for name in names}
        grouped.setdefault(tuple(own.values()), (own, []))[1].append(found)
    return tabulate_seeds(list(grouped.values()))


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the single numbers of one job: those of tables as ``row: column``."""
    found = {name: float(leaf) for name, leaf in arrays(metrics).items() if leaf.ndim == 0}
    for entries in tables(metrics).values():
        found |= {f"{label}: {column}": v for (label, column), v in entries.items()}
    return found


def arrays(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """Return the numbers and rectangular lists of numbers in `metrics`, names joined by dots."""
    found: dict[str, np.ndarray] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found |= arrays(value, f"{prefix}{name}.")
        elif _is_number(value) or isinstance(value, list):
            try:
                leaf = np.asarray(value)
            except ValueError:  # ragged
                continue
            if leaf.dtype.kind in "iuf" and leaf.size:
                found[prefix + name] = leaf
    return found


def tables(metrics: Mapping[str, Any]) -> dict[str, Entries]:
    """Return the numbers of all tables (lists of rows) by row and column.

    A row is called by its entries before the first fraction, and by its place where two rows would
    be called the same.
    """
    found = {}
    for name, rows in metrics.items():
        if isinstance(rows, list) and rows and all(isinstance(r, Mapping) for r in rows):
            fractions = [c for c in rows[0] if any(isinstance(r.get(c), float) for r in rows)]
            columns = list(rows[0])
            first = columns.index(fractions[0]) if fractions else 1
            titles = columns[: max(first, 1)]
            labels = [" ".join(str(row.get(c)) for c in titles) for row in rows]
            if len(set(labels)) < len(labels):
                labels = [f"{label} ({i})" for i, label in enumerate(labels)]
            entries = {
                (label, column): float(value)
                for label, row in zip(labels, rows, strict=True)
                for column, value in row.items()
                if column not in titles and _is_number(value)
            }
            if entries:
                found[name] = entries
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
