"""Facts about the rows of all sites that a model needs before the fit, from sums alone."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from fedmcmc._checks import in_quotes
from fedmcmc.data import FederatedData
from fedmcmc.models._columns import (
    Levels,
    SiteRows,
    column_of,
    group_labels,
    is_text,
    read_rows,
    row_values,
    row_weights,
    sort_labels,
    split_tables,
)
from fedmcmc.models._formula import Formula, calls_in
from fedmcmc.models._matrix import Matrix
from fedmcmc.models._missing import check_missing
from fedmcmc.models._numbers import NUM_BINS, Numbers

WITHOUT_OFFSET = "y - offset"
"""Name of the outcome minus the offset."""
RARE = 5
"""Number of rows below which a level is reported as rare."""
CONSTANT = 1e-9
"""Standard deviation of a constant column, as a fraction of its mean."""
Arrays = dict[str, tuple[np.ndarray, np.ndarray]]
"""Numbers of a site with their weights, by name."""


@dataclass(frozen=True)
class Group:
    """Groups of a random term, with `levels` unless they stay at the sites (see `TermDesign`)."""

    kind: str
    num_levels: int
    levels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Schema:
    """Facts that all sites share before the fit; made by `exchange`.

    Attributes
    ----------
    formula
        Text of the formula.
    client, clients
        Name of the column with each row's client or ``None``, and the clients' labels as text.
    rows, complete, missing
        Number of rows, of rows without missing values, and of missing values of each column.
    levels, counts, unobserved
        Levels of each factor in their order, the number of rows of each level, and levels of the
        dictionary that no row has, which have no coefficient.
    numbers, columns
        `Numbers` of each numerical column, and of each column of the fixed part by its name.
    outcome
        `Numbers` of each array of the outcome, of ``event_time``, the times of events, and of
        ``y - offset``.
    groups
        `Group` of each random term by its label.
    covariates
        For each covariate that may be missing, names, means and standard deviations of the columns
        of its model.
    """

    formula: str
    client: str | None
    clients: tuple[str, ...]
    rows: int
    complete: int
    missing: dict[str, int]
    levels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    counts: dict[str, tuple[float, ...]] = field(default_factory=dict)
    unobserved: dict[str, tuple[str, ...]] = field(default_factory=dict)
    numbers: dict[str, Numbers] = field(default_factory=dict)
    columns: dict[str, Numbers] = field(default_factory=dict)
    outcome: dict[str, Numbers] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    covariates: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns of the fixed part."""
        return tuple(self.columns)

    @property
    def means(self) -> tuple[float, ...]:
        """Means of the columns of the fixed part."""
        return tuple(x.mean for x in self.columns.values())

    @property
    def events(self) -> float:
        """Number of events (survival), or sum of the outcome."""
        number = self.outcome["event" if "event" in self.outcome else "y"]
        return number.count * number.mean

    def to_dict(self) -> dict[str, Any]:
        """Return the schema as a dictionary for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Schema":
        """Return the schema in a dictionary of `to_dict`, also after JSON made lists of tuples."""
        entries = _as_tuples(content)
        for name in ("numbers", "columns", "outcome", "groups"):
            kind = Group if name == "groups" else Numbers
            entries[name] = {key: kind(**x) for key, x in entries[name].items()}
        return cls(**entries)


def exchange(
    formula: Formula,
    tables: Any,
    dictionary: Any = None,
    *,
    client: str | None,
    max_missing: float = 0.2,
) -> Schema:
    """Return the schema of a model from sums over the sites' rows.

    A site computes its sums by `count_rows`, `sum_numbers` and `sum_squares`.

    Parameters
    ----------
    formula
        Parsed formula.
    tables
        Table of each client by its label, a list of tables, or one table with all rows.
    dictionary
        `fedmcmc.data.Dictionary` with levels and ranges. Without it, which is possible in a
        simulation only, levels are sorted or merged from ordered categories, and ranges come from
        the rows.
    client
        Name of the column with each row's client. Tables of single clients need not have it.
    max_missing
        Largest fraction of rows that may be dropped because a value is missing.

    Raises
    ------
    ValueError
        If a value is no level of the dictionary, a column is constant at all sites, or too many
        rows are incomplete. The message names client, column, row and value.
    """
    tables = split_tables(tables, client)
    factors = [*find_factors(formula, dictionary)]
    sites = [read_rows(formula, x, label, factors, client) for label, x in tables.items()]
    _check_complete(sites, max_missing, dictionary)
    used = (*formula.covariates, *map(column_of, formula.rows.values()))
    levels = {
        name: _levels_of(dictionary, name) or _merge_levels(name, tables, sites)
        for name in dict.fromkeys(used)
        if any(is_text(site.columns.get(name, np.zeros(0))) for site in sites)
    }
    event = column_of(formula.rows.get("event", ""))
    if event in levels and not _levels_of(dictionary, event):
        raise ValueError(
            f"The event {event!r} is text: {', '.join(map(repr, levels[event]))}. Turn it into 0 "
            f"(no event) and 1, or give the order of its levels in a dictionary."
        )
    counts = _add([count_rows(formula, site, levels) for site in sites])
    levels, unobserved = _find_observed(levels, counts["levels"], formula.covariates)
    schema = Schema(
        formula.text,
        client,
        tuple(map(str, tables)),
        int(counts["rows"]),
        int(counts["complete"]),
        counts["missing"],
        levels,
        {
            name: tuple(x[x > 0].tolist() if name in formula.covariates else x.tolist())
            for name, x in counts["levels"].items()
        },
        unobserved,
    )
    check_missing(formula, schema, max_missing)
    names = [name for name in formula.covariates if name not in levels]
    ranges = {name: _range_of(dictionary, name) for name in names}
    for name, limits in ranges.items():
        for site in sites if limits else ():
            x, (low, high) = site.columns[name], limits or (0.0, 0.0)
            is_valid = np.isnan(x) | ((low <= x) & (x <= high))
            site.require(is_valid, name, x, f"from {low:g} to {high:g}")
    all_weights = [row_weights(formula, site) for site in sites]
    arrays = [
        {name: _drop_missing(site.columns[name], weights) for name in names}
        for site, weights in zip(sites, all_weights, strict=True)
    ]
    numbers = _summarize(arrays, ranges)
    expressions = dict(formula.outcome) | {"event_time": formula.rows.get("time", "")}
    outcome = _summarize(
        [outcome_arrays(formula, site, levels) for site in sites],
        {name: _range_of(dictionary, text) for name, text in expressions.items()},
    )
    _check_varying(numbers)
    schema = replace(schema, numbers=numbers, outcome=outcome)
    filled = [fill_missing(formula, site, schema) for site in sites]
    columns = _summarize_columns(formula.fixed, schema, filled, all_weights)
    covariates = {}
    for name, text in formula.missing:
        model = _summarize_columns(text, schema, filled, all_weights)
        means, sds = (
            zip(*((x.mean, x.sd) for x in model.values()), strict=True) if model else ((), ())
        )
        covariates[name] = (tuple(model), means, sds)
    groups = _find_groups(formula, sites, dictionary)
    return replace(schema, columns=columns, covariates=covariates, groups=groups)


def fill_missing(formula: Formula, site: SiteRows, schema: Schema) -> SiteRows:
    """Return rows whose missing covariates have the mean of all sites, for design matrices."""
    columns = dict(site.columns)
    for name, _ in formula.missing:
        columns[name] = np.nan_to_num(columns[name], nan=schema.numbers[name].mean)
    return replace(site, columns=columns)


def _summarize_columns(
    text: str, schema: Schema, sites: Sequence[SiteRows], all_weights: Sequence[np.ndarray]
) -> dict[str, Numbers]:
    """Return summaries of the columns of a right side, without ``Intercept``."""
    matrix = Matrix(text, schema.levels, schema.numbers)
    arrays = []
    for site, weights in zip(sites, all_weights, strict=True):
        pairs = zip(matrix.names, matrix.array(site).T, strict=True)
        arrays.append({name: (x, weights) for name, x in pairs if name != "Intercept"})
    columns = _summarize(arrays, {})
    _check_varying(columns)
    # Plain columns may have missing values, which are not part of their moments.
    return {name: replace(schema.numbers.get(name, x), histogram=()) for name, x in columns.items()}


def _drop_missing(values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    is_observed = ~np.isnan(values)
    return values[is_observed], weights[is_observed]


def count_rows(formula: Formula, site: SiteRows, levels: Levels) -> dict[str, Any]:
    """Return a site's number of rows, complete rows, missing values, and rows of each level.

    Raise `ValueError` with row and value if a value is not one of the `levels`.
    """
    weights = row_weights(formula, site)
    counts = {
        name: np.bincount(site.codes(name, x), weights, minlength=len(x))
        for name, x in levels.items()
    }
    num = len(site.numbers)
    return {"rows": site.num_rows, "complete": num, "missing": site.missing, "levels": counts}


def sum_numbers(arrays: Arrays, edges: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return a site's sum of weights, sum, and number of rows in each bin, by name."""
    sums: dict[str, Any] = {}
    for name, (values, weights) in arrays.items():
        sums[name] = {"count": weights.sum(), "sum": weights @ values}
        if name in edges:
            bins = np.searchsorted(edges[name], values, side="right") - 1
            bins = np.clip(bins, 0, NUM_BINS - 1)
            sums[name]["histogram"] = np.bincount(bins, weights, minlength=NUM_BINS)
    return sums


def sum_squares(arrays: Arrays, means: Mapping[str, float]) -> dict[str, float]:
    """Return a site's weighted sum of squares around the means of all sites, by name."""
    return {name: float(w @ (x - means[name]) ** 2) for name, (x, w) in arrays.items()}


def _summarize(
    parts: Sequence[Arrays], ranges: Mapping[str, tuple[float, float] | None]
) -> dict[str, Numbers]:
    """Return summaries of all sites from two exchanges: sums, then squares around the means."""
    edges = {}
    for name in [name for name in ranges if name in parts[0]]:
        values = np.concatenate([[], *(part[name][0] for part in parts)])
        limits = ranges[name] or ((values.min(), values.max()) if values.size else (0.0, 1.0))
        edges[name] = np.linspace(limits[0], limits[1], NUM_BINS + 1)
    sums = _add([sum_numbers(part, edges) for part in parts])
    means = {name: x["sum"] / max(x["count"], 1e-300) for name, x in sums.items()}
    squares = _add([sum_squares(part, means) for part in parts])
    numbers = {}
    for name, x in sums.items():
        sd = np.sqrt(squares[name] / max(x["count"] - 1, 1))
        numbers[name] = Numbers(float(x["count"]), float(means[name]), float(sd))
        if name in edges:
            counts, limits = tuple(x["histogram"].tolist()), edges[name][[0, -1]].tolist()
            numbers[name] = replace(numbers[name], histogram=counts, low=limits[0], high=limits[1])
    return numbers


def outcome_arrays(formula: Formula, site: SiteRows, levels: Levels) -> Arrays:
    """Return the arrays of the outcome with weights.

    ``event_time`` has the times of events, or finite upper bounds for interval censoring. With an
    offset there is the outcome minus the offset.
    """
    weights = row_weights(formula, site)
    values = {name: row_values(site, name, x, levels) for name, x in formula.outcome}
    arrays = {name: (x[np.isfinite(x)], weights[np.isfinite(x)]) for name, x in values.items()}
    if "event" in values:
        is_event = values["event"] == 1
        arrays["event_time"] = (values["time"][is_event], weights[is_event])
    elif "upper" in values:
        arrays["event_time"] = arrays["upper"]
    elif formula.offset is not None:
        offset = row_values(site, "offset", formula.offset, levels)
        arrays[WITHOUT_OFFSET] = (values["y"] - offset, weights)
    return arrays


def find_factors(formula: Formula, dictionary: Any) -> tuple[str, ...]:
    """Return the columns that are factors even if they hold numbers: groups, levels, ``C(...)``."""
    texts = (*formula.parts, *formula.rows.values())
    calls = [call for text in texts if "C(" in text for call in calls_in(text)]
    coded = {name for function, _, names in calls if function == "C" for name in names}
    used = (*formula.covariates, *map(column_of, formula.rows.values()))
    coded |= {name for name in used if _levels_of(dictionary, name)}
    return tuple(coded.union(formula.factors))


def _column_in(dictionary: Any, name: str) -> Any:
    return None if dictionary is None else dictionary.columns.get(column_of(name))


def _levels_of(dictionary: Any, name: str) -> tuple[str, ...]:
    column = _column_in(dictionary, name)
    return () if column is None else tuple(column.levels)


def _range_of(dictionary: Any, name: str) -> tuple[float, float] | None:
    """Return the finite range of a column in the dictionary, or ``None``."""
    limits = getattr(_column_in(dictionary, name), "range", None)
    return limits if limits is not None and np.isfinite(limits).all() else None


def _merge_levels(
    name: str, tables: Mapping[Any, Any], sites: Sequence[SiteRows]
) -> tuple[str, ...]:
    """Return the levels of a column without a dictionary, in one order for all clients."""
    import narwhals.stable.v2 as nw  # slow

    parts = {}
    for site, (label, table) in zip(sites, tables.items(), strict=True):
        if not is_text(site.columns[name]):
            raise ValueError(
                f"Column {name!r} of client {in_quotes(label)} holds numbers, and text at other "
                f"clients. Use either text or numbers at all clients."
            )
        frame = nw.from_native(table, eager_only=True)
        dtype = frame[name].dtype if name in frame.columns else None
        if dtype not in (nw.String, nw.Categorical, nw.Enum):
            return sort_labels({x for part in sites for x in part.columns[name]})
        is_complete = np.isin(np.arange(len(frame)), site.numbers)
        parts[label] = frame.select(name).filter(is_complete.tolist()).to_native()
    return FederatedData.from_clients(parts).coding[name]


def _find_observed(
    levels: Levels, counts: Mapping[str, np.ndarray], covariates: Sequence[str]
) -> tuple[Levels, Levels]:
    """Return covariates' levels that occur, and levels that do not; warn of rare levels."""
    observed, unobserved = dict(levels), dict[str, tuple[str, ...]]()
    for name in [name for name in levels if name in covariates]:
        names = levels[name]
        pairs = list(zip(names, counts[name].tolist(), strict=True))
        observed[name] = tuple(level for level, num in pairs if num > 0)
        if len(observed[name]) < len(names):
            unobserved[name] = tuple(level for level, num in pairs if num == 0)
        if len(observed[name]) == 1:
            raise ValueError(
                f"Column {name!r} is {observed[name][0]!r} in all rows of all sites. Remove it "
                f"from the formula."
            )
        rare = [f"{level!r} ({num:g})" for level, num in pairs if num < RARE]
        if rare:
            warnings.warn(
                f"Column {name!r} has fewer than {RARE} rows with {', '.join(rare)}. The prior "
                f"decides these coefficients, and levels without rows have none. Merge levels at "
                f"all sites if possible.",
                stacklevel=3,
            )
    return observed, unobserved


def _check_complete(sites: Sequence[SiteRows], max_missing: float, dictionary: Any) -> None:
    """Raise if too many rows are incomplete, or a site has fewer than the owners' rules allow."""
    num_rows = sum(site.num_rows for site in sites)
    dropped = num_rows - sum(len(site.numbers) for site in sites)
    if dropped > max_missing * num_rows:
        totals = _add([site.missing for site in sites])
        name = max(totals, key=lambda x: totals[x])
        site = max(sites, key=lambda x: x.missing[name] / x.num_rows)
        raise ValueError(
            f"{dropped} of {num_rows} rows have missing values, more than max_missing = "
            f"{max_missing:g}. Most are in column {name!r} ({totals[name]}), and client "
            f"{in_quotes(site.client)} lacks {site.missing[name]} of its {site.num_rows} values. "
            f"Impute them, leave the column out, or raise max_missing."
        )
    smallest = getattr(getattr(dictionary, "rules", None), "min_rows", 1)
    for site in sites:
        if len(site.numbers) < smallest:
            raise ValueError(
                f"Client {in_quotes(site.client)} has {len(site.numbers)} complete rows, and the "
                f"rules of the study need at least {smallest} (min_rows)."
            )


def _check_varying(numbers: Mapping[str, Numbers]) -> None:
    """Raise if a column has the same value in all rows of all sites."""
    for name, number in numbers.items():
        if number.sd <= CONSTANT * abs(number.mean):
            raise ValueError(
                f"Column {name!r} is {number.mean:g} in all rows of all sites. Remove it from the "
                f"formula."
            )


def _find_groups(formula: Formula, sites: Sequence[SiteRows], dictionary: Any) -> dict[str, Group]:
    """Return the kind and the levels of each random term.

    Effects of at most one term stay at the clients: the term with the most groups. Effects of the
    other terms are shared, and their levels are coordinates of the posterior.
    """
    groups = {}
    for term in formula.random:
        sets = [set(group_labels(site, term.factors)) for site in sites]
        union = sort_labels(set().union(*sets))
        is_inside = sum(map(len, sets)) == len(union)
        levels = _levels_of(dictionary, term.label) or union
        kind = "group" if is_inside else "shared"
        if kind == "group" and all(len(x) == 1 for x in sets):
            kind, levels = "client", tuple(label for x in sets for label in x)
        groups[term.label] = Group(kind, len(levels), levels)
    local = [label for label, group in groups.items() if group.kind != "shared"]
    finest = max(local, key=lambda x: (groups[x].num_levels, groups[x].kind), default="")
    for label in local:
        if label != finest:
            groups[label] = replace(groups[label], kind="shared")
        elif groups[label].kind == "group":
            groups[label] = replace(groups[label], levels=())  # labels stay at the sites
    return groups


def _add(parts: Sequence[Any]) -> Any:
    """Return the sum of nested dictionaries of numbers."""
    if isinstance(parts[0], Mapping):
        return {key: _add([part[key] for part in parts]) for key in parts[0]}
    return sum(parts[1:], parts[0])


def _as_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_tuples(x) for key, x in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value
