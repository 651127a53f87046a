"""Search for the step size with the cheapest effective draw within limits on the bias."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import Array

from fedmcmc.gaussian import Gaussian
from fedmcmc.tuning._predictions import Prediction, is_simulated, predict_silently
from fedmcmc.tuning._row_counts import count_rows_per_round
from fedmcmc.tuning._visits import WorstVisits, find_worst_visits
from fedmcmc.types import ArrayTree, FederatedKernel

FACTOR, MAX_STEPS, NUM_BISECTIONS = 1.5, 80, 8
"""Ratio of consecutive step sizes, their number, and bisections at the edge of the limits."""
COARSE_FACTOR, MAX_COARSE_STEPS, NUM_COARSE_BISECTIONS = 2.0, 14, 3
"""The same for simulated kernels, from long to short steps, because short steps take longer."""
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
BURN_IN_LOG_FACTOR = math.log(100)
"""After burn-in, distances from the stationary mean have shrunk by a factor of 100."""

Entry = dict[str, Any]


@dataclass(frozen=True)
class TuningObjective:
    """Cost to minimize and limits on the error; see `tune`."""

    unit: str
    latency: float
    bandwidth: float
    seconds_per_gradient: float
    max_bias: float
    max_spread: float
    functional: Callable[[ArrayTree], Array] | None


@dataclass
class StepSizeSearch:
    """Search over the step sizes of a kernel whose other settings are fixed."""

    kernel_fn: Callable[[float], FederatedKernel]
    settings: dict[str, Any]  # other settings, for the table
    data: Any
    surrogates: Gaussian
    scores: Array | None
    objective: TuningObjective
    entries: dict[float, tuple[Entry, Prediction]] = field(default_factory=dict)  # by step size
    unsafe: list[tuple[Entry, WorstVisits]] = field(default_factory=list)  # with small errors
    seconds_computing: float = 0.0  # per round, at the slowest client

    def run(self, curvature: float, step_size: tuple[float, float] | None) -> None:
        """Try step sizes in the range `step_size`; by default, in a range from the curvature."""
        # A thousandth of the step size for the stiffest direction is short for every kernel.
        low, high = step_size or (1e-3 / curvature, math.inf)
        kernel = self.kernel_fn(low)
        if self.objective.unit == "seconds" and self.objective.seconds_per_gradient:
            rows = count_rows_per_round(kernel, self.data.federation, self.surrogates)
            self.seconds_computing = self.objective.seconds_per_gradient * rows
        if is_simulated(kernel, self.data, self.surrogates, self.scores):
            # Langevin and leapfrog steps of this length diverge.
            longest = 2 / min(curvature, math.sqrt(curvature))
            self._decrease(min(longest, high), low if step_size else 0.0)
            self._refine(NUM_COARSE_BISECTIONS)
            return
        self._increase(low, high)
        if self.best is None and step_size is None:
            self._decrease(low, 0.0)  # the noise of minibatches may require shorter steps
        self._refine(NUM_BISECTIONS)

    @property
    def best(self) -> tuple[Entry, Prediction] | None:
        """Cheapest step size within the limits."""
        feasible = [pair for pair in self.entries.values() if pair[0]["feasible"]]
        return min(feasible, key=lambda pair: pair[0]["cost"]) if feasible else None

    def _try(self, step: float) -> tuple[Entry, Prediction]:
        kernel, objective = self.kernel_fn(step), self.objective
        prediction = predict_silently(
            kernel, self.data, self.surrogates, self.scores, 0, objective.functional
        )
        entry: Entry = {"step_size": step, **self.settings}
        entry.update(dict.fromkeys(("bias", "spread", "rounds", "cost", "burn_in"), math.inf))
        entry.update(growth=0.0, drift=0.0, feasible=False, why="it diverges")
        if prediction.spectral_radius < 1:
            rounds = prediction.slowest
            if objective.functional is not None:
                rounds = prediction.functional_rounds
            bias = float(np.abs(prediction.bias).max())
            spread = float(np.abs(prediction.spread - 1).max())
            why, visits = self._find_objection(kernel, prediction, bias, spread)
            if visits is not None:
                entry["growth"], entry["drift"] = visits.growth, visits.drift
                if why:
                    self.unsafe.append((entry, visits))
            entry.update(bias=bias, spread=spread, rounds=rounds, feasible=not why, why=why)
            entry["cost"] = rounds * self._cost_per_round(kernel, prediction)
            entry["burn_in"] = BURN_IN_LOG_FACTOR / -math.log(
                max(prediction.spectral_radius, 1e-300)
            )
        self.entries[step] = entry, prediction
        return entry, prediction

    def _find_objection(
        self, kernel: FederatedKernel, prediction: Prediction, bias: float, spread: float
    ) -> tuple[str, WorstVisits | None]:
        """Return the reason against a kernel, if any, and its worst visits, if computed."""
        if not np.isfinite(prediction.mean_error).all():
            return "too slow to be simulated", None
        if not bias <= self.objective.max_bias:
            return "bias", None
        if not spread <= self.objective.max_spread:
            return "spread", None
        visits = find_worst_visits(kernel, self.data, self.surrogates)
        return "" if visits is None or visits.are_safe else "a visit goes far", visits

    def _cost_per_round(self, kernel: FederatedKernel, prediction: Prediction) -> float:
        objective = self.objective
        if objective.unit == "rounds":
            return 1.0
        if objective.unit == "bits":
            return prediction.bits
        latency = len(kernel.phases) * objective.latency
        sending = latency + prediction.bits / 8 / objective.bandwidth
        return sending + self.seconds_computing

    def _increase(self, low: float, high: float) -> None:
        """Try longer and longer steps until the kernel diverges."""
        step = low
        for _ in range(MAX_STEPS):
            _, prediction = self._try(min(step, high))
            if not prediction.spectral_radius < 1 or step >= high:
                break
            step *= FACTOR

    def _decrease(self, high: float, low: float) -> None:
        """Try shorter and shorter steps until one is within the limits."""
        step = high
        for _ in range(MAX_COARSE_STEPS):
            entry, prediction = self._try(max(step, low))
            if entry["feasible"] or step <= low:
                break
            if prediction.spectral_radius < 1 and not np.isfinite(prediction.mean_error).all():
                break  # too slow to be simulated, and shorter steps are slower
            step /= COARSE_FACTOR

    def _refine(self, times: int) -> None:
        """Search next to the best step: for the edge of the limits, then for a minimum."""
        if self.best is None:
            return
        best = self.best[0]["step_size"]
        for outside in self._neighbors(best, feasible=False):
            inside = best
            for _ in range(times):
                middle = math.sqrt(inside * outside)
                if self._try(middle)[0]["feasible"]:
                    inside = middle
                else:
                    outside = middle
        around = self._neighbors(self.best[0]["step_size"], feasible=True)
        if len(around) == 2:
            self._minimize(around[0], around[1], times)

    def _neighbors(self, step: float, *, feasible: bool) -> list[float]:
        """Return the steps next to a step that are within the limits, or that are not."""
        steps = sorted(self.entries)
        index = steps.index(step)
        around = [steps[i] for i in (index - 1, index + 1) if 0 <= i < len(steps)]
        return [each for each in around if self.entries[each][0]["feasible"] == feasible]

    def _minimize(self, low: float, high: float, times: int) -> None:
        """Search for the cheapest step between two by golden section, on their logarithms."""

        def cost_of(step: float) -> float:
            entry, _ = self._try(step)
            return float(entry["cost"]) if entry["feasible"] else math.inf

        left, right = high * (low / high) ** GOLDEN_RATIO, low * (high / low) ** GOLDEN_RATIO
        left_cost, right_cost = cost_of(left), cost_of(right)
        for _ in range(times):
            if left_cost <= right_cost:
                high, right, right_cost = right, left, left_cost
                left = high * (low / high) ** GOLDEN_RATIO
                left_cost = cost_of(left)
            else:
                low, left, left_cost = left, right, right_cost
                right = low * (high / low) ** GOLDEN_RATIO
                right_cost = cost_of(right)
