"""Generalized linear (mixed) models from a formula and the clients' tables."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc import criticism
from fedmcmc._checks import in_quotes
from fedmcmc.data import FederatedData, row_values
from fedmcmc.fitting import fit
from fedmcmc.interop.numpyro import from_numpyro
from fedmcmc.models._columns import split_tables
from fedmcmc.models._design import Design
from fedmcmc.models._families import Family, find_family
from fedmcmc.models._formula import Formula, parse
from fedmcmc.models._model_fit import ModelFit
from fedmcmc.models._priors import Priors, default_priors, describe
from fedmcmc.models._regression import RegressionModel, draw_outcomes, draw_prior, make_model
from fedmcmc.models._schema import exchange
from fedmcmc.types import ArrayTree, Posterior

METHODS = ("auto", "exact", "approximate")


@dataclass(frozen=True, repr=False)
class Specification:
    """Regression model before the fit.

    Attributes
    ----------
    formula, family, priors
        Parsed formula, family of the outcome, and prior of each parameter.
    design, data
        What makes arrays of a table, and the rows of all clients.
    model
        NumPyro model of one group's rows.
    tables
        Table of each client.
    """

    formula: Formula
    family: Family
    priors: Priors
    design: Design
    data: FederatedData
    model: RegressionModel
    tables: Mapping[Any, Any]

    def __repr__(self) -> str:
        """Return the formula, the family and the priors."""
        link = f"{self.family.name}({self.family.link})"
        return f"{self.formula.text}, {link}\n{self.data}\n\n{self.priors!r}"

    def fit(
        self, *, rng_key: Array | None = None, method: str = "auto", **settings: Any
    ) -> ModelFit:
        """Fit the model; see `glm`."""
        if method not in METHODS:
            raise ValueError(
                f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}. For a "
                f"kernel, use fedmcmc.from_numpyro(specification.model, "
                f"example=specification.data)."
            )
        if method != "auto":
            settings["effort"] = method
        key = jax.random.key(0) if rng_key is None else rng_key
        posterior = from_numpyro(self.model, example=self.data)
        fitted = fit(posterior, self.data, rng_key=key, **settings)
        return ModelFit(
            fitted,
            self.model,
            posterior,
            self.data,
            self.design,
            self.family,
            self.priors,
            self.formula.text,
            self.tables,
        )

    def prior_predictive(
        self,
        statistics: Callable[[ArrayTree], Array] | Mapping[str, Any],
        *,
        rng_key: Array | None = None,
        num_draws: int = 1000,
        **settings: Any,
    ) -> criticism.PredictiveCheck:
        """Compare sums over rows with sums over outcomes that the priors predict.

        Parameters
        ----------
        statistics
            Function ``rows -> [num_rows]``, or several by name; ``rows["y"]`` is the outcome.
        rng_key, num_draws, settings
            Random key, number of draws, and arguments of `fedmcmc.criticism.prior_predictive`.

        Raises
        ------
        ValueError
            If a prior is flat, or for the reasons listed there.
        """
        flat = [name for name, prior in self.priors.items() if describe(prior) == "flat"]
        if flat:
            raise ValueError(f"Outcomes cannot be drawn, because the prior of {flat[0]!r} is flat.")
        values = row_values(self.data.rows)
        num_groups = self.data.num_groups
        max_groups = 1 if num_groups is None else int(np.max(num_groups))
        group = getattr(self.data.rows, "group", jnp.zeros(self.data.num_rows, jnp.int32))
        # Outcomes need the group of each row as a column, which the model does not take.
        data = replace(self.data, rows={**values, "_group": group})
        row = {name: column[:1] for name, column in values.items()}

        def resample(key: Array, drawn: ArrayTree, rows: dict[str, Array]) -> dict[str, Array]:
            columns = {name: column for name, column in rows.items() if name != "_group"}
            y = draw_outcomes(self.model, drawn, columns, rows["_group"], max_groups, key)
            return {**rows, "y": y.astype(rows["y"].dtype)}

        posterior = Posterior(_no_density, _no_densities, resample)
        key = jax.random.key(0) if rng_key is None else rng_key
        return criticism.prior_predictive(
            key,
            posterior,
            data,
            partial(draw_prior, self.model, row),
            statistics,
            num_draws=num_draws,
            **settings,
        )


def specify(
    formula: str,
    data: Any,
    *,
    family: str | Family = "gaussian",
    link: str | None = None,
    priors: Mapping[str, Any] | None = None,
    client: str | None = None,
    weights: str | None = None,
    trials: str | None = None,
    dictionary: Any = None,
    max_missing: float = 0.2,
) -> Specification:
    """Return a regression model before the fit, for example to print its priors.

    Parameters
    ----------
    formula, data, family, link, priors, client, weights, trials, dictionary, max_missing
        See `glm`.

    Raises
    ------
    ValueError, TypeError
        For the reasons listed in `glm`.

    Examples
    --------
    >>> import pandas as pd
    >>> table = pd.DataFrame({"y": [1.0, 2.0, 4.0, 5.0], "x": [1, 2, 3, 5], "site": list("aabb")})
    >>> print(specify("y ~ x", table, client="site").priors)
    Intercept  Normal(3, 4.564)
    x          Normal(0, 2.673)
    sigma      Exponential(0.5477)
    """
    parsed = parse(formula)
    if parsed.is_survival:
        raise ValueError("Outcomes Surv(...) are for models.survival; glm takes other outcomes.")
    parsed = replace(parsed, trials=trials or parsed.trials, weights=weights or parsed.weights)
    if family == "binomial" and parsed.trials is None:
        family = "bernoulli"
    chosen = find_family(family, link)
    if (chosen.name == "binomial") != (parsed.trials is not None):
        raise ValueError(
            f"Trials belong to the family 'binomial': write 'y | trials(n) ~ ...' or trials='n'. "
            f"The family is {chosen.name!r}, trials are {parsed.trials!r}."
        )
    tables = split_tables(data, client)
    schema = exchange(parsed, tables, dictionary, client=client, max_missing=max_missing)
    design = Design(parsed, schema)
    rows = design.data(tables)
    for i, label in enumerate(rows.labels):
        columns = row_values(rows.client_rows(i))
        where = f" {parsed.response!r} of client {in_quotes(label)}"
        chosen.check(columns["y"], columns.get("trials"), where)
    model_priors = default_priors(design, chosen, priors)
    return Specification(
        parsed, chosen, model_priors, design, rows, make_model(design, chosen, model_priors), tables
    )


def glm(
    formula: str,
    data: Any,
    *,
    family: str | Family = "gaussian",
    link: str | None = None,
    priors: Mapping[str, Any] | None = None,
    client: str | None = None,
    weights: str | None = None,
    trials: str | None = None,
    dictionary: Any = None,
    max_missing: float = 0.2,
    rng_key: Array | None = None,
    method: str = "auto",
    **settings: Any,
) -> ModelFit:
    """Fit a generalized linear model, with random effects if the formula has bars.

    Parameters
    ----------
    formula
        Formula as in R, such as ``"y ~ age * arm + (1 | hospital)"`` (docs/guides/formulas.md).
    data
        Table of each client by its label, a list of tables, or one table with `client`.
    family, link
        One of `FAMILIES`, and its link function, by default the first of its ``links``.
        ``"binomial"`` without trials is ``"bernoulli"``.
    priors
        Name of a parameter to NumPyro distribution, in place of a default prior.
    client
        Column with the client of each row, or with the groups that are clients.
    weights, trials
        Columns of frequency weights and of numbers of trials; also possible in the formula.
    dictionary
        `fedmcmc.data.Dictionary` with levels and ranges of columns.
    max_missing
        Largest fraction of rows that may be left out because a value is missing.
    rng_key
        Random key, by default ``jax.random.key(0)``.
    method, settings
        ``"auto"``, ``"exact"`` or ``"approximate"`` (the `effort` of `fedmcmc.fit`), and other
        arguments of `fedmcmc.fit`.

    Raises
    ------
    ValueError, TypeError
        If the formula, a column, an outcome, a prior or a family does not fit. The message names
        client, column and row.
    """
    specification = specify(
        formula,
        data,
        family=family,
        link=link,
        priors=priors,
        client=client,
        weights=weights,
        trials=trials,
        dictionary=dictionary,
        max_missing=max_missing,
    )
    return specification.fit(rng_key=rng_key, method=method, **settings)


def glmm(formula: str, data: Any, **settings: Any) -> ModelFit:
    """Fit a generalized linear mixed model: `glm` for formulas that must have random effects.

    Parameters
    ----------
    formula, data, settings
        See `glm`.

    Raises
    ------
    ValueError
        If the formula has no random effects, or for the reasons listed in `glm`.
    """
    if not parse(formula).random:
        raise ValueError(
            f"{formula!r} has no random effects, such as (1 | hospital). For a model without them, "
            f"use glm."
        )
    return glm(formula, data, **settings)


def _no_density(position: ArrayTree) -> Array:
    return jnp.zeros(())


def _no_densities(position: ArrayTree, rows: dict[str, Array]) -> Array:
    return jnp.zeros(rows["y"].shape)
