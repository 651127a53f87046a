"""Settings from exact laws, before any round is run."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedmcmc._types import FederatedKernel, Posterior
from fedmcmc.data import FederatedData
from fedmcmc.gaussian import Gaussian
from fedmcmc.tuning._predictions import Prediction, largest_curvature, predict_bias

FACTOR = 1.5
"""Between two steps that are tried."""
MOST_STEPS = 80
BISECTIONS = 8
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
        ``rounds`` per effective draw, ``cost`` per effective draw, ``feasible``.
    """

    kernel: FederatedKernel
    settings: dict[str, Any]
    prediction: Prediction
    table: list[dict[str, Any]]

    def __str__(self) -> str:
        """Say what was chosen, what it costs, and what it gets wrong."""
        chosen = ", ".join(
            f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in self.settings.items()
        )
        rounds = self.prediction.rounds_per_draw
        return (
            f"{chosen}: {rounds.max():.3g} rounds per effective draw ({len(self.table)} settings "
            f"tried).\n{self.prediction}"
        )


def tune(
    kernel_fn: Callable[..., FederatedKernel],
    posterior: Posterior,
    data: FederatedData,
    surrogates: Gaussian,
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
    objective: Literal["rounds", "bits", "seconds"] = "rounds",
    latency: float | None = None,
    bandwidth: float = math.inf,
    max_bias: float = 0.05,
    max_spread: float = 0.02,
) -> Tuned:
    """Choose a step size, and settings from a grid, by exact laws on Gaussian clients.

    Of all settings whose means are off by at most `max_bias` posterior sds and whose sds by at most
    `max_spread`, in every coordinate, those whose effective draw of the slowest direction costs
    least. No round is run: `predict_bias` gives the law of each.

    Parameters
    ----------
    kernel_fn
        ``(step_size=..., **point) -> kernel``, for every point of the grid.
    posterior, data, surrogates
        What the kernels are for, and a Gaussian per client for its likelihood: on whitened
        coordinates ``white.posterior`` and ``white.surrogates`` of `fedmcmc.whiten`.
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
        If nothing is accepted, with what comes closest; and what `predict_bias` raises of kernels
        whose law is not known. Minibatch noise is not part of the law: tune with whole batches.

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
    # Far below what any kernel takes: a thousandth of the stiffest direction's.
    first = 1e-3 / largest_curvature(posterior, surrogates)
    table: list[dict[str, Any]] = []
    best: tuple[float, dict[str, Any], Prediction] | None = None

    def cost_of(kernel: FederatedKernel, told: Prediction) -> float:
        seconds = len(kernel.phases) * (latency or 0.0) + told.bits / 8 / bandwidth
        return {"rounds": 1.0, "bits": told.bits, "seconds": seconds}[objective]

    def tried(step_size: float, point: dict[str, Any]) -> tuple[dict[str, Any], Prediction]:
        settings = {"step_size": step_size, **point}
        kernel = kernel_fn(**settings)
        if not isinstance(kernel, FederatedKernel):
            raise TypeError(
                f"kernel_fn must return a FederatedKernel, got {type(kernel).__name__}."
            )
        told = predict_bias(kernel, data, surrogates)
        entry = dict(settings, bias=math.inf, spread=math.inf, rounds=math.inf, cost=math.inf)
        if told.spectral_radius < 1:
            entry["bias"] = float(np.abs(told.bias).max())
            entry["spread"] = float(np.abs(told.spread - 1).max())
            entry["rounds"] = told.slowest
            entry["cost"] = told.slowest * cost_of(kernel, told)
        entry["feasible"] = entry["bias"] <= max_bias and entry["spread"] <= max_spread
        table.append(entry)
        nonlocal best
        if entry["feasible"] and (best is None or entry["cost"] < best[0]):
            best = entry["cost"], entry, told
        return entry, told

    for combination in itertools.product(*values):
        point = dict(zip(names, combination, strict=True))
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
        for _ in range(BISECTIONS if outside else 0):
            middle = math.sqrt(inside * outside)
            if tried(middle, point)[0]["feasible"]:
                inside = middle
            else:
                outside = middle
    if best is None:
        raise ValueError(_nothing(table, max_bias, max_spread))
    settings = {name: best[1][name] for name in ("step_size", *names)}
    return Tuned(kernel_fn(**settings), settings, best[2], table)


def _nothing(table: list[dict[str, Any]], max_bias: float, max_spread: float) -> str:
    stable = [entry for entry in table if math.isfinite(entry["bias"])]
    if not stable:
        return "All settings that were tried diverge on these surrogates: see predict_bias."
    closest = min(stable, key=lambda e: max(e["bias"] / max_bias, e["spread"] / max_spread))
    settings = {k: v for k, v in closest.items() if k not in ("rounds", "cost", "feasible")}
    return (
        f"No settings keep means within {max_bias:g} sd and sds within {max_spread:.0%}; closest "
        f"are {settings}. Fewer local steps, control_variate=True or better surrogates help."
    )
