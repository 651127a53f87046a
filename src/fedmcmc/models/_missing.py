"""Covariates that are missing at random: Gaussian models that are integrated out of each row."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from jax.scipy.special import gammaln, logsumexp
from jax.typing import ArrayLike
from numpyro import distributions as dist

from fedmcmc.models._formula import Formula, columns_of, names_in, read_terms

NUM_NODES, NUM_STEPS = 15, 6
"""Nodes of Gauss-Hermite quadrature, and Newton steps to the mode around which they lie."""
_Curve = Callable[[Array], Array]


@dataclass(frozen=True)
class CovariateModel:
    """Gaussian model of a covariate that may be missing, given complete columns.

    `column` is its index in ``x``, where `center` is subtracted. Its observed values have `mean`
    and `sd`, and the `columns` of its model have the means `centers` and `sds`.
    """

    name: str
    column: int
    center: float
    mean: float
    sd: float
    columns: tuple[str, ...]
    centers: tuple[float, ...]
    sds: tuple[float, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of intercept, standard deviation and coefficients, as in the summary."""
        names = (f"{self.name}_Intercept", f"sigma_{self.name}")
        return names + tuple(f"{self.name}_{x}" for x in self.columns)

    def add_priors(self, add: Callable[..., None]) -> None:
        """Add the default priors by ``add(name, prior, location, scale)``."""
        intercept, sigma, *slopes = self.parameters
        add(intercept, dist.Normal(self.mean, 2.5 * self.sd), self.mean, self.sd)
        for name, sd in zip(slopes, self.sds, strict=True):
            add(name, dist.Normal(0.0, 2.5 * self.sd / sd), 0.0, self.sd / sd)
        add(sigma, dist.Exponential(1 / self.sd), 0.0, self.sd)

    def name_draws(self, sites: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Remove the model's sites; return their draws by name, for columns not centered."""
        intercept, sigma = (sites.pop(f"{x}_{self.name}") for x in ("Intercept", "sigma"))
        slopes = sites.pop(f"b_{self.name}", np.zeros((*intercept.shape, 0)))
        draws = [intercept - slopes @ np.array(self.centers), sigma, *np.moveaxis(slopes, -1, 0)]
        return dict(zip(self.parameters, draws, strict=True))

    def sample(self, priors: Any, rows: Mapping[str, Any]) -> tuple[Array, Array]:
        """Sample the parameters; return mean ``[n]`` (minus `center`) and standard deviation."""
        intercept, sigma, *slopes = self.parameters
        mean = numpyro.sample(f"Intercept_{self.name}", priors.scalar(intercept)) - self.center
        if slopes:
            b = numpyro.sample(f"b_{self.name}", priors.vector(tuple(slopes)))
            mean = mean + rows[f"w_{self.name}"] @ b
        return mean, numpyro.sample(f"sigma_{self.name}", priors.scalar(sigma))


def add_missing(formula: Formula, missing: Mapping[str, str]) -> Formula:
    """Return the formula with models of missing covariates; raise if a model is not possible."""
    terms = [(str(x), columns_of(str(x))) for x in read_terms(formula.fixed)]
    elsewhere = [*formula.factors, *(x for y in formula.random for x in columns_of(y.left))]
    elsewhere += [x for text in formula.rows.values() for x in names_in(text)]
    for name, text in missing.items():
        if [x for x, columns in terms if name in columns] != [name] or name in elsewhere:
            raise ValueError(
                f"{name!r} may be missing, so that its only term must be {name!r}, without "
                f"functions and interactions; the formula is {formula.text!r}."
            )
        impossible = set(columns_of(text)) & {*missing, *names_in(formula.response)}
        if impossible or "1" not in map(str, read_terms(text)):
            raise ValueError(
                f"The model {text!r} of {name!r} must have an intercept and complete columns other "
                f"than the outcome" + "".join(f"; {x!r} is not possible" for x in impossible) + "."
            )
    return replace(formula, missing=tuple(missing.items()))


def check_missing(formula: Formula, schema: Any, max_missing: float) -> None:
    """Raise if a covariate with a model is text, or has too many missing values."""
    for name, _ in formula.missing:
        if name in schema.levels:
            raise ValueError(f"Column {name!r} of missing= must be numbers, not text or a factor.")
        if schema.missing[name] > max_missing * schema.rows:
            raise ValueError(
                f"Column {name!r} has {schema.missing[name]} missing values in {schema.rows} rows, "
                f"more than {max_missing:g} of them (max_missing)."
            )


def covariate_models(
    schema: Any, names: Sequence[str], centers: np.ndarray
) -> tuple[CovariateModel, ...]:
    """Return the models of covariates in ``x``, whose columns have `names` and `centers`."""
    models = []
    for name, moments in schema.covariates.items():
        column, number = names.index(name), schema.numbers[name]
        center = float(centers[column])
        models.append(CovariateModel(name, column, center, number.mean, number.sd, *moments))
    return tuple(models)


def outcome_given_observed(
    regression: Any, predictor: Array, b: Any, parameters: Mapping[str, Any], rows: Any
) -> "IntegratedOutcome":
    """Return the distribution of each row's outcome, given its observed covariates.

    `predictor` ``[n]`` lacks missing covariates: in ``x`` they are zero. All covariates with a
    model are independent given complete columns, so that their sum is normal.
    """
    variance = log_density = jnp.zeros_like(predictor)
    for i, model in enumerate(regression.covariates):
        is_missing, x = rows["is_missing"][:, i], rows["x"][:, model.column]
        mean, sd = model.sample(regression.predictor.priors, rows)
        weight = is_missing * b[model.column]
        predictor, variance = predictor + weight * mean, variance + (weight * sd) ** 2
        log_density += (1 - is_missing) * dist.Normal(mean, sd).log_prob(x)
    # The derivative of a square root at zero is infinite.
    spread = jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1.0)), 0.0)
    parameters, trials = dict(parameters), rows.get("trials")
    return IntegratedOutcome(predictor, spread, log_density, parameters, trials, regression.family)


class IntegratedOutcome(dist.Distribution):
    """Outcome whose linear predictor is normal, because covariates of its row are missing.

    `predictor` and `spread` ``[n]`` are its mean and standard deviation, which is zero for complete
    rows. `log_prob` includes `covariate_log_density` ``[n]`` of the row's observed covariates.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    pytree_data_fields = ("predictor", "spread", "covariate_log_density", "parameters", "trials")
    pytree_aux_fields = ("family", "_batch_shape", "_event_shape")

    def __init__(self, *fields: Any) -> None:
        self.predictor, self.spread, self.covariate_log_density = fields[:3]
        self.parameters, self.trials, self.family = fields[3:]
        super().__init__(jnp.shape(self.predictor))

    @property
    def support(self) -> Any:
        return self.at(0.0).support

    def at(self, z: ArrayLike) -> dist.Distribution:
        """Return the distribution of outcomes at `z` standard deviations of the predictor."""
        predictor = self.predictor + self.spread * z
        return self.family.distribution(predictor, self.parameters, self.trials)

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        if (self.family.name, self.family.link) == ("gaussian", "identity"):
            sd = jnp.sqrt(self.parameters["sigma"] ** 2 + self.spread**2)
            return dist.Normal(self.predictor, sd).log_prob(value) + self.covariate_log_density
        # Nodes need no derivatives: their place has little influence on the integral.
        fixed: Any = jax.tree.map(jax.lax.stop_gradient, self)
        limit = 2 / jnp.maximum(fixed.spread, 0.5)  # longer steps could overshoot large counts
        return self.covariate_log_density + jnp.where(
            self.spread > 0,
            integrate(self.integrand(value), fixed.integrand(value), limit),
            self.at(0.0).log_prob(value),
        )

    def integrand(self, value: ArrayLike) -> _Curve:
        """Return the log density of the outcome jointly with a latent variable ``[..., n]``."""
        if self.family.name != "student":
            return lambda z: self.at(z).log_prob(value) + dist.Normal(0.0, 1.0).log_prob(z)
        half, sigma = self.parameters["nu"] / 2, self.parameters["sigma"]

        # Over the predictor there could be two modes; over the log of the precision there is one.
        def of_log_precision(u: Array) -> Array:
            sd = jnp.sqrt(sigma**2 * jnp.exp(-u) + self.spread**2)
            prior = half * (jnp.log(half) + u - jnp.exp(u)) - gammaln(half)
            return dist.Normal(self.predictor, sd).log_prob(value) + prior

        return of_log_precision

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        keys = jax.random.split(key)
        z = jax.random.normal(keys[0], (*sample_shape, *self.batch_shape))
        return self.at(z).sample(keys[1])


def integrate(fn: _Curve, fixed_fn: _Curve, limit: Array) -> Array:
    """Return the log integral of ``exp(fn(z))`` over z, ``[n]``, by adaptive quadrature.

    `fixed_fn` has the same values, and determines the nodes; Newton steps are at most `limit`.
    """

    def slope(z: Array) -> Array:
        return jax.jvp(fixed_fn, (z,), (jnp.ones_like(z),))[1]

    def slope_and_precision(z: Array) -> tuple[Array, Array]:
        gradient, second = jax.jvp(slope, (z,), (jnp.ones_like(z),))
        return gradient, jnp.maximum(-second, 1.0)

    def step(_: Any, z: Array) -> Array:
        gradient, precision = slope_and_precision(z)
        return z + jnp.clip(gradient / precision, -limit, limit)

    mode = jax.lax.fori_loop(0, NUM_STEPS, step, jnp.zeros_like(limit))
    scale = slope_and_precision(mode)[1] ** -0.5
    nodes, weights = np.polynomial.hermite_e.hermegauss(NUM_NODES)
    log_weights = jnp.asarray(np.log(weights) + nodes**2 / 2, limit.dtype)[:, None]
    z = mode + scale * jnp.asarray(nodes, limit.dtype)[:, None]
    return logsumexp(fn(z) + log_weights, axis=0) + jnp.log(scale)
