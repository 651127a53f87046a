"""Tables in CSV and Parquet files, read by the types of a study dictionary."""

import csv
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedmcmc.data._levels import is_plain_number

MISSING = frozenset({"", "NA", "NaN"})
"""Texts that mark a missing value in a CSV file, unless they are levels of the column."""


def read_file(dictionary: Any, path: Path) -> Any:
    """Return the table in a file; raise `ValueError` if it is neither CSV nor Parquet."""
    suffix = path.suffix.lower()
    if suffix == ".csv":
        return _read_csv(dictionary, path)
    if suffix == ".parquet":
        return _read_parquet(path)
    raise ValueError(f"{path} must be a .csv or a .parquet file.")


def _read_csv(dictionary: Any, path: Path) -> dict[str, np.ndarray]:
    """Return columns by name, with objects that are texts, numbers or ``None``.

    Libraries guess types from the values, so that a site's rows could change the type of a column.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = list(csv.reader(file, strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8: {error}.") from None
    if not lines:
        raise ValueError(f"{path} is empty: the first line must hold the names of the columns.")
    header, *rows = lines
    repeated = [name for name, num in Counter(header).items() if num > 1]
    if repeated:
        raise ValueError(f"{path} has several columns with the name {repeated[0]!r}.")
    for i, row in enumerate(rows):
        if len(row) != len(header):
            raise ValueError(
                f"Row {i} of {path} has {len(row)} values, and the file has {len(header)} columns "
                f"({', '.join(map(repr, header))}). Separate values by commas."
            )
    columns = {}
    for name, texts in zip(header, zip(*rows, strict=True), strict=False):
        column = dictionary.columns.get(name)
        is_number = column is not None and not column.levels and column.type != "text"
        levels = () if column is None else column.levels
        values = np.empty(len(texts), object)
        values[:] = [
            None if x in MISSING and x not in levels else _as_number(x) if is_number else x
            for x in texts
        ]
        columns[name] = values
    return columns if rows else {name: np.empty(0) for name in header}


def _as_number(text: str) -> Any:
    """Return a text as a number, or the text itself, which the dictionary refuses."""
    plain = text.strip().casefold()
    if not is_plain_number(plain):
        return text
    return int(plain) if plain.lstrip("+-").isdecimal() else float(plain)


def _read_parquet(path: Path) -> Any:
    import narwhals.stable.v2 as nw  # slow

    for backend in ("polars", "pyarrow"):
        if find_spec(backend) is not None:
            try:
                return nw.read_parquet(str(path), backend=backend).to_native()
            except Exception as error:  # each library has its own errors
                raise ValueError(f"{path} cannot be read as a Parquet file: {error}") from None
    raise ImportError(f"Reading {path} needs Polars or PyArrow: pip install polars")
