"""Covariates that are missing at random: Gaussian models that are integrated out of each row."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike
from numpyro import distributions as dist

from fedmcmc.models._columns import SiteRows
from fedmcmc.models._families import Family
from fedmcmc.models._formula import Formula, names_in, terms_of

NUM_NODES = 15
"""Number of nodes of Gauss-Hermite quadrature over a row's missing covariates."""
NUM_STEPS = 12
"""Number of Newton steps to the mode around which the nodes lie."""


@dataclass(frozen=True)
class CovariateModel:
    """Gaussian model of a covariate that may be missing, given other columns.

    Attributes
    ----------
    name, column
        Name of the covariate, and the index of its column in ``x``.
    mean, sd, center
        Mean and standard deviation of its observed values, and what is subtracted in ``x``.
    names, centers, sds
        Columns of its model without the intercept, their means, and their standard deviations.
    earlier
        For each column, the index of the earlier covariate model that it belongs to, or -1.
    """

    name: str
    column: int
    mean: float
    sd: float
    center: float
    names: tuple[str, ...]
    centers: tuple[float, ...]
    sds: tuple[float, ...]
    earlier: tuple[int, ...]

    @property
    def intercept(self) -> str:
        """Name of the intercept."""
        return f"{self.name}_Intercept"

    @property
    def slopes(self) -> tuple[str, ...]:
        """Names of the coefficients."""
        return tuple(f"{self.name}_{x}" for x in self.names)

    def add_priors(self, add: Callable[..., None]) -> None:
        """Add the default priors by ``add(name, prior, location, scale)``."""
        add(self.intercept, dist.Normal(self.mean, 2.5 * self.sd), self.mean, self.sd)
        for name, sd in zip(self.slopes, self.sds, strict=True):
            add(name, dist.Normal(0.0, 2.5 * self.sd / sd), 0.0, self.sd / sd)
        add(f"sigma_{self.name}", dist.Exponential(1 / self.sd), 0.0, self.sd)

    def name_draws(self, sites: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Remove the model's sites, and return their draws by name, for columns not centered."""
        intercept, slopes = sites.pop(f"Intercept_{self.name}"), sites.pop(f"b_{self.name}", None)
        draws = {}
        if slopes is not None:
            intercept = intercept - slopes @ np.asarray(self.centers)
            draws = {name: slopes[..., i] for i, name in enumerate(self.slopes)}
        sigma = f"sigma_{self.name}"
        return {self.intercept: intercept, **draws, sigma: sites.pop(sigma)}


def add_missing(formula: Formula, missing: Mapping[str, str] | None) -> Formula:
    """Return the formula with models of missing covariates.

    Raises
    ------
    ValueError
        If a covariate is no term by itself, has another term, or its model is not possible.
    """
    names = tuple(missing or ())
    terms = terms_of(formula.fixed)
    others = [*formula.rows.values(), *formula.factors]
    for term in formula.random:
        others += [x for factors in terms_of(term.left).values() for x in factors]
    for i, name in enumerate(names):
        text = (missing or {})[name]
        if terms.get(name) != [name]:
            raise ValueError(
                f"missing has {name!r}, which must be a term of the formula by itself; got "
                f"{formula.text!r}."
            )
        bad = [x for x, factors in terms.items() if x != name and _has(name, factors)]
        bad += [x for x in others if _has(name, [x])]
        if bad:
            raise ValueError(
                f"{name!r} may be missing, so its only term can be {name!r}: {bad[0]!r} in "
                f"{formula.text!r} is not possible."
            )
        parts = terms_of(text)
        if "1" not in parts:
            raise ValueError(f"The model of {name!r} needs an intercept, got {text!r}.")
        for later in names[i:]:
            if any(_has(later, x) for x in parts.values()):
                raise ValueError(
                    f"The model {text!r} of {name!r} has {later!r}, which may be missing and must "
                    f"come before {name!r} in missing=."
                )
        for term, factors in parts.items():
            if factors != [term] and any(_has(x, factors) for x in names[:i]):
                raise ValueError(
                    f"{term!r} in the model of {name!r} has a covariate that may be missing; "
                    f"only the column by itself is possible."
                )
        if any(_has(x, [y]) for x in names_in(formula.response) for y in parts):
            raise ValueError(f"The model {text!r} of {name!r} has the outcome.")
    return replace(formula, missing=tuple((missing or {}).items()))


def _has(name: str, expressions: Sequence[str]) -> bool:
    return any(name in names_in(x) for x in expressions)


def check_missing(formula: Formula, schema: Any, max_missing: float) -> None:
    """Raise if a covariate with a model is text, or has too many missing values."""
    for name, _ in formula.missing:
        if name in schema.levels:
            raise ValueError(
                f"missing has {name!r}, which is text or a factor; the models are for numbers."
            )
        count = schema.missing[name]
        if count > max_missing * schema.rows:
            raise ValueError(
                f"Column {name!r} has {count} missing values in {schema.rows} rows, more than "
                f"max_missing = {max_missing:g}. Leave the column out, or raise max_missing."
            )


def fill_missing(formula: Formula, site: SiteRows, schema: Any) -> SiteRows:
    """Return rows whose missing covariates have the mean of all sites, for design matrices."""
    columns = dict(site.columns)
    for name, _ in formula.missing:
        values = columns[name]
        columns[name] = np.where(np.isnan(values), schema.numbers[name].mean, values)
    return replace(site, columns=columns)


def covariate_models(formula: Formula, schema: Any) -> tuple[CovariateModel, ...]:
    """Return the models of missing covariates with the facts of the schema."""
    models: list[CovariateModel] = []
    is_centered = "1" in terms_of(formula.fixed)
    for name, _ in formula.missing:
        names, means, sds = schema.covariates[name]
        number = schema.numbers[name]
        before = {model.name: i for i, model in enumerate(models)}
        earlier = tuple(before.get(x, -1) for x in names)
        centers = [models[i].center if i >= 0 else x for i, x in zip(earlier, means, strict=True)]
        center = schema.means[schema.names.index(name)] if is_centered else 0.0
        model = CovariateModel(
            name,
            schema.names.index(name),
            number.mean,
            number.sd,
            center,
            names,
            tuple(centers),
            sds,
            earlier,
        )
        models.append(model)
    return tuple(models)


def add_arrays(
    arrays: dict[str, np.ndarray],
    models: Sequence[CovariateModel],
    matrices: Mapping[str, Any],
    site: SiteRows,
    filled: SiteRows,
) -> None:
    """Add ``is_missing`` ``[n, m]`` and the columns ``w_<name>`` of each covariate's model.

    A missing value is zero in ``x``.
    """
    masks = [np.isnan(site.columns[model.name]) for model in models]
    arrays["is_missing"] = np.stack(masks, axis=1)
    for model, mask in zip(models, masks, strict=True):
        arrays["x"][mask, model.column] = 0
        matrix = matrices[model.name]
        index = [matrix.names.index(x) for x in model.names]
        arrays[f"w_{model.name}"] = matrix.array(filled)[:, index] - np.array(model.centers)


@dataclass(frozen=True, eq=False)
class MissingCovariates:
    """Models of all missing covariates: jointly Gaussian given the complete columns.

    Attributes
    ----------
    models, priors
        Model of each covariate, and prior of each parameter.
    """

    models: tuple[CovariateModel, ...]
    priors: Any

    def integrate(
        self,
        predictor: Array,
        coefficients: Array,
        family: Family,
        parameters: Mapping[str, Any],
        rows: Mapping[str, Any],
    ) -> dist.Distribution:
        """Return the distribution of each row's outcome, given its observed covariates.

        `predictor` ``[num_rows]`` lacks the missing covariates.
        """
        x, is_missing = rows["x"], rows["is_missing"]
        num, size = is_missing.shape
        means: list[Array] = []
        factor: list[Array] = []
        for model in self.models:
            mean, row = self._expected(model, rows, means, factor)
            means.append(mean)
            factor.append(row)
        mean = jnp.stack(means, axis=1)
        covariance = jnp.stack(factor) @ jnp.stack(factor).T
        covariance = jnp.broadcast_to(covariance, (num, size, size))
        log_density = jnp.zeros(num)
        # Condition on one observed covariate after another.
        for j, model in enumerate(self.models):
            is_observed = 1 - is_missing[:, j]
            variance = covariance[:, j, j]
            error = x[:, model.column] - mean[:, j]
            log_density += is_observed * dist.Normal(0.0, jnp.sqrt(variance)).log_prob(error)
            gain = covariance[:, :, j] * (is_observed / variance)[:, None]
            mean = mean + gain * error[:, None]
            covariance = covariance - gain[:, :, None] * covariance[:, j, None, :]
        columns = np.array([model.column for model in self.models])
        weights = coefficients[columns] * is_missing
        variance = jnp.einsum("ni,nij,nj->n", weights, covariance, weights)
        spread = jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1.0)), 0.0)
        predictor = predictor + jnp.sum(weights * mean, axis=1)
        return IntegratedOutcome(
            predictor, spread, log_density, dict(parameters), rows.get("trials"), family
        )

    def _expected(
        self,
        model: CovariateModel,
        rows: Mapping[str, Any],
        means: Sequence[Array],
        factor: Sequence[Array],
    ) -> tuple[Array, Array]:
        """Sample a model's parameters; return its mean and its row of the covariance's factor."""
        name, priors = model.name, self.priors
        intercept = numpyro.sample(f"Intercept_{name}", priors.scalar(model.intercept))
        sigma = numpyro.sample(f"sigma_{name}", priors.scalar(f"sigma_{name}"))
        mean = jnp.full(rows["x"].shape[0], intercept - model.center)
        row = jnp.zeros(len(self.models)).at[len(means)].set(sigma)
        if model.names:
            slopes = numpyro.sample(f"b_{name}", priors.vector(model.slopes))
            is_complete = np.array(model.earlier) < 0
            mean = mean + rows[f"w_{name}"] @ jnp.where(is_complete, slopes, 0.0)
            for k, i in enumerate(model.earlier):
                if i >= 0:
                    mean, row = mean + slopes[k] * means[i], row + slopes[k] * factor[i]
        return mean, row


class IntegratedOutcome(dist.Distribution):
    """Outcome whose linear predictor is normal, because covariates of its row are missing.

    The log density of an outcome includes `covariate_log_density`, that of the row's observed
    covariates. The integral over the predictor uses nodes around the mode of the integrand.

    Parameters
    ----------
    predictor, spread
        ``[num_rows]``, mean and standard deviation of the predictor; zero for complete rows.
    covariate_log_density
        ``[num_rows]``.
    parameters, trials, family
        Parameters of the family, numbers of trials, and the family.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    pytree_data_fields = ("predictor", "spread", "covariate_log_density", "parameters", "trials")
    pytree_aux_fields = ("family", "_batch_shape", "_event_shape")

    def __init__(
        self,
        predictor: Array,
        spread: Array,
        covariate_log_density: Array,
        parameters: Mapping[str, Any],
        trials: Any,
        family: Family,
    ) -> None:
        self.predictor, self.spread, self.trials = predictor, spread, trials
        self.covariate_log_density, self.family = covariate_log_density, family
        self.parameters = parameters
        super().__init__(jnp.shape(predictor))

    @property
    def support(self) -> Any:
        return self.at(jnp.zeros(())).support

    def at(self, z: Array) -> dist.Distribution:
        """Return the distribution of outcomes at a predictor of `z` standard deviations."""
        return self.family.distribution(
            self.predictor + self.spread * z, self.parameters, self.trials
        )

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        if self.family.name == "gaussian" and self.family.link == "identity":
            sigma = jnp.sqrt(self.parameters["sigma"] ** 2 + self.spread**2)
            return dist.Normal(self.predictor, sigma).log_prob(value) + self.covariate_log_density
        return integrate_normal(self, value) + self.covariate_log_density

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        node_key, outcome_key = jax.random.split(key)
        z = jax.random.normal(node_key, (*sample_shape, *self.batch_shape))
        return self.at(z).sample(outcome_key)


def integrate_normal(outcome: IntegratedOutcome, value: ArrayLike) -> Array:
    """Return the log of the outcome's density, integrated over a standard normal variable."""
    # The nodes need no derivatives: their place has little influence on the integral.
    fixed: Any = jax.tree.map(jax.lax.stop_gradient, outcome)

    def slope(z: Array) -> Array:
        return jax.jvp(lambda z: fixed.at(z).log_prob(value), (z,), (jnp.ones_like(z),))[1]

    def slope_and_precision(z: Array) -> tuple[Array, Array]:
        first, second = jax.jvp(slope, (z,), (jnp.ones_like(z),))
        return first - z, 1 + jnp.maximum(-second, 0)

    # A long step on the scale of the predictor could overshoot, for example for large counts.
    limit = jnp.minimum(4.0, 2 / jnp.maximum(fixed.spread, 0.5))

    def step(_: Any, z: Array) -> Array:
        gradient, precision = slope_and_precision(z)
        return z + jnp.clip(gradient / precision, -limit, limit)

    mode = jax.lax.fori_loop(0, NUM_STEPS, step, jnp.zeros_like(fixed.predictor))
    scale = slope_and_precision(mode)[1] ** -0.5
    nodes, weights = np.polynomial.hermite_e.hermegauss(NUM_NODES)
    log_weights = np.log(weights / weights.sum()) + nodes**2 / 2
    z = mode + scale * jnp.asarray(nodes, mode.dtype)[:, None]
    terms = outcome.at(z).log_prob(value) - z**2 / 2
    return logsumexp(terms + jnp.asarray(log_weights, z.dtype)[:, None], axis=0) + jnp.log(scale)
