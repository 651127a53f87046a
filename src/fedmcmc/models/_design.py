"""Arrays of a regression model from one site's table."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedmcmc.data import FederatedData
from fedmcmc.models._columns import (
    SiteRows,
    group_labels,
    read_rows,
    read_site,
    row_values,
    split_tables,
)
from fedmcmc.models._formula import Formula, names_in
from fedmcmc.models._matrix import Matrix
from fedmcmc.models._missing import covariate_models
from fedmcmc.models._schema import Schema, fill_missing, find_factors

MAX_LOCAL = 3
"""Largest number of coefficients per group that stays at the clients."""


@dataclass(frozen=True)
class TermDesign:
    """Random effects of a model.

    Attributes
    ----------
    label
        Name of the groups, such as ``"hospital"`` or ``"hospital:patient"``.
    names
        Names of the coefficients of a group, such as ``("Intercept", "age")``.
    correlated
        Whether the coefficients of a group are correlated.
    kind
        ``"client"`` (a client is a group), ``"group"`` (groups within clients), or ``"shared"``
        (groups at several clients, whose effects are shared parameters).
    num_levels
        Number of groups of all clients.
    levels
        Labels of the groups, which are empty for ``"group"``.
    """

    label: str
    names: tuple[str, ...]
    correlated: bool
    kind: str
    num_levels: int
    levels: tuple[str, ...]


class Design:
    """Arrays of a regression model from one site's table.

    Parameters
    ----------
    formula, schema
        Parsed formula, and the facts that all sites share.

    Attributes
    ----------
    names, has_intercept
        Names of the coefficients without ``Intercept``, and whether the model has an intercept.
    centers, scales
        ``[p]``, means and standard deviations of the columns over all sites. Columns are centered
        by the means if the model has an intercept; otherwise `centers` are zero.
    terms
        Random effects, `TermDesign`.
    covariates
        Models of covariates that may be missing.
    """

    def __init__(self, formula: Formula, schema: Schema) -> None:
        self.formula, self.schema = formula, schema
        self._fixed = Matrix(formula.fixed, schema.levels, schema.numbers)
        self._left = [Matrix(x.left, schema.levels, schema.numbers) for x in formula.random]
        self._factors = [*schema.levels, *find_factors(formula, None)]
        self.names = tuple(x for x in self._fixed.names if x != "Intercept")
        self.has_intercept = len(self.names) < len(self._fixed.names)
        columns = [schema.columns[name] for name in self.names]
        self.scales = np.array([x.sd for x in columns], np.float64)
        self.centers = np.array([x.mean for x in columns], np.float64) * self.has_intercept
        terms = []
        for term, left in zip(formula.random, self._left, strict=True):
            group = schema.groups[term.label]
            terms.append(
                TermDesign(
                    term.label,
                    left.names,
                    term.correlated,
                    group.kind,
                    group.num_levels,
                    group.levels,
                )
            )
            if group.kind != "shared" and len(left.names) > MAX_LOCAL:
                raise ValueError(
                    f"Groups of {term.label!r} have {len(left.names)} coefficients "
                    f"({', '.join(left.names)}), and at most {MAX_LOCAL} can vary between groups."
                )
        self.terms = tuple(terms)
        self._models = {
            name: Matrix(text, schema.levels, schema.numbers) for name, text in formula.missing
        }
        self.covariates = covariate_models(schema, self.names, self.centers)

    def __reduce__(self) -> tuple[Any, ...]:
        return Design, (self.formula, self.schema)

    def rows(self, table: Any, client: Any, *, outcome: bool = True) -> dict[str, np.ndarray]:
        """Return the arrays of a site's complete rows.

        Parameters
        ----------
        table, client
            Table and label of the site.
        outcome
            If false, the table needs no outcome, weights and grouping factors, as for predictions.
            Groups that are not in the study then have the index -1, and ``group_<label>`` holds
            labels of groups within clients.

        Returns
        -------
        dict of numpy.ndarray
            ``x`` ``[n, p]``, centered; ``y`` ``[n]``, or ``time`` with ``event``, ``start`` or
            ``upper`` (infinite if censored); ``offset``, ``trials`` and ``weights`` ``[n]`` if the
            formula has them; for each random term ``z_<label>`` ``[n, k]``, and for shared ones
            ``index_<label>`` ``[n]`` int32; for covariates that may be missing ``is_missing``
            ``[n, m]`` and ``w_<name>`` ``[n, q]``.

        Raises
        ------
        ValueError
            If a value is no level or not finite, or a time or an event is not valid. The message
            names client, column, row and value.
        """
        site = self._read(table, client, outcome)
        filled = fill_missing(self.formula, site, self.schema) if outcome else site
        x = self._fixed.array(filled)
        index = [i for i, name in enumerate(self._fixed.names) if name != "Intercept"]
        arrays: dict[str, np.ndarray] = {"x": x[:, index] - self.centers}
        for name, expression in self.formula.rows.items():
            if outcome or name == "offset":
                arrays[name] = row_values(site, name, expression, self.schema.levels)
        if outcome:
            self._check(site, arrays)
            self._add_covariates(arrays, site, filled)
        for term, left in zip(self.terms, self._left, strict=True):
            arrays[f"z_{term.label}"] = left.array(site)
        real = jnp.result_type(float)
        arrays = {name: np.asarray(array, real) for name, array in arrays.items()}
        for term, parsed in zip(self.terms, self.formula.random, strict=True):
            if not all(name in site.columns for name in parsed.factors):
                continue  # a prediction for a new group
            labels = np.array(group_labels(site, parsed.factors), object)
            if term.kind == "shared":
                codes = {level: i for i, level in enumerate(term.levels)}
                groups = np.array([codes.get(label, -1) for label in labels], np.int32)
                if outcome:
                    site.require(groups >= 0, term.label, labels, "a group of the study")
                arrays[f"index_{term.label}"] = groups
            elif not outcome:
                arrays[f"group_{term.label}"] = labels
        return arrays

    def data(self, tables: Any) -> FederatedData:
        """Return the rows of all clients, with the groups of the local term if it has some."""
        tables = split_tables(tables, self.schema.client)
        rows = {client: self.rows(table, client) for client, table in tables.items()}
        groups = None
        for term, parsed in zip(self.terms, self.formula.random, strict=True):
            if term.kind == "group":
                sites = [self._read(table, client, True) for client, table in tables.items()]
                groups = [group_labels(site, parsed.factors) for site in sites]
        has_bounds = "upper" in self.formula.rows
        return FederatedData.from_clients(rows, groups=groups, allow_nonfinite=has_bounds)

    def _read(self, table: Any, client: Any, outcome: bool) -> SiteRows:
        """Return a site's complete rows of the columns that are needed."""
        import narwhals.stable.v2 as nw  # slow

        column = self.schema.client
        if outcome:
            return read_rows(self.formula, table, client, self._factors, column)
        columns = nw.from_native(table, eager_only=True).columns
        if str(client) not in self.schema.clients:
            column = None
        covariates = replace(self.formula, missing=()).covariates
        names = [*covariates, *names_in(self.formula.offset or "0")]
        names += [x for x in self.formula.factors if x in columns or x == column]
        return read_site(table, client, dict.fromkeys(names), self._factors, column)

    def _add_covariates(
        self, arrays: dict[str, np.ndarray], site: SiteRows, filled: SiteRows
    ) -> None:
        """Add the arrays of missing covariates, which are zero in ``x``."""
        masks = [np.isnan(site.columns[model.name]) for model in self.covariates]
        if masks:
            arrays["is_missing"] = np.stack(masks, axis=1)
        for model, mask in zip(self.covariates, masks, strict=True):
            matrix = self._models[model.name]
            index = [matrix.names.index(name) for name in model.columns]
            arrays["x"][mask, model.column] = 0
            arrays[f"w_{model.name}"] = matrix.array(filled)[:, index] - model.centers

    def _check(self, site: SiteRows, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise if times or events are not valid."""
        time, rules = arrays.get("time", np.zeros(0)), []
        if "upper" in arrays:
            rules += [("time", time >= 0, "at least 0")]
            rules += [("upper", arrays["upper"] >= time, "at least the lower bound")]
        elif "time" in arrays:
            rules += [("time", time > 0, "positive")]
            rules += [("event", np.isin(arrays["event"], (0, 1)), "0 or 1")]
        if "start" in arrays:
            start = arrays["start"]
            rules += [("start", (start >= 0) & (start < time), "at least 0 and before the stop")]
        for name, is_valid, expected in rules:
            site.require(is_valid, self.formula.rows[name], arrays[name], expected)
