"""Runs of many kernels that differ by numbers alone, their rows and their keys, in one program."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import FederatedKernel, FederatedState
from fedmcmc.data import FederatedData
from fedmcmc.pytrees import num_bytes, schedules
from fedmcmc.rounds import (
    PREPARED_BYTES,
    TOGETHER,
    Arrangement,
    Collect,
    Plan,
    Segment,
    block_length,
)
from fedmcmc.runs import BUFFER_BYTES, Keeping, Run, pace_of
from fedmcmc.sweeps._points import Points, points_of, prepares_alike, run_points

__all__ = ["PointsRun", "SteadyRun", "runs_faster_together"]

LARGE_BYTES = 2**17
"""Where all chains of a run have larger positions, a CPU takes one run after another."""


class SteadyRun(Run):
    """A run that goes on where chains turn non-finite, and remembers since when they are.

    It ends where all are.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.first_bad = np.full(len(self.keys), -1)

    def _stop(self, first_bad: np.ndarray, *_: Any) -> None:
        self.first_bad = np.where(self.first_bad < 0, first_bad, self.first_bad)
        self.stopped = {"reached": bool((self.first_bad >= 0).all())}


class PointsRun(SteadyRun):
    """A run of several kernels that differ by numbers alone; its chains are those of all.

    `on` are each kernel's rows and the keys of its chains, of equal shapes; what is the same for
    all is held once.
    """

    def __init__(
        self,
        kernels: Sequence[FederatedKernel],
        points: Points,
        on: Sequence[tuple[FederatedData, Array]],
        collect: Collect | None,
        state: FederatedState,
        max_bytes: int,
        arrangement: Arrangement = TOGETHER,
    ) -> None:
        data, keys = on[0]
        everyones = jnp.concatenate([keys_ for _, keys_ in on])
        given = (kernels[0], data, everyones, Keeping(collect), state)
        super().__init__(*given, arrangement=arrangement)
        self.kernels, self.points = kernels, points
        self.rest = points_of(on)
        self.rest_leaves = self.rest.stack(on)
        self.scheduled = points.treedef != jax.tree.structure(kernels[0])
        self.leaves = points.stack(kernels) if not self.scheduled else []
        leaves = self._leaves_at(0, 1, 0)
        own = (points, leaves, self.rest, self.rest_leaves, state, len(kernels))
        prepared = min(PREPARED_BYTES, max_bytes // 4)
        distinct = keys if prepares_alike(*own) else everyones
        tabulated = schedules.tabulate(kernels[0], 0, 1, 0)
        self.pace = pace_of(block_length(tabulated, data, distinct, state, prepared, arrangement))
        self.buffer_bytes = min(BUFFER_BYTES, max_bytes // 4)

    def _leaves_at(self, at: int, num_rounds: int, num_used: int) -> list[Array]:
        if not self.scheduled:
            return self.leaves
        return self.points.stack(
            [schedules.tabulate(kernel, at, num_rounds, num_used) for kernel in self.kernels]
        )

    def _call(
        self,
        arrangement: Arrangement,
        state: FederatedState,
        at: int,
        stop: int,
        plan: Plan,
        capacity: int,
    ) -> Segment:
        return run_points(
            self._leaves_at(at, self.pace.longest, stop - at),
            self.rest_leaves,
            state,
            plan,
            points=self.points,
            arrangement=arrangement,
            rest=self.rest,
            num_points=len(self.kernels),
            block=self.pace.block,
            capacity=capacity,
            collect=self.keeping.collect,
            canonical=self.canonical,
        )


def runs_faster_together(state: FederatedState, *, canonical: bool) -> bool:
    """Return whether runs of such a state are to be one program; see `benchmarks/sweeps.py`.

    On accelerators always. On a CPU it is about twice as fast for small models, but of larger ones
    anything between half and twice as fast, depending on the model; and `canonical` convolutions
    are computed for one chain at a time in any case.
    """
    on_cpu = {device.platform for device in state.broadcast.round.devices()} == {"cpu"}
    size = num_bytes(state.broadcast.position)
    return not on_cpu or (size <= LARGE_BYTES and not canonical)
