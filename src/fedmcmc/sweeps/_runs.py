"""The runs of a sweep: kernels that share a program, the parts in which they run, and results.

What is random in a round is drawn once for all points wherever it does not depend on the numbers
in which their kernels differ: kernels of different step sizes share their noise and minibatches.
"""

import re
import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState, compiled
from fedmcmc.data import FederatedData
from fedmcmc.pytrees import is_key, named_leaves, num_bytes, trees, variables
from fedmcmc.rounds import (
    PREPARED_BYTES,
    SINGLE_DEVICE,
    Collect,
    Plan,
    Program,
    Segment,
    run_segment,
)
from fedmcmc.runs import BUFFER_BYTES, choose_layout, pace_of, start

LARGE_BYTES = 2**17
"""If the positions of all chains of a run together are larger, a CPU takes runs one by one."""
TOTALS = ("diverged", "num_rounds", "total_bits_up", "total_bits_down")
"""One number per chain: the first non-finite round, rounds that were run, bits of all of them."""


class SweepSettings(NamedTuple):
    """What all runs of a sweep have in common."""

    keys: Array  # [num_seeds, num_chains]
    position: ArrayTree | Callable[[Array], ArrayTree]
    num_rounds: int
    num_burnin: int
    thinning: int
    collect: Collect | None
    max_bytes: int

    def num_kept(self, round_: int) -> int:
        """Return how many draws of a chain are kept before round `round_`."""
        return max(round_ - self.num_burnin, 0) // self.thinning


def alike(kernels: Sequence[FederatedKernel]) -> list[list[int]]:
    """Return which kernels can share a program, as lists of their indices."""
    groups: dict[Hashable, list[int]] = {}
    for i, kernel in enumerate(kernels):
        leaves, treedef = jax.tree.flatten(kernel)
        groups.setdefault((treedef, *map(jax.typeof, leaves)), []).append(i)
    # Where functions are new at each call, the trees differ in nothing but their addresses.
    num_needed = len({re.sub(r" at 0x[0-9a-f]+", "", str(structure)) for structure in groups})
    if num_needed < len(groups) == len(kernels):
        warnings.warn(
            f"Each of the {len(kernels)} points is compiled by itself, though {num_needed} "
            f"{'program' if num_needed == 1 else 'programs'} would do: kernel_fn makes functions "
            "anew at each call (a log density, a lambda), and functions are the same only if they "
            "are the same object. Define them outside of kernel_fn; numbers that they need can be "
            "bound by jax.tree_util.Partial.",
            RuntimeWarning,
            stacklevel=3,
        )
    return list(groups.values())


class SweepGroup:
    """Kernels that differ by numbers alone, and what they run on."""

    def __init__(
        self,
        points: list[int],  # of the grid
        kernels: list[FederatedKernel],  # with the values of their schedules
        data: FederatedData,
        settings: SweepSettings,
    ) -> None:
        kernel, keys = kernels[0], settings.keys[0]
        data = data.pooled() if kernel.participation.pooled else data
        state = start(kernel, data, keys, settings.position)
        # Clients of large positions one by one, as `sample` takes them.
        layout = choose_layout(kernel, data, SINGLE_DEVICE, keys, state.broadcast.position)
        self.points, self.kernels = points, kernels
        self.program = Program(kernel, data, layout, settings.collect)
        self.shapes = self.program.record_shapes(keys, state)
        self.canonical = self.program.needs_canonical(keys, state)
        # On accelerators always. On a CPU it is about twice as fast for small models, but of
        # larger ones anything between half and twice as fast, depending on the model
        # (`benchmarks/sweeps.py`); and convolutions are computed for one chain at a time.
        large = num_bytes(state.broadcast.position) > LARGE_BYTES
        on_cpu = {device.platform for device in keys.devices()} == {"cpu"}
        self.faster_together = not on_cpu or not (large or self.canonical)
        # Of each leaf, 0 if the kernels differ in it: it is stacked then.
        columns = zip(*map(jax.tree.leaves, kernels), strict=True)
        self.axes = tuple(
            None if all(_same(column[0], leaf) for leaf in column[1:]) else 0 for column in columns
        )
        self.bytes_per_run = 2 * num_bytes(state) + len(keys) * (
            num_bytes(self.shapes) + self.program.prepared_bytes(keys, state)
        )

    def stacked(self, kernels: Sequence[FederatedKernel]) -> Program:
        """Return the program of some kernels, stacked: a leading axis where `axes` has one."""
        columns = zip(*map(jax.tree.leaves, kernels), strict=True)
        leaves = [
            column[0] if axis is None else jnp.stack(column)
            for column, axis in zip(columns, self.axes, strict=True)
        ]
        kernel = jax.tree.unflatten(jax.tree.structure(kernels[0]), leaves)
        return replace(self.program, kernel=kernel)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if is_key(a):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return np.array_equal(np.asarray(a), np.asarray(b))


class SweepResults:
    """Everything that the runs of a sweep keep, arrays ``[num_points, num_seeds, num_chains]``.

    Those of `draws` and `info` then have an axis of kept rounds.
    """

    def __init__(
        self,
        grid: Mapping[str, Mapping[Any, Any]],
        groups: Sequence[SweepGroup],
        settings: SweepSettings,
    ) -> None:
        self.grid, self.settings = grid, settings
        rounds = np.arange(settings.num_burnin, settings.num_rounds)
        self.kept_rounds = rounds[settings.thinning - 1 :: settings.thinning]
        lead = (sum(len(some.points) for some in groups), *settings.keys.shape)
        self.first_bad, self.num_rounds = np.full(lead, -1), np.zeros(lead, np.int64)
        self.bits = np.zeros((*lead, 2), np.int64)  # up and down

        def empty(shape: Any) -> np.ndarray:
            return np.zeros((*lead, len(self.kept_rounds), *shape.shape), shape.dtype)

        self.draws = jax.tree.map(empty, groups[0].shapes.draw)
        reports = [some.shapes.info for some in groups]
        self.info = {name: empty(shape) for info in reports for name, shape in info.items()}
        del self.info["round"]  # a coordinate
        for name, leaf in self.info.items():
            if not all(name in info for info in reports):
                # Kernels differ in what they report (lost clients): NaN where they do not.
                self.info[name] = np.full_like(leaf, np.nan, _type_with_nan(leaf))
        taken = [*variables(named_leaves(self.draws)), *self.info, *TOTALS]
        for name in {*grid, "seed", "chain", "draw"}.intersection(taken):
            raise ValueError(
                f"{name} names both a coordinate (a setting of the grid, seed, chain or draw) and "
                "a result: rename it."
            )
        if len(set(taken)) < len(taken):
            doubled = sorted({name for name in taken if taken.count(name) > 1})
            raise ValueError(
                f"{', '.join(doubled)} names both a part of the draws and another result: rename "
                "that part."
            )

    def put(self, where: Any, at: int, stop: int, segment: Any) -> None:
        """Store rounds ``[at, stop)`` of the points and seeds at the indices `where`."""
        slots = slice(self.settings.num_kept(at), self.settings.num_kept(stop))

        def store(everything: np.ndarray, new: np.ndarray) -> None:
            everything[(*where, slice(None), slots)] = new[:, :, :, : slots.stop - slots.start]

        jax.tree.map(store, self.draws, segment.records.draw)
        for name in self.info.keys() & segment.records.info.keys():
            store(self.info[name], segment.records.info[name])
        before = self.first_bad[where]
        self.first_bad[where] = np.where(before < 0, segment.first_bad, before)
        high, low = np.moveaxis(segment.bits.astype(np.int64), -2, 0)
        self.bits[where] += high * 2**32 + low
        self.num_rounds[where] = stop

    @property
    def complete(self) -> np.ndarray:
        """Which seeds of which points ran to the end with no chain that diverged, bool."""
        ran = self.num_rounds == self.settings.num_rounds
        return (ran & (self.first_bad < 0)).all(axis=2)

    def draws_of(self, point: int, seeds: np.ndarray) -> ArrayTree:
        """Return the draws of some seeds of a point, ``[num_seeds * num_chains, num_draws, ...]``.

        `seeds` is ``[num_seeds]`` bool.
        """

        def chains(leaf: np.ndarray) -> np.ndarray:
            own = leaf[point, seeds]
            return own.reshape(-1, *own.shape[2:])

        return jax.tree.map(chains, self.draws)

    def dataset(self, draws: ArrayTree) -> Any:
        """Return everything as an `xarray.Dataset`, with these draws."""
        import xarray

        first_bad, num_rounds = self.first_bad[..., None], self.num_rounds[..., None]
        there = self.kept_rounds < np.where(first_bad < 0, num_rounds, first_bad)
        sizes = tuple(map(len, self.grid.values()))
        kept = {}

        def add(name: str, leaf: np.ndarray, there: np.ndarray) -> None:
            if not there.all():
                there = there.reshape(*there.shape, *[1] * (leaf.ndim - there.ndim))
                leaf = np.where(there, leaf, np.asarray(np.nan, _type_with_nan(leaf)))
            dims = (*self.grid, "seed", "chain", "draw")
            event = (f"{name}_dim_{i}" for i in range(leaf.ndim - 4))
            leaf = leaf.reshape(*sizes, *leaf.shape[1:])
            kept[name] = (*dims[: leaf.ndim], *event), leaf

        for name, leaf in (variables(named_leaves(draws)) | self.info).items():
            add(name, leaf, there)
        totals = (self.first_bad, self.num_rounds, self.bits[..., 0], self.bits[..., 1])
        for name, leaf in zip(TOTALS, totals, strict=True):
            add(name, leaf, np.array(True))
        coords: dict[str, Any] = {name: list(labels) for name, labels in self.grid.items()}
        coords |= dict(zip(("seed", "chain", "draw"), map(np.arange, there.shape[1:]), strict=True))
        return xarray.Dataset(kept, coords | {"round": ("draw", self.kept_rounds)})


def _type_with_nan(leaf: np.ndarray) -> np.dtype:
    return np.result_type(leaf.dtype, np.float32)


def run_group(group: SweepGroup, results: SweepResults, bar: Any, *, vmapped: bool) -> None:
    """Run every seed of every kernel: each by itself, or as many at a time as `max_bytes` allows.

    Kernels first: they share their draws. All parts run one program, and are equal, so that little
    is run twice: a part that is smaller than the others repeats its last run.
    """
    fits = max(results.settings.max_bytes // 2 // max(group.bytes_per_run, 1), 1) if vmapped else 1

    def parts(total: int, most: int) -> list[np.ndarray]:
        num = -(-total // max(most, 1))
        size = -(-total // num)
        return [np.minimum(np.arange(size) + i * size, total - 1) for i in range(num)]

    # Convolutions are computed for one chain at a time in any case.
    of_kernels = parts(len(group.kernels), 1 if group.canonical else fits)
    for seeds in parts(len(results.settings.keys), fits // len(of_kernels[0])):
        for part in of_kernels:
            _run_part(group, results, bar, part, seeds)


def _run_part(
    group: SweepGroup, results: SweepResults, bar: Any, part: np.ndarray, seeds: np.ndarray
) -> None:
    """Run all rounds in segments, which end where all chains are non-finite."""
    settings = results.settings
    kernels, keys = [group.kernels[i] for i in part], settings.keys[seeds].reshape(-1)
    states = [start(kernel, group.program.data, keys, settings.position) for kernel in kernels]
    program = replace(group.program, kernel=kernels[0])
    alone = len(kernels) == 1  # as `sample` runs it
    most = BUFFER_BYTES if alone else settings.max_bytes // 4
    ahead = min(PREPARED_BYTES, most) // len(kernels)
    pace = pace_of(program.block_length(keys, states[0], ahead))
    run: Any = run_segment
    state = states[0]
    if not alone:
        run, program = partial(_run_points, axes=group.axes), group.stacked(kernels)
        state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    state = jax.tree.map(trees.strong, state)
    bytes_per_draw = num_bytes(group.shapes) * len(kernels) * len(keys)
    budget = max(min(BUFFER_BYTES, most) // max(bytes_per_draw, 1), 1)
    # A power of two, so that another number of draws runs the same program.
    capacity = 2 ** max(len(results.kept_rounds) - 1, 0).bit_length()
    capacity = min(capacity, budget, pace.longest)
    where: Any = np.ix_(np.asarray(group.points)[part], seeds)
    shape, num_axes = (len(part), len(seeds), settings.keys.shape[1]), 1 if alone else 2

    def by_run(leaf: Array) -> np.ndarray:
        return np.asarray(leaf).reshape(*shape, *leaf.shape[num_axes:])

    num_runs = len(np.unique(part)) * len(np.unique(seeds))
    at, length = 0, pace.block
    while at < settings.num_rounds and (results.first_bad[where] < 0).any():
        num_kept = settings.num_kept(at)
        full = settings.num_burnin + settings.thinning * (num_kept + capacity)
        stop = min(pace.end_of(at, length), full, settings.num_rounds)
        numbers = (at, stop, settings.num_burnin, settings.thinning, num_kept)
        plan = Plan(*(jnp.asarray(x, jnp.int32) for x in numbers))
        begun = time.perf_counter()
        static = dict(block=pace.block, capacity=capacity, canonical=group.canonical)
        segment = run(program, keys, state, plan, {}, {}, **static)
        by_runs = jax.tree.map(by_run, segment._replace(state=(), accumulator_states={}))
        results.put(where, at, stop, by_runs)
        length = pace.next_length(length, stop - at, time.perf_counter() - begun)
        bar.update((stop - at) * num_runs)
        state, at = segment.state, stop


@compiled(static_argnames=("axes", "block", "capacity", "canonical"))
def _run_points(
    program: Program,
    keys: Array,
    states: FederatedState,
    *arguments: Any,
    axes: tuple[int | None, ...],
    **static: Any,
) -> Segment:
    """Run a segment of several points: kernels stacked along `axes`, a leading axis of states."""
    leaves, treedef = jax.tree.flatten(program.kernel)

    def point(own_leaves: list[Any], state: FederatedState) -> Segment:
        own = replace(program, kernel=jax.tree.unflatten(treedef, own_leaves))
        return run_segment(own, keys, state, *arguments, **static)

    result: Segment = jax.vmap(point, in_axes=(list(axes), 0))(leaves, states)
    return result
