"""The runs of a sweep: one after another, or many in one program."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc import schedules
from fedmcmc._pace import pace_of
from fedmcmc._points import Points, points_of, prepares_alike, run_points, start_points
from fedmcmc._run import BUFFER_BYTES, Keeping, Run
from fedmcmc._segments import (
    PREPARED_BYTES,
    Collect,
    Kept,
    Plan,
    Segment,
    block_length,
    kept_shapes,
    needs_canonical,
    prepared_bytes,
)
from fedmcmc._starts import laid_out, start, start_positions
from fedmcmc._sweep_results import Results, Rounds
from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState
from fedmcmc.data import FederatedData

__all__ = ["Group", "Sampler", "one_by_one", "runs_faster_together", "together"]


LARGE_BYTES = 2**17
"""Where all chains of a run have larger positions, a CPU takes one run after another."""


class SteadyRun(Run):
    """A run that goes on where chains turn non-finite, and remembers since when they are.

    It ends where all are.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.first_bad = np.full(len(self.keys), -1)

    def _stop(self, first_bad: np.ndarray, *_: Any) -> None:
        self.first_bad = np.where(self.first_bad < 0, first_bad, self.first_bad)
        self.stopped = {"reached": bool((self.first_bad >= 0).all())}


class PointsRun(SteadyRun):
    """A run of several kernels that differ by numbers alone; its chains are those of all."""

    def __init__(
        self,
        kernels: Sequence[FederatedKernel],
        points: Points,
        data: FederatedData,
        keys: Array,
        collect: Collect | None,
        state: FederatedState,
        max_bytes: int,
    ) -> None:
        everyones = jnp.broadcast_to(keys, (len(kernels), len(keys))).reshape(-1)
        super().__init__(kernels[0], data, everyones, Keeping(collect), state)
        self.kernels, self.points, self.own_keys = kernels, points, keys
        self.scheduled = points.treedef != jax.tree.structure(kernels[0])
        self.leaves = points.stack(kernels) if not self.scheduled else []
        tabulated = schedules.tabulate(kernels[0], 0, 1, 0)
        alike = prepares_alike(points, self._leaves_at(0, 1, 0), data, keys, state, len(kernels))
        prepared = min(PREPARED_BYTES, max_bytes // 4)
        distinct = keys if alike else everyones
        self.pace = pace_of(block_length(tabulated, data, distinct, state, prepared))
        self.buffer_bytes = min(BUFFER_BYTES, max_bytes // 4)

    def _leaves_at(self, at: int, num_rounds: int, num_used: int) -> list[Array]:
        if not self.scheduled:
            return self.leaves
        return self.points.stack(
            [schedules.tabulate(kernel, at, num_rounds, num_used) for kernel in self.kernels]
        )

    def _call(
        self,
        data: FederatedData,
        state: FederatedState,
        at: int,
        stop: int,
        plan: Plan,
        capacity: int,
    ) -> Segment:
        return run_points(
            self._leaves_at(at, self.pace.longest, stop - at),
            data,
            self.own_keys,
            state,
            plan,
            points=self.points,
            block=self.pace.block,
            capacity=capacity,
            collect=self.keeping.collect,
            canonical=self.canonical,
        )


class Group(NamedTuple):
    """Kernels that differ by numbers alone, and what they run on."""

    indices: list[int]  # of the grid's points
    kernels: list[FederatedKernel]
    data: FederatedData
    rows: FederatedData  # the same, laid out as rounds are to be computed
    example: FederatedState  # of one seed's chains
    shapes: Kept
    canonical: bool  # whether convolutions are rewritten, one chain at a time


class Sampler(NamedTuple):
    """What all runs of a sweep have in common."""

    rng_key: Array
    position: ArrayTree | Callable[[Array], ArrayTree]
    num_seeds: int
    num_chains: int
    rounds: Rounds
    collect: Collect | None
    max_bytes: int

    def keys(self, seed: int) -> Array:
        """Return the keys of the chains of one seed, ``[num_chains]``, as `sample` makes them."""
        key = jax.random.fold_in(self.rng_key, seed)
        return jax.vmap(lambda c: jax.random.fold_in(key, c))(jnp.arange(self.num_chains))

    def group(
        self, indices: list[int], kernels: Sequence[FederatedKernel], data: FederatedData
    ) -> Group:
        """Return the kernels of these indices as a group."""
        own = [kernels[i] for i in indices]
        pooled = data.pooled() if own[0].participation.pooled else data
        keys = self.keys(0)
        state = start(own[0], pooled, keys, self.position)
        rows = laid_out(own[0], pooled, keys, state.broadcast.position)
        tabulated = schedules.tabulate(own[0], 0, 1, 0)
        shapes = kept_shapes(tabulated, rows, keys, state, self.collect)
        canonical = needs_canonical(tabulated, rows, keys, state, self.collect)
        return Group(indices, own, pooled, rows, state, shapes, canonical)


class Bar(NamedTuple):
    """A progress bar that counts each round `times` times."""

    bar: Any
    times: int

    def update(self, num: int) -> None:
        """Add `num` rounds."""
        self.bar.update(num * self.times)


def runs_faster_together(group: Group) -> bool:
    """Return whether kernels are to be run in one program, measured in `benchmarks/sweeps.py`.

    On accelerators always. On a CPU it is about twice as fast for small models, but of larger ones
    anything between half and twice as fast, depending on the model; and convolutions are computed
    for one chain at a time in any case.
    """
    on_cpu = {device.platform for device in group.example.broadcast.round.devices()} == {"cpu"}
    size = _num_bytes(group.example.broadcast.position)
    return not on_cpu or (size <= LARGE_BYTES and not group.canonical)


def one_by_one(group: Group, sampler: Sampler, results: Results, bar: Any) -> None:
    """Run every seed of every kernel by itself; all run the same program."""
    for seed in range(sampler.num_seeds):
        keys = sampler.keys(seed)
        init_keys, places = start_positions(keys, sampler.position)
        for i, kernel in zip(group.indices, group.kernels, strict=True):
            state = jax.vmap(kernel.init, in_axes=(0, 0, None))(init_keys, places, group.data)
            run = SteadyRun(kernel, group.rows, keys, Keeping(sampler.collect), state)
            _go(run, [i], range(seed, seed + 1), 1, sampler.rounds, results, Bar(bar, 1))


def together(group: Group, sampler: Sampler, results: Results, bar: Any) -> None:
    """Run kernels and seeds in one program, as many at a time as `max_bytes` allows."""
    points = points_of(group.kernels, sampler.rounds.num_rounds)
    num_points, num_seeds = _at_once(group, sampler)
    for first in range(0, sampler.num_seeds, num_seeds):
        seeds = range(first, min(first + num_seeds, sampler.num_seeds))
        # Padded by the last, so that a shorter rest needs no program of its own.
        keys = jnp.concatenate([sampler.keys(min(first + s, seeds[-1])) for s in range(num_seeds)])
        init_keys, places = start_positions(keys, sampler.position)
        for at in range(0, len(group.kernels), num_points):
            indices = group.indices[at : at + num_points]
            kernels = group.kernels[at : at + num_points]
            some = kernels + kernels[-1:] * (num_points - len(kernels))
            start_leaves = points.stack([schedules.tabulate(k, 0, 1) for k in some])
            state = start_points(
                start_leaves, group.data, init_keys, places, points=points, num_kernels=num_points
            )
            run: SteadyRun
            if num_points == 1:  # an axis of length one would cost a fifth of the speed
                run = SteadyRun(kernels[0], group.rows, keys, Keeping(sampler.collect), state)
            else:
                settings = (group.rows, keys, sampler.collect, state, sampler.max_bytes)
                run = PointsRun(some, points, *settings)
            counted = Bar(bar, len(indices) * len(seeds))
            _go(run, indices, seeds, num_seeds, sampler.rounds, results, counted)


def _go(
    run: SteadyRun,
    points: Sequence[int],
    seeds: range,
    at_once: int,
    rounds: Rounds,
    results: Results,
    bar: Bar,
) -> None:
    try:
        run.keep(rounds.num_burnin, rounds.thinning)
        run.advance(rounds.num_rounds, bar)
    finally:
        results.put(points, seeds, at_once, run.samples(), run.first_bad)


def _at_once(group: Group, sampler: Sampler) -> tuple[int, int]:
    """Return how many kernels and seeds are run at a time.

    Kernels first: they share their draws. In equal parts, so that little is padded.
    """
    tabulated = schedules.tabulate(group.kernels[0], 0, 1, 0)
    # The state before and after a round, one draw, one round's randomness.
    size = 2 * _num_bytes(group.example) + sampler.num_chains * (
        _num_bytes(group.shapes)
        + prepared_bytes(tabulated, group.rows, sampler.keys(0), group.example)
    )
    fits = max(sampler.max_bytes // 2 // max(size, 1), 1)

    def parts(total: int, most: int) -> int:
        return -(-total // -(-total // max(min(most, total), 1)))

    num_points = parts(len(group.kernels), fits)
    return num_points, parts(sampler.num_seeds, fits // num_points)


def _num_bytes(tree: ArrayTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
