"""Distributions of outcomes, given the linear predictor, with accurate log densities.

Log densities are functions of the linear predictor itself, so that they neither overflow nor lose
digits where a mean or a probability underflows. Terms that cancel are subtracted analytically:
large shapes would otherwise cost most digits of single precision.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import gammaln
from jax.scipy.stats import norm
from jax.typing import ArrayLike
from numpyro import distributions as dist
from numpyro.distributions import constraints

LARGE = 80.0
"""Linear predictors on a log scale are limited to this value before they are exponentiated."""
HALF_LOG_TAU = 0.5 * float(np.log(2 * np.pi))


def log1mexp_exp(x: ArrayLike) -> Array:
    """Return ``log(1 - exp(-exp(x)))``, the log probability of an event with log cumulative hazard.

    Accurate for all `x`, as is its derivative.
    """
    x = jnp.minimum(jnp.asarray(x), LARGE)
    is_small, is_large = x < -8, x > -0.4
    middle = jnp.exp(jnp.clip(x, -9, 0))
    rate = jnp.exp(jnp.where(is_large, x, 0.0))
    large = jnp.log1p(-jnp.exp(-rate))
    small = jnp.where(is_small, x, -8.0)
    return jnp.where(
        is_small,
        small - jnp.exp(small) / 2,
        jnp.where(is_large, large, jnp.log(-jnp.expm1(-middle))),
    )


def log_gamma_correction(x: ArrayLike) -> Array:
    """Return ``gammaln(x) - ((x - 1/2) log(x) - x + log(2 pi) / 2)``, Stirling's remainder."""
    x = jnp.asarray(x)
    small = jnp.clip(x, 1e-30, 8.0)
    direct = gammaln(small) - ((small - 0.5) * jnp.log(small) - small + HALF_LOG_TAU)
    inverse = 1 / jnp.maximum(x, 8.0)
    square = inverse**2
    series = inverse * (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680)))
    return jnp.where(x < 8, direct, series)


def _poisson_log_prob(log_rate: Array, count: Array) -> Array:
    positive = jnp.where(count > 0, count, 1.0)
    gap = log_rate - jnp.log(positive)
    terms = positive * (gap - jnp.expm1(jnp.minimum(gap, LARGE)))
    terms = terms - HALF_LOG_TAU - 0.5 * jnp.log(positive) - log_gamma_correction(positive)
    return jnp.where(count > 0, terms, -jnp.exp(jnp.minimum(log_rate, LARGE)))


class _Outcome(dist.Distribution):
    """Distribution whose arguments have the shape of its outcomes."""

    def _set(self, **arguments: ArrayLike) -> None:
        for name, value in arguments.items():
            setattr(self, name, jnp.asarray(value))
        super().__init__(jnp.broadcast_shapes(*(jnp.shape(x) for x in arguments.values())))


class LogPoisson(_Outcome):
    """Poisson distribution, by the log of its rate."""

    arg_constraints: ClassVar[dict[str, Any]] = {"log_rate": constraints.real}
    support = constraints.nonnegative_integer

    def __init__(self, log_rate: ArrayLike) -> None:
        self._set(log_rate=log_rate)

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        return _poisson_log_prob(self.log_rate, _as_float(value))

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        return jax.random.poisson(key, self.mean, (*sample_shape, *self.batch_shape))

    @property
    def mean(self) -> Array:
        return jnp.exp(self.log_rate)


class HurdlePoisson(_Outcome):
    """Zero with a probability, otherwise a Poisson variable that is not zero."""

    arg_constraints: ClassVar[dict[str, Any]] = {
        "log_rate": constraints.real,
        "hurdle": constraints.unit_interval,
    }
    support = constraints.nonnegative_integer

    def __init__(self, log_rate: ArrayLike, hurdle: ArrayLike) -> None:
        self._set(log_rate=log_rate, hurdle=hurdle)

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        count = _as_float(value)
        positive = jnp.where(count > 0, count, 1.0)
        terms = _poisson_log_prob(self.log_rate, positive) - log1mexp_exp(self.log_rate)
        return jnp.where(count > 0, jnp.log1p(-self.hurdle) + terms, jnp.log(self.hurdle))

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        shape = (*sample_shape, *self.batch_shape)
        keys = jax.random.split(key, 3)
        rate = jnp.broadcast_to(jnp.exp(self.log_rate), shape)
        # Time of the first event of a process of unit rate, given that it is before `rate`.
        arrival = -jnp.log1p(jax.random.uniform(keys[0], shape) * jnp.expm1(-rate))
        positive = 1 + jax.random.poisson(keys[1], jnp.maximum(rate - arrival, 0), shape)
        return jnp.where(jax.random.uniform(keys[2], shape) < self.hurdle, 0, positive)

    @property
    def mean(self) -> Array:
        return (1 - self.hurdle) * jnp.exp(self.log_rate - log1mexp_exp(self.log_rate))


class LogNegativeBinomial(_Outcome):
    """Negative binomial distribution, by the log of its mean m, with variance m + m^2 / shape."""

    arg_constraints: ClassVar[dict[str, Any]] = {
        "log_mean": constraints.real,
        "shape_parameter": constraints.positive,
    }
    support = constraints.nonnegative_integer

    def __init__(self, log_mean: ArrayLike, shape_parameter: ArrayLike) -> None:
        self._set(log_mean=log_mean, shape_parameter=shape_parameter)

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        count, k = _as_float(value), self.shape_parameter
        positive = jnp.where(count > 0, count, 1.0)
        log_ratio = jax.nn.softplus(self.log_mean - jnp.log(k))  # log((k + mean) / k)
        gap = self.log_mean - jnp.log(positive)
        # (mean - count) / (k + count); near zero, log1p of it has more digits than a difference
        relative = positive * jnp.expm1(jnp.minimum(gap, LARGE)) / (k + positive)
        is_near = jnp.abs(relative) < 0.5
        near = jnp.log1p(jnp.where(is_near, relative, 0.0))
        log_quotient = jnp.where(is_near, near, log_ratio - jnp.log1p(positive / k))
        terms = positive * gap - (k + positive) * log_quotient
        terms = terms - 0.5 * jnp.log1p(positive / k) - 0.5 * jnp.log(positive) - HALF_LOG_TAU
        terms = terms + log_gamma_correction(k + positive) - log_gamma_correction(k)
        return jnp.where(count > 0, terms - log_gamma_correction(positive), -k * log_ratio)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        shape = (*sample_shape, *self.batch_shape)
        gamma_key, count_key = jax.random.split(key)
        k = jnp.broadcast_to(self.shape_parameter, shape)
        rate = jnp.exp(self.log_mean) * jax.random.gamma(gamma_key, k, shape) / k
        return jax.random.poisson(count_key, rate, shape)

    @property
    def mean(self) -> Array:
        return jnp.broadcast_to(jnp.exp(self.log_mean), self.batch_shape)


class LogGamma(_Outcome):
    """Gamma distribution, by the log of its mean m, with variance m^2 / shape."""

    arg_constraints: ClassVar[dict[str, Any]] = {
        "log_mean": constraints.real,
        "shape_parameter": constraints.positive,
    }
    support = constraints.positive

    def __init__(self, log_mean: ArrayLike, shape_parameter: ArrayLike) -> None:
        self._set(log_mean=log_mean, shape_parameter=shape_parameter)

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        k, log_value = self.shape_parameter, jnp.log(_as_float(value))
        gap = log_value - self.log_mean
        terms = k * (gap - jnp.expm1(jnp.minimum(gap, LARGE))) - log_value
        return terms + 0.5 * jnp.log(k) - HALF_LOG_TAU - log_gamma_correction(k)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        k = self.shape_parameter
        shape = (*sample_shape, *self.batch_shape)
        return jnp.exp(self.log_mean) * jax.random.gamma(key, k, shape) / k

    @property
    def mean(self) -> Array:
        return jnp.broadcast_to(jnp.exp(self.log_mean), self.batch_shape)


class LogitBeta(_Outcome):
    """Beta distribution, by the logit of its mean m, with variance m (1 - m) / (1 + precision)."""

    arg_constraints: ClassVar[dict[str, Any]] = {
        "logit_mean": constraints.real,
        "precision": constraints.positive,
    }
    support = constraints.unit_interval

    def __init__(self, logit_mean: ArrayLike, precision: ArrayLike) -> None:
        self._set(logit_mean=logit_mean, precision=precision)

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        value, k = _as_float(value), self.precision
        terms = -jnp.log(k) - 2 * HALF_LOG_TAU
        corrections = log_gamma_correction(k)
        total = jnp.zeros(())
        for sign, log_value in ((1, jnp.log(value)), (-1, jnp.log1p(-value))):
            log_share = jax.nn.log_sigmoid(sign * self.logit_mean)
            share = k * jnp.exp(log_share)
            total = total + share * (log_value - log_share) - log_value
            terms = terms + log_share + jnp.log(k)
            corrections = corrections - log_gamma_correction(share)
        return total + 0.5 * terms + corrections

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        shape = (*sample_shape, *self.batch_shape)
        a, b = (self.precision * jax.nn.sigmoid(x) for x in (self.logit_mean, -self.logit_mean))
        draws = jax.random.beta(key, a, b, shape)
        info = jnp.finfo(draws.dtype)  # draws near a bound are rounded to it
        return jnp.clip(draws, info.tiny, 1 - info.epsneg)

    @property
    def mean(self) -> Array:
        return jnp.broadcast_to(jax.nn.sigmoid(self.logit_mean), self.batch_shape)


class LinkedBinomial(_Outcome):
    """Number of successes in `total_count` trials, by a link function of the probability."""

    arg_constraints: ClassVar[dict[str, Any]] = {"predictor": constraints.real}
    pytree_data_fields = ("predictor", "total_count")
    pytree_aux_fields = ("link", "_batch_shape", "_event_shape")

    def __init__(
        self, predictor: ArrayLike, link: str, total_count: ArrayLike | None = None
    ) -> None:
        self.link, self.total_count = link, total_count
        self._set(predictor=predictor)

    @property
    def support(self) -> constraints.Constraint:
        if self.total_count is None:
            return constraints.boolean
        return constraints.integer_interval(0, self.total_count)

    def log_probabilities(self) -> tuple[Array, Array]:
        """Return the log probabilities of success and of failure."""
        x = self.predictor
        if self.link == "logit":
            return jax.nn.log_sigmoid(x), jax.nn.log_sigmoid(-x)
        if self.link == "probit":
            return norm.logcdf(x), norm.logcdf(-x)
        return log1mexp_exp(x), -jnp.exp(jnp.minimum(x, LARGE))

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        count = _as_float(value)
        success, failure = self.log_probabilities()
        if self.total_count is None:
            return jnp.where(count > 0.5, success, failure)
        trials = _as_float(self.total_count)
        terms = count * success + (trials - count) * failure
        return terms + gammaln(trials + 1) - gammaln(count + 1) - gammaln(trials - count + 1)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        shape = (*sample_shape, *self.batch_shape)
        probability = jnp.exp(self.log_probabilities()[0])
        if self.total_count is None:
            return (jax.random.uniform(key, shape) < probability).astype(jnp.int32)
        binomial = dist.Binomial(jnp.asarray(self.total_count).astype(jnp.int32), probability)
        return jnp.asarray(binomial.sample(key, sample_shape))

    @property
    def mean(self) -> Array:
        probability = jnp.exp(self.log_probabilities()[0])
        return (
            probability if self.total_count is None else jnp.asarray(self.total_count) * probability
        )


class OrderedCumulative(_Outcome):
    """Ordered categories ``0, 1, ...``: ``P(y <= j) = F(cutpoints[j] - predictor)``.

    F is the logistic (``"logit"``) or normal (``"probit"``) distribution function.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"predictor": constraints.real}
    pytree_data_fields = ("predictor", "cutpoints")
    pytree_aux_fields = ("link", "_batch_shape", "_event_shape")

    def __init__(self, predictor: ArrayLike, cutpoints: ArrayLike, link: str) -> None:
        self.cutpoints, self.link = jnp.asarray(cutpoints), link
        self._set(predictor=predictor)

    @property
    def support(self) -> constraints.Constraint:
        return constraints.integer_interval(0, self.cutpoints.shape[-1])

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        category = jnp.asarray(value).astype(jnp.int32)
        num_cutpoints = self.cutpoints.shape[-1]
        is_bottom, is_top = category <= 0, category >= num_cutpoints
        upper = self.cutpoints[jnp.clip(category, 0, num_cutpoints - 1)]
        lower = self.cutpoints[jnp.clip(category - 1, 0, num_cutpoints - 1)]
        gap = jnp.where(is_bottom | is_top, 1.0, upper - lower)
        upper, lower = upper - self.predictor, lower - self.predictor
        if self.link == "logit":
            below = jnp.where(is_top, 0.0, jax.nn.log_sigmoid(upper))
            above = jnp.where(is_bottom, 0.0, jax.nn.log_sigmoid(-lower))
            between = jnp.where(is_bottom | is_top, 0.0, jnp.log(-jnp.expm1(-gap)))
            return below + above + between
        # In the upper tail, probabilities of exceeding have more digits.
        is_flipped = lower > 0
        high = norm.logcdf(jnp.where(is_flipped, -lower, lower + gap))
        low = norm.logcdf(jnp.where(is_flipped, -lower - gap, lower))
        between = high + jnp.log(-jnp.expm1(low - high))
        return jnp.where(
            is_bottom, norm.logcdf(upper), jnp.where(is_top, norm.logcdf(-lower), between)
        )

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        draw = jax.random.logistic if self.link == "logit" else jax.random.normal
        latent = self.predictor + draw(key, (*sample_shape, *self.batch_shape))
        return jnp.sum(latent[..., None] > self.cutpoints, axis=-1, dtype=jnp.int32)

    @property
    def probs(self) -> Array:
        """Probabilities of the categories, ``[..., num_categories]``."""
        categories = range(self.cutpoints.shape[-1] + 1)
        like = jnp.zeros(self.batch_shape, jnp.int32)
        return jnp.exp(jnp.stack([self.log_prob(like + j) for j in categories], axis=-1))

    @property
    def mean(self) -> Array:
        return jnp.sum(self.probs * jnp.arange(self.cutpoints.shape[-1] + 1), axis=-1)


def _as_float(value: ArrayLike) -> Array:
    return jnp.asarray(value).astype(jnp.result_type(float))
