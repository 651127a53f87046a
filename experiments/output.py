"""What a run leaves behind: metrics, draws, tables."""

import json
import math
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedmcmc

__all__ = [
    "METRICS",
    "environment",
    "format_number",
    "markdown_table",
    "percent",
    "plain",
    "published",
    "relative",
    "save_draws",
    "summary",
    "text_table",
    "write_metrics",
    "write_whole",
]

METRICS = "metrics.json"
ROOT = Path(__file__).resolve().parents[1]


def environment() -> dict[str, Any]:
    """Return versions, device and (in a git checkout) the commit, for `METRICS`."""
    packages = ("jax", "jaxlib", "numpy", "numpyro", "hydra-core", "matplotlib")
    versions = {"python": platform.python_version(), "fedmcmc": fedmcmc.__version__}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    device = jax.devices()[0]
    return {
        "versions": versions,
        "device": device.device_kind,
        "x64": bool(jax.config.jax_enable_x64),
        "matmul_precision": jax.config.jax_default_matmul_precision,
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": _dirty(),
    }


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _dirty() -> bool | None:
    status = _git("status", "--porcelain", "--untracked-files=no", "--", "src", "experiments")
    return None if status is None else bool(status)


def write_metrics(out: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Write `record` as JSON and return it as it will be read back.

    Arrays become lists. Numbers that are not finite become ``null``: JSON has no others.
    """
    found = plain(dict(record))
    write_whole(out / METRICS, json.dumps(found, indent=1, allow_nan=False) + "\n")
    return found


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file that is there whole or not at all, whenever the process dies."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.replace(path)


def plain(value: Any) -> Any:
    """Return `value` as JSON gives it back: arrays as lists, numbers not finite as ``None``."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return plain(np.asarray(value).tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"metrics must be numbers, strings, lists and dicts, got {type(value)}.")


def save_draws(samples: fedmcmc.Samples, path: Path, **kwargs: Any) -> None:
    """Write draws as netCDF, to be read with ``xarray.open_datatree``."""
    samples.to_datatree(**kwargs).to_netcdf(path, engine="h5netcdf")


def format_number(value: Any) -> str:
    """Format one cell: three significant digits, text as it is."""
    if value is None:
        return "-"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e6):
        return f"{int(value):,}"
    return f"{value:.3g}"


def percent(share: float, digits: int = 0) -> str:
    """Format a share for a sentence.

    Examples
    --------
    >>> percent(0.953), percent(0.1234, 1)
    ('95 %', '12.3 %')
    """
    return f"{100 * share:.{digits}f} %"


def text_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay out rows with equal keys for a terminal."""
    columns = list(rows[0])
    cells = [columns] + [[format_number(row[c]) for c in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay out rows with equal keys as a Markdown table."""
    columns = list(rows[0])

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    lines = [line(columns), "|" + "---|" * len(columns)]
    return "\n".join([*lines, *(line(format_number(row[c]) for c in columns) for row in rows)])


def published(
    first: str, columns: Sequence[str], rows: Mapping[str, Sequence[float | str | None]]
) -> str:
    """Lay out a table of a paper: one line for each name, with the numbers as printed."""
    return markdown_table(
        [
            {first: name}
            | {c: v if v is None else f"{v}" for c, v in zip(columns, values, strict=True)}
            for name, values in rows.items()
        ]
    )


def summary(record: Mapping[str, Any]) -> str:
    """Return what a run prints at its end: its table, else its single numbers."""
    metrics = record["metrics"]
    if metrics.get("table"):
        return text_table(metrics["table"])
    scalars = {k: v for k, v in metrics.items() if isinstance(v, int | float | str)}
    return text_table([{"metric": k, "value": v} for k, v in scalars.items()]) if scalars else ""


def relative(path: Path) -> str:
    """Return `path` relative to the working directory where it lies below it."""
    path = path.resolve()
    here = Path.cwd().resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
