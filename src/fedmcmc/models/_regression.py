"""NumPyro model of a regression with random effects, from a design, a family and priors."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from numpyro import distributions as dist
from numpyro import handlers

from fedmcmc.models._design import Design, TermDesign
from fedmcmc.models._families import Family
from fedmcmc.models._missing import CovariateModel, outcome_given_observed
from fedmcmc.models._priors import OrderedDraws, Priors, sd_names


@dataclass(frozen=True, eq=False)
class LinearPredictor:
    """Intercept, coefficients and random effects of a model.

    A call samples the sites ``Intercept``, ``b`` ``[p]``, and for each random term ``sd_<groups>``
    ``[k]``, ``cor_<groups>`` ``[k, k]`` (a Cholesky factor), and either the local site
    ``effect_<groups>`` ``[k]``, or ``z_<groups>`` ``[num_levels, k]``, standard normal variables
    behind the effects of shared groups.

    Attributes
    ----------
    names, terms
        Names of the coefficients, and random terms.
    has_intercept
        Whether the model has an intercept at the means of the columns.
    priors
        Prior of each parameter.
    """

    names: tuple[str, ...]
    terms: tuple[TermDesign, ...]
    has_intercept: bool
    priors: Priors

    def coefficients(self) -> Array:
        """Sample the coefficients, ``[p]``."""
        return numpyro.sample("b", self.priors.vector(self.names))

    def __call__(self, rows: Mapping[str, Any], coefficients: Array | None = None) -> Array:
        """Return the linear predictor of each row, ``[num_rows]``."""
        predictor = jnp.zeros(num_rows(rows))
        if self.has_intercept:
            predictor = predictor + numpyro.sample("Intercept", self.priors.scalar("Intercept"))
        if self.names:
            b = self.coefficients() if coefficients is None else coefficients
            predictor = predictor + rows["x"] @ b
        for term in self.terms:
            predictor = predictor + self._effects(term, rows)
        return predictor + rows["offset"] if "offset" in rows else predictor

    def _effects(self, term: TermDesign, rows: Mapping[str, Any]) -> Array:
        """Return the effects of a random term on each row."""
        label, size = term.label, len(term.names)
        sd = numpyro.sample(f"sd_{label}", self.priors.vector(sd_names(term)))
        is_correlated = term.correlated and size > 1
        factor = (
            numpyro.sample(f"cor_{label}", self.priors[f"cor_{label}"]) if is_correlated else None
        )
        if term.kind == "shared":
            standard = dist.Normal(0, 1).expand([term.num_levels, size]).to_event(2)
            z = numpyro.sample(f"z_{label}", standard)
            effects = (z if factor is None else z @ factor.T) * sd
            effect = effects[rows[f"index_{label}"]]
        else:
            population = dist.Normal(jnp.zeros(size), sd).to_event(1)
            if factor is not None:
                population = dist.MultivariateNormal(scale_tril=sd[:, None] * factor)
            effect = numpyro.sample(f"effect_{label}", population, infer={"local": True})
        # A group has one effect, [k]; predictions may substitute one for each row, [num_rows, k].
        return jnp.sum(rows[f"z_{label}"] * effect, axis=-1)


@dataclass(frozen=True, eq=False)
class RegressionModel:
    """NumPyro model of the rows of one group, which can be pickled.

    The arguments of a call are the arrays of `Design.rows`. Without ``y``, the outcome is drawn.

    Attributes
    ----------
    predictor
        Linear predictor.
    family
        Family of the outcome.
    num_categories
        Number of categories of an ordinal outcome, otherwise 0.
    covariates
        Models of covariates that may be missing.
    """

    predictor: LinearPredictor
    family: Family
    num_categories: int = 0
    covariates: tuple[CovariateModel, ...] = ()

    def __call__(self, **rows: Any) -> None:
        """Sample the model's sites for rows, ``[num_rows, ...]`` each."""
        b = self.predictor.coefficients() if self.covariates else None
        predictor = self.predictor(rows, b)
        parameters = {name: self._parameter(name) for name in self.family.parameters}
        outcome = self.family.distribution(predictor, parameters, rows.get("trials"))
        if self.covariates:
            outcome = outcome_given_observed(self, predictor, b, parameters, rows)
        weights = rows.get("weights")
        scaled = nullcontext() if weights is None else handlers.scale(scale=weights)
        with numpyro.plate("rows", num_rows(rows)), scaled:
            numpyro.sample("y", outcome, obs=rows.get("y"))

    def _parameter(self, name: str) -> Any:
        priors = self.predictor.priors
        if name == "cutpoints":
            prior: dist.Distribution = OrderedDraws(priors[name], self.num_categories - 1)
        else:
            prior = priors.scalar(name)
        return numpyro.sample(name, prior)


def make_model(design: Design, family: Family, priors: Priors) -> RegressionModel:
    """Return the NumPyro model of a design."""
    has_intercept = design.has_intercept and family.has_intercept
    predictor = LinearPredictor(tuple(design.names), design.terms, has_intercept, priors)
    num_categories = count_categories(design) if "cutpoints" in priors else 0
    return RegressionModel(predictor, family, num_categories, design.covariates)


def count_categories(design: Design) -> int:
    """Return the number of categories of an ordinal outcome, or raise `ValueError` for a gap."""
    schema, response = design.schema, design.formula.response
    column = response.removeprefix("C(").removesuffix(")").strip("`")
    if column in schema.levels:
        return len(schema.levels[column])
    outcome = schema.outcome["y"]
    num, num_used = round(outcome.high) + 1, np.count_nonzero(outcome.histogram)
    if outcome.low != 0 or num_used < max(num, 2):
        raise ValueError(
            f"An ordinal outcome has two or more categories 0, 1, ..., each with at least a row; "
            f"{response!r} has {num_used} values from {outcome.low:g} to {outcome.high:g}. Write "
            f"C({response}) in the formula, which numbers the values that occur."
        )
    return num


def num_rows(rows: Mapping[str, Any]) -> int:
    """Return the number of rows of a dictionary of columns."""
    return next(iter(rows.values())).shape[0]


def draw_prior(model: RegressionModel, row: Mapping[str, Any], rng_key: Array) -> dict[str, Array]:
    """Draw the shared parameters from their priors, given any row."""
    with handlers.trace() as trace:
        handlers.seed(model, rng_key)(**row)
    is_shared = {
        name: not site["infer"].get("local")
        for name, site in trace.items()
        if site["type"] == "sample"
    }
    return {
        name: trace[name]["value"] for name, shared in is_shared.items() if shared and name != "y"
    }


def draw_outcomes(
    model: RegressionModel,
    values: Mapping[str, Any],
    rows: Mapping[str, Any],
    group: Array,
    max_groups: int,
    rng_key: Array,
) -> Array:
    """Draw the outcome of each row, with effects of new groups.

    Parameters
    ----------
    model
        NumPyro model.
    values
        Shared parameters by site.
    rows
        Rows of a client, ``[num_rows, ...]`` each.
    group, max_groups
        Group of each row, ``[num_rows]``, below the static `max_groups`.
    rng_key
        Random key.
    """
    effect_key, outcome_key = jax.random.split(rng_key)
    covariates = {name: column for name, column in rows.items() if name != "y"}
    values = dict(values)
    for term in model.predictor.terms:
        if term.kind != "shared":
            label = term.label
            z = jax.random.normal(effect_key, (max_groups, len(term.names)))
            factor = values.get(f"cor_{label}")
            effects = (z if factor is None else z @ factor.T) * values[f"sd_{label}"]
            values[f"effect_{label}"] = effects[group]
    seeded = handlers.seed(handlers.substitute(model, data=values), outcome_key)
    with handlers.trace() as trace:
        seeded(**covariates)
    return jnp.asarray(trace["y"]["value"])
