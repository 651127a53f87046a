"""Choice of settings from predictions, before any round is run."""

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from jax import Array

from fedmcmc._checks import expect
from fedmcmc.data import constructor_of
from fedmcmc.gaussian import Gaussian
from fedmcmc.tuning._gaussian_clients import largest_curvature
from fedmcmc.tuning._metropolis import mala_rounds_per_draw
from fedmcmc.tuning._predictions import Prediction, warn_of_unknown_noise
from fedmcmc.tuning._search import Entry, StepSizeSearch, TuningObjective
from fedmcmc.tuning._visits import WorstVisits, has_unchecked_visits
from fedmcmc.types import ArrayTree, FederatedKernel, Posterior

TIE_RATIO = 1.05
"""Ratio of costs below which settings tie; the smallest step among them is chosen."""
NUM_DRAWS = 400
"""Number of effective draws in the advice on rounds."""
OBJECTIVES = ("rounds", "bits", "seconds")


@dataclass(frozen=True)
class Tuned:
    """Best settings, and a table of all settings that were tried.

    Attributes
    ----------
    kernel
        Kernel with the best settings.
    settings
        Keyword arguments of `kernel_fn`, including the step size.
    prediction
        Prediction for the kernel on Gaussian clients.
    table
        One entry per trial: settings, ``bias`` and ``spread`` (largest errors), ``rounds`` and
        ``cost`` per effective draw, ``burn_in`` (rounds until a distance has shrunk to a
        hundredth), ``feasible``, and ``why`` not. For a relay within the limits, ``growth`` is the
        distance after the worst visit from 4 sds, divided by 4, and ``drift`` its root mean square
        over the visited client, also from farther away; otherwise both are zero.
    note
        Line on the reason for shorter steps than the limits allow; often empty.
    """

    kernel: FederatedKernel
    settings: dict[str, Any]
    prediction: Prediction
    table: list[dict[str, Any]]
    note: str = ""

    def __str__(self) -> str:
        """Return the chosen settings with their cost, their errors and an exact alternative."""
        chosen = ", ".join(
            f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in self.settings.items()
        )
        prediction, size = self.prediction, len(self.prediction.mean)
        rounds, quantity = prediction.rounds_per_draw.max(), ""
        if not math.isnan(prediction.functional_rounds):
            rounds, quantity = prediction.functional_rounds, " of the functional"
        rounds_per_chain = math.ceil(NUM_DRAWS * rounds / 4)
        return (
            f"{chosen}: {rounds:.3g} rounds per effective draw{quantity} ({len(self.table)} "
            f"settings tried); 4 chains have {NUM_DRAWS} effective draws after "
            f"{rounds_per_chain:,} rounds each, and the standard error of a mean is then "
            f"{NUM_DRAWS**-0.5:.2g} sd.\n{prediction}\n{self.note}"
            f"Methods without bias: fedmcmc.mala in whitened coordinates takes about "
            f"{mala_rounds_per_draw(size):.2g} rounds per effective draw of a Gaussian in "
            f"{size} dimensions, with all clients in each round; fedmcmc.correct weights draws "
            f"from a Gaussian approximation, in one round more than the approximation takes, and "
            f"reports whether the approximation is good enough; fedmcmc.fit chooses a method."
        )


def tune(
    kernel_fn: Callable[..., FederatedKernel],
    posterior: Posterior,
    data: object,
    surrogates: Gaussian,
    *,
    scores: Array | None = None,
    grid: Mapping[str, Sequence[Any]] | None = None,
    step_size: tuple[float, float] | None = None,
    objective: Literal["rounds", "bits", "seconds"] = "rounds",
    latency: float | None = None,
    bandwidth: float = math.inf,
    seconds_per_gradient: float = 0.0,
    max_bias: float = 0.05,
    max_spread: float = 0.02,
    functional: Callable[[ArrayTree], Array] | None = None,
) -> Tuned:
    """Choose a step size, and settings from a grid, from predictions on Gaussian clients.

    Among settings within `max_bias` and `max_spread` in every coordinate, minimize the cost per
    effective draw of the slowest direction (or of `functional`). Within five percent of the lowest
    cost, choose the point of the grid with the smallest step. Predictions need no round. For relays
    (`fedmcmc.fsgld`, `fedmcmc.dsgld`), settings whose visits throw a chain far out are excluded
    too; see docs/explanation/diagnostics.md.

    Parameters
    ----------
    kernel_fn
        ``(step_size=..., **point) -> kernel``, for each point of the grid.
    posterior, data, surrogates
        Model; `FederatedData` or consortium of remote clients; one Gaussian per client for its
        likelihood. In whitened coordinates use ``white.posterior`` and ``white.surrogates`` of
        `fedmcmc.whiten`.
    scores
        Covariance of minibatch noise, see `predict_bias`. In whitened coordinates use
        ``fedmcmc.surrogates.score_covariance(white.posterior, data, white.position)``.
    grid
        Names of other arguments of `kernel_fn`, each with the values to try.
    step_size
        Smallest and largest step size to try. By default from a thousandth of the limit for the
        stiffest direction to the step size at which the kernel diverges.
    objective
        Unit of the cost: ``"rounds"``, ``"bits"`` (up and down, all clients), or ``"seconds"``.
    latency, bandwidth, seconds_per_gradient
        Prices for ``"seconds"``: seconds per exchange, bytes per second of the server, and seconds
        per gradient of a row's log likelihood, at the client that evaluates most rows.
    max_bias, max_spread
        Limits on errors of means, in posterior sds, and on relative errors of sds.
    functional
        Function of the position whose draws should be cheap, see `predict_bias`.

    Returns
    -------
    Tuned

    Raises
    ------
    ValueError
        If no settings are within the limits (the error lists the closest), and in all cases of
        `predict_bias`.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> white = fedmcmc.whiten(posterior, data, jnp.zeros(()))
    >>> def kernel_fn(step_size):
    ...     return fedmcmc.lsd(white.posterior, step_size=step_size)
    >>> best = tune(kernel_fn, white.posterior, data, white.surrogates)
    >>> round(best.settings["step_size"], 3)  # 2 * (1 - 1 / 1.02**2): sds two percent too wide
    0.078
    """
    if isinstance(kernel_fn, FederatedKernel) or not callable(kernel_fn):
        raise TypeError(
            f"kernel_fn must be a function that takes step_size= and returns a kernel, got "
            f"{type(kernel_fn).__name__}."
        )
    expect(posterior, Posterior, "posterior")
    if not hasattr(data, "federation"):
        raise TypeError(
            f"data must be a fedmcmc.FederatedData or a consortium of clients, got "
            f"{type(data).__name__}. {constructor_of(data)}"
        )
    if objective not in OBJECTIVES:
        raise ValueError(f"objective must be one of {OBJECTIVES}, got {objective!r}.")
    latency = 0.0 if latency is None else latency
    for name, price in (("latency", latency), ("seconds_per_gradient", seconds_per_gradient)):
        if not 0 <= price < math.inf:
            raise ValueError(f"{name} must be a number of seconds, got {price!r}.")
    if not bandwidth > 0:
        raise ValueError(f"bandwidth must be a number of bytes per second, got {bandwidth!r}.")
    if objective == "seconds" and not (latency or seconds_per_gradient or bandwidth < math.inf):
        raise ValueError(
            'objective="seconds" needs latency=, bandwidth= or seconds_per_gradient=, the time of '
            "exchanges, bytes or gradients."
        )
    if step_size is not None and not 0 < step_size[0] <= step_size[-1] < math.inf:
        raise ValueError(
            f"step_size must be the smallest and the largest to try, got {step_size!r}."
        )
    names, values = zip(*grid.items(), strict=True) if grid else ((), ())
    _check_arguments(kernel_fn, ("step_size", *names))
    cost = TuningObjective(
        objective, latency, bandwidth, seconds_per_gradient, max_bias, max_spread, functional
    )
    curvature = largest_curvature(posterior, surrogates)
    searches = []
    for combination in itertools.product(*values):
        point = dict(zip(names, combination, strict=True))
        build = partial(_build, kernel_fn, point)
        search = StepSizeSearch(build, point, data, surrogates, scores, cost)
        search.run(curvature, step_size)
        searches.append(search)
    table = [entry for search in searches for entry, _ in search.entries.values()]
    unsafe = [pair for search in searches for pair in search.unsafe]
    candidates = [search.best for search in searches if search.best is not None]
    if not candidates:
        raise ValueError(_no_settings(table, unsafe, max_bias, max_spread))
    lowest = min(entry["cost"] for entry, _ in candidates)
    ties = [pair for pair in candidates if pair[0]["cost"] <= TIE_RATIO * lowest]
    entry, prediction = min(ties, key=lambda pair: pair[0]["step_size"])
    settings = {name: entry[name] for name in ("step_size", *names)}
    longer = [pair for pair in unsafe if all(pair[0][name] == settings[name] for name in names)]
    kernel, note = kernel_fn(**settings), _note_on(longer)
    warn_of_unknown_noise(kernel)
    if has_unchecked_visits(kernel, data):
        note = (
            "Visits to clients at real sites were not checked. Away from the mode, errors of "
            "surrogates may throw a chain far out: take fewer local steps than predictions allow.\n"
        )
    return Tuned(kernel, settings, prediction, table, note)


def _check_arguments(kernel_fn: Callable[..., FederatedKernel], names: tuple[str, ...]) -> None:
    """Raise `TypeError` unless `kernel_fn` can be called with these keyword arguments."""
    try:
        signature = inspect.signature(kernel_fn)
    except ValueError:  # for some builtins
        return
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        call = ", ".join(f"{name}=..." for name in names)
        raise TypeError(
            f"tune calls kernel_fn({call}), but kernel_fn has the arguments {signature}: {error}."
        ) from error


def _build(
    kernel_fn: Callable[..., FederatedKernel], point: dict[str, Any], step_size: float
) -> FederatedKernel:
    kernel = kernel_fn(step_size=step_size, **point)
    if not isinstance(kernel, FederatedKernel):
        raise TypeError(f"kernel_fn must return a FederatedKernel, got {type(kernel).__name__}.")
    return kernel


def _note_on(unsafe: list[tuple[Entry, WorstVisits]]) -> str:
    """Return a line on steps that are within the limits and unsafe, or an empty string."""
    if not unsafe:
        return ""
    longest, visits = max(unsafe, key=lambda pair: pair[0]["step_size"])
    return (
        f"Longer steps are within the limits on Gaussian clients but unsafe, such as "
        f"{longest['step_size']:.3g}: {_explain(visits)}\n"
    )


def _explain(visits: WorstVisits) -> str:
    return (
        f"{visits}, because surrogates differ from likelihoods there. Take fewer local steps, or a "
        f"kernel in whose rounds all clients take part."
    )


def _no_settings(
    table: list[Entry],
    unsafe: list[tuple[Entry, WorstVisits]],
    max_bias: float,
    max_spread: float,
) -> str:
    """Return the error message if no settings are within the limits."""
    if unsafe:
        settings, visits = min(unsafe, key=lambda pair: pair[1].drift)
        return (
            f"All settings within the limits on Gaussian clients are unsafe. With {settings}, "
            f"{_explain(visits)}"
        )
    stable = [entry for entry in table if math.isfinite(entry["bias"])]
    if not stable:
        return "All settings that were tried diverge on these surrogates: see predict_bias."
    closest = min(stable, key=lambda e: max(e["bias"] / max_bias, e["spread"] / max_spread))
    outcomes = ("rounds", "cost", "burn_in", "growth", "drift", "feasible", "why")
    settings = {k: v for k, v in closest.items() if k not in outcomes}
    return (
        f"No settings keep means within {max_bias:g} sd and sds within {max_spread:.0%}; closest "
        f"are {settings}. Fewer local steps, control_variate=True or better surrogates help."
    )
