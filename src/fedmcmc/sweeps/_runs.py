"""Runs of a sweep: groups of kernels that share a program, and their results.

Random numbers of a round that do not depend on the numbers in which kernels differ are drawn once
for all points: kernels of different step sizes share their noise and minibatches.
"""

import re
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from fedmcmc.data import FederatedData
from fedmcmc.pytrees import is_key, named_leaves, num_bytes, trees, variables
from fedmcmc.rounds import (
    PREPARED_BYTES,
    SINGLE_DEVICE,
    Collect,
    Plan,
    Program,
    RoundRecord,
    Segment,
    run_segment,
)
from fedmcmc.runs import BUFFER_BYTES, choose_layout, pace_of, start
from fedmcmc.types import ArrayTree, FederatedKernel, FederatedState, compiled

if TYPE_CHECKING:
    import xarray

LARGE_BYTES = 2**17
"""Size of the positions of a run's chains above which a CPU computes runs one after the other."""
TOTALS = ("diverged", "num_rounds", "total_bits_up", "total_bits_down")
"""Results with one number per chain."""


class SweepSettings(NamedTuple):
    """Settings that all runs of a sweep share."""

    keys: Array  # [num_seeds, num_chains]
    position: ArrayTree | Callable[[Array], ArrayTree]
    num_rounds: int
    num_burnin: int
    thinning: int
    collect: Collect | None
    max_bytes: int

    def num_kept(self, round_: int) -> int:
        """Return the number of draws per chain that are kept before round `round_`."""
        return max(round_ - self.num_burnin, 0) // self.thinning


def group_kernels(kernels: Sequence[FederatedKernel]) -> list[list[int]]:
    """Return lists of indices of kernels that can share a program."""
    groups: dict[Hashable, list[int]] = {}
    for i, kernel in enumerate(kernels):
        leaves, treedef = jax.tree.flatten(kernel)
        groups.setdefault((treedef, *map(jax.typeof, leaves)), []).append(i)
    # Kernels whose functions are created by each call differ only in addresses.
    num_needed = len({re.sub(r" at 0x[0-9a-f]+", "", str(structure)) for structure in groups})
    if num_needed < len(groups) == len(kernels):
        warnings.warn(
            f"Each of the {len(kernels)} points is compiled separately, but {num_needed} "
            f"{'program' if num_needed == 1 else 'programs'} would suffice: each call of kernel_fn "
            "creates functions again (a log density, a lambda), and only identical function "
            "objects share a program. Define them outside of kernel_fn; jax.tree_util.Partial "
            "binds numbers that they need.",
            RuntimeWarning,
            stacklevel=3,
        )
    return list(groups.values())


class SweepGroup:
    """Kernels that share a program, with their data."""

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
        # `sample` also computes clients of large positions one after the other.
        layout = choose_layout(kernel, data, SINGLE_DEVICE, keys, state.broadcast.position)
        self.points, self.kernels = points, kernels
        self.program = Program(kernel, data, layout, settings.collect)
        self.shapes = self.program.record_shapes(keys, state)
        self.canonical = self.program.needs_canonical(keys, state)
        # Accelerators are always faster with many runs. A CPU is about twice as fast for small
        # models; for larger models the ratio is between 0.5 and 2 (`benchmarks/sweeps.py`), and
        # convolutions are computed for one chain at a time.
        is_large = num_bytes(state.broadcast.position) > LARGE_BYTES
        on_cpu = {device.platform for device in keys.devices()} == {"cpu"}
        self.is_faster_vmapped = not on_cpu or not (is_large or self.canonical)
        # Leaves in which the kernels differ have the axis 0 and are stacked.
        columns = zip(*map(jax.tree.leaves, kernels), strict=True)
        self.axes = tuple(
            None if all(_is_same(column[0], leaf) for leaf in column[1:]) else 0
            for column in columns
        )
        self.bytes_per_run = 2 * num_bytes(state) + len(keys) * (
            num_bytes(self.shapes) + self.program.prepared_bytes(keys, state)
        )

    def stack(self, kernels: Sequence[FederatedKernel]) -> Program:
        """Return the program of several kernels, with a leading axis on leaves that differ."""
        columns = zip(*map(jax.tree.leaves, kernels), strict=True)
        leaves = [
            column[0] if axis is None else jnp.stack(column)
            for column, axis in zip(columns, self.axes, strict=True)
        ]
        kernel = jax.tree.unflatten(jax.tree.structure(kernels[0]), leaves)
        return replace(self.program, kernel=kernel)


def _is_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if is_key(a):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return np.array_equal(np.asarray(a), np.asarray(b))


class SweepResults:
    """Results of all runs, arrays ``[num_points, num_seeds, num_chains]``.

    Leaves of `draws` and `info` have a next axis of kept rounds.
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
        shape = (sum(len(group.points) for group in groups), *settings.keys.shape)
        self.first_bad, self.num_rounds = np.full(shape, -1), np.zeros(shape, np.int64)
        self.bits = np.zeros((*shape, 2), np.int64)  # up and down

        def allocate(leaf: Array) -> np.ndarray:
            return np.zeros((*shape, len(self.kept_rounds), *leaf.shape), leaf.dtype)

        self.draws = jax.tree.map(allocate, groups[0].shapes.draw)
        infos = [group.shapes.info for group in groups]
        self.info = {name: allocate(leaf) for info in infos for name, leaf in info.items()}
        del self.info["round"]  # a coordinate
        for name, leaf in self.info.items():
            if not all(name in info for info in infos):
                # Kernels without this value (such as the number of lost clients) have NaN.
                self.info[name] = np.full_like(leaf, np.nan, _type_with_nan(leaf))
        names = [*variables(named_leaves(self.draws)), *self.info, *TOTALS]
        for name in {*grid, "seed", "chain", "draw"}.intersection(names):
            raise ValueError(
                f"{name} names both a coordinate (a setting of the grid, seed, chain or draw) and "
                "a result: rename it."
            )
        if len(set(names)) < len(names):
            duplicates = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(
                f"{', '.join(duplicates)} names both a part of the draws and another result: "
                "rename that part."
            )

    def put(
        self,
        index: tuple[Any, ...],
        start: int,
        stop: int,
        records: RoundRecord,
        first_bad: np.ndarray,
        bits: np.ndarray,
    ) -> None:
        """Store rounds ``[start, stop)`` of the points and seeds at `index`."""
        slots = slice(self.settings.num_kept(start), self.settings.num_kept(stop))

        def store(array: np.ndarray, new: Array) -> None:
            array[(*index, slice(None), slots)] = new[:, :, :, : slots.stop - slots.start]

        jax.tree.map(store, self.draws, records.draw)
        for name in self.info.keys() & records.info.keys():
            store(self.info[name], records.info[name])
        previous = self.first_bad[index]
        self.first_bad[index] = np.where(previous < 0, first_bad, previous)
        high, low = np.moveaxis(bits.astype(np.int64), -2, 0)
        self.bits[index] += high * 2**32 + low
        self.num_rounds[index] = stop

    @property
    def is_complete(self) -> np.ndarray:
        """``[num_points, num_seeds]`` bool, true if all chains ran to the end and stayed finite."""
        ran = self.num_rounds == self.settings.num_rounds
        return (ran & (self.first_bad < 0)).all(axis=2)

    def select_draws(self, point: int, seeds: np.ndarray) -> ArrayTree:
        """Return draws ``[num_seeds * num_chains, num_draws, ...]`` of seeds of a point.

        `seeds` is ``[num_seeds]`` bool.
        """

        def flatten(leaf: np.ndarray) -> np.ndarray:
            selected = leaf[point, seeds]
            return selected.reshape(-1, *selected.shape[2:])

        return jax.tree.map(flatten, self.draws)

    def dataset(self, draws: ArrayTree) -> "xarray.Dataset":
        """Return all results as a labeled data set, with `draws`."""
        import xarray

        first_bad, num_rounds = self.first_bad[..., None], self.num_rounds[..., None]
        is_finite = self.kept_rounds < np.where(first_bad < 0, num_rounds, first_bad)
        sizes = tuple(map(len, self.grid.values()))
        dims = (*self.grid, "seed", "chain", "draw")
        labeled = {}

        def add(name: str, leaf: np.ndarray, valid: np.ndarray) -> None:
            if not valid.all():
                valid = valid.reshape(*valid.shape, *[1] * (leaf.ndim - valid.ndim))
                leaf = np.where(valid, leaf, np.asarray(np.nan, _type_with_nan(leaf)))
            event = (f"{name}_dim_{i}" for i in range(leaf.ndim - 4))
            leaf = leaf.reshape(*sizes, *leaf.shape[1:])
            labeled[name] = (*dims[: leaf.ndim], *event), leaf

        for name, leaf in (variables(named_leaves(draws)) | self.info).items():
            add(name, leaf, is_finite)
        totals = (self.first_bad, self.num_rounds, self.bits[..., 0], self.bits[..., 1])
        for name, leaf in zip(TOTALS, totals, strict=True):
            add(name, leaf, np.array(True))
        coords: dict[str, Any] = {name: list(labels) for name, labels in self.grid.items()}
        ranges = map(np.arange, is_finite.shape[1:])
        coords |= dict(zip(("seed", "chain", "draw"), ranges, strict=True))
        return xarray.Dataset(labeled, coords | {"round": ("draw", self.kept_rounds)})


def _type_with_nan(leaf: np.ndarray) -> np.dtype:
    return np.result_type(leaf.dtype, np.float32)


def run_group(group: SweepGroup, results: SweepResults, bar: tqdm, *, vmapped: bool) -> None:
    """Run all seeds of all kernels: one after the other, or as many together as memory allows.

    Parts hold many kernels first, because kernels share their random numbers. All parts have the
    same size, so that they share a program: a smaller part repeats its last run.
    """
    fits = max(results.settings.max_bytes // 2 // max(group.bytes_per_run, 1), 1) if vmapped else 1

    def split(total: int, limit: int) -> Iterator[np.ndarray]:
        num_parts = -(-total // max(limit, 1))
        size = -(-total // num_parts)
        return (np.minimum(np.arange(size) + i * size, total - 1) for i in range(num_parts))

    # Convolutions are computed for one chain at a time in any case.
    parts = list(split(len(group.kernels), 1 if group.canonical else fits))
    for seeds in split(len(results.settings.keys), fits // len(parts[0])):
        for part in parts:
            _run_part(group, results, bar, part, seeds)


def _run_part(
    group: SweepGroup, results: SweepResults, bar: tqdm, part: np.ndarray, seeds: np.ndarray
) -> None:
    """Run all rounds in segments, until all chains are non-finite."""
    settings = results.settings
    kernels, keys = [group.kernels[i] for i in part], settings.keys[seeds].reshape(-1)
    states = [start(kernel, group.program.data, keys, settings.position) for kernel in kernels]
    is_single = len(kernels) == 1  # runs as in `sample`
    max_bytes = BUFFER_BYTES if is_single else settings.max_bytes // 4
    program = replace(group.program, kernel=kernels[0])
    ahead = min(PREPARED_BYTES, max_bytes) // len(kernels)
    pace = pace_of(program.block_length(keys, states[0], ahead))
    run: Callable[..., Segment] = run_segment
    state = states[0]
    if not is_single:
        run, program = partial(_run_points, axes=group.axes), group.stack(kernels)
        state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    state = jax.tree.map(trees.strip_weak_type, state)
    bytes_per_draw = num_bytes(group.shapes) * len(kernels) * len(keys)
    budget = max(min(BUFFER_BYTES, max_bytes) // max(bytes_per_draw, 1), 1)
    # With a power of two, runs with similar numbers of draws share a program.
    capacity = 2 ** max(len(results.kept_rounds) - 1, 0).bit_length()
    capacity = min(capacity, budget, pace.longest)
    static = dict(block=pace.block, capacity=capacity, canonical=group.canonical)
    index = np.ix_(np.asarray(group.points)[part], seeds)
    shape, num_axes = (len(part), len(seeds), settings.keys.shape[1]), 1 if is_single else 2

    def unstack(leaf: Array) -> np.ndarray:
        return np.asarray(leaf).reshape(*shape, *leaf.shape[num_axes:])

    num_runs = len(np.unique(part)) * len(np.unique(seeds))
    round_, length = 0, pace.block
    while round_ < settings.num_rounds and (results.first_bad[index] < 0).any():
        num_kept = settings.num_kept(round_)
        full = settings.num_burnin + settings.thinning * (num_kept + capacity)
        stop = min(pace.end_of(round_, length), full, settings.num_rounds)
        numbers = (round_, stop, settings.num_burnin, settings.thinning, num_kept)
        plan = Plan(*(jnp.asarray(x, jnp.int32) for x in numbers))
        start_time = time.perf_counter()
        segment = run(program, keys, state, plan, {}, {}, **static)
        outputs = (segment.records, segment.first_bad, segment.bits)
        results.put(index, round_, stop, *jax.tree.map(unstack, outputs))
        length = pace.next_length(length, stop - round_, time.perf_counter() - start_time)
        bar.update((stop - round_) * num_runs)
        state, round_ = segment.state, stop


@compiled(static_argnames=("axes", "block", "capacity", "canonical"))
def _run_points(
    program: Program,
    keys: Array,
    states: FederatedState,
    *arguments: ArrayTree,
    axes: tuple[int | None, ...],
    **static: Any,
) -> Segment:
    """Run a segment of several points: kernels stacked along `axes`, a leading axis of states."""
    leaves, treedef = jax.tree.flatten(program.kernel)

    def run_point(point_leaves: list[Any], state: FederatedState) -> Segment:
        kernel = jax.tree.unflatten(treedef, point_leaves)
        return run_segment(replace(program, kernel=kernel), keys, state, *arguments, **static)

    result: Segment = jax.vmap(run_point, in_axes=(list(axes), 0))(leaves, states)
    return result
