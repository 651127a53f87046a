"""Facts about the rows of all sites that a model needs before the fit, from sums alone."""

import ast
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from fedmcmc._checks import in_quotes
from fedmcmc.data import FederatedData
from fedmcmc.models._columns import (
    SiteRows,
    read_site,
    sort_labels,
    split_tables,
)
from fedmcmc.models._formula import Formula, calls_in, evaluate, names_in
from fedmcmc.models._matrix import Matrix
from fedmcmc.models._missing import check_missing, fill_missing

NUM_BINS = 1024
"""Number of bins of a histogram."""
RARE = 5
"""Number of rows below which a level is reported as rare."""
CONSTANT = 1e-9
"""Standard deviation of a constant column, as a fraction of its mean."""
Sums = dict[str, Any]


@dataclass(frozen=True)
class Numbers:
    """Summary of numbers of all sites.

    Attributes
    ----------
    count, mean, sd
        Number of rows (or sum of the weights), mean, and standard deviation with ``count - 1``.
    low, high
        Range of the histogram.
    histogram
        Number of rows in each of its 1,024 bins.
    """

    count: float = 0.0
    mean: float = 0.0
    sd: float = 0.0
    low: float = 0.0
    high: float = 0.0
    histogram: tuple[float, ...] = ()

    def quantile(self, probability: Any) -> np.ndarray:
        """Return quantiles, linear within a bin; 0 and 1 are the edges of the occupied bins."""
        counts = np.asarray(self.histogram)
        edges = np.linspace(self.low, self.high, len(counts) + 1)
        occupied = np.flatnonzero(counts)
        begin, end = occupied[0], occupied[-1] + 1
        cumulative = np.concatenate(([0.0], np.cumsum(counts[begin:end]))) / counts.sum()
        return np.interp(probability, cumulative, edges[begin : end + 1])


@dataclass(frozen=True)
class Group:
    """Grouping factor: its `kind` (``"client"``, ``"group"`` or ``"shared"``) and its levels."""

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
    client
        Name of the column with each row's client, or ``None``.
    clients
        Labels of the clients as text.
    rows, complete
        Number of rows of all sites, and of rows without missing values, except for covariates
        with a model of their own.
    missing
        Number of missing values of each column.
    levels, counts
        Levels of each factor in their order, and the number of rows of each level.
    unobserved
        Levels of the dictionary that no row has, which have no coefficient.
    numbers
        `Numbers` of each numerical column.
    outcome
        `Numbers` of each array of the outcome, with ``event_time`` for times of events.
    events
        Sum of the outcome's events (survival) or of a binary outcome.
    names, means, sds
        Columns of the fixed part without ``Intercept``, with their means and standard deviations.
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
    outcome: dict[str, Numbers] = field(default_factory=dict)
    events: float = 0.0
    names: tuple[str, ...] = ()
    means: tuple[float, ...] = ()
    sds: tuple[float, ...] = ()
    groups: dict[str, Group] = field(default_factory=dict)
    covariates: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the schema as a dictionary for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Schema":
        """Return the schema in a dictionary of `to_dict`, also after JSON made lists of tuples."""
        entries = dict(content)
        for name, kind in (("numbers", Numbers), ("outcome", Numbers), ("groups", Group)):
            entries[name] = {key: kind(**_as_tuples(x)) for key, x in entries[name].items()}
        for name in ("levels", "counts", "unobserved"):
            entries[name] = _as_tuples(entries[name])
        return cls(**_as_tuples(entries))


def exchange(
    formula: Formula,
    tables: Any,
    dictionary: Any = None,
    *,
    client: str | None,
    max_missing: float = 0.2,
) -> Schema:
    """Return the schema of a model from sums over the sites' rows.

    The functions `count_site`, `sum_site` and `sum_squares_of_site` compute a site's part.

    Parameters
    ----------
    formula
        Parsed formula.
    tables
        Table of each client by its label, a list of tables, or one table with all rows.
    dictionary
        `fedmcmc.data.Dictionary` with levels and ranges. Without it, which is possible in a
        simulation only, levels are the sorted union of all clients' levels, ordered categories keep
        their order, and ranges are those of the rows.
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
    factors = find_factors(formula, tables, dictionary)
    sites = [read_rows(formula, x, label, factors, client) for label, x in tables.items()]
    _check_missing(sites, max_missing)
    _check_sizes(sites, dictionary)
    covariates = [name for name in factors if name not in formula.factors]
    used = [name for name in formula.covariates if name in formula.factors]
    levels = {
        name: _dictionary_levels(dictionary, name) or _merge_levels(name, tables, sites)
        for name in dict.fromkeys([*covariates, *used])
    }
    counts = _add([count_site(formula, site, levels) for site in sites])
    schema = Schema(
        formula.text,
        client,
        tuple(str(label) for label in tables),
        int(counts["rows"]),
        int(counts["complete"]),
        {name: int(num) for name, num in counts["missing"].items()},
    )
    schema = _drop_unobserved(schema, levels, counts["levels"])
    check_missing(formula, schema, max_missing)
    names = [x for x in formula.covariates if x not in schema.levels]
    values = {x: [site.columns[x] for site in sites] for x in names}
    ranges = {x: _find_range(dictionary, x, parts) for x, parts in values.items()}
    arrays = [outcome_arrays(formula, site, schema.levels) for site in sites]
    for name in arrays[0]:
        expressions = dict(formula.outcome)
        column = expressions.get("time" if name == "event_time" else name, "")
        ranges[f"~{name}"] = _find_range(dictionary, column, [x[name][0] for x in arrays])
    # Two exchanges: sums and histograms, then squares around the common means.
    sums = _add([sum_site(formula, site, schema, ranges) for site in sites])
    means = {name: x["sum"] / max(x["count"], 1e-300) for name, x in sums.items()}
    squares = _add([sum_squares_of_site(formula, site, schema, means) for site in sites])
    numbers = {
        name: Numbers(
            float(x["count"]),
            float(means[name]),
            float(np.sqrt(squares[name] / max(x["count"] - 1, 1))),
            *ranges[name],
            tuple(x["histogram"].tolist()),
        )
        for name, x in sums.items()
    }
    outcome = {name[1:]: numbers.pop(name) for name in list(numbers) if name.startswith("~")}
    schema = replace(schema, numbers=numbers, outcome=outcome)
    for name, number in numbers.items():
        if number.sd <= CONSTANT * abs(number.mean):
            raise ValueError(
                f"Column {name!r} is {number.mean:g} in all rows of all sites. Remove it from the "
                f"formula."
            )
    key = "event" if "event" in outcome else "y"
    if key in outcome:
        schema = replace(schema, events=outcome[key].mean * outcome[key].count)
    schema = replace(schema, groups=_find_groups(formula, sites, client, dictionary))
    return _add_moments(formula, schema, sites)


def read_rows(
    formula: Formula, table: Any, label: Any, factors: Sequence[str], client: str | None
) -> SiteRows:
    """Return a site's complete rows of the columns that the formula needs."""
    outcome = dict(formula.outcome)
    bounds = [outcome["time"], outcome["upper"]] if "upper" in outcome else []
    return read_site(
        table,
        label,
        formula.columns,
        factors=factors,
        client_column=client,
        may_miss=[*bounds, *(name for name, _ in formula.missing)],
    )


def count_site(formula: Formula, site: SiteRows, levels: Mapping[str, tuple[str, ...]]) -> Sums:
    """Return a site's number of rows, complete rows, missing values, and rows of each level.

    Raise `ValueError` with row and value if a value is not one of the `levels`.
    """
    weights = row_weights(formula, site)
    counts = {}
    for name, names in levels.items():
        codes = code_levels(site, name, names)
        counts[name] = np.bincount(codes, weights, minlength=len(names))
    return {
        "rows": site.num_rows,
        "complete": len(site.numbers),
        "missing": site.missing,
        "levels": counts,
    }


def sum_site(
    formula: Formula, site: SiteRows, schema: Schema, ranges: Mapping[str, tuple[float, float]]
) -> Sums:
    """Return the count, the sum and the histogram of each number; outcomes have ``~`` in front."""
    sums = {}
    for name, (values, weights) in _numbers_of_site(formula, site, schema).items():
        low, high = ranges[name]
        is_outside = (values < low) | (values > high)
        if is_outside.any() and not name.startswith("~"):
            row = int(is_outside.argmax())
            raise ValueError(
                f"Column {site.where(name, row)} is {values[row]:g}, outside of the range {low:g} "
                f"to {high:g} of the dictionary."
            )
        edges = np.linspace(low, high, NUM_BINS + 1)
        bins = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, NUM_BINS - 1)
        sums[name] = {
            "count": weights.sum(),
            "sum": weights @ values,
            "histogram": np.bincount(bins, weights, minlength=NUM_BINS),
        }
    return sums


def sum_squares_of_site(
    formula: Formula, site: SiteRows, schema: Schema, means: Mapping[str, float]
) -> Sums:
    """Return the sum of squares of each number around the mean of all sites."""
    parts = _numbers_of_site(formula, site, schema)
    return {
        name: weights @ (values - means[name]) ** 2 for name, (values, weights) in parts.items()
    }


def _numbers_of_site(
    formula: Formula, site: SiteRows, schema: Schema
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the numerical columns and the arrays of the outcome, each with weights."""
    weights = row_weights(formula, site)
    names = [x for x in formula.covariates if x not in schema.levels]
    outcomes = outcome_arrays(formula, site, schema.levels)
    observed = {name: ~np.isnan(site.columns[name]) for name in names}
    return {name: (site.columns[name][mask], weights[mask]) for name, mask in observed.items()} | {
        f"~{name}": (values, weights[mask]) for name, (values, mask) in outcomes.items()
    }


def outcome_arrays(
    formula: Formula, site: SiteRows, levels: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the arrays of the outcome with the mask of the rows that they summarize.

    ``event_time`` holds the times of events (of all finite bounds for interval censoring).
    """
    arrays = {}
    for name, expression in formula.outcome:
        values = row_values(site, name, expression, levels)
        mask = np.isfinite(values)
        arrays[name] = (values[mask], mask)
    if "event" in arrays:
        mask = arrays["event"][0] == 1
        arrays["event_time"] = (arrays["time"][0][mask], mask)
    elif "upper" in arrays:
        arrays["event_time"] = arrays["upper"]
    return arrays


def row_values(
    site: SiteRows, name: str, expression: str, levels: Mapping[str, tuple[str, ...]]
) -> np.ndarray:
    """Return an array with one number per row, such as the outcome; text becomes codes."""
    column = _column_of(expression)
    if column in levels:
        return code_levels(site, column, levels[column]).astype(np.float64)
    values = np.asarray(evaluate(expression, site.columns))
    if values.dtype.kind not in "fiub":
        raise ValueError(
            f"{expression!r} ({name}) of client {in_quotes(site.client)} is not a number."
        )
    values = np.broadcast_to(values, (len(site.numbers),)).astype(np.float64)
    if name == "upper":
        return np.where(np.isnan(values), np.inf, values)
    if name == "time" and np.isnan(values).any():
        return np.where(np.isnan(values), 0.0, values)
    if not np.isfinite(values).all():
        row = int((~np.isfinite(values)).argmax())
        raise ValueError(f"{site.where(expression, row)} is {values[row]}; it must be finite.")
    return values


def row_weights(formula: Formula, site: SiteRows) -> np.ndarray:
    """Return the frequency weight of each row."""
    if formula.weights is None:
        return np.ones(len(site.numbers))
    weights = row_values(site, "weights", formula.weights, {})
    if (weights < 0).any():
        row = int((weights < 0).argmax())
        raise ValueError(
            f"Weight {site.where(formula.weights, row)} is {weights[row]:g}; weights must be at "
            f"least 0."
        )
    return weights


def code_levels(site: SiteRows, name: str, levels: Sequence[str]) -> np.ndarray:
    """Return the code of each row's level; raise `ValueError` for a value that is no level."""
    codes = {level: code for code, level in enumerate(levels)}
    for row, value in enumerate(site.columns[name]):
        if value not in codes:
            raise ValueError(
                f"Column {site.where(name, row)} holds {value!r}, which is none of the levels "
                f"{', '.join(map(repr, levels))}. Correct the value, or add the level for all "
                f"clients."
            )
    return np.array([codes[x] for x in site.columns[name]], np.int32)


def find_factors(
    formula: Formula, tables: Mapping[Any, Any], dictionary: Any = None
) -> tuple[str, ...]:
    """Return the columns that are factors: text, levels in the dictionary, or inside ``C(...)``."""
    import narwhals.stable.v2 as nw  # slow

    coded = {
        call.args[0].id
        for text in formula.parts
        for call in calls_in(text)
        if getattr(call.func, "id", "") == "C" and isinstance(call.args[0], ast.Name)
    }
    outcome = {_column_of(x) for _, x in formula.outcome if x.startswith("C(")}
    for table in tables.values():
        frame = nw.from_native(table, eager_only=True)
        for name in set(formula.columns) & set(frame.columns):
            dtype = frame[name].dtype
            if dtype in (nw.String, nw.Categorical, nw.Enum) or (
                dtype == nw.Object
                and any(isinstance(x, str) for x in frame[name].drop_nulls().to_list())
            ):
                coded.add(name)
    coded |= outcome | set(formula.factors)
    coded |= {name for name in formula.columns if _dictionary_levels(dictionary, name)}
    return tuple(name for name in formula.columns if name in coded)


def _column_of(expression: str) -> str:
    """Return the column in ``C(column)`` or a plain name, else the expression."""
    if expression.startswith("C("):
        names = names_in(expression)
        return names[0] if len(names) == 1 else expression
    return expression.strip("`")


def _dictionary_column(dictionary: Any, name: str) -> Any:
    return None if dictionary is None else dictionary.columns.get(name)


def _dictionary_levels(dictionary: Any, name: str) -> tuple[str, ...]:
    column = _dictionary_column(dictionary, name)
    return () if column is None else tuple(map(str, column.levels))


def _find_range(dictionary: Any, name: str, parts: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the range of a histogram: the dictionary's, or in a simulation that of the rows."""
    column = _dictionary_column(dictionary, name)
    limits = None if column is None else column.range
    if limits is not None and np.isfinite(limits).all():
        return float(limits[0]), float(limits[1])
    values = np.concatenate([x[np.isfinite(x)] for x in parts])
    return (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)


def _merge_levels(
    name: str, tables: Mapping[Any, Any], sites: Sequence[SiteRows]
) -> tuple[str, ...]:
    """Return the levels of a column without a dictionary, in one order for all clients."""
    import narwhals.stable.v2 as nw  # slow

    parts = {}
    for site, (label, table) in zip(sites, tables.items(), strict=True):
        frame = nw.from_native(table, eager_only=True)
        if name not in frame.columns or frame[name].dtype.is_numeric():
            return sort_labels({x for part in sites for x in part.columns[name]})
        is_complete = np.isin(np.arange(site.num_rows), site.numbers)
        parts[label] = frame.select(name).filter(is_complete.tolist()).to_native()
    data = FederatedData.from_clients(parts)
    return tuple(data.coding[name]) if name in data.coding else ("0", "1")


def _drop_unobserved(
    schema: Schema, levels: Mapping[str, tuple[str, ...]], counts: Mapping[str, np.ndarray]
) -> Schema:
    """Return the schema with levels that occur, and warn of rare levels."""
    kept: dict[str, tuple[str, ...]] = {}
    unobserved: dict[str, tuple[str, ...]] = {}
    numbers: dict[str, tuple[float, ...]] = {}
    for name, names in levels.items():
        pairs = list(zip(names, counts[name].tolist(), strict=True))
        kept[name] = tuple(level for level, num in pairs if num > 0)
        numbers[name] = tuple(num for _, num in pairs if num > 0)
        if len(kept[name]) < len(names):
            unobserved[name] = tuple(level for level, num in pairs if num == 0)
            warnings.warn(
                f"No site has a row with {', '.join(map(repr, unobserved[name]))} in column "
                f"{name!r}, so that there is no coefficient for it.",
                stacklevel=3,
            )
        if len(kept[name]) == 1:
            raise ValueError(
                f"Column {name!r} is {kept[name][0]!r} in all rows of all sites. Remove it from "
                f"the formula."
            )
        rare = [f"{level!r} ({num:g})" for level, num in pairs if 0 < num < RARE]
        if rare:
            warnings.warn(
                f"Column {name!r} has fewer than {RARE} rows with {', '.join(rare)}: the prior "
                f"decides these coefficients. Merge rare levels at all sites if possible.",
                stacklevel=3,
            )
    return replace(schema, levels=kept, counts=numbers, unobserved=unobserved)


def _check_missing(sites: Sequence[SiteRows], max_missing: float) -> None:
    """Raise if too many rows are incomplete, and name the column and client with most of them."""
    num_rows = sum(site.num_rows for site in sites)
    dropped = num_rows - sum(len(site.numbers) for site in sites)
    if dropped > max_missing * num_rows:
        totals = {x: sum(site.missing[x] for site in sites) for x in sites[0].missing}
        name = max(totals, key=lambda x: totals[x])
        site = max(sites, key=lambda x: x.missing[name] / x.num_rows)
        raise ValueError(
            f"{dropped} of {num_rows} rows have missing values, more than max_missing = "
            f"{max_missing:g}. Most are in column {name!r} ({totals[name]}), and client "
            f"{in_quotes(site.client)} lacks {site.missing[name]} of its {site.num_rows} values. "
            f"Impute them, leave the column out, or raise max_missing."
        )


def _check_sizes(sites: Sequence[SiteRows], dictionary: Any) -> None:
    """Raise if a site has fewer complete rows than the owners' rules allow."""
    smallest = getattr(getattr(dictionary, "rules", None), "min_rows", 1)
    for site in sites:
        if len(site.numbers) < smallest:
            raise ValueError(
                f"Client {in_quotes(site.client)} has {len(site.numbers)} complete rows, and the "
                f"rules of the study need at least {smallest} (min_rows)."
            )


def _find_groups(
    formula: Formula, sites: Sequence[SiteRows], client: str | None, dictionary: Any
) -> dict[str, Group]:
    """Return the kind and the levels of each random term.

    Effects of at most one term can stay at the clients: the term with the most groups. Effects of
    the other terms are shared, and their levels are coordinates of the posterior.
    """
    labels = {
        term.label: [group_labels(site, term.factors) for site in sites] for term in formula.random
    }
    groups = {}
    for term in formula.random:
        sets = [set(x) for x in labels[term.label]]
        union = sort_labels(set().union(*sets))
        is_inside = sum(map(len, sets)) == len(union)
        kind = "shared"
        if term.factors == (client,) or (is_inside and all(len(x) == 1 for x in sets)):
            kind = "client"
        elif is_inside or client in term.factors:
            kind = "group"
        column = _dictionary_column(dictionary, term.label)
        levels = tuple(column.levels) if column is not None and column.levels else union
        if kind == "client":
            levels = tuple(next(iter(x)) for x in sets)
        groups[term.label] = Group(kind, len(levels), levels)
    local = [label for label, group in groups.items() if group.kind != "shared"]
    finest = max(local, key=lambda x: (groups[x].kind == "group", groups[x].num_levels), default="")
    for label in local:
        if label != finest:
            groups[label] = replace(groups[label], kind="shared")
        elif groups[label].kind == "group":
            groups[label] = replace(groups[label], levels=())  # labels stay at the sites
    return groups


def group_labels(site: SiteRows, factors: Sequence[str]) -> list[str]:
    """Return each row's label of a combination of factors, such as ``"Bern:3"``."""
    return [":".join(x) for x in zip(*(site.columns[name] for name in factors), strict=True)]


def _add_moments(formula: Formula, schema: Schema, sites: Sequence[SiteRows]) -> Schema:
    """Return the schema with means and standard deviations of the columns of all coefficients."""
    weights = [row_weights(formula, site) for site in sites]
    sites = [fill_missing(formula, site, schema) for site in sites]
    names, means, sds = _moments(formula.fixed, schema, sites, weights)
    covariates = {name: _moments(text, schema, sites, weights) for name, text in formula.missing}
    return replace(schema, names=names, means=means, sds=sds, covariates=covariates)


def _moments(
    text: str, schema: Schema, sites: Sequence[SiteRows], weights: Sequence[np.ndarray]
) -> tuple[tuple[str, ...], tuple[float, ...], tuple[float, ...]]:
    """Return names, means and standard deviations of the columns of a right side."""
    matrix = Matrix(text, schema.levels, schema.numbers)
    arrays = [matrix.array(site) for site in sites]
    count = sum(x.sum() for x in weights)
    means = sum(w @ x for w, x in zip(weights, arrays, strict=True)) / count
    squares = sum(w @ (x - means) ** 2 for w, x in zip(weights, arrays, strict=True))
    sds = np.sqrt(squares / max(count - 1, 1))
    names = [name for name in matrix.names if name != "Intercept"]
    index = [matrix.names.index(name) for name in names]
    for i in index:
        if sds[i] <= CONSTANT * abs(means[i]):
            raise ValueError(
                f"The column {matrix.names[i]!r} is {means[i]:g} in all rows of all sites. Remove "
                f"its term from the formula."
            )
    # Columns of numbers alone may have missing values, which are not part of their spread.
    spreads = [
        schema.numbers[x].sd if x in schema.numbers else sds[i]
        for x, i in zip(names, index, strict=True)
    ]
    return tuple(names), tuple(means[index].tolist()), tuple(map(float, spreads))


def _add(parts: Sequence[Any]) -> Any:
    """Return the sum of nested dictionaries of numbers."""
    if isinstance(parts[0], Mapping):
        return {key: _add([part[key] for part in parts]) for key in parts[0]}
    return sum(parts[1:], parts[0])


def _as_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_tuples(x) for key, x in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value
