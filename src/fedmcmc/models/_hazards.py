"""Hazards of survival times, and the distribution of censored times as a row of data has them."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro import distributions as dist
from numpyro.distributions import constraints
from scipy.interpolate import BSpline, PPoly

BISECTIONS = 30
"""Number of halvings of an interval in which a drawn time lies."""
Parameters = dict[str, Any]
"""Parameters of a hazard by site, with axes of draws in front if there are several draws."""


@dataclass(frozen=True)
class SplineHazard:
    """Baseline hazard that is a sum of B-splines in time with positive coefficients.

    Degree 0 is the piecewise exponential model. A time on a cut belongs to the interval on its
    left. After the end the hazard is constant. Equal coefficients are a constant hazard.

    Attributes
    ----------
    cuts
        Increasing inner knots, inside of ``(0, end)``.
    end
        Positive time up to which the hazard may change.
    degree
        Degree of the splines: 0 or 3.
    """

    cuts: tuple[float, ...]
    end: float
    degree: int = 0
    SITES: ClassVar[tuple[str, ...]] = ("baseline",)

    def __post_init__(self) -> None:
        knots = (0.0, *self.cuts, self.end)
        if not (np.all(np.diff(knots) > 0) and np.isfinite(knots).all()):
            raise ValueError(f"cuts must increase within (0, end = {self.end:g}), got {self.cuts}.")

    @property
    def num_coefficients(self) -> int:
        return len(self.cuts) + 1 + self.degree

    @cached_property
    def _pieces(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return left ends, widths, and the polynomials of the splines and of their integrals.

        A polynomial's variable is the share of the interval before a time.
        """
        knots = np.array([0.0, *self.cuts, self.end])
        padded = np.concatenate([np.zeros(self.degree), knots, np.full(self.degree, self.end)])
        spline = BSpline(padded, np.eye(self.num_coefficients), self.degree)
        powers = range(self.degree, -1, -1)
        taylor = [spline(knots[:-1], nu=power) / math.factorial(power) for power in powers]
        pieces = PPoly(np.stack(taylor), knots)
        return knots, _rescaled(pieces), _rescaled(pieces.antiderivative())

    def _evaluate(self, time: ArrayLike) -> tuple[Array, Array]:
        """Return the splines and their integrals from zero at times, ``[..., J]`` each."""
        knots, values, integrals = self._pieces
        time = jnp.asarray(time)
        dtype = jnp.result_type(time, float)
        within = jnp.clip(time, 0, jnp.asarray(self.end, dtype))
        cuts = jnp.asarray(knots[1:-1], dtype)
        index = jnp.sum(within[..., None] > cuts, axis=-1)
        left, right = jnp.asarray(knots[:-1], dtype)[index], jnp.asarray(knots[1:], dtype)[index]
        share = ((within - left) / (right - left))[..., None]
        splines = _horner(jnp.asarray(values, dtype), index, share)
        integral = _horner(jnp.asarray(integrals, dtype), index, share)
        return splines, integral + splines * (time - within)[..., None]

    def log_ratio(self, parameters: Parameters, eta: ArrayLike) -> Array:
        """Return the log hazard ratio to the baseline of a linear predictor."""
        return jnp.asarray(eta)

    def log_hazard(self, parameters: Parameters, time: ArrayLike) -> Array:
        """Return the log baseline hazard at positive times."""
        logs = parameters["baseline"]
        largest = jax.lax.stop_gradient(jnp.max(logs))
        return jnp.log(jnp.sum(self._evaluate(time)[0] * jnp.exp(logs - largest), -1)) + largest

    def cumulative_hazard(
        self, parameters: Parameters, time: ArrayLike, start: ArrayLike = 0.0
    ) -> Array:
        """Return the integral of the baseline hazard from `start` to `time`."""
        exposure = self._evaluate(time)[1] - self._evaluate(start)[1]
        return jnp.sum(exposure * jnp.exp(parameters["baseline"]), -1)

    def time_at(self, parameters: Parameters, cumulative: Array, start: ArrayLike) -> Array:
        """Return the time at which the cumulative hazard since `start` is `cumulative`."""
        knots = jnp.asarray(self._pieces[0], cumulative.dtype)
        target = cumulative + self.cumulative_hazard(parameters, start)
        at_knots = self.cumulative_hazard({"baseline": parameters["baseline"][..., None, :]}, knots)
        index = jnp.sum(target[..., None] > at_knots[..., 1:-1], axis=-1)

        def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bounds
            middle = (low + high) / 2
            is_before = self.cumulative_hazard(parameters, middle) < target
            return jnp.where(is_before, middle, low), jnp.where(is_before, high, middle)

        bounds = jax.lax.fori_loop(0, BISECTIONS, halve, (knots[index], knots[index + 1]))
        beyond = (target - at_knots[..., -1]) / jnp.exp(self.log_hazard(parameters, knots[-1]))
        return jnp.where(beyond > 0, knots[-1] + beyond, sum(bounds) / 2)


@dataclass(frozen=True)
class WeibullHazard:
    """Hazard ``exp(eta) * shape * (time / unit) ** (shape - 1)``.

    Attributes
    ----------
    unit
        Time at which the hazard is ``shape * exp(eta)``.
    aft
        If true, a linear predictor is the location of the log time (accelerated failure time, as in
        R's ``survreg``) instead of a log hazard.
    """

    unit: float
    aft: bool = False
    SITES: ClassVar[tuple[str, ...]] = ("shape",)

    def log_ratio(self, parameters: Parameters, eta: ArrayLike) -> Array:
        """Return the log hazard ratio to the baseline of a linear predictor."""
        if not self.aft:
            return jnp.asarray(eta)
        log_unit = math.log(self.unit)
        return parameters["shape"] * (log_unit - jnp.asarray(eta)) - log_unit

    def log_hazard(self, parameters: Parameters, time: ArrayLike) -> Array:
        """Return the log baseline hazard at positive times."""
        shape = parameters["shape"]
        log_time = jnp.log(jnp.asarray(time) / self.unit)
        return jnp.log(shape) + (shape - 1) * log_time

    def cumulative_hazard(
        self, parameters: Parameters, time: ArrayLike, start: ArrayLike = 0.0
    ) -> Array:
        """Return the integral of the baseline hazard from `start` to `time`."""
        shape = parameters["shape"]
        time, start = jnp.broadcast_arrays(jnp.asarray(time), jnp.asarray(start))
        is_positive, is_late = time > 0, start > 0
        # Zeros are replaced before the logarithm, because gradients pass through both branches.
        positive = jnp.where(is_positive, time, self.unit)
        log_ratio = jnp.log(jnp.where(is_late, start, positive) / positive)
        total = self.unit * jnp.exp(shape * jnp.log(positive / self.unit))
        share = jnp.where(is_late, -jnp.expm1(shape * log_ratio), 1.0)
        return jnp.where(is_positive, total * share, 0.0)

    def time_at(self, parameters: Parameters, cumulative: Array, start: ArrayLike) -> Array:
        """Return the time at which the cumulative hazard since `start` is `cumulative`."""
        target = cumulative + self.cumulative_hazard(parameters, start)
        return self.unit * jnp.exp(jnp.log(target / self.unit) / parameters["shape"])


Hazard = SplineHazard | WeibullHazard


def _rescaled(pieces: PPoly) -> np.ndarray:
    """Return coefficients, highest power first, of polynomials in the share of each interval."""
    powers = np.arange(len(pieces.c))[::-1]
    return pieces.c * (np.diff(pieces.x)[None, :] ** powers[:, None])[..., None]


def _horner(coefficients: Array, index: Array, share: Array) -> Array:
    value = coefficients[0][index]
    for power in coefficients[1:]:
        value = value * share + power[index]
    return value


class CensoredTimes(dist.Distribution):
    """Distribution of survival times of which a row has what was observed.

    An outcome is ``(time, event)``, where ``event`` is 1 if the event happened at ``time`` and 0 if
    the row was last observed without it. With ``interval=True`` an outcome is ``(lower, upper)``:
    the event happened after ``lower`` and up to ``upper``, at the time itself if both are equal,
    and an infinite ``upper`` is a censored row.

    Parameters
    ----------
    hazard, parameters
        Baseline hazard and its parameters.
    eta
        Linear predictor of each row with its intercept, ``[n]``.
    start
        Time from which each row was observed.
    follow_up
        Time at which observation of each row would have ended without an event, ``[n]``, or
        ``None`` if it is unknown. Only replicated outcomes need it.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.independent(constraints.nonnegative, 1)
    pytree_data_fields = ("parameters", "eta", "start", "follow_up")
    pytree_aux_fields = ("hazard", "interval")

    def __init__(
        self,
        hazard: Hazard,
        parameters: Parameters,
        eta: Array,
        start: ArrayLike = 0.0,
        *,
        follow_up: ArrayLike | None = None,
        interval: bool = False,
    ) -> None:
        self.hazard, self.parameters, self.interval = hazard, parameters, interval
        self.eta, self.start, self.follow_up = hazard.log_ratio(parameters, eta), start, follow_up
        super().__init__(jnp.shape(eta), (2,), validate_args=False)

    def log_prob(self, value: Array, intermediates: object = None) -> Array:
        """Return the log density of each outcome, ``[n]``."""
        time = value[..., 0]
        if self.interval:
            upper = value[..., 1]
            is_event, is_between = upper == time, (upper > time) & jnp.isfinite(upper)
        else:
            is_event = value[..., 1] > 0
        ratio = jnp.exp(self.eta)
        terms = -ratio * self.hazard.cumulative_hazard(self.parameters, time, self.start)
        # A time of zero, such as the lower end of a left-censored row, has no log hazard.
        event_time = jnp.where(is_event & (time > 0), time, 1.0)
        log_hazard = self.hazard.log_hazard(self.parameters, event_time) + self.eta
        terms += jnp.where(is_event, log_hazard, 0.0)
        if self.interval:
            lower = jnp.where(is_between, time, 1.0)
            upper = jnp.where(is_between, upper, 2.0)
            between = self.hazard.cumulative_hazard(self.parameters, upper, lower)
            terms += jnp.where(is_between, jax.nn.log1mexp(ratio * jnp.maximum(between, 0.0)), 0.0)
        return terms

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw outcomes of rows that are observed from `start` to `follow_up`."""
        if self.interval:
            raise NotImplementedError(
                "the rows do not contain the times of all inspections (interval censoring)"
            )
        if self.follow_up is None:
            raise NotImplementedError(
                "the rows do not contain the censoring times of rows with an event; pass "
                "follow_up= with the end of each row's follow-up"
            )
        shape = sample_shape + self.batch_shape
        cumulative = jax.random.exponential(key, shape, jnp.result_type(float)) / jnp.exp(self.eta)
        start = jnp.broadcast_to(jnp.asarray(self.start), shape)
        time = self.hazard.time_at(self.parameters, cumulative, start)
        is_event = time <= self.follow_up
        return jnp.stack(
            [jnp.where(is_event, time, self.follow_up), is_event.astype(time.dtype)], axis=-1
        )
