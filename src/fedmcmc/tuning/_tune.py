"""Settings from exact laws, before any round is run."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from jax import Array

from fedmcmc._checks import expect
from fedmcmc._types import ArrayTree, FederatedKernel, Posterior
from fedmcmc.data import constructor_of
from fedmcmc.gaussian import Gaussian
from fedmcmc.tuning._gaussian_clients import largest_curvature
from fedmcmc.tuning._metropolis import mala_rounds_per_draw
from fedmcmc.tuning._predictions import Prediction
from fedmcmc.tuning._search import Search, Wanted
from fedmcmc.tuning._visits import Visits, not_looked_at

TIE = 1.05
"""Settings whose costs differ by less than that factor tie: the smaller step is taken."""
ENOUGH = 400
"""Effective draws that a run is to have."""
OBJECTIVES = ("rounds", "bits", "seconds")


@dataclass(frozen=True)
class Tuned:
    """The best settings, and all that were tried.

    Attributes
    ----------
    kernel
        With the best settings.
    settings
        Keyword arguments of `kernel_fn`, the step size among them.
    prediction
        Its law on Gaussian approximations.
    table
        One entry per step that was tried: settings, ``bias``, ``spread`` (largest errors),
        ``rounds`` per effective draw, ``cost`` per effective draw, ``burn_in`` (rounds until a
        distance has shrunk to a hundredth), ``growth`` (of a relay whose law is accepted: where the
        worst visit from 4 sds away ends, over these; else zero), ``drift`` (its root mean square
        over who is visited, also from farther away), ``feasible``, ``why`` not.
    note
        A line on what kept steps shorter than the law allows; often nothing.
    """

    kernel: FederatedKernel
    settings: dict[str, Any]
    prediction: Prediction
    table: list[dict[str, Any]]
    note: str = ""

    def __str__(self) -> str:
        """Say what was chosen, what it costs, and what it gets wrong."""
        chosen = ", ".join(
            f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in self.settings.items()
        )
        told, size = self.prediction, len(self.prediction.mean)
        rounds, of_what = told.rounds_per_draw.max(), ""
        if not math.isnan(told.of_functional):
            rounds, of_what = told.of_functional, " of the functional"
        each = math.ceil(ENOUGH * rounds / 4)
        return (
            f"{chosen}: {rounds:.3g} rounds per effective draw{of_what} ({len(self.table)} "
            f"settings tried); 4 chains have {ENOUGH} after {each:,} rounds each, with which a "
            f"mean is known to {ENOUGH**-0.5:.2g} sd.\n{told}\n{self.note}"
            f"Exact instead: fedmcmc.mala in whitened coordinates takes about "
            f"{mala_rounds_per_draw(size):.2g} rounds per effective draw of a Gaussian in "
            f"{size} dimensions, all clients in each, and has no bias; fedmcmc.correct weights "
            f"draws of a Gaussian approximation in one round more than that took, and says whether "
            f"it is good enough; fedmcmc.fit chooses."
        )


def tune(
    kernel_fn: Callable[..., FederatedKernel],
    posterior: Posterior,
    data: Any,
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
    """Choose a step size, and settings from a grid, by the law of kernels on Gaussian clients.

    Of all settings whose means are off by at most `max_bias` posterior sds and whose sds by at most
    `max_spread`, in every coordinate, those whose effective draw of the slowest direction (or of
    `functional`) costs least; within five percent of that, those of the grid with the smallest
    step. No round is run: `predict_bias` gives the law of each. Kernels that it simulates take
    seconds per setting, and of these fewer step sizes are tried.

    Of relays (`fedmcmc.fsgld`, `fedmcmc.dsgld`) that law is not enough, as they multiply what a
    surrogate gets wrong away from the mode by the number of clients. So no client's visit that
    begins 4 posterior sds from the mean may end more than 6 away from it, which is looked at with
    the model and the clients' rows.

    Parameters
    ----------
    kernel_fn
        ``(step_size=..., **point) -> kernel``, for every point of the grid.
    posterior, data, surrogates
        What the kernels are for, a `FederatedData` or a consortium of clients elsewhere, and a
        Gaussian per client for its likelihood: on whitened coordinates ``white.posterior`` and
        ``white.surrogates`` of `fedmcmc.whiten`.
    scores
        ``[num_clients, d, d]``, the noise of minibatches, as of `predict_bias`: on whitened
        coordinates ``fedmcmc.surrogates.score_covariance(white.posterior, data, white.position)``.
        Without them minibatches count as whole batches.
    grid
        What else to try: names of `kernel_fn`'s arguments, and values of each.
    step_size
        The smallest and the largest to try. By default from a thousandth of what the stiffest
        direction allows to where the kernel diverges.
    objective
        ``"rounds"``, ``"bits"`` (sent up and down, all clients), or ``"seconds"``: exchanges times
        `latency`, bytes over `bandwidth`, and rows times `seconds_per_gradient`.
    latency, bandwidth, seconds_per_gradient
        Seconds per exchange, bytes per second of the server, and seconds that a client takes for
        the gradient of one row's log likelihood; for ``"seconds"``. In a round all wait for the
        client with most rows. How many rows it passes over is counted in rounds of the kernel with
        a model that counts.
    max_bias, max_spread
        What is accepted.
    functional
        What draws are wanted of: a number as a function of the position, unconstrained and in the
        user's coordinates (not the whitened ones). It is taken as linear, by its gradient at the
        posterior's mode. By default the slowest direction counts.

    Returns
    -------
    Tuned

    Raises
    ------
    ValueError
        If nothing is accepted, with what comes closest; and what `predict_bias` raises.

    Notes
    -----
    The law is that of the surrogates. Where the posterior is far from a Gaussian, believe what the
    run says of its draws (``samples.diagnosis``).

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
    >>> found = tune(kernel_fn, white.posterior, data, white.surrogates)
    >>> round(found.settings["step_size"], 3)  # 2 * (1 - 1 / 1.02**2): sds two percent too wide
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
            'objective="seconds" needs latency=, bandwidth= or seconds_per_gradient=: what takes '
            "time."
        )
    if step_size is not None and not 0 < step_size[0] <= step_size[-1] < math.inf:
        raise ValueError(
            f"step_size must be the smallest and the largest to try, got {step_size!r}."
        )
    names, values = zip(*grid.items(), strict=True) if grid else ((), ())
    wanted = Wanted(
        objective, latency, bandwidth, seconds_per_gradient, max_bias, max_spread, functional
    )
    curvature = largest_curvature(posterior, surrogates)
    searches = []
    for combination in itertools.product(*values):
        point = dict(zip(names, combination, strict=True))
        search = Search(partial(_built, kernel_fn, point), point, data, surrogates, scores, wanted)
        search.run(curvature, step_size)
        searches.append(search)
    table = [entry for search in searches for entry, _ in search.entries.values()]
    unsafe = [pair for search in searches for pair in search.unsafe]
    found = [search.best for search in searches if search.best is not None]
    if not found:
        raise ValueError(_nothing(table, unsafe, max_bias, max_spread))
    least = min(entry["cost"] for entry, _ in found)
    ties = [pair for pair in found if pair[0]["cost"] <= TIE * least]
    entry, told = min(ties, key=lambda pair: pair[0]["step_size"])
    settings = {name: entry[name] for name in ("step_size", *names)}
    longer = [pair for pair in unsafe if all(pair[0][name] == settings[name] for name in names)]
    kernel, note = kernel_fn(**settings), _shortened(longer)
    if not_looked_at(kernel, data):
        note = (
            "Clients at real sites were not asked how far their visits throw a chain where "
            "surrogates err, away from the mode: take fewer local steps than the law allows.\n"
        )
    return Tuned(kernel, settings, told, table, note)


def _built(
    kernel_fn: Callable[..., FederatedKernel], point: dict[str, Any], step_size: float
) -> FederatedKernel:
    kernel = kernel_fn(step_size=step_size, **point)
    if not isinstance(kernel, FederatedKernel):
        raise TypeError(f"kernel_fn must return a FederatedKernel, got {type(kernel).__name__}.")
    return kernel


def _shortened(unsafe: list[tuple[dict[str, Any], Visits]]) -> str:
    """Return what is said of steps that are accepted by law and unsafe, a line or nothing."""
    if not unsafe:
        return ""
    longest, visit = max(unsafe, key=lambda pair: pair[0]["step_size"])
    return (
        f"Longer steps that the law accepts are unsafe, as of {longest['step_size']:.3g}: "
        f"{_thrown(visit)}\n"
    )


def _thrown(visit: Visits) -> str:
    return (
        f"{visit}, as surrogates differ from likelihoods there. Fewer local steps help, or a "
        f"kernel in whose rounds all clients take part."
    )


def _nothing(
    table: list[dict[str, Any]],
    unsafe: list[tuple[dict[str, Any], Visits]],
    max_bias: float,
    max_spread: float,
) -> str:
    if unsafe:
        settings, visit = min(unsafe, key=lambda pair: pair[1].drift)
        return f"All settings that the law accepts are unsafe; of {settings}: {_thrown(visit)}"
    stable = [entry for entry in table if math.isfinite(entry["bias"])]
    if not stable:
        return "All settings that were tried diverge on these surrogates: see predict_bias."
    closest = min(stable, key=lambda e: max(e["bias"] / max_bias, e["spread"] / max_spread))
    left_out = ("rounds", "cost", "burn_in", "growth", "drift", "feasible", "why")
    settings = {k: v for k, v in closest.items() if k not in left_out}
    return (
        f"No settings keep means within {max_bias:g} sd and sds within {max_spread:.0%}; closest "
        f"are {settings}. Fewer local steps, control_variate=True or better surrogates help."
    )
