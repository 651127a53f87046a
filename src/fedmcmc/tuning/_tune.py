"""Settings from exact laws, before any round is run."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jax import Array

from fedmcmc._types import FederatedKernel, Posterior
from fedmcmc.gaussian import Gaussian
from fedmcmc.tuning._gaussian_clients import largest_curvature
from fedmcmc.tuning._metropolis import mala_rounds_per_draw
from fedmcmc.tuning._predictions import Prediction, is_simulated, predict_bias
from fedmcmc.tuning._visits import FAR, MOST_GROWTH, Visits, not_looked_at, worst_visit

FACTOR = 1.5
"""Between two steps that are tried."""
MOST_STEPS = 80
BISECTIONS = 8
COARSE_FACTOR, COARSE_STEPS, COARSE_BISECTIONS = 2.0, 14, 3
"""The same of kernels that are simulated, from the longest step downwards: short ones are slow."""
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
        ``rounds`` per effective draw, ``cost`` per effective draw, ``growth`` (of a relay whose law
        is accepted: where the worst visit from 4 sds away ends, over these; else zero),
        ``feasible``.
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
        rounds, size = self.prediction.rounds_per_draw, len(self.prediction.mean)
        return (
            f"{chosen}: {rounds.max():.3g} rounds per effective draw ({len(self.table)} settings "
            f"tried).\n{self.prediction}\n{self.note}"
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
    objective: Literal["rounds", "bits", "seconds"] = "rounds",
    latency: float | None = None,
    bandwidth: float = math.inf,
    max_bias: float = 0.05,
    max_spread: float = 0.02,
) -> Tuned:
    """Choose a step size, and settings from a grid, by the law of kernels on Gaussian clients.

    Of all settings whose means are off by at most `max_bias` posterior sds and whose sds by at most
    `max_spread`, in every coordinate, those whose effective draw of the slowest direction costs
    least. No round is run: `predict_bias` gives the law of each. Kernels that it simulates take
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
    objective
        ``"rounds"``, ``"bits"`` (sent up and down, all clients), or ``"seconds"``: exchanges times
        `latency` and bytes over `bandwidth`.
    latency, bandwidth
        Seconds per exchange, and bytes per second of the server; for ``"seconds"``.
    max_bias, max_spread
        What is accepted.

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
    if objective not in OBJECTIVES:
        raise ValueError(f"objective must be one of {OBJECTIVES}, got {objective!r}.")
    if objective == "seconds" and latency is None:
        raise ValueError('objective="seconds" needs latency=, the seconds that an exchange takes.')
    names, values = zip(*grid.items(), strict=True) if grid else ((), ())
    curvature = largest_curvature(posterior, surrogates)
    table: list[dict[str, Any]] = []
    best: tuple[float, dict[str, Any], Prediction] | None = None
    unsafe: list[tuple[dict[str, Any], Visits]] = []

    def cost_of(kernel: FederatedKernel, told: Prediction) -> float:
        seconds = len(kernel.phases) * (latency or 0.0) + told.bits / 8 / bandwidth
        return {"rounds": 1.0, "bits": told.bits, "seconds": seconds}[objective]

    def checked(step_size: float, point: dict[str, Any]) -> FederatedKernel:
        kernel = kernel_fn(step_size=step_size, **point)
        if not isinstance(kernel, FederatedKernel):
            raise TypeError(
                f"kernel_fn must return a FederatedKernel, got {type(kernel).__name__}."
            )
        return kernel

    def tried(step_size: float, point: dict[str, Any]) -> tuple[dict[str, Any], Prediction]:
        settings, kernel = {"step_size": step_size, **point}, checked(step_size, point)
        told = predict_bias(kernel, data, surrogates, scores=scores)
        entry = dict(settings, bias=math.inf, spread=math.inf, rounds=math.inf, cost=math.inf)
        entry.update(growth=0.0, feasible=False)
        if told.spectral_radius < 1:
            entry["bias"] = float(np.abs(told.bias).max())
            entry["spread"] = float(np.abs(told.spread - 1).max())
            entry["rounds"] = told.slowest
            entry["cost"] = told.slowest * cost_of(kernel, told)
            known = bool(np.isfinite(told.mean_error).all())
            within = entry["bias"] <= max_bias and entry["spread"] <= max_spread
            entry["feasible"] = known and within
            visit = worst_visit(kernel, data, surrogates) if known and within else None
            if visit is not None:
                entry.update(growth=visit.growth, feasible=visit.safe)
                if not visit.safe:
                    unsafe.append((settings, visit))
        table.append(entry)
        nonlocal best
        if entry["feasible"] and (best is None or entry["cost"] < best[0]):
            best = entry["cost"], entry, told
        return entry, told

    def search_upwards(point: dict[str, Any], first: float) -> tuple[float, float]:
        """Return the longest step that is accepted and a longer one that is not, or zeros."""
        step, inside, outside = first, 0.0, 0.0
        for _ in range(MOST_STEPS):
            entry, told = tried(step, point)
            if entry["feasible"]:
                inside, outside = step, 0.0
            elif inside and not outside:
                outside = step
            if not told.spectral_radius < 1:
                break
            step *= FACTOR
        return inside, outside

    def search_downwards(point: dict[str, Any], first: float) -> tuple[float, float]:
        """Return likewise, beginning at a long step."""
        step, outside = first, 0.0
        for _ in range(COARSE_STEPS):
            entry, told = tried(step, point)
            if entry["feasible"]:
                return step, outside
            if told.spectral_radius < 1 and not np.isfinite(told.mean_error).all():
                break  # too slow to be simulated, and shorter steps are slower
            step, outside = step / COARSE_FACTOR, step
        return 0.0, 0.0

    for combination in itertools.product(*values):
        point = dict(zip(names, combination, strict=True))
        # Far below what any kernel takes: a thousandth of the stiffest direction's.
        first = 1e-3 / curvature
        if is_simulated(checked(first, point), data, surrogates, scores):
            # Far above: where Langevin and leapfrog steps diverge.
            longest = 2 / min(curvature, math.sqrt(curvature))
            inside, outside = search_downwards(point, longest)
            bisections = COARSE_BISECTIONS
        else:
            inside, outside = search_upwards(point, first)
            if not inside:  # the noise of minibatches and cohorts may allow no step as long
                inside, outside = search_downwards(point, first)
            bisections = BISECTIONS
        for _ in range(bisections if outside else 0):
            middle = math.sqrt(inside * outside)
            if tried(middle, point)[0]["feasible"]:
                inside = middle
            else:
                outside = middle
    if best is None:
        raise ValueError(_nothing(table, unsafe, max_bias, max_spread))
    settings = {name: best[1][name] for name in ("step_size", *names)}
    longer = [pair for pair in unsafe if all(pair[0][name] == settings[name] for name in names)]
    kernel, note = kernel_fn(**settings), _shortened(longer)
    if not_looked_at(kernel, data):
        note = (
            "Clients elsewhere were not asked how far their visits throw a chain where surrogates "
            "err, away from the mode: take fewer local steps than the law allows.\n"
        )
    return Tuned(kernel, settings, best[2], table, note)


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
        f"a visit to client {visit.client} takes a chain that is {FAR:g} posterior sds away to "
        f"{FAR * visit.growth:.3g} sds (at most {FAR * MOST_GROWTH:g} are accepted), as its "
        f"surrogate differs from its likelihood there. Fewer local steps help, or a kernel in "
        f"whose rounds all clients take part."
    )


def _nothing(
    table: list[dict[str, Any]],
    unsafe: list[tuple[dict[str, Any], Visits]],
    max_bias: float,
    max_spread: float,
) -> str:
    if unsafe:
        settings, visit = min(unsafe, key=lambda pair: pair[1].growth)
        return f"All settings that the law accepts are unsafe; of {settings}: {_thrown(visit)}"
    stable = [entry for entry in table if math.isfinite(entry["bias"])]
    if not stable:
        return "All settings that were tried diverge on these surrogates: see predict_bias."
    closest = min(stable, key=lambda e: max(e["bias"] / max_bias, e["spread"] / max_spread))
    left_out = ("rounds", "cost", "growth", "feasible")
    settings = {k: v for k, v in closest.items() if k not in left_out}
    return (
        f"No settings keep means within {max_bias:g} sd and sds within {max_spread:.0%}; closest "
        f"are {settings}. Fewer local steps, control_variate=True or better surrogates help."
    )
