"""Default priors from the summed moments of the schema, overrides by name, and coordinates."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import gammaln
from jax.typing import ArrayLike
from numpyro import distributions as dist
from numpyro.distributions import biject_to, constraints, transforms

from fedmcmc.models._design import Design
from fedmcmc.models._families import Family
from fedmcmc.models._schema import WITHOUT_OFFSET

Prior: TypeAlias = dist.Distribution


@dataclass(frozen=True, repr=False)
class Priors(Mapping[str, Any]):
    """Prior of each parameter by its name.

    Coefficients have the names of the summary. The intercept is the linear predictor at the means
    of all columns. ``print(priors)`` shows the table.

    Attributes
    ----------
    distributions
        Name to distribution: ``Intercept``, coefficients, parameters of the family,
        ``sd_<groups>`` or ``sd_<groups>[<coefficient>]``, and ``cor_<groups>``.
    units
        Name to ``(location, scale)``, the typical values of a parameter. Samplers work in these
        units, so that the units of columns do not matter.
    """

    distributions: Mapping[str, Prior]
    units: Mapping[str, tuple[float, float]]

    def __getitem__(self, name: str) -> Prior:
        return self.distributions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.distributions)

    def __len__(self) -> int:
        return len(self.distributions)

    def __repr__(self) -> str:
        width = max((len(name) for name in self), default=0)
        return "\n".join(f"{name:<{width}}  {describe(prior)}" for name, prior in self.items())

    def vector(self, names: tuple[str, ...]) -> Prior:
        """Return the joint prior of several parameters, ``[len(names)]``."""
        return ParameterPrior(
            tuple(self[name] for name in names), tuple(self.units[name] for name in names)
        )

    def scalar(self, name: str) -> Prior:
        """Return the prior of a parameter."""
        return ParameterPrior((self[name],), (self.units[name],), is_scalar=True)


def default_priors(design: Design, family: Family, overrides: Mapping[str, Any] | None) -> Priors:
    """Return the default priors of a regression model, with the user's in their place.

    Raises
    ------
    ValueError, TypeError
        If a name is unknown, or a prior is no distribution of a single parameter.
    """
    outcome = design.schema.outcome["y"]
    if not outcome.sd > 0:
        raise ValueError(
            f"The outcome {design.formula.response!r} is {outcome.mean:g} in all rows of all sites."
        )
    is_linear = family.link == "identity"
    if is_linear:
        outcome = design.schema.outcome.get(WITHOUT_OFFSET, outcome)
    location, size = (outcome.mean, outcome.sd) if is_linear else (0.0, 1.0)
    spread = 2.5 * size
    if family.link == "log":
        if design.formula.offset is not None:
            spread = 5.0
        elif outcome.mean > 0:
            location = float(np.log(outcome.mean))
    distributions: dict[str, Prior] = {}
    units: dict[str, tuple[float, float]] = {}

    def add(name: str, prior: Prior, location: float = 0.0, scale: float = 1.0) -> None:
        if name in distributions:
            raise ValueError(f"Two parameters have the name {name!r}: rename that column.")
        distributions[name], units[name] = prior, (float(location), float(scale))

    if design.has_intercept and family.has_intercept:
        add("Intercept", dist.Normal(location, spread), location, size)
    # Without an intercept, coefficients also have the size of the outcome's location.
    coefficient = size if design.has_intercept else float(np.hypot(size, location))
    scales = dict(zip(design.names, (coefficient / design.scales).tolist(), strict=True))
    for name, scale in scales.items():
        add(name, dist.Normal(0.0, 2.5 * scale), 0.0, scale)
    for name in family.parameters:
        if name == "sigma":
            add(name, dist.Exponential(1 / outcome.sd), 0.0, outcome.sd)
        else:
            add(name, _FAMILY_PRIORS[name]())
    add_group_priors(add, design, scales, size)
    for model in design.covariates:
        model.add_priors(add)
    return Priors(_override(distributions, overrides or {}, design), units)


def add_group_priors(
    add: Callable[..., None], design: Design, scales: Mapping[str, float], size: float
) -> None:
    """Add the priors of the standard deviations and correlations of random effects."""
    for term in design.terms:
        names = sd_names(term)
        for name, column in zip(names, term.names, strict=True):
            scale = size if column == "Intercept" else scales.get(column, size)
            add(name, dist.HalfNormal(scale), 0.0, scale)
        if term.correlated and len(names) > 1:
            add(f"cor_{term.label}", dist.LKJCholesky(len(names), 2.0))


def sd_names(term: Any) -> tuple[str, ...]:
    """Return the names of the standard deviations of a random term."""
    if len(term.names) == 1:
        return (f"sd_{term.label}",)
    return tuple(f"sd_{term.label}[{name}]" for name in term.names)


def inverse_square(prior: Prior) -> Prior:
    """Return the distribution of a shape whose inverse square root has the distribution `prior`."""
    return dist.TransformedDistribution(prior, transforms.PowerTransform(-2.0))


_FAMILY_PRIORS: dict[str, Callable[[], Prior]] = {
    "nu": lambda: dist.Gamma(2.0, 0.1),
    "shape": lambda: inverse_square(dist.Exponential(1.0)),
    "precision": lambda: inverse_square(dist.Exponential(1.0)),
    "cutpoints": lambda: dist.Normal(0.0, 2.5),
    "zero_inflation": lambda: dist.Beta(1.0, 1.0),
    "hurdle": lambda: dist.Beta(1.0, 1.0),
}


def _override(
    distributions: dict[str, Prior], overrides: Mapping[str, Any], design: Design
) -> dict[str, Prior]:
    """Return priors with overrides; ``sd_<groups>`` stands for all coefficients of the groups."""
    sizes = {f"cor_{term.label}": len(term.names) for term in design.terms}
    all_sds = {f"sd_{term.label}": sd_names(term) for term in design.terms}
    result = dict(distributions)
    for name, prior in overrides.items():
        targets = all_sds.get(name, (name,))
        if not set(targets) <= distributions.keys():
            raise ValueError(
                f"priors has {name!r}, which is no parameter of the model. The parameters are "
                f"{', '.join(distributions)}."
            )
        if name in sizes and isinstance(prior, int | float):
            prior = dist.LKJCholesky(sizes[name], float(prior))
        if name in sizes and isinstance(prior, dist.LKJ):
            prior = dist.LKJCholesky(prior.dimension, prior.concentration)
        expected = (sizes[name],) * 2 if name in sizes else ()
        if not isinstance(prior, dist.Distribution) or prior.shape() != expected:
            shape = prior.shape() if isinstance(prior, dist.Distribution) else None
            kind = type(prior).__name__ + ("" if shape is None else f" of shape {shape}")
            raise TypeError(
                f"The prior of {name!r} must be a numpyro distribution of shape {expected}, such "
                f"as {describe(distributions[targets[0]])}; got {kind}."
            )
        is_real = prior.support is constraints.real
        if is_real and distributions[targets[0]].support is not constraints.real:
            raise ValueError(
                f"The prior of {name!r} must be on positive numbers, such as "
                f"{describe(distributions[targets[0]])}; got {describe(prior)}."
            )
        result |= dict.fromkeys(targets, prior)
    return result


def _support(prior: Prior) -> Any:
    support = prior.support
    return getattr(support, "base_constraint", support)


class _Units(constraints.Constraint):
    """Support of `ParameterPrior`, which determines the coordinates of a sampler."""

    def __init__(self, prior: "ParameterPrior") -> None:
        self.prior, self.event_dim = prior, len(prior.event_shape)

    def __call__(self, x: Array) -> Array:
        pairs = zip(self.prior.priors, self.prior.split(x), strict=True)
        is_inside = [_support(prior)(value) for prior, value in pairs]
        return jnp.all(jnp.stack(is_inside, axis=-1), axis=-1)

    def tree_flatten(self) -> tuple[Any, Any]:
        return (), ((), {"prior": self.prior, "event_dim": self.event_dim})


class _FromUnits(transforms.Transform):
    """Transform from coordinates without units to parameters.

    A real parameter is ``location + scale * u``, a positive one ``scale * exp(u)``.
    """

    def __init__(self, prior: "ParameterPrior") -> None:
        self.prior = prior
        self.location, self.scale = (np.array(x) for x in zip(*prior.units, strict=True))
        if prior.is_scalar:
            self.location, self.scale = self.location[0], self.scale[0]
        # Coordinates that are not real parameters, with their transforms.
        self.bounded = {
            i: biject_to(_support(p))
            for i, p in enumerate(prior.priors)
            if _support(p) != constraints.real
        }

    @property
    def domain(self) -> constraints.Constraint:
        return constraints.real if self.prior.is_scalar else constraints.real_vector

    @property
    def codomain(self) -> constraints.Constraint:
        return self.prior.support

    def __call__(self, x: Array) -> Array:
        return self._replace(self.location + self.scale * x, x, lambda t, v: t(v))

    def _inverse(self, y: Array) -> Array:
        return self._replace((y - self.location) / self.scale, y, lambda t, v: t.inv(v), True)

    def log_abs_det_jacobian(self, x: Array, y: Array, intermediates: Any = None) -> Array:
        terms = jnp.broadcast_to(jnp.log(jnp.abs(self.scale)), jnp.shape(x))
        values, images = self.prior.split(x), self.prior.split(y)
        for i, transform in self.bounded.items():
            unit = self._unit(i)
            term = transform.log_abs_det_jacobian(values[i], images[i] / unit) + np.log(unit)
            terms = term if self.prior.is_scalar else terms.at[..., i].set(term)
        return terms if self.prior.is_scalar else jnp.sum(terms, axis=-1)

    def _replace(
        self, result: Array, x: Array, fn: Callable[[Any, Array], Array], inverse: bool = False
    ) -> Array:
        """Return coordinates `result` with those of bounded parameters replaced."""
        values = self.prior.split(x)
        for i, transform in self.bounded.items():
            unit = self._unit(i)
            value = fn(transform, values[i] / unit) if inverse else unit * fn(transform, values[i])
            result = value if self.prior.is_scalar else result.at[..., i].set(value)
        return result

    def _unit(self, i: int) -> float:
        """Return the unit of a bounded parameter: its scale if it is any positive number."""
        positive = constraints.positive, constraints.nonnegative
        is_positive = _support(self.prior.priors[i]) in positive
        return self.prior.units[i][1] if is_positive else 1.0

    def tree_flatten(self) -> tuple[Any, Any]:
        return (), ((), {"prior": self.prior})


biject_to.register(_Units, lambda constraint: _FromUnits(constraint.prior))


class ParameterPrior(dist.Distribution):
    """Joint distribution of independent parameters, sampled in units of their typical values."""

    arg_constraints: ClassVar[dict[str, Any]] = {}
    pytree_aux_fields = ("priors", "units", "is_scalar", "_batch_shape", "_event_shape")

    def __init__(
        self,
        priors: tuple[Prior, ...],
        units: tuple[tuple[float, float], ...],
        is_scalar: bool = False,
    ) -> None:
        self.priors, self.units, self.is_scalar = priors, units, is_scalar
        flat = [prior for prior in priors if isinstance(prior, dist.ImproperUniform)]
        if flat:  # `from_numpyro` recognizes an improper prior by a base distribution
            self.base_dist = flat[0]
        super().__init__((), () if is_scalar else (len(priors),))

    @property
    def support(self) -> constraints.Constraint:
        return _Units(self)

    def split(self, value: ArrayLike) -> list[Array]:
        """Return the values of the single parameters."""
        value = jnp.asarray(value)
        return [value] if self.is_scalar else [value[..., i] for i in range(len(self.priors))]

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        value = jnp.asarray(value)
        if all(type(prior) is dist.Normal for prior in self.priors):  # also fast for many
            loc = np.array([float(prior.loc) for prior in self.priors])
            scale = np.array([float(prior.scale) for prior in self.priors])
            if self.is_scalar:
                return dist.Normal(loc[0], scale[0]).log_prob(value)
            return dist.Normal(loc, scale).to_event(1).log_prob(value)
        terms = [p.log_prob(v) for p, v in zip(self.priors, self.split(value), strict=True)]
        return sum(terms[1:], terms[0])

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        keys = jax.random.split(key, len(self.priors))
        draws = [p.sample(k, sample_shape) for p, k in zip(self.priors, keys, strict=True)]
        return draws[0] if self.is_scalar else jnp.stack(draws, axis=-1)


class OrderedDraws(dist.Distribution):
    """Sorted draws from a distribution of real numbers, ``[num]``."""

    arg_constraints: ClassVar[dict[str, Any]] = {}
    pytree_aux_fields = ("prior", "num", "_batch_shape", "_event_shape")
    support = constraints.ordered_vector

    def __init__(self, prior: Prior, num: int) -> None:
        self.prior, self.num = prior, num
        super().__init__((), (num,))

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        return jnp.sum(self.prior.log_prob(value), axis=-1) + gammaln(self.num + 1.0)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        return jnp.sort(self.prior.sample(key, (*sample_shape, self.num)), axis=-1)


def describe(prior: Prior) -> str:
    """Return a prior as text, such as ``Normal(0, 2.5)``."""
    if isinstance(prior, dist.ImproperUniform):
        return "flat"
    if isinstance(prior, dist.LKJCholesky):
        return f"LKJ({float(prior.concentration):.4g})"
    if isinstance(prior, dist.TransformedDistribution):
        transform, base = prior.transforms[-1], describe(prior.base_dist)
        if isinstance(transform, transforms.PowerTransform) and float(transform.exponent) == -2:
            return f"1 / sqrt(.) ~ {base}"
        return f"{type(transform).__name__} of {base}"
    values = [getattr(prior, name, None) for name in _argument_names(prior)]
    numbers = [f"{float(x):.4g}" for x in values if x is not None and np.ndim(x) == 0]
    return f"{type(prior).__name__}({', '.join(numbers)})"


def _argument_names(prior: Prior) -> list[str]:
    if isinstance(prior, dist.Gamma):
        return ["concentration", "rate"]
    return [x for x in prior.arg_constraints if x in vars(prior)]
