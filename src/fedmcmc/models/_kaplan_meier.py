"""Kaplan-Meier curves and the log-rank test from counts that are summed over sites."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtri
from scipy.stats import chi2

from fedmcmc._checks import in_quotes, positive_integer
from fedmcmc.models._columns import split_tables
from fedmcmc.models._design import Design
from fedmcmc.models._formula import columns_of, parse
from fedmcmc.models._schema import exchange

Columns = Mapping[str, np.ndarray]


def count_at_times(rows: Columns, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers at risk and of events, ``[num_times]`` each: all that a site reveals.

    `rows` have ``time``, ``event`` and perhaps ``start``. An event between two times counts at the
    later one, and a row that is censored between them was last at risk at the earlier one.
    """
    time, event = rows["time"], rows["event"] > 0
    num = len(times)
    place = np.searchsorted(times, time, side="left")
    events = np.bincount(place[event], minlength=num + 1)[:num]
    exit_place = np.where(event, place, np.searchsorted(times, time, side="right") - 1)
    start = rows.get("start", np.full(len(time), -np.inf))
    entry = np.minimum(np.searchsorted(times, start, side="right"), exit_place + 1)
    at_risk = np.bincount(entry, minlength=num + 2) - np.bincount(exit_place + 1, minlength=num + 2)
    return np.cumsum(at_risk)[:num], events


@dataclass(frozen=True)
class KaplanMeier:
    """Kaplan-Meier curve, at the times at which it may be shown.

    Attributes
    ----------
    times
        Increasing times, ``[num_times]``.
    at_risk, events
        Number of rows at risk at each time, and of events since the previous time.
    survival, log_sd
        Estimate at each time, and the standard error of its logarithm (Greenwood's formula).
    """

    times: np.ndarray
    at_risk: np.ndarray
    events: np.ndarray
    survival: np.ndarray
    log_sd: np.ndarray

    def survival_at(self, times: Any) -> np.ndarray:
        """Return the estimate at any times; before the first event it is 1."""
        index = np.searchsorted(self.times, np.asarray(times, float), side="right")
        return np.concatenate([[1.0], self.survival])[index]

    def interval(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Return confidence limits on the log scale at each time, as R's ``survfit`` does."""
        z = ndtri((1 + level) / 2) * self.log_sd
        with np.errstate(invalid="ignore", over="ignore"):
            lower, upper = self.survival * np.exp(-z), np.minimum(self.survival * np.exp(z), 1)
        return np.where(self.survival > 0, lower, np.nan), upper

    def quantile(self, share: float = 0.5, level: float = 0.95) -> tuple[float, float, float]:
        """Return the time by which a share had the event, and confidence limits; NaN if unknown."""
        curves = (self.survival, *self.interval(level))
        times = []
        for curve in curves:
            reached = np.flatnonzero(curve <= 1 - share + 1e-9)
            times.append(float(self.times[reached[0]]) if len(reached) else float("nan"))
        return times[0], times[1], times[2]

    def restricted_mean(self, horizon: float) -> float:
        """Return the mean time without event up to a horizon: the area under the curve."""
        steps = np.concatenate([[0.0], self.times[self.times < horizon], [horizon]])
        return float(np.sum(np.diff(steps) * self.survival_at(steps[:-1])))


@dataclass(frozen=True)
class LogRank:
    """Log-rank test of equal hazards in all groups.

    Attributes
    ----------
    observed, expected
        Group to its number of events, and to the number expected under equal hazards.
    statistic, degrees, p_value
        Chi-squared statistic, its degrees of freedom, and the p-value.
    """

    observed: Mapping[Any, float]
    expected: Mapping[Any, float]
    statistic: float
    degrees: int
    p_value: float


def kaplan_meier(
    formula: str,
    data: Any,
    *,
    client: str | None = None,
    times: Sequence[float] | np.ndarray | None = None,
    min_count: int = 5,
    dictionary: Any = None,
) -> dict[Any, KaplanMeier]:
    """Estimate survival curves from numbers at risk and of events, summed over sites.

    Parameters
    ----------
    formula
        ``Surv(time, event) ~ arm`` for a curve per arm, or ``~ 1``; also ``Surv(start, stop,
        event)``.
    data, client
        Table per client, or a table and the name of its column with clients.
    times
        Increasing times at which sites count events. By default all times with an event, so the
        curve is exact; real sites should agree on a grid, such as months.
    min_count
        A time is shown if at least `min_count` events happened since the previous shown time, and
        as many rows were at risk. Shown estimates do not change.
    dictionary
        `Dictionary` of the study, with the levels of the group.

    Returns
    -------
    dict
        Level of the group (``None`` for ``~ 1``) to `KaplanMeier`.

    Raises
    ------
    ValueError
        If a time or an event is impossible, with client and row, or if there are no events.

    Examples
    --------
    >>> import pandas as pd
    >>> site = pd.DataFrame({"t": [6, 6], "died": [1, 0]})
    >>> tables = {"Bern": site, "Chur": site.assign(t=[7, 9], died=1)}
    >>> curve = kaplan_meier("Surv(t, died) ~ 1", tables, min_count=1)[None]
    >>> curve.times.tolist(), curve.survival.round(3).tolist()
    ([6.0, 7.0, 9.0], [0.75, 0.375, 0.0])
    """
    positive_integer(min_count, "min_count")
    grid, counts = _sum_counts(formula, data, client, times, dictionary)
    return {level: _curve(grid, *pair, min_count) for level, pair in counts.items()}


def log_rank(
    formula: str,
    data: Any,
    *,
    client: str | None = None,
    times: Sequence[float] | np.ndarray | None = None,
    min_count: int = 5,
    dictionary: Any = None,
) -> LogRank:
    """Test equal hazards in groups from counts that are summed over sites.

    See `kaplan_meier` for the parameters. A group with fewer than `min_count` events is an error.

    Examples
    --------
    >>> import pandas as pd
    >>> table = pd.DataFrame({"t": [1, 2, 3, 4], "died": 1, "arm": ["a", "a", "b", "b"]})
    >>> test = log_rank("Surv(t, died) ~ arm", [table], min_count=1)
    >>> round(test.statistic, 3), test.degrees
    (2.882, 1)
    """
    positive_integer(min_count, "min_count")
    _, counts = _sum_counts(formula, data, client, times, dictionary)
    if len(counts) < 2:
        raise ValueError(f"A log-rank test compares groups, as in 'Surv(...) ~ arm': {formula!r}.")
    at_risk = np.stack([pair[0] for pair in counts.values()]).astype(float)  # [groups, times]
    events = np.stack([pair[1] for pair in counts.values()]).astype(float)
    for level, total in zip(counts, events.sum(1), strict=True):
        if total < min_count:
            raise ValueError(
                f"The group {in_quotes(level)} has {total:g} events, fewer than min_count="
                f"{min_count}. Merge it with another group, or leave it out."
            )
    num_at_risk, num_events = at_risk.sum(0), events.sum(0)
    shares = at_risk / np.maximum(num_at_risk, 1)
    expected = (num_events * shares).sum(1)
    factor = num_events * (num_at_risk - num_events) / np.maximum(num_at_risk - 1, 1)
    covariance = np.diag((factor * shares).sum(1)) - (factor * shares) @ shares.T
    difference = (events.sum(1) - expected)[1:]
    degrees = len(counts) - 1
    statistic = float(difference @ np.linalg.pinv(covariance[1:, 1:]) @ difference)
    return LogRank(
        dict(zip(counts, events.sum(1).tolist(), strict=True)),
        dict(zip(counts, expected.tolist(), strict=True)),
        statistic,
        degrees,
        float(chi2.sf(statistic, degrees)),
    )


def _sum_counts(
    formula: str, data: Any, client: str | None, times: Any, dictionary: Any
) -> tuple[np.ndarray, dict[Any, tuple[np.ndarray, np.ndarray]]]:
    """Return the times and, for each level of the group, the sums of sites' counts."""
    parsed, tables = parse(formula), split_tables(data, client)
    factors = columns_of(parsed.fixed)
    unknown = {"y", "upper", "offset", "trials", "weights"} & parsed.rows.keys()
    if unknown or len(factors) > 1 or parsed.random:
        raise ValueError(
            f"The formula must be 'Surv(time, event) ~ group' with one group or 1; got {formula!r}."
        )
    # A design without an intercept has an indicator column per level.
    right = f"0 + C({factors[0]})" if factors else "1"
    parsed = parse(f"{parsed.response} ~ {right}")
    with warnings.catch_warnings():  # of rare levels, whose coefficients priors would decide
        warnings.simplefilter("ignore", UserWarning)
        design = Design(parsed, exchange(parsed, tables, dictionary, client=client))
    sites = [design.rows(table, label) for label, table in tables.items()]
    levels = design.schema.levels[factors[0]] if factors else (None,)
    event_times = np.unique(np.concatenate([x["time"][x["event"] > 0] for x in sites]))
    if not len(event_times):
        raise ValueError("No client has an event, so there is no curve.")
    grid = event_times if times is None else np.asarray(times).astype(event_times.dtype)
    if grid.ndim != 1 or not len(grid) or np.any(np.diff(grid) <= 0):
        raise ValueError(f"times must be an increasing list of numbers, got {times!r}.")
    counts = {}
    for i, level in enumerate(levels):
        parts = []
        for rows in sites:
            is_member = rows["x"][:, i] > 0 if factors else np.ones(len(rows["time"]), bool)
            part = {name: values[is_member] for name, values in rows.items()}
            parts.append(np.stack(count_at_times(part, grid)))
        counts[level] = tuple(np.sum(parts, axis=0))
    return grid, counts


def _curve(
    times: np.ndarray, at_risk: np.ndarray, events: np.ndarray, min_count: int
) -> KaplanMeier:
    """Return the curve of a group at the times that the rule for small cells allows."""
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.where(at_risk > 0, 1 - events / at_risk, 1.0)
        terms = np.where(events > 0, events / (at_risk * (at_risk - events)), 0.0)
    survival, variance = np.cumprod(factors), np.cumsum(terms)
    shown, since = [], []
    num_since = 0
    for j in range(len(times)):
        num_since += int(events[j])
        if num_since >= min_count and at_risk[j] >= min_count:
            shown.append(j)
            since.append(num_since)
            num_since = 0
    index = np.array(shown, int)
    return KaplanMeier(
        times[index],
        at_risk[index],
        np.array(since, int),
        survival[index],
        np.sqrt(variance[index]),
    )
