"""A run on the host: one compiled program, called in segments so that draws leave the device."""

import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc import schedules
from fedmcmc._segments import (
    Collect,
    Kept,
    Plan,
    Segment,
    block_length,
    kept_shapes,
    needs_canonical,
    run_segment,
)
from fedmcmc._types import FederatedKernel, FederatedState
from fedmcmc.data import FederatedData
from fedmcmc.errors import NonFiniteError
from fedmcmc.samples import Samples
from fedmcmc.stopping import StoppingRule

__all__ = ["Run"]

BUFFER_BYTES = 2**26
"""Memory for the draws that wait on the device for the end of a segment."""
MAX_SEGMENT = 2**14
"""Rounds in a segment at most."""
MOST_LOST = 0.5
"""Share of the clients' results that may be lost without a warning."""
GROWN = 1e6
"""Positions that many times larger than where they began (or than one) make a run suspicious."""
SEGMENT_SECONDS = 0.5
"""Time that a segment should take, so that progress moves and an interrupt is heard."""
BLOCK_SECONDS = 5.0
"""Time that a segment may take before it is to be shorter than a block."""


class Run:
    """A run on the host: calls segments, moves what they keep to the host, watches for trouble."""

    def __init__(
        self,
        kernel: FederatedKernel,
        data: FederatedData,
        keys: Array,
        collect: Collect | None,
        state: FederatedState,
        until: StoppingRule | None = None,
    ) -> None:
        self.kernel, self.data, self.keys, self.collect = kernel, data, keys, collect
        self.state, self.until = state, until
        self.start = _largest(state)
        self.at = 0  # the first round that was not run
        self.buffer_bytes = BUFFER_BYTES
        self.stopped: dict[str, Any] = {}
        # Tabulated, so that another schedule is not traced again for the same shapes; no value is
        # used, and a run that goes on need not have one for round 0.
        tabulated = schedules.tabulate(kernel, 0, 1, 0)
        self.shapes = kept_shapes(tabulated, data, keys, state, collect)
        self.canonical = needs_canonical(tabulated, data, keys, state, collect)
        self.block = block_length(tabulated, data, keys, state)
        self.longest = max(MAX_SEGMENT // self.block, 1) * self.block
        self.kept: list[Kept] = []
        zero = np.zeros(len(keys), np.int64)
        self.totals = {"bits_up": zero, "bits_down": zero, "rounds": zero}

    def go(self, first: int, keep_from: int, end: int, thinning: int, bar: Any) -> Samples:
        """Run rounds ``[first, end)`` and return what was kept."""
        try:
            self.advance(first, keep_from, end, thinning, bar)
        except KeyboardInterrupt:
            warnings.warn(
                f"Interrupted in or after round {self.at}; returning what was kept before. Go on "
                f"with sample(..., state=samples.state).",
                RuntimeWarning,
                stacklevel=3,
            )
        if self.until is not None and not self.stopped.get("reached"):
            self._warn_unreached(self.until.name, self.at - first)
        samples = self.samples()
        _warn_lost(samples.info)
        _warn_grown(self.start, _largest(self.state))
        return samples

    def advance(self, first: int, keep_from: int, end: int, thinning: int, bar: Any) -> None:
        """Run rounds ``[first, end)``; what was kept so far is safe from an interrupt."""
        num_draws = (end - keep_from) // thinning
        bytes_per_draw = sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.shapes)
        )
        budget = max(self.buffer_bytes // max(bytes_per_draw * len(self.keys), 1), 1)
        # A power of two, so that another number of draws runs the same program.
        capacity = int(min(2 ** max(num_draws - 1, 0).bit_length(), budget, self.longest))
        length, at = self.block, first
        asked = 0 if self.until is None else self.until.next_check(0)
        self.at = at
        while at < end and not self.stopped.get("reached"):
            num_kept = max(at - keep_from, 0) // thinning
            full = keep_from + (num_kept + capacity) * thinning
            stop = min(self._end_of(at, length), end, full)
            if self.until is not None:
                stop = min(stop, keep_from + asked * thinning)
            begun = time.perf_counter()
            segment = self._segment(at, stop, keep_from, thinning, capacity)
            took = time.perf_counter() - begun
            self._take(segment, at, stop, max(stop - keep_from, 0) // thinning - num_kept)
            bar.update(stop - at)
            length = self._next_length(length, stop - at, took)
            at = self.at = stop
            if self.until is not None and at in (keep_from + asked * thinning, end):
                self._ask(max(at - keep_from, 0) // thinning, at - first)
                asked = self.until.next_check(asked)

    def _ask(self, num_draws: int, num_rounds: int) -> None:
        assert self.until is not None
        if num_draws < self.until.next_check(0):
            return  # fewer than the rule can judge
        verdict = self.until.check(self.samples().draws)
        self.stopped = {
            "rule": self.until.name,
            "reached": verdict.stop,
            "rounds": num_rounds,
            **verdict.figures,
        }

    def _warn_unreached(self, name: str, num_rounds: int) -> None:
        self.stopped = {"rule": name, "reached": False, "rounds": num_rounds} | self.stopped
        figures = {k: v for k, v in self.stopped.items() if isinstance(v, float)}
        found = ", ".join(f"{k} {v:.4g}" for k, v in figures.items()) or "too few draws to tell"
        warnings.warn(
            f"Stopped after {num_rounds} rounds without {name} ({found}). Go on with "
            f"sample(..., state=samples.state).",
            RuntimeWarning,
            stacklevel=4,
        )

    def _segment(self, at: int, stop: int, keep_from: int, thinning: int, capacity: int) -> Segment:
        num_kept = max(at - keep_from, 0) // thinning
        plan = Plan(*(jnp.asarray(x, jnp.int32) for x in (at, stop, keep_from, thinning, num_kept)))
        segment = self._compute(at, stop, plan, capacity)
        first_bad = np.asarray(segment.first_bad)
        if (first_bad >= 0).any():
            self._stop(first_bad, at, keep_from, thinning, capacity)
        return segment

    def _compute(self, at: int, stop: int, plan: Plan, capacity: int) -> Segment:
        return self._call(self.data, self.state, at, stop, plan, capacity)

    def _call(
        self,
        data: FederatedData,
        state: FederatedState,
        at: int,
        stop: int,
        plan: Plan,
        capacity: int,
    ) -> Segment:
        return run_segment(
            schedules.tabulate(self.kernel, at, self.longest, stop - at),
            data,
            self.keys,
            state,
            plan,
            block=self.block,
            capacity=capacity,
            collect=self.collect,
            canonical=self.canonical,
        )

    def _take(self, segment: Segment, at: int, stop: int, num_kept: int) -> None:
        # Sliced on the host: on the device each number of draws would compile a program of its own.
        # Copied, so that slots without a draw are not kept alive.
        kept = jax.tree.map(lambda leaf: np.asarray(leaf)[:, :num_kept].copy(), segment.kept)
        high, low = np.moveaxis(np.asarray(segment.bits, np.int64), 1, 0)
        up, down = (high * 2**32 + low).T
        new = {"bits_up": up, "bits_down": down, "rounds": stop - at}
        totals = {name: total + new[name] for name, total in self.totals.items()}
        self.kept, self.state, self.totals = [*self.kept, kept], segment.state, totals

    def _stop(
        self, first_bad: np.ndarray, at: int, keep_from: int, thinning: int, capacity: int
    ) -> None:
        chains = np.flatnonzero(first_bad >= 0).tolist()
        round_ = int(first_bad[first_bad >= 0].min())
        if round_ > at:
            # Once more up to the last good round: draws, state and totals then belong together.
            segment = self._segment(at, round_, keep_from, thinning, capacity)
            num_kept = [max(r - keep_from, 0) // thinning for r in (at, round_)]
            self._take(segment, at, round_, num_kept[1] - num_kept[0])
        samples = self.samples()
        hint = " At the start of a run also try a position nearer to the mode." * (round_ == 0)
        raise NonFiniteError(
            f"Chain {chains[0]} turned non-finite in round {round_} ({len(chains)} of "
            f"{len(first_bad)} chains did by the end of the segment). The step size is too large "
            f"for this posterior, or a log density or gradient is not finite there.{hint} The "
            f"{samples.num_draws} draws a chain from the rounds before are in `error.samples`.",
            samples,
            round_,
            chains,
        )

    def _next_length(self, length: int, ran: int, took: float) -> int:
        # The first call of a program compiles, which only makes the next segment short.
        rate = ran / max(took, 1e-6)
        if rate * SEGMENT_SECONDS < self.block:
            # A part of a block prepares all of it: short parts would do little else.
            return int(max(1, min(4 * length, self.block, rate * BLOCK_SECONDS)))
        return int(min(4 * length, rate * SEGMENT_SECONDS))

    def _end_of(self, at: int, length: int) -> int:
        """Return where a segment of about `length` rounds ends: with a block, if one does in it."""
        stop = at + min(length, self.longest)
        whole = stop // self.block * self.block
        return whole if whole > at and self.longest >= self.block else stop

    def samples(self) -> Samples:
        """Return what was kept so far."""
        if self.kept:
            kept = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *self.kept)
        else:
            lead = (len(self.keys), 0)
            kept = jax.tree.map(lambda s: np.zeros(lead + s.shape, s.dtype), self.shapes)
        return Samples(
            kept.draw, kept.info, self.state, self.totals, self.kernel.constrain_fn, self.stopped
        )


def _warn_lost(info: dict[str, np.ndarray]) -> None:
    """Warn where most clients sent nothing, which draws and positions need not show."""
    lost, active = info.get("num_lost", np.zeros(0)).sum(), info["num_active"].sum()
    if lost > MOST_LOST * active:
        warnings.warn(
            f"{lost / active:.0%} of the clients' results in the kept rounds were of no use (a "
            "Gaussian that is not proper, or numbers that are not finite), so that these clients "
            "changed nothing: see samples.info['num_lost']. What may help: smaller local steps "
            "(for clients with few rows inference.sgd_mean has row_curvature=), more samples or "
            "shrinkage= in inference.mcmc, a positive initial_precision, a damping nearer to zero.",
            RuntimeWarning,
            stacklevel=4,
        )


def _largest(state: FederatedState) -> float:
    """Return the largest absolute coordinate of all chains' positions."""
    leaves = jax.tree.leaves(state.broadcast.position)
    return max((float(jnp.max(jnp.abs(leaf))) for leaf in leaves if leaf.size), default=0.0)


def _warn_grown(before: float, after: float) -> None:
    """Warn where a run went far away without a number that is not finite."""
    if after > GROWN * max(before, 1.0):
        warnings.warn(
            f"The position grew to {after:.3g} from {before:.3g} at the start of this run. Unless "
            "parameters of this model are that large, steps are too large for it and the draws are "
            "of no use: use a smaller step size or learning rate (for inference.sgd_mean with few "
            "rows a client also row_curvature=).",
            RuntimeWarning,
            stacklevel=4,
        )
