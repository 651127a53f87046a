"""Tidy rows of a study's run, and the record of its settings and versions.

A study `<paper>/<name>` has ``records/<paper>/<name>.csv`` with one number per row, and
``records/<paper>/<name>.json`` with its settings, versions, commit, device and seconds.

``python -m experiments.tidy results/<paper>/<name>`` copies a study's run into ``records``.
"""

import csv
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).resolve().parents[1] / "records"
DIGITS = 6  # significant digits of the values in a record

Place = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Row:
    """One number of a run, NaN where a chain was lost."""

    method: str
    metric: str  # "<metric> s.e." is the standard error of "<metric>"
    value: float
    settings: Mapping[str, Any]  # those that differ within the study
    seed: int | None = None  # None for a summary over repetitions
    x: float | None = None  # place on a curve, such as a number of rounds

    @property
    def place(self) -> Place:
        """Return names and values of all but metric and value."""
        return (("method", self.method), ("seed", self.seed), ("x", self.x), *self.settings.items())

    def matches(self, conditions: Mapping[str, Any]) -> bool:
        """Return whether the place has these values, or one of a list of values."""
        place = dict(self.place)
        return all(
            place.get(name) in (value if isinstance(value, list) else [value])
            for name, value in conditions.items()
        )


def by_place(rows: Iterable[Row]) -> dict[Place, dict[str, float]]:
    """Return metrics and values by `Row.place`."""
    table: dict[Place, dict[str, float]] = defaultdict(dict)
    for row in rows:
        table[row.place][row.metric] = row.value
    return table


def from_numbers(
    method: str,
    settings: Mapping[str, Any],
    numbers: Mapping[str, Any],
    seed: int | None = None,
    x: float | None = None,
) -> list[Row]:
    """Return a row per metric, and one for its standard error if its number has an `error`.

    `x` can be among the settings.
    """
    rows, x = [], settings.get("x", x)
    settings = {name: value for name, value in settings.items() if name != "x"}
    for metric, number in numbers.items():
        value = math.nan if number is None else float(number)
        rows.append(Row(method, metric, value, settings, seed, x))
        error = getattr(number, "error", 0.0)
        if 0 < error < math.inf:
            rows.append(Row(method, f"{metric} s.e.", error, settings, seed, x))
    return rows


def distinct(rows: Iterable[Row]) -> list[Row]:
    """Return rows without repetitions, for a reference that several jobs have."""
    return list({str(row): row for row in rows}.values())  # NaN is not equal to itself


def write(study: str, rows: Iterable[Row], record: Mapping[str, Any], root: Path = RECORDS) -> None:
    """Write the rows and the record of a study."""
    path = root / f"{study}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, rows, DIGITS)
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


def write_rows(path: Path, rows: Iterable[Row], digits: int = 17) -> None:
    """Write rows as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("method", "setting", "seed", "x", "metric", "value"))
        for row in rows:
            numbers = (_text(row.seed), _text(row.x), row.metric, _text(row.value, digits))
            writer.writerow((row.method, setting_text(row.settings), *numbers))


def setting_text(settings: Mapping[str, Any]) -> str:
    """Return settings as the column of a file holds them."""
    return " ".join(f"{name}={_text(value)}" for name, value in settings.items())


def _text(value: Any, digits: int = DIGITS) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


@cache
def read(study: str, root: Path = RECORDS) -> tuple[Row, ...]:
    """Return the rows of a study."""
    return tuple(read_rows(root / f"{study}.csv"))


def read_rows(path: Path) -> list[Row]:
    """Read what `write_rows` wrote."""
    with path.open(newline="") as file:
        return [
            Row(
                line["method"],
                line["metric"],
                float(line["value"] or math.nan),
                pairs(line["setting"]),
                int(line["seed"]) if line["seed"] else None,
                float(line["x"]) if line["x"] else None,
            )
            for line in csv.DictReader(file)
        ]


def pairs(text: str) -> dict[str, Any]:
    """Return the settings in what `setting_text` returned."""
    return dict(pair(part) for part in text.split())


def pair(part: str) -> tuple[str, Any]:
    """Return name and value of a setting ``name=value``; the value is a number if it can be one."""
    name, _, text = part.partition("=")
    try:
        number = float(text)
    except ValueError:
        return name, "".join(text.split())
    return name, int(text) if text.lstrip("-").replace("_", "").isdigit() else number


def take(folder: Path, root: Path = RECORDS) -> str:
    """Copy rows and record of a study's run into `root`; return the study's name."""
    record = json.loads((folder / "record.json").read_text())
    write(record["study"], read_rows(folder / "rows.csv"), record, root)
    return str(record["study"])


def read_record(study: str, root: Path = RECORDS) -> dict[str, Any]:
    """Return the record of a study."""
    return dict(json.loads((root / f"{study}.json").read_text()))


def studies(paper: str = "*", root: Path = RECORDS) -> list[str]:
    """Return the studies that have a record, as ``<paper>/<name>``."""
    return sorted(f"{path.parent.name}/{path.stem}" for path in root.glob(f"{paper}/*.csv"))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(take(Path(argument)))
