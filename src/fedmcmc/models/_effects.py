"""Average effects of a column by g-computation: sums at the clients, quotients at the server."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedmcmc.models._draws import Values, expected_outcomes, fixed_part, shared_part
from fedmcmc.models._tables import describe, pandas

MAX_NUMBERS = 2**22
"""Number of draws times rows in one block."""


def client_sums(
    design: Any,
    family: Any,
    values: Values,
    local: tuple[Any, np.ndarray, np.ndarray] | None,
    rows: Mapping[str, Any],
) -> tuple[np.ndarray, float]:
    """Return expected outcomes summed over a client's rows, ``[num_draws, ...]``, and the weight.

    This is what a client sends. `local` is the local term, with its effects ``[num_draws,
    num_groups, k]`` and the group of each row.
    """
    num_rows = len(rows["x"])
    rows = dict(rows)
    trials = rows.pop("trials", None)  # expected shares, weighted by the trials
    weights = np.asarray(rows.get("weights", np.ones(num_rows)), np.float64)
    if trials is not None:
        weights = weights * np.asarray(trials, np.float64)
    size = max(1, MAX_NUMBERS // len(next(iter(values.values()))))
    total: Any = 0.0
    for start in range(0, num_rows, size):
        part = {name: np.asarray(x)[start : start + size] for name, x in rows.items()}
        eta = fixed_part(values, part) + shared_part(design, values, part)
        if local is not None:
            term, effects, groups = local
            theta = effects[:, groups[start : start + size]]
            eta = eta + np.einsum("srk,rk->sr", theta, part[f"z_{term.label}"])
        expected = expected_outcomes(family, eta, values, part)
        total = total + np.einsum("sr...,r->s...", expected, weights[start : start + size])
    return total, float(weights.sum())


def effect_rows(
    column: str,
    arms: Sequence[Any],
    means: Sequence[np.ndarray],
    contrast: str,
    prob: float,
) -> Any:
    """Return the table of `ModelFit.effects` from means ``[num_draws, ...]`` of each arm."""
    if contrast not in ("difference", "ratio"):
        raise ValueError(f"contrast must be 'difference' or 'ratio', got {contrast!r}.")
    rows = {}
    for arm, mean in zip(arms, means, strict=True):
        for name, draws in _categories(mean):
            rows[f"{column}={arm}{name}"] = describe(draws, prob)
    reference, sign = means[0], "-" if contrast == "difference" else "/"
    null = 0 if contrast == "difference" else 1
    for arm, mean in zip(arms[1:], means[1:], strict=True):
        values = mean - reference if contrast == "difference" else mean / reference
        for name, draws in _categories(values):
            label = f"{arm} {sign} {arms[0]}{name}"
            rows[label] = describe(draws, prob) | {f"P(>{null})": float(np.mean(draws > null))}
    frame = pandas().DataFrame.from_dict(rows, orient="index")
    frame.index.name = "expected outcome"
    return frame


def _categories(draws: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return draws ``[num_draws]`` by the suffix of a label, for each category of an outcome."""
    if draws.ndim == 1:
        return [("", draws)]
    return [(f", category {i}", draws[:, i]) for i in range(draws.shape[1])]


def set_column(table: Any, column: str, value: Any) -> Any:
    """Return a copy of a table of pandas or Polars whose column has the same value in all rows.

    Missing values stay missing, so that the same rows are complete.
    """
    import narwhals as nw

    frame = nw.from_native(table, eager_only=True)
    series = frame[column]
    values = [x if x is None or x != x else value for x in series.to_list()]
    dtype = nw.Categorical if series.dtype == nw.Categorical else None
    changed = nw.new_series(column, values, dtype, backend=nw.get_native_namespace(frame))
    return frame.with_columns(changed).to_native()


def arms_of(column: str, design: Any, values: Sequence[Any] | None) -> list[Any]:
    """Return the values to compare, by default the column's levels, or 0 and 1 for numbers.

    Raises
    ------
    ValueError
        If the formula lacks the column, or there are fewer than two values.
    """
    covariates = design.formula.covariates
    levels = {name: x for name, x in design.schema.levels.items() if name in covariates}
    levels |= {term.label: term.levels for term in design.terms if term.kind == "shared"}
    columns = [*levels, *design.schema.numbers]
    if column not in columns:
        raise ValueError(
            f"column must be a column of the formula's right side, one of "
            f"{', '.join(map(repr, dict.fromkeys(columns)))}; got {column!r}."
        )
    arms = list(levels.get(column, (0, 1)) if values is None else values)
    if len(arms) < 2:
        raise ValueError(f"effects compares two or more values, got {arms!r}.")
    return arms


def default_statistics(family: Any) -> dict[str, Any]:
    """Return the statistics of `ModelFit.pp_check`."""
    if hasattr(family, "hazard"):
        return {"time": lambda rows: rows["y"][:, 0], "events": lambda rows: rows["y"][:, 1]}
    statistics: dict[str, Any] = {"outcome": lambda rows: rows["y"]}
    if family.name in ("bernoulli", "ordinal"):
        return statistics
    statistics["outcome squared"] = lambda rows: rows["y"] ** 2
    if "poisson" in family.name or "binomial" in family.name:
        statistics["zeros"] = lambda rows: rows["y"] == 0
    return statistics
