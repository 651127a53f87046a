"""Tidy rows of a study's run, and the record that says how the run was made.

A study `<paper>/<name>` has ``records/<paper>/<name>.csv`` with one number per row, and
``records/<paper>/<name>.json`` with its settings, versions, commit, device and seconds.
"""

import csv
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["COLUMNS", "RECORDS", "Row", "read", "read_record", "rounded", "studies", "write"]

RECORDS = Path(__file__).resolve().parents[1] / "records"
COLUMNS = ("method", "setting", "seed", "x", "metric", "value")
DIGITS = 6
"""Significant digits of the values in a file."""


@dataclass(frozen=True)
class Row:
    """One number of a run.

    Attributes
    ----------
    method
        Name of the sampler or estimator.
    settings
        Settings that differ within the study, such as ``{"num_local_steps": 10}``.
    seed
        Repetition, ``None`` for a summary over repetitions.
    x
        Place on a curve, such as the number of rounds, ``None`` for a number that is no curve.
    metric
        Name of the number. ``"<metric> s.e."`` holds its standard error.
    value
        The number, NaN where a chain was lost.
    """

    method: str
    metric: str
    value: float
    settings: Mapping[str, Any]
    seed: int | None = None
    x: float | None = None

    def matches(self, conditions: Mapping[str, Any]) -> bool:
        """Return whether all conditions on method, seed, x and settings hold."""
        own = {"method": self.method, "seed": self.seed, "x": self.x, **self.settings}
        return all(own.get(name) == value for name, value in conditions.items())


def write(study: str, rows: Iterable[Row], record: Mapping[str, Any], root: Path = RECORDS) -> None:
    """Write the rows and the record of a study."""
    path = root / f"{study}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            setting = " ".join(f"{name}={_text(value)}" for name, value in row.settings.items())
            numbers = (_text(row.seed), _text(row.x), row.metric, _text(row.value))
            writer.writerow((row.method, setting, *numbers))
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


def read(study: str, root: Path = RECORDS) -> tuple[Row, ...]:
    """Return the rows of a study."""
    return _read(root / f"{study}.csv")


@cache
def _read(path: Path) -> tuple[Row, ...]:
    with path.open(newline="") as file:
        return tuple(
            Row(
                line["method"],
                line["metric"],
                float(line["value"] or math.nan),
                dict(_pair(part) for part in line["setting"].split()),
                int(line["seed"]) if line["seed"] else None,
                float(line["x"]) if line["x"] else None,
            )
            for line in csv.DictReader(file)
        )


def read_record(study: str, root: Path = RECORDS) -> dict[str, Any]:
    """Return the record of a study."""
    found: dict[str, Any] = json.loads((root / f"{study}.json").read_text())
    return found


def studies(paper: str = "*", root: Path = RECORDS) -> list[str]:
    """Return the studies that have a record, as ``<paper>/<name>``."""
    return sorted(
        path.relative_to(root).with_suffix("").as_posix() for path in root.glob(f"{paper}/*.csv")
    )


def rounded(text: str) -> float:
    """Return a number in a text, rounded as in a record."""
    return float(f"{float(text):.{DIGITS}g}")


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else str(value)


def _pair(part: str) -> tuple[str, Any]:
    name, _, text = part.partition("=")
    try:
        number = float(text)
    except ValueError:
        return name, text
    return name, int(number) if text.lstrip("-").isdigit() else number
