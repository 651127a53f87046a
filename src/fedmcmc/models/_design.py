"""Arrays of a regression model from one site's table."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedmcmc.data import FederatedData
from fedmcmc.models._columns import SiteRows, read_site, split_tables
from fedmcmc.models._formula import Formula, columns_of
from fedmcmc.models._matrix import Matrix
from fedmcmc.models._missing import covariate_models, fill_missing
from fedmcmc.models._schema import Schema, group_labels, read_rows, row_values, row_weights

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
    names
        Names of the coefficients without ``Intercept``.
    has_intercept
        Whether the model has an intercept.
    centers, scales
        ``[p]``, means and standard deviations of the columns over all sites. Columns are centered
        by the means if the model has an intercept; otherwise `centers` are zero.
    terms
        Random effects.
    covariates
        Models of covariates that may be missing.
    """

    def __init__(self, formula: Formula, schema: Schema) -> None:
        self.formula, self.schema = formula, schema
        self._fixed = Matrix(formula.fixed, schema.levels, schema.numbers)
        self.has_intercept = "Intercept" in self._fixed.names
        self.names = schema.names
        self._index = [self._fixed.names.index(name) for name in self.names]
        self.scales = np.array(schema.sds, np.float64)
        self.centers = np.array(schema.means, np.float64) * self.has_intercept
        self._left = {
            x.label: Matrix(x.left, schema.levels, schema.numbers) for x in formula.random
        }
        self.terms = tuple(
            TermDesign(
                term.label,
                self._left[term.label].names,
                term.correlated,
                schema.groups[term.label].kind,
                schema.groups[term.label].num_levels,
                schema.groups[term.label].levels,
            )
            for term in formula.random
        )
        self.covariates = covariate_models(formula, schema)
        self._models = {
            name: Matrix(text, schema.levels, schema.numbers) for name, text in formula.missing
        }
        for term in self.terms:
            if term.kind != "shared" and len(term.names) > MAX_LOCAL:
                raise ValueError(
                    f"Groups of {term.label!r} have {len(term.names)} coefficients "
                    f"({', '.join(term.names)}), and at most {MAX_LOCAL} can vary between groups."
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return Design, (self.formula, self.schema)

    def rows(self, table: Any, client: Any, *, outcome: bool = True) -> dict[str, np.ndarray]:
        """Return the arrays of a site's complete rows.

        Parameters
        ----------
        table, client
            Table and label of the site.
        outcome
            If false, the table needs no outcome, no grouping factors and no weights, as for
            predictions. Groups that are not in the study then have the index -1, and
            ``group_<label>`` holds labels of local groups.

        Returns
        -------
        dict of numpy.ndarray
            ``x`` ``[n, p]``, centered; ``y`` ``[n]``, or ``time`` with ``event``, ``start`` or
            ``upper`` (infinite if censored); ``offset``, ``trials`` and ``weights`` ``[n]`` if the
            formula has them; for each random term ``z_<label>`` ``[n, k]``, and for shared ones
            ``index_<label>`` ``[n]``; for missing covariates ``is_missing`` ``[n, m]`` and
            ``w_<name>`` ``[n, q]``.

        Raises
        ------
        ValueError
            If a value is no level or not finite, or a time or an event is not valid. The message
            names client, column, row and value.
        """
        site = self._read(table, client, outcome)
        filled = fill_missing(self.formula, site, self.schema) if outcome else site
        arrays = {"x": self._fixed.array(filled)[:, self._index] - self.centers}
        if self.covariates and outcome:
            self._add_covariates(arrays, site, filled)
        for name, expression in self.formula.rows.items():
            if outcome or name == "offset":
                arrays[name] = row_values(site, name, expression, self.schema.levels)
        if outcome:
            self._check_outcome(site, arrays)
        for term, parsed in zip(self.terms, self.formula.random, strict=True):
            arrays[f"z_{term.label}"] = self._left[term.label].array(site)
        real = jnp.result_type(float)
        arrays = {name: array.astype(real) for name, array in arrays.items()}
        for term, parsed in zip(self.terms, self.formula.random, strict=True):
            if not all(name in site.columns for name in parsed.factors):
                continue
            labels = group_labels(site, parsed.factors)
            if term.kind == "shared":
                arrays[f"index_{term.label}"] = self._find_groups(site, term, labels, outcome)
            elif not outcome:
                arrays[f"group_{term.label}"] = np.array(labels, object)
        return arrays

    def data(self, tables: Any) -> FederatedData:
        """Return the rows of all clients, with the groups of the local term if it has some."""
        tables = split_tables(tables, self.schema.client)
        rows = {client: self.rows(table, client) for client, table in tables.items()}
        groups = None
        for term, parsed in zip(self.terms, self.formula.random, strict=True):
            if term.kind == "group":
                groups = [
                    group_labels(self._read(table, client, True), parsed.factors)
                    for client, table in tables.items()
                ]
        has_bounds = "upper" in self.formula.rows
        return FederatedData.from_clients(rows, groups=groups, allow_nonfinite=has_bounds)

    def _read(self, table: Any, client: Any, outcome: bool) -> SiteRows:
        """Return a site's complete rows of the columns that are needed."""
        import narwhals.stable.v2 as nw  # slow

        levels, column = self.schema.levels, self.schema.client
        factors = [*levels, *self.formula.factors]
        if outcome:
            return read_rows(self.formula, table, client, factors, column)
        frame = nw.from_native(table, eager_only=True)
        names = [*replace(self.formula, missing=()).covariates]
        if self.formula.offset is not None:
            names += columns_of(self.formula.offset)
        is_client = str(client) in self.schema.clients
        names += [
            x for x in self.formula.factors if x in frame.columns or (x == column and is_client)
        ]
        return read_site(
            table,
            client,
            dict.fromkeys(names),
            factors=factors,
            client_column=column if is_client else None,
        )

    def _add_covariates(
        self, arrays: dict[str, np.ndarray], site: SiteRows, filled: SiteRows
    ) -> None:
        """Add the arrays of missing covariates, which are zero in ``x``."""
        masks = [np.isnan(site.columns[model.name]) for model in self.covariates]
        arrays["is_missing"] = np.stack(masks, axis=1)
        for model, mask in zip(self.covariates, masks, strict=True):
            matrix = self._models[model.name]
            index = [matrix.names.index(name) for name in model.columns]
            arrays["x"][mask, model.column] = 0
            arrays[f"w_{model.name}"] = matrix.array(filled)[:, index] - model.centers

    def _find_groups(
        self, site: SiteRows, term: TermDesign, labels: list[str], outcome: bool
    ) -> np.ndarray:
        """Return the index of each row's group."""
        codes: Mapping[str, int] = {level: i for i, level in enumerate(term.levels)}
        index = np.array([codes.get(x, -1) for x in labels], np.int32)
        if outcome and (index < 0).any():
            row = int((index < 0).argmax())
            raise ValueError(
                f"Column {site.where(term.label, row)} holds {labels[row]!r}, which is no group of "
                f"the study."
            )
        return index

    def _check_outcome(self, site: SiteRows, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise if weights are negative, or times and events are not valid."""
        row_weights(self.formula, site)
        if not self.formula.is_survival:
            return
        time = arrays["time"]
        rules = []
        if "upper" in arrays:
            rules += [
                ("upper", arrays["upper"] >= time, "at least the lower bound"),
                ("time", time >= 0, "at least 0"),
            ]
        else:
            rules += [
                ("time", time > 0, "positive"),
                ("event", np.isin(arrays["event"], (0, 1)), "0 or 1"),
            ]
        if "start" in arrays:
            rules += [
                ("start", arrays["start"] < time, "less than the time"),
                ("start", arrays["start"] >= 0, "at least 0"),
            ]
        for name, is_valid, expected in rules:
            if not is_valid.all():
                row = int((~is_valid).argmax())
                expression = self.formula.rows[name]
                raise ValueError(
                    f"{name} {site.where(expression, row)} is {arrays[name][row]:g}; it must be "
                    f"{expected}."
                )
