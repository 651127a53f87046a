"""Survival models: hazards from summed counts, regression on hazards or times, and predictions."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from numpyro import distributions as dist
from numpyro import handlers

from fedmcmc.models._columns import split_tables
from fedmcmc.models._design import Design
from fedmcmc.models._draws import MAX_DRAWS, thin
from fedmcmc.models._formula import Formula, parse, split
from fedmcmc.models._glm import Specification
from fedmcmc.models._hazards import CensoredTimes, Hazard, SplineHazard, WeibullHazard
from fedmcmc.models._model_fit import ModelFit
from fedmcmc.models._priors import Prior, Priors, _override, add_group_priors
from fedmcmc.models._regression import LinearPredictor, num_rows
from fedmcmc.models._schema import Schema, exchange

HAZARDS = ("piecewise", "weibull", "mspline")
FEW_EVENTS = 5
"""Number of events per interval below which the prior of the baseline matters."""
STEP_SD = 0.5
"""Prior standard deviation of the change of the log hazard from one interval to the next."""
HORIZON_PARTS = 200
"""Number of steps in which integrals over time are computed."""


@dataclass(frozen=True)
class SurvivalFamily:
    """Family of survival times; see `Family`.

    Attributes
    ----------
    name
        One of `HAZARDS`.
    hazard
        Baseline hazard.
    interval
        If true, outcomes are intervals.
    """

    name: str
    hazard: Hazard
    interval: bool = False
    has_intercept: ClassVar[bool] = True

    @property
    def link(self) -> str:
        """Function of the hazard, or of the time, that is linear."""
        return "log time" if self.is_aft else "log hazard"

    @property
    def is_aft(self) -> bool:
        """True if coefficients are logarithms of ratios of times."""
        return isinstance(self.hazard, WeibullHazard) and self.hazard.aft

    @property
    def is_survival(self) -> bool:
        """True if coefficients are logarithms of hazard ratios."""
        return not self.is_aft

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the sites of the baseline hazard."""
        return self.hazard.SITES

    def distribution(
        self,
        predictor: Array,
        parameters: Mapping[str, Any],
        follow_up: Any = None,
        start: Any = 0.0,
    ) -> CensoredTimes:
        """Return the distribution of outcomes with the linear `predictor`, ``[num_rows]``."""
        return CensoredTimes(
            self.hazard,
            dict(parameters),
            predictor,
            start,
            follow_up=follow_up,
            interval=self.interval,
        )


class SurvivalDesign(Design):
    """Design whose rows have the outcome as ``y`` ``[n, 2]``; see `CensoredTimes`."""

    def rows(self, table: Any, client: Any, *, outcome: bool = True) -> dict[str, np.ndarray]:
        """Return the arrays of a site's complete rows; see `Design.rows`."""
        arrays = super().rows(table, client, outcome=outcome)
        if outcome:
            second = arrays.pop("upper" if "upper" in arrays else "event")
            arrays["y"] = np.stack([arrays.pop("time"), second], axis=-1)
        if "trials" in arrays:
            arrays["follow_up"] = arrays.pop("trials")
            is_early = arrays["follow_up"] < arrays["y"][:, 0]
            if is_early.any():
                row = int(is_early.argmax())
                raise ValueError(
                    f"The end of follow-up of client {client!r} in complete row {row} is "
                    f"{arrays['follow_up'][row]:g}, before its time {arrays['y'][row, 0]:g}."
                )
        return arrays

    def __reduce__(self) -> tuple[Any, ...]:
        return SurvivalDesign, (self.formula, self.schema)


@dataclass(frozen=True, eq=False)
class SurvivalModel:
    """NumPyro model of survival times of one group's rows, which can be pickled.

    Attributes
    ----------
    predictor, family
        Linear predictor, and family with the baseline hazard.
    """

    predictor: LinearPredictor
    family: SurvivalFamily

    def __call__(self, **rows: Any) -> None:
        """Sample the model's sites for rows, ``[num_rows, ...]`` each."""
        predictor = self.predictor(rows)
        parameters = {name: self._parameter(name) for name in self.family.parameters}
        outcome = self.family.distribution(
            predictor, parameters, rows.get("follow_up"), rows.get("start", 0.0)
        )
        weights = rows.get("weights")
        scaled = nullcontext() if weights is None else handlers.scale(scale=weights)
        with numpyro.plate("rows", num_rows(rows)), scaled:
            numpyro.sample("y", outcome, obs=rows.get("y"))

    def _parameter(self, name: str) -> Any:
        priors, hazard = self.predictor.priors, self.family.hazard
        if isinstance(hazard, WeibullHazard):
            return numpyro.sample(name, priors.scalar(name))
        # A random walk with average zero: the intercept is the average log hazard.
        num_steps = hazard.num_coefficients - 1
        walk = jnp.zeros(1)
        if num_steps:
            steps = numpyro.sample("steps", priors.vector(("steps",) * num_steps))
            walk = jnp.concatenate([walk, jnp.cumsum(steps)])
        return numpyro.deterministic(name, walk - jnp.mean(walk))


def survival(
    formula: str,
    data: Any,
    *,
    hazard: Literal["piecewise", "weibull", "mspline"] = "piecewise",
    intervals: int | Sequence[float] = 10,
    aft: bool = False,
    cause: Any = None,
    follow_up: str | float | None = None,
    priors: Mapping[str, Any] | None = None,
    client: str | None = None,
    dictionary: Any = None,
    max_missing: float = 0.2,
    **settings: Any,
) -> ModelFit:
    """Fit a survival model (docs/guides/survival.md).

    Parameters
    ----------
    formula
        ``Surv(time, event) ~ age + (1 | hospital)``, ``Surv(start, stop, event)`` for delayed entry
        or covariates that change, or ``Surv(lower, upper, type="interval")``, with missing values
        for open bounds.
    data, client, dictionary, priors, max_missing
        See `glm`.
    hazard, intervals
        Baseline hazard, and the number of its intervals between quantiles of the event times, or
        their inner cuts. Changes of the log hazard between intervals have the prior ``steps``.
    aft
        For ``"weibull"``: coefficients of log times (R's ``survreg``) instead of log hazards.
    cause
        Value of the event column that counts as the event, for competing risks; fit each cause.
    follow_up
        Column, or number, with the end of each row's follow-up, for replicated outcomes.
    settings
        ``rng_key``, ``method`` and arguments of `fedmcmc.fit`.

    Returns
    -------
    ModelFit
        Coefficients are log hazard ratios. ``Intercept`` is the average log hazard, and
        ``baseline`` the log hazard of each interval minus this average.

    Raises
    ------
    ValueError, TypeError
        If the formula, a time, an event or an argument does not fit.
    """
    parsed = rewrite(parse(formula), cause, follow_up)
    tables = split_tables(data, client)
    schema = exchange(parsed, tables, dictionary, client=client, max_missing=max_missing)
    described: dict[str, Any] = {"hazard": hazard, "intervals": intervals, "aft": aft}
    design, family, all_priors, model = specify_survival(parsed, schema, priors=priors, **described)
    rows = design.data(tables)
    specification = Specification(parsed, family, all_priors, design, rows, model, tables)  # type: ignore[arg-type]
    fit = specification.fit(**settings)
    return replace(fit, settings={**fit.settings, **described, "cause": cause})


def rewrite(formula: Formula, cause: Any, follow_up: str | float | None) -> Formula:
    """Return a formula whose text has the cause and the end of follow-up."""
    arguments = dict(formula.outcome)
    if not formula.is_survival:
        raise ValueError(
            f"A survival outcome is Surv(time, event), Surv(start, stop, event) or Surv(lower, "
            f'upper, type="interval"); got {formula.response!r}.'
        )
    if "upper" in arguments and (cause is not None or follow_up is not None):
        raise ValueError("Intervals have neither a cause nor an end of follow-up.")
    if cause is None and follow_up is None:
        return formula
    if cause is not None:
        arguments["event"] = f"({arguments['event']}) == {cause!r}"
    inside = ", ".join(arguments[x] for x in ("start", "time", "event") if x in arguments)
    options = [f"weights({formula.weights})"] if formula.weights else []
    options += [f"trials({follow_up})"] if follow_up is not None else []
    response = f"Surv({inside})" + f" | {' + '.join(options)}" * bool(options)
    right = [piece for _, piece in split(formula.text, ("~",))][1]
    return parse(f"{response} ~ {right}")


def specify_survival(
    formula: Formula,
    schema: Schema,
    *,
    hazard: str = "piecewise",
    intervals: int | Sequence[float] = 10,
    aft: bool = False,
    priors: Mapping[str, Any] | None = None,
) -> tuple[SurvivalDesign, SurvivalFamily, Priors, SurvivalModel]:
    """Return design, family, priors and NumPyro model, which depend on the schema alone."""
    if hazard not in HAZARDS:
        raise ValueError(f"hazard must be one of {', '.join(map(repr, HAZARDS))}, got {hazard!r}.")
    if aft and hazard != "weibull":
        raise ValueError(f"aft=True is for hazard='weibull', got {hazard!r}.")
    design, outcome = SurvivalDesign(formula, schema), schema.outcome
    num_events = outcome["event_time"].count
    if not num_events:
        raise ValueError(f"No client has an event ({formula.response}).")
    total = outcome["time"].mean * outcome["time"].count
    if "start" in outcome:
        total -= outcome["start"].mean * outcome["start"].count
    if "upper" in outcome:
        total = (total + outcome["upper"].mean * outcome["upper"].count) / 2
    baseline: Hazard = WeibullHazard(float(outcome["event_time"].mean), aft)
    if hazard != "weibull":
        baseline = SplineHazard(*_find_cuts(schema, intervals), 3 if hazard == "mspline" else 0)
    family = SurvivalFamily(hazard, baseline, "upper" in outcome)
    rate = float(np.log(num_events / total))
    all_priors = _default_priors(design, family, -rate if aft else rate, priors)
    predictor = LinearPredictor(design.names, design.terms, design.has_intercept, all_priors)
    return design, family, all_priors, SurvivalModel(predictor, family)


def _find_cuts(schema: Schema, intervals: int | Sequence[float]) -> tuple[tuple[float, ...], float]:
    """Return inner cuts at quantiles of event times, and the largest time."""
    outcome = schema.outcome
    end = max(float(outcome[x].quantile(1.0)) for x in ("time", "upper") if x in outcome)
    if not isinstance(intervals, int):
        cuts = tuple(float(x) for x in intervals)
        return cuts, max(end, 1.001 * max(cuts, default=0.0))
    if isinstance(intervals, bool) or intervals < 1:
        raise ValueError(f"intervals must be a positive number or a list of cuts: {intervals!r}.")
    num_events = outcome["event_time"].count
    if intervals > 1 and num_events < FEW_EVENTS * intervals:
        warnings.warn(
            f"{intervals} intervals have {num_events / intervals:.2g} events each, so the prior of "
            f"the baseline matters. Use fewer intervals, or hazard='weibull'.",
            stacklevel=4,
        )
    quantiles = outcome["event_time"].quantile(np.arange(1, intervals) / intervals)
    cuts = tuple(float(x) for x in np.unique(quantiles) if 0 < x < end)
    return cuts, end


def _default_priors(
    design: Design, family: SurvivalFamily, location: float, overrides: Mapping[str, Any] | None
) -> Priors:
    distributions: dict[str, Prior] = {}
    units: dict[str, tuple[float, float]] = {}

    def add(name: str, prior: Prior, location: float = 0.0, scale: float = 1.0) -> None:
        distributions[name], units[name] = prior, (location, scale)

    if design.has_intercept:
        add("Intercept", dist.Normal(location, 2.5), location)
    scales = dict(zip(design.names, (1 / design.scales).tolist(), strict=True))
    for name, scale in scales.items():
        add(name, dist.Normal(0.0, 2.5 * scale), 0.0, scale)
    if isinstance(family.hazard, WeibullHazard):
        add("shape", dist.LogNormal(0.0, 1.0))
    elif family.hazard.num_coefficients > 1:
        add("steps", dist.Normal(0.0, STEP_SD), 0.0, STEP_SD)
    add_group_priors(add, design, scales, 1.0)
    return Priors(_override(distributions, overrides or {}, design), units)


@dataclass(frozen=True)
class _Predictor:
    """Family whose expected outcome is the linear predictor."""

    name: str
    parameters: tuple[str, ...] = ()

    def distribution(self, predictor: Array, *_: Any) -> Any:
        return SimpleNamespace(mean=predictor)


def cumulative_hazards(
    fit: ModelFit, new: Any, times: Any, *, client: Any = "new", seed: int = 0
) -> np.ndarray:
    """Return draws of the cumulative hazard, ``[num_draws, num_rows, num_times]``."""
    times = np.atleast_1d(np.asarray(times, np.float64))
    if times.ndim != 1 or not np.all(times >= 0):
        raise ValueError(f"times must be a list of numbers of at least 0, got {times!r}.")
    if not isinstance(fit.family, SurvivalFamily):
        raise ValueError(
            f"The fit must be from models.survival; its family is {fit.family.name!r}."
        )
    # A copy with the effects that `fit` has drawn, if these are needed.
    view = copy.copy(fit)
    if client is not None and not (isinstance(client, str) and client == "new"):
        vars(view)["effect_draws"] = fit.effect_draws
    vars(view)["family"] = _Predictor(fit.family.name)
    predictor = view.predict(new, client=client, summary=False, seed=seed)
    values, hazard = thin(fit.samples.constrained, MAX_DRAWS), fit.family.hazard
    parameters = {x: np.asarray(values[x], np.float64)[:, None] for x in fit.family.parameters}
    ratios = np.exp(np.asarray(hazard.log_ratio(parameters, predictor), np.float64))
    baseline = np.asarray(hazard.cumulative_hazard(parameters, times), np.float64)  # [S, T]
    return ratios[..., None] * baseline[:, None, :]


def survival_curves(
    fit: ModelFit, new: Any, times: Any, *, client: Any = "new", seed: int = 0
) -> np.ndarray:
    """Return draws of the probability of no event by each time.

    Parameters
    ----------
    fit
        Result of `survival`, without ``cause``.
    new
        Table with the columns of the formula's right side.
    times
        Times, ``[num_times]``.
    client, seed
        See `ModelFit.predict`.

    Returns
    -------
    numpy.ndarray
        ``[num_draws, num_rows, num_times]``.

    Raises
    ------
    ValueError
        If the fit is for one of several causes.
    """
    if fit.settings.get("cause") is not None:
        raise ValueError(
            f"The fit is for the cause {fit.settings['cause']!r} alone, whose hazard determines no "
            f"probability. Call cumulative_incidence with the fits of all causes."
        )
    return np.exp(-cumulative_hazards(fit, new, times, client=client, seed=seed))


def restricted_mean(
    fit: ModelFit, new: Any, horizon: float, *, client: Any = "new", seed: int = 0
) -> np.ndarray:
    """Return draws of the mean time without event up to a horizon, ``[num_draws, num_rows]``.

    See `survival_curves` for the parameters.
    """
    grid = _grid([fit], [horizon])
    # Simpson's rule; the grid contains all cuts.
    middle = (grid[1:] + grid[:-1]) / 2
    curves = survival_curves(fit, new, np.concatenate([grid, middle]), client=client, seed=seed)
    ends, middles = curves[..., : len(grid)], curves[..., len(grid) :]
    return (ends[..., 1:] + 4 * middles + ends[..., :-1]) @ np.diff(grid) / 6


def cumulative_incidence(
    fits: Mapping[Any, ModelFit], new: Any, times: Any, *, client: Any = "new", seed: int = 0
) -> dict[Any, np.ndarray]:
    """Return draws of the probability of an event of each cause by each time.

    Parameters
    ----------
    fits
        Cause to its fit, for all causes: ``{x: survival(..., cause=x) for x in causes}``.
    new, times, client, seed
        See `survival_curves`.

    Returns
    -------
    dict of numpy.ndarray
        ``[num_draws, num_rows, num_times]`` for each cause. Their sum is one minus the probability
        of no event.

    Raises
    ------
    ValueError
        If there are fewer than two causes, or `fits` has another cause than its fit.
    """
    if len(fits) < 2 or any(fit.settings.get("cause") != x for x, fit in fits.items()):
        causes = [fit.settings.get("cause") for fit in fits.values()]
        raise ValueError(
            f"fits must have a fit with cause= for each of two causes or more, by its cause; got "
            f"{list(fits)!r} with fits for {causes!r}."
        )
    times = np.atleast_1d(np.asarray(times, np.float64))
    grid = _grid(list(fits.values()), times)
    hazards, rng = {}, np.random.default_rng(seed)
    for i, (cause, fit) in enumerate(fits.items()):
        draws = cumulative_hazards(fit, new, grid, client=client, seed=seed + i)
        # Posteriors of causes are independent; the order of draws must not couple them.
        hazards[cause] = rng.permutation(draws)
    num_draws = min(map(len, hazards.values()))
    steps = {cause: np.diff(x[:num_draws], axis=-1) for cause, x in hazards.items()}
    total = np.sum(list(steps.values()), axis=0)
    survival = np.exp(-np.cumsum(np.concatenate([np.zeros_like(total[..., :1]), total], -1), -1))
    # Within a step, each cause has its share of the events.
    events = survival[..., :-1] - survival[..., 1:]
    place = np.searchsorted(grid, times)
    result = {}
    for cause, step in steps.items():
        share = np.divide(step, total, out=np.zeros_like(step), where=total > 0)
        incidence = np.cumsum(events * share, axis=-1)
        incidence = np.concatenate([np.zeros_like(incidence[..., :1]), incidence], axis=-1)
        result[cause] = incidence[..., place]
    return result


def _grid(fits: Sequence[ModelFit], times: Any) -> np.ndarray:
    """Return a fine grid from zero to the last time with all times and cuts."""
    times = np.asarray(times, np.float64)
    end = float(times.max())
    if not (times >= 0).all() or not 0 < end < np.inf:
        raise ValueError(f"Times must be at least 0, finite, and not all zero; got {times!r}.")
    cuts = [x for fit in fits for x in getattr(fit.family.hazard, "cuts", ())]
    early = end / HORIZON_PARTS * 0.5 ** np.arange(1, 12)  # hazards may be steep at zero
    points = np.concatenate([np.linspace(0, end, HORIZON_PARTS + 1), cuts, times, early])
    return np.unique(points[points <= end])
