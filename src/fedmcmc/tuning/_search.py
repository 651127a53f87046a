"""The search for a step size: what each costs, and which are accepted."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, FederatedKernel
from fedmcmc.gaussian import Gaussian
from fedmcmc.tuning._predictions import Prediction, is_simulated, predict_bias
from fedmcmc.tuning._visits import Visits, worst_visit
from fedmcmc.tuning._work import rows_per_round

FACTOR = 1.5
"""Between two steps that are tried."""
MAX_STEPS = 80
BISECTIONS = 8
COARSE_FACTOR, COARSE_STEPS, COARSE_BISECTIONS = 2.0, 14, 3
"""The same of kernels that are simulated, from the longest step downwards: short ones are slow."""
GOLDEN = (math.sqrt(5) - 1) / 2
BURNED_IN = math.log(100)
"""Distances from the stationary mean have shrunk to a hundredth after burn-in."""

Entry = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """What is to be small, and what is accepted; see `tune`."""

    objective: str
    latency: float
    bandwidth: float
    seconds_per_gradient: float
    max_bias: float
    max_spread: float
    functional: Callable[[ArrayTree], Array] | None


@dataclass
class Search:
    """The steps of a kernel whose other settings are fixed.

    Attributes
    ----------
    kernel_fn
        ``step_size -> kernel``.
    settings
        The other settings, for the entries.
    data, surrogates, scores
        As `tune` takes them.
    wanted
        What is to be small, and what is accepted.
    entries
        Step to its entry in the table and its prediction, in the order in which they were tried.
    unsafe
        Entries that the law accepts and a client's visit does not, with that visit.
    """

    kernel_fn: Callable[[float], FederatedKernel]
    settings: dict[str, Any]
    data: Any
    surrogates: Gaussian
    scores: Array | None
    wanted: Wanted
    entries: dict[float, tuple[Entry, Prediction]] = field(default_factory=dict)
    unsafe: list[tuple[Entry, Visits]] = field(default_factory=list)
    computing: float = 0.0

    def run(self, curvature: float, step_size: tuple[float, float] | None) -> None:
        """Try steps from the first to the last of `step_size`, or all that there are."""
        # Far below what any kernel takes: a thousandth of the stiffest direction's.
        first, last = step_size or (1e-3 / curvature, math.inf)
        kernel = self.kernel_fn(first)
        if self.wanted.objective == "seconds" and self.wanted.seconds_per_gradient:
            rows = rows_per_round(kernel, self.data.federation, self.surrogates)
            self.computing = self.wanted.seconds_per_gradient * rows
        if is_simulated(kernel, self.data, self.surrogates, self.scores):
            # Far above: where Langevin and leapfrog steps diverge.
            longest = 2 / min(curvature, math.sqrt(curvature))
            self._downwards(min(longest, last), first if step_size else 0.0)
            self._refine(COARSE_BISECTIONS)
            return
        self._upwards(first, last)
        if self.best is None and step_size is None:
            self._downwards(first, 0.0)  # the noise of minibatches may allow no step as long
        self._refine(BISECTIONS)

    @property
    def best(self) -> tuple[Entry, Prediction] | None:
        """The cheapest step that is accepted."""
        accepted = [pair for pair in self.entries.values() if pair[0]["feasible"]]
        return min(accepted, key=lambda pair: pair[0]["cost"]) if accepted else None

    def _try(self, step: float) -> tuple[Entry, Prediction]:
        kernel, wanted = self.kernel_fn(step), self.wanted
        told = predict_bias(
            kernel, self.data, self.surrogates, scores=self.scores, functional=wanted.functional
        )
        entry: Entry = {"step_size": step, **self.settings}
        entry.update(dict.fromkeys(("bias", "spread", "rounds", "cost", "burn_in"), math.inf))
        entry.update(growth=0.0, drift=0.0, feasible=False, why="it diverges")
        if told.spectral_radius < 1:
            rounds = told.slowest if wanted.functional is None else told.of_functional
            bias = float(np.abs(told.bias).max())
            spread = float(np.abs(told.spread - 1).max())
            why, visit = self._objection(kernel, told, bias, spread)
            if visit is not None:
                entry["growth"], entry["drift"] = visit.growth, visit.drift
                if why:
                    self.unsafe.append((entry, visit))
            entry.update(bias=bias, spread=spread, rounds=rounds, feasible=not why, why=why)
            entry["cost"] = rounds * self._cost_of_round(kernel, told)
            entry["burn_in"] = BURNED_IN / -math.log(max(told.spectral_radius, 1e-300))
        self.entries[step] = entry, told
        return entry, told

    def _objection(
        self, kernel: FederatedKernel, told: Prediction, bias: float, spread: float
    ) -> tuple[str, Visits | None]:
        """Return what speaks against a kernel, and its worst visit if that is looked at."""
        if not np.isfinite(told.mean_error).all():
            return "too slow to be simulated", None
        if not bias <= self.wanted.max_bias:
            return "bias", None
        if not spread <= self.wanted.max_spread:
            return "spread", None
        visit = worst_visit(kernel, self.data, self.surrogates)
        return "" if visit is None or visit.safe else "a visit goes far", visit

    def _cost_of_round(self, kernel: FederatedKernel, told: Prediction) -> float:
        wanted = self.wanted
        if wanted.objective == "rounds":
            return 1.0
        if wanted.objective == "bits":
            return told.bits
        sending = len(kernel.phases) * wanted.latency + told.bits / 8 / wanted.bandwidth
        return sending + self.computing

    def _upwards(self, first: float, last: float) -> None:
        """Try longer and longer steps, to where the kernel diverges."""
        step = first
        for _ in range(MAX_STEPS):
            _, told = self._try(min(step, last))
            if not told.spectral_radius < 1 or step >= last:
                break
            step *= FACTOR

    def _downwards(self, first: float, last: float) -> None:
        """Try shorter and shorter steps, to one that is accepted."""
        step = first
        for _ in range(COARSE_STEPS):
            entry, told = self._try(max(step, last))
            if entry["feasible"] or step <= last:
                break
            if told.spectral_radius < 1 and not np.isfinite(told.mean_error).all():
                break  # too slow to be simulated, and shorter steps are slower
            step /= COARSE_FACTOR

    def _refine(self, times: int) -> None:
        """Look around the best step: at the edge of what is accepted, then for a minimum."""
        if self.best is None:
            return
        best = self.best[0]["step_size"]
        for outside in self._neighbors(best, accepted=False):
            inside = best
            for _ in range(times):
                middle = math.sqrt(inside * outside)
                if self._try(middle)[0]["feasible"]:
                    inside = middle
                else:
                    outside = middle
        around = self._neighbors(self.best[0]["step_size"], accepted=True)
        if len(around) == 2:
            self._narrow(around[0], around[1], times)

    def _neighbors(self, step: float, *, accepted: bool) -> list[float]:
        """Return those of the steps next to one that are accepted, or that are not."""
        steps = sorted(self.entries)
        place = steps.index(step)
        around = [steps[i] for i in (place - 1, place + 1) if 0 <= i < len(steps)]
        return [each for each in around if self.entries[each][0]["feasible"] == accepted]

    def _narrow(self, low: float, high: float, times: int) -> None:
        """Look for the cheapest step between two by golden section, on their logarithms."""

        def cost_at(step: float) -> float:
            entry, _ = self._try(step)
            return float(entry["cost"]) if entry["feasible"] else math.inf

        left, right = high * (low / high) ** GOLDEN, low * (high / low) ** GOLDEN
        at_left, at_right = cost_at(left), cost_at(right)
        for _ in range(times):
            if at_left <= at_right:
                high, right, at_right = right, left, at_left
                left = high * (low / high) ** GOLDEN
                at_left = cost_at(left)
            else:
                low, left, at_left = left, right, at_right
                right = low * (high / low) ** GOLDEN
                at_right = cost_at(right)
