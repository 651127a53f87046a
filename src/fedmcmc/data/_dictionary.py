"""Study dictionary: columns, roles, sites and rules that all clients of a study agree on."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedmcmc.data._dictionary_columns import CODED, Column, Rules, build, check_names, read_column
from fedmcmc.data._rows import Levels

NAMES = ("text", "category", "integer")
"""Types that the columns of clients and groups may have."""
STUDY_KEYS = ("name", "posterior", "rows", "kernels", "settings", "asks", "secure", "reproducible")
"""Keys of `study.toml` that describe a run at real sites, and that the dictionary does not read."""
MODEL_KEY = "model"
"""Key of `study.toml` for the command ``fedmcmc fit``, which the dictionary does not read."""
RowRange = tuple[int, int]
"""Smallest and largest number of rows of a site."""


@dataclass(frozen=True, repr=False)
class Dictionary:
    """Dictionary of a study, which codes text and checks rows in simulations and at real sites.

    Parameters
    ----------
    columns
        Columns by name: `Column`, or a mapping of its arguments.
    outcome
        Name of the outcome, or names, such as a time and an event.
    client, group
        Names of the columns with each row's client and with its group within the client. Their type
        is ``"text"``, ``"category"`` or ``"integer"``. They do not become part of the rows.
    sites
        Number of rows of each client by name, or the smallest and the largest number. If empty,
        clients can have any names and numbers of rows.
    rules
        `Rules`, or a mapping of its arguments.

    Raises
    ------
    ValueError
        If an entry is not valid; the message names the column.

    Examples
    --------
    >>> dictionary = Dictionary(
    ...     {
    ...         "age": {"type": "number", "unit": "years", "range": [18, 110]},
    ...         "pain": {"type": "ordered", "levels": ["none", "mild", "severe"]},
    ...     }
    ... )
    >>> dictionary.code({"age": [40, 61], "pain": ["severe", "none"]}, "Bern")["pain"].tolist()
    [2, 0]
    >>> dictionary.check({"age": [40, 610], "pain": ["severe", "none"]}, "Bern")
    Traceback (most recent call last):
    ...
    ValueError: Column 'age' of client 'Bern' holds 610 in row 1, outside of the range 18 to 110
    years. Correct the value, or change the range for all clients.
    """

    columns: Mapping[str, Column]
    outcome: str | Sequence[str] = ()
    client: str | None = None
    group: str | None = None
    sites: Mapping[str, int | RowRange] = field(default_factory=dict)
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        if not isinstance(self.columns, Mapping) or not self.columns:
            raise ValueError(
                f'columns must hold a table per column, such as age = {{ type = "number" }}; got '
                f"{self.columns!r}."
            )
        outcome = (self.outcome,) if isinstance(self.outcome, str) else tuple(self.outcome)
        columns = {name: read_column(name, column) for name, column in self.columns.items()}
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "outcome", outcome)
        object.__setattr__(self, "sites", _check_sites(self.sites))
        if not isinstance(self.rules, Rules):
            object.__setattr__(self, "rules", build(Rules, self.rules, "rules"))
        for role, names in {
            "outcome": outcome,
            "client": [self.client] if self.client is not None else [],
            "group": [self.group] if self.group is not None else [],
        }.items():
            check_names(names, columns, role)
            for name in names:
                is_name = role != "outcome"
                if is_name and columns[name].type not in NAMES:
                    raise ValueError(
                        f"Column {name!r} names each row's {role}, so that its type must be one of "
                        f"{', '.join(NAMES)}; got {columns[name].type!r}."
                    )
                if not is_name and (name in (self.client, self.group) or name not in self.rows):
                    raise ValueError(f"The outcome {name!r} is not a value of the rows.")
        if not self.rows:
            raise ValueError("The dictionary has no column of rows, only clients, groups and text.")
        if self.rules.min_events and not self.events:
            raise ValueError(
                "min_events counts events of the outcome, and no outcome has the type 'event'. Set "
                'outcome, and the type of its column to "event".'
            )

    def __repr__(self) -> str:
        """Return a line per column with its type, levels, range and unit."""
        lines = [f"Dictionary of {len(self.columns)} columns:"]
        for name, column in self.columns.items():
            parts = [column.type]
            if column.levels:
                separator = " < " if column.type == "ordered" else ", "
                parts.append(separator.join(map(repr, column.levels)))
            if column.range is not None:
                parts.append(f"{column.range[0]:g} to {column.range[1]:g}")
            roles = [x for x in ("client", "group") if getattr(self, x) == name]
            roles += ["outcome"] if name in self.outcome else []
            text = ", ".join(filter(None, [*parts, column.unit, *roles]))
            lines.append(f"  {name}: {text}" + (f". {column.description}".rstrip(". ") + "."))
        return "\n".join(lines)

    @classmethod
    def read(cls, path: str | Path) -> "Dictionary":
        """Return the dictionary in a TOML file, such as the `study.toml` of a study at real sites.

        Raise `ValueError` if the file is not valid.
        """
        try:
            content = tomllib.loads(Path(path).read_bytes().decode("utf-8-sig"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{path} is not a valid TOML file: {error}.") from None
        try:
            return cls.from_dict(content)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Dictionary":
        """Return the dictionary in a mapping of the form of the study's file.

        Keys that only describe a model or a run at real sites are ignored; unknown keys raise
        `ValueError`.
        """
        ignored = (*STUDY_KEYS, MODEL_KEY)
        entries = {key: x for key, x in content.items() if key not in ignored}
        names = [x.name for x in fields(cls)]
        check_names(entries, names, "The study", (*names, *ignored))
        if "columns" not in entries:
            raise ValueError("The study has no table columns, which declares its columns.")
        return cls(**entries)

    def to_dict(self) -> dict[str, Any]:
        """Return the dictionary in the form of the study's file, for `from_dict` and JSON."""
        sites = {k: list(x) if isinstance(x, tuple) else x for k, x in self.sites.items()}
        rules = {
            x.name: getattr(self.rules, x.name)
            for x in fields(Rules)
            if getattr(self.rules, x.name) != x.default
        }
        entries: dict[str, Any] = {
            "outcome": list(self.outcome),
            "client": self.client,
            "group": self.group,
            "columns": {name: column.to_dict() for name, column in self.columns.items()},
            "sites": sites,
            "rules": rules,
        }
        return {key: x for key, x in entries.items() if x not in ([], {}, None)}

    @property
    def rows(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and type of each column of one row, without clients, groups and text.

        Numbers and times are floats, and so are integers that may be missing. Codes are int32.
        """
        integer, real = (jax.dtypes.canonicalize_dtype(x) for x in (np.int64, np.float64))
        dtypes = {
            name: np.dtype(np.int32)
            if column.type in CODED
            else integer
            if column.type == "integer" and not self.max_missing(name)
            else real
            for name, column in self.columns.items()
            if column.is_row_value and name not in (self.client, self.group)
        }
        return {name: jax.ShapeDtypeStruct((), dtype) for name, dtype in dtypes.items()}

    @property
    def levels(self) -> dict[str, Levels]:
        """Levels of each coded column of the rows, in the order of their codes."""
        return {name: self.columns[name].levels for name in self.rows if self.columns[name].levels}

    @property
    def orders(self) -> dict[str, str]:
        """Name of the order of each coded column's levels; see `FederatedData.orders`."""
        names = {"ordered": "ordered"}
        return {name: names.get(self.columns[name].type, "as declared") for name in self.levels}

    @property
    def events(self) -> tuple[str, ...]:
        """Names of the outcomes of the type ``"event"``."""
        return tuple(name for name in self.outcome if self.columns[name].type == "event")

    def max_missing(self, name: str) -> float:
        """Return the largest fraction of missing values in a column of a client."""
        if name in (self.client, self.group):
            return 0.0
        fraction = self.columns[name].max_missing
        return self.rules.max_missing if fraction is None else fraction

    def read_table(self, path: str | Path) -> Any:
        """Return one client's table in a CSV or Parquet file, for `code` and `check`.

        In a CSV file the dictionary determines the type of each column, and empty fields, ``NA``
        and ``NaN`` are missing values unless they are levels. Values are separated by commas, and
        the text is UTF-8. Parquet files need Polars or PyArrow. Raise `ValueError` if the file is
        damaged or has another form.
        """
        from fedmcmc.data._dictionary_files import read_file

        return read_file(self, Path(path))

    def code(self, table: Any, client: Any = None) -> dict[str, np.ndarray]:
        """Check one client's rows, and return them as numbers.

        Parameters
        ----------
        table
            Table, or a mapping of columns ``[num_rows]``. The client's column may be missing.
        client
            Label of the client, for messages, `sites` and the client's column.

        Returns
        -------
        dict of numpy.ndarray
            Columns of the rows, ``[num_rows]`` each, with codes of levels for text. Missing numbers
            are NaN.

        Raises
        ------
        ValueError
            In the cases of `check`, and if a coded column has a missing value.
        """
        from fedmcmc.data._dictionary_rows import code_table  # imports narwhals, which is slow

        return code_table(self, table, client)

    def check(self, table: Any, client: Any = None) -> None:
        """Check one client's rows; arguments are those of `code`.

        Raises
        ------
        ValueError
            If columns differ from the dictionary, a value has another type, is not a level, or is
            outside of the range, too many values are missing, or rows or events are too few. The
            message names client, column, row and value. Rows are counted from 0.
        """
        from fedmcmc.data._dictionary_rows import check_table

        check_table(self, table, client)

    def check_parameters(self, num_parameters: int, num_rows: int, client: Any = None) -> None:
        """Raise `ValueError` if a client has too few rows for a model of `num_parameters`."""
        smallest = self.rules.min_rows_per_parameter * num_parameters
        if num_rows < smallest:
            raise ValueError(
                f"{'The client' if client is None else f'Client {client!r}'} has {num_rows} rows, "
                f"and a model of {num_parameters} parameters needs at least "
                f"{math.ceil(smallest)} by the rules of the study "
                f"(min_rows_per_parameter = {self.rules.min_rows_per_parameter:g})."
            )


def with_roles(dictionary: Dictionary, client: str | None, group: str | None) -> Dictionary:
    """Return a dictionary with these names of the columns of clients and groups.

    Raise `ValueError` if the dictionary has other names.
    """
    for role, name in (("client", client), ("group", group)):
        declared = getattr(dictionary, role)
        if name is not None and declared is None:
            changes: dict[str, Any] = {role: name}
            dictionary = replace(dictionary, **changes)
        elif name not in (None, declared):
            argument = "groups" if role == "group" else role
            raise ValueError(
                f"{argument} is the column {name!r}, and in the dictionary it is {declared!r}."
            )
    return dictionary


def _check_sites(sites: Any) -> dict[str, int | RowRange]:
    """Return the numbers of rows of sites, with pairs for ranges."""
    if not isinstance(sites, Mapping):
        raise ValueError(f"sites must be a table of numbers of rows by name, got {sites!r}.")
    checked: dict[str, int | RowRange] = {}
    for site, num in sites.items():
        numbers = list(num) if isinstance(num, list | tuple) else [num, num]
        is_valid = len(numbers) == 2 and all(type(x) is int and x > 0 for x in numbers)
        if not is_valid or numbers[0] > numbers[1]:
            raise ValueError(
                f"sites must give each site's number of rows, a whole number of at least 1, or the "
                f"smallest and the largest number, such as [100, 150]; got {num!r} for {site!r}."
            )
        checked[site] = num if type(num) is int else (numbers[0], numbers[1])
    return checked
