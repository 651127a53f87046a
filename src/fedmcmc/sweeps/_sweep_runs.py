"""The runs of a sweep: one after another, or many in one program."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState
from fedmcmc.data import FederatedData
from fedmcmc.pytrees import num_bytes, schedules
from fedmcmc.rounds import (
    TOGETHER,
    Arrangement,
    Collect,
    Kept,
    kept_shapes,
    needs_canonical,
    prepared_bytes,
)
from fedmcmc.runs import Keeping, chosen, start, start_positions
from fedmcmc.sweeps._points import points_of, start_points
from fedmcmc.sweeps._points_run import PointsRun, SteadyRun
from fedmcmc.sweeps._sweep_results import Results, Rounds

__all__ = ["Group", "Sampler", "one_by_one", "together"]


class Group(NamedTuple):
    """Kernels that differ by numbers alone, and what they run on."""

    indices: list[int]  # of the grid's points
    kernels: list[FederatedKernel]
    data: FederatedData
    arrangement: Arrangement
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
        given = (pooled.num_clients, TOGETHER, keys, state.broadcast.position)
        arrangement = chosen(own[0], *given)
        tabulated = schedules.tabulate(own[0], 0, 1, 0)
        shapes = kept_shapes(tabulated, pooled, keys, state, self.collect, arrangement)
        canonical = needs_canonical(tabulated, pooled, keys, state, self.collect, arrangement)
        return Group(indices, own, pooled, arrangement, state, shapes, canonical)


class Bar(NamedTuple):
    """A progress bar that counts each round `times` times."""

    bar: Any
    times: int

    def update(self, num: int) -> None:
        """Add `num` rounds."""
        self.bar.update(num * self.times)


def one_by_one(group: Group, sampler: Sampler, results: Results, bar: Any) -> None:
    """Run every seed of every kernel by itself; all run the same program."""
    for seed in range(sampler.num_seeds):
        keys = sampler.keys(seed)
        init_keys, places = start_positions(keys, sampler.position)
        for i, kernel in zip(group.indices, group.kernels, strict=True):
            state = jax.vmap(kernel.init, in_axes=(0, 0, None))(init_keys, places, group.data)
            given = (kernel, group.data, keys, Keeping(sampler.collect), state)
            run = SteadyRun(*given, arrangement=group.arrangement)
            _go(run, [i], range(seed, seed + 1), 1, sampler.rounds, results, Bar(bar, 1))


def together(group: Group, sampler: Sampler, results: Results, bar: Any) -> None:
    """Run kernels and seeds in one program, as many at a time as `max_bytes` allows."""
    num_rounds = sampler.rounds.num_rounds
    points = points_of([schedules.tabulate(kernel, 0, num_rounds) for kernel in group.kernels])
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
                given = (kernels[0], group.data, keys, Keeping(sampler.collect), state)
                run = SteadyRun(*given, arrangement=group.arrangement)
            else:
                on = [(group.data, keys)] * num_points
                settings = (sampler.collect, state, sampler.max_bytes, group.arrangement)
                run = PointsRun(some, points, on, *settings)
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
    size = 2 * num_bytes(group.example) + sampler.num_chains * (
        num_bytes(group.shapes)
        + prepared_bytes(tabulated, group.data, sampler.keys(0), group.example, group.arrangement)
    )
    fits = max(sampler.max_bytes // 2 // max(size, 1), 1)

    def parts(total: int, most: int) -> int:
        return -(-total // -(-total // max(min(most, total), 1)))

    num_points = parts(len(group.kernels), fits)
    return num_points, parts(sampler.num_seeds, fits // num_points)
