"""The runs of a sweep: parts of its points and seeds, each a map of `run_rounds` over them.

What is random in a round is drawn once for all points wherever it does not depend on the numbers
in which their kernels differ: kernels of different step sizes share their noise and minibatches.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState
from fedmcmc.data import FederatedData
from fedmcmc.placement import Placement
from fedmcmc.pytrees import is_key, num_bytes, schedules, trees
from fedmcmc.rounds import (
    PREPARED_BYTES,
    TOGETHER,
    Arrangement,
    Collect,
    Kept,
    Program,
    Records,
    run_rounds,
)
from fedmcmc.runs import BUFFER_BYTES, chosen, pace_of, start, start_positions
from fedmcmc.sweeps._results import Results, Settings

__all__ = ["Group", "group_of", "run_group"]

LARGE_BYTES = 2**17
"""Where all chains of a run have larger positions, a CPU takes one run after another."""


class Group(NamedTuple):
    """Kernels that differ by numbers alone, and what they run on."""

    indices: list[int]  # of the grid's points
    kernels: list[FederatedKernel]
    tabulated: list[FederatedKernel]  # the same with the values of schedules
    data: FederatedData
    arrangement: Arrangement
    example: FederatedState  # of one seed's chains
    shapes: Kept
    in_turn: bool  # convolutions that are slow where they are mapped

    @property
    def differs(self) -> tuple[bool, ...]:
        """Whether the kernels differ in a leaf, which is stacked then."""
        columns = zip(*map(jax.tree.leaves, self.tabulated), strict=True)
        return tuple(not all(_same(column[0], leaf) for leaf in column[1:]) for column in columns)

    @property
    def faster_together(self) -> bool:
        """Whether many runs are to be one program; see `benchmarks/sweeps.py`.

        On accelerators always. On a CPU it is about twice as fast for small models, but of larger
        ones anything between half and twice as fast, depending on the model; and convolutions
        are computed for one chain at a time in any case.
        """
        broadcast = self.example.broadcast
        on_cpu = {device.platform for device in broadcast.round.devices()} == {"cpu"}
        return not on_cpu or (num_bytes(broadcast.position) <= LARGE_BYTES and not self.in_turn)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if is_key(a):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return np.array_equal(np.asarray(a), np.asarray(b))


def group_of(
    indices: list[int], everyone: Sequence[FederatedKernel], data: FederatedData, settings: Settings
) -> Group:
    """Return the kernels of these indices as a group."""
    kernels = [everyone[i] for i in indices]
    # A power of two, so that another number of rounds runs the same program.
    num = 2 ** (settings.num_rounds - 1).bit_length()
    tabulated = [schedules.tabulate(kernel, 0, num, settings.num_rounds) for kernel in kernels]
    keys, kernel = settings.keys(0), kernels[0]
    data = data.pooled() if kernel.participation.pooled else data
    state = start(kernel, data, keys, settings.position)
    # Clients of large positions one by one, as `sample` takes them.
    arrangement = chosen(kernel, data.num_clients, TOGETHER, keys, state.broadcast.position)
    program = Program(tabulated[0], data, arrangement, settings.collect)
    shapes, in_turn = program.kept_shapes(keys, state), program.needs_canonical(keys, state)
    return Group(indices, kernels, tabulated, data, arrangement, state, shapes, in_turn)


def run_group(
    group: Group, settings: Settings, results: Results, bar: Any, *, vmapped: bool
) -> None:
    """Run every seed of every kernel: each by itself, or as many at a time as `max_bytes` allows.

    All parts run one program; one that is smaller than the others is padded by its last run.
    """
    num_points, num_seeds = _at_once(group, settings) if vmapped else (1, 1)
    differs = group.differs if num_points > 1 else (False,) * len(group.differs)
    for first in range(0, settings.num_seeds, num_seeds):
        seeds = range(first, min(first + num_seeds, settings.num_seeds))
        keys = jnp.concatenate([settings.keys(min(first + s, seeds[-1])) for s in range(num_seeds)])
        for at in range(0, len(group.kernels), num_points):
            part = slice(at, at + num_points)
            points, padding = group.indices[part], num_points - len(group.indices[part])
            kernels, tabulated = (
                some[part] + some[-1:] * padding for some in (group.kernels, group.tabulated)
            )
            init_keys, places = start_positions(keys, settings.position)
            begin = [
                jax.vmap(kernel.init, in_axes=(0, 0, None))(init_keys, places, group.data)
                for kernel in kernels
            ]
            states = jax.tree.map(lambda *leaves: trees.strong(jnp.stack(leaves)), *begin)
            columns = zip(*map(jax.tree.leaves, tabulated), strict=True)
            leaves = [
                jnp.stack([jnp.asarray(leaf) for leaf in column]) if stacked else column[0]
                for column, stacked in zip(columns, differs, strict=True)
            ]
            kernel = jax.tree.unflatten(jax.tree.structure(tabulated[0]), leaves)
            _run_part(group, settings, results, bar, points, seeds, kernel, keys, states, differs)


def _run_part(
    group: Group,
    settings: Settings,
    results: Results,
    bar: Any,
    points: Sequence[int],
    seeds: range,
    kernel: FederatedKernel,
    keys: Array,
    states: FederatedState,
    differs: tuple[bool, ...],
) -> None:
    """Run all rounds in segments, which end where all chains are non-finite.

    `keys` are ``[num_seeds * num_chains]``, `states` have leaves ``[num_points, *keys.shape]``.
    """
    num_points, num_rounds = len(states.broadcast.round), settings.num_rounds
    # One point is run in any case, and as `sample` runs it.
    most = settings.max_bytes // 4 if num_points > 1 else BUFFER_BYTES
    ahead = min(PREPARED_BYTES, most) // (num_points * len(keys))
    program = Program(group.tabulated[0], group.data, group.arrangement)
    block = program.block_length(keys[:1], group.example, ahead)
    pace = pace_of(block)
    size = num_bytes(group.shapes) * num_points * len(keys)
    budget = max(min(BUFFER_BYTES, most) // max(size, 1), 1)
    num_draws = settings.num_kept(num_rounds)
    capacity = min(2 ** max(num_draws - 1, 0).bit_length(), budget, pace.longest)
    static: dict[str, Any] = dict(
        differs=differs,
        in_turn=group.in_turn,
        collect=settings.collect,
        capacity=capacity,
        ahead_bytes=ahead,
        placement=Placement(clients_at_a_time=group.arrangement.clients_at_a_time),
    )
    at, length, places = 0, block, np.ix_(points, seeds)
    while at < num_rounds and (results.first_bad[places] < 0).any():
        full = settings.num_burnin + settings.thinning * (settings.num_kept(at) + capacity)
        stop = min(pace.end_of(at, length), full, num_rounds)
        begun = time.perf_counter()
        counts = np.asarray([stop - at, settings.num_burnin, settings.thinning], np.int32)
        states, records = _segment(kernel, group.data, keys, states, counts, **static)
        results.put(points, seeds, at, stop, records)
        length = pace.next_length(length, stop - at, time.perf_counter() - begun)
        bar.update((stop - at) * len(points) * len(seeds))
        at = stop


@partial(
    jax.jit,
    static_argnames=("differs", "in_turn", "collect", "capacity", "ahead_bytes", "placement"),
)
def _segment(
    kernel: FederatedKernel,
    data: FederatedData,
    keys: Array,
    states: FederatedState,
    counts: Array,
    *,
    differs: tuple[bool, ...],
    in_turn: bool,
    collect: Collect | None,
    capacity: int,
    ahead_bytes: int,
    placement: Placement,
) -> tuple[FederatedState, Records]:
    """Run rounds of all points and chains; the leaves in which kernels differ are stacked."""
    leaves, treedef = jax.tree.flatten(kernel)
    num_rounds, num_burnin, thinning = counts

    def point(own: list[Array], begin: FederatedState) -> ArrayTree:
        entries = iter(own)
        whole = [next(entries) if new else x for x, new in zip(leaves, differs, strict=True)]
        chain = partial(
            run_rounds,
            jax.tree.unflatten(treedef, whole),
            data,
            num_rounds=num_rounds,
            thinning=thinning,
            collect=collect,
            capacity=capacity,
            keep_from=num_burnin,
            ahead_bytes=ahead_bytes,
            placement=placement,
        )
        return _over(lambda key, state: chain(key, state), in_turn, keys, begin)

    own = [x for x, new in zip(leaves, differs, strict=True) if new]
    result: tuple[FederatedState, Records] = _over(point, in_turn, own, states)
    return result


def _over(fn: Callable[..., ArrayTree], in_turn: bool, *mapped: ArrayTree) -> ArrayTree:
    if in_turn:
        return jax.lax.map(lambda given: fn(*given), mapped)
    if len(jax.tree.leaves(mapped)[0]) == 1:  # an axis of length one costs a fifth of the speed
        only = fn(*jax.tree.map(lambda leaf: leaf[0], mapped))
        return jax.tree.map(lambda leaf: leaf[None], only)
    return jax.vmap(fn)(*mapped)


def _at_once(group: Group, settings: Settings) -> tuple[int, int]:
    """Return how many kernels and seeds are run at a time.

    Kernels first: they share their draws. In equal parts, so that little is padded.
    """
    program = Program(group.tabulated[0], group.data, group.arrangement)
    # The state before and after a round, one draw, one round's randomness.
    size = 2 * num_bytes(group.example) + settings.num_chains * (
        num_bytes(group.shapes) + program.prepared_bytes(settings.keys(0), group.example)
    )
    fits = max(settings.max_bytes // 2 // max(size, 1), 1)

    def parts(total: int, most: int) -> int:
        return -(-total // -(-total // max(min(most, total), 1)))

    num_points = parts(len(group.kernels), fits)
    return num_points, parts(settings.num_seeds, fits // num_points)
