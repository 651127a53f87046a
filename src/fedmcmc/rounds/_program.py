"""The compiled part of a run: many rounds in one program.

Rounds are prepared in blocks that start at multiples of the block length, wherever a segment starts
or ends. So interrupted and uninterrupted runs compute a round with the same instructions and get
the same numbers, bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from fedmcmc._checks import positive_integer
from fedmcmc.data import FederatedData
from fedmcmc.hierarchy import find_latent_state
from fedmcmc.pytrees import convolutions, largest_of_batch, schedules, trees
from fedmcmc.random import as_key, draw_key, stream_key
from fedmcmc.rounds._layout import (
    CHAIN_AXIS,
    CLIENT_AXIS,
    Layout,
    PlacementLike,
    layout_on_one_device,
    state_specs,
)
from fedmcmc.rounds._simulate import RoundDraws, RoundInfo, prepare_round, run_round
from fedmcmc.streaming import Accumulator
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Cohort,
    FederatedKernel,
    FederatedState,
    as_functions,
    compiled,
    register_dataclass,
    user_position,
)

PREPARED_BYTES = 2**22
"""Memory for random numbers that are drawn in advance, for all chains together."""
MAX_BLOCK = 1024
"""Maximum number of rounds prepared together."""
RECORDED_FIGURES = (
    *("round", "num_active", "bits_up", "bits_down", "gradient_norm"),
    *("num_lost", "num_excluded", "shift", "acceptance"),
)
"""Fields of `RoundInfo` that are recorded, except for empty fields."""

Collect = Callable[[FederatedState, RoundInfo], ArrayTree]
"""Function of the state and the `RoundInfo` of a round whose result is recorded."""
Accumulators = dict[str, Accumulator]
"""Accumulators on the device, by name."""


class Plan(NamedTuple):
    """Rounds that a segment runs and records; all ``[]`` int32."""

    start: Array  # first round of the segment
    stop: Array  # last round plus one
    keep_from: Array  # first round after burn-in
    thinning: Array
    num_kept: Array  # draws kept in earlier segments


class RoundRecord(NamedTuple):
    """Record of one round."""

    draw: ArrayTree
    info: dict[str, Array]
    latents: ArrayTree = ()  # of all clients' groups, if they are recorded


class Records(NamedTuple):
    """Records of `run_rounds`.

    Attributes
    ----------
    draws
        Draws, or the results of `collect`, leaves ``[num_kept, ...]``.
    info
        ``[num_kept]`` each: `round`, `num_active`, `bits_up`, `bits_down`, `gradient_norm`.
    first_bad
        ``[]`` int32, the first round after which the state was not finite, or -1. Rounds that are
        not recorded count.
    bits
        ``[2, 2]`` uint32, sums over all rounds, recorded or not: rows in units of ``2**32`` and of
        1, columns up and down.
    """

    draws: ArrayTree
    info: dict[str, Array]
    first_bad: Array
    bits: Array


class Segment(NamedTuple):
    """Result of a segment; every leaf has a leading chain axis."""

    state: FederatedState
    # Leaves [capacity + 1, ...]; the last slot receives the rounds that are not kept. Without
    # capacity there are no leaves.
    records: RoundRecord
    bits: Array  # [2, 2] uint32, rows in units of 2**32 and of 1, columns up and down
    first_bad: Array  # [] int32, the first non-finite round, or -1
    accumulator_states: dict[str, ArrayTree]


@register_dataclass
@dataclass(frozen=True)
class Program:
    """Computation of rounds: a kernel, its data, the layout of clients, and the records.

    Most methods take the keys of all chains ``[num_chains]`` and a state with a leading chain axis,
    which may consist of shapes.
    """

    kernel: FederatedKernel
    data: FederatedData
    layout: Layout
    collect: Collect | None = field(default=None, metadata={"static": True})
    keeps_latents: bool = field(default=False, metadata={"static": True})

    def prepared_bytes(self, keys: Array, state: FederatedState) -> int:
        """Return the size of the random numbers of one round of one chain."""
        prepared = _prepare_first.trace(self, keys, state).out_info
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(prepared))

    def block_length(
        self, keys: Array, state: FederatedState, num_bytes: int = PREPARED_BYTES
    ) -> int:
        """Return the number of rounds prepared together, which depends only on shapes."""
        size = self.prepared_bytes(keys, state) * keys.shape[0]
        return int(min(max(num_bytes // max(size, 1), 1), MAX_BLOCK))

    def traced_round(self, keys: Array, state: FederatedState) -> Any:
        """Return the trace of one round of one chain, with its `jaxpr` and shapes of its record."""
        return _run_first.trace(self, keys, state)

    def record_shapes(self, keys: Array, state: FederatedState) -> RoundRecord:
        """Return the shapes of the record of one round of one chain."""
        shapes: RoundRecord = self.traced_round(keys, state).out_info
        return shapes

    def needs_canonical(self, keys: Array, state: FederatedState) -> bool:
        """Return true if a round has convolutions on a CPU, where loops make them slow."""
        is_traced = isinstance(keys, jax.core.Tracer)
        platforms = {jax.default_backend()} if is_traced else {d.platform for d in keys.devices()}
        return platforms == {"cpu"} and convolutions.holds_convolution(
            self.traced_round(keys, state).jaxpr
        )

    def one_by_one(self) -> "Program":
        """Return the program that computes clients and chains one by one."""
        layout = replace(self.layout, clients_at_a_time=1, chains_one_by_one=True)
        return replace(self, layout=layout)

    def prepare(self, rng_key: Array, like: Broadcast, round_: Array) -> tuple[Cohort, RoundDraws]:
        """Draw all random numbers of a round."""
        return prepare_round(self.kernel, self.data, self.layout, rng_key, like, round_)

    def run(
        self, rng_key: Array, state: FederatedState, cohort: Cohort, draws: RoundDraws
    ) -> tuple[FederatedState, RoundInfo, RoundRecord]:
        """Run a prepared round, and return its record in addition."""
        state, info = run_round(self.kernel, self.data, self.layout, state, cohort, draws)
        if self.collect is None:
            draw = self.kernel.draw(draw_key(rng_key, info.round), state)
            draw = user_position(self.kernel, draw)
        else:
            draw = self.collect(state, info)
        figures = {name: getattr(info, name) for name in RECORDED_FIGURES}
        figures = {name: x for name, x in figures.items() if not trees.is_empty(x)}
        local_states = find_latent_state(state.clients) if self.keeps_latents else None
        latents = () if local_states is None else local_states.latents
        return state, info, RoundRecord(draw, figures, latents)


# These two are only traced for their shapes; jit caches the trace.
@compiled
def _prepare_first(program: Program, keys: Array, state: FederatedState) -> ArrayTree:
    broadcast = jax.tree.map(lambda leaf: leaf[0], state.broadcast)
    return program.prepare(keys[0], broadcast, broadcast.round)


@compiled
def _run_first(program: Program, keys: Array, state: FederatedState) -> RoundRecord:
    key, chain = keys[0], jax.tree.map(lambda leaf: leaf[0], state)
    prepared = program.prepare(key, chain.broadcast, chain.broadcast.round)
    return program.run(key, chain, *prepared)[2]


def first_accumulator_states(
    shapes: RoundRecord, num_chains: int, accumulators: Accumulators
) -> dict[str, ArrayTree]:
    """Return the initial states of the accumulators, leaves ``[num_chains, ...]``."""
    zeros = trees.zeros_like(shapes.draw)
    states = {name: accumulator.init(zeros) for name, accumulator in accumulators.items()}
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_chains, *leaf.shape)), states)


def run_rounds(
    kernel: FederatedKernel,
    data: FederatedData,
    rng_key: Array,
    state: FederatedState,
    num_rounds: int | Array,
    *,
    thinning: int | Array = 1,
    collect: Collect | None = None,
    placement: PlacementLike | None = None,
    capacity: int | None = None,
    keep_from: int | Array | None = None,
    ahead_bytes: int = PREPARED_BYTES,
) -> tuple[FederatedState, Records]:
    """Run rounds of one chain, as a pure function that can be compiled and mapped.

    It returns the last state, and `Records` of ``num_rounds // thinning`` draws, or of `capacity`
    entries. `fedmcmc.sample` is a loop on the host around the same program, with the same numbers
    for the same state and key (``fold_in(rng_key, c)`` for chain ``c``).

    Parameters
    ----------
    kernel, data, rng_key, state
        Federated kernel, all rows, key of the chain, and initial state (``kernel.init(rng_key,
        position, data)`` or a later state). States under `jax.vmap` must be in one round.
    num_rounds, thinning
        Number of rounds, and number of rounds per draw, the last of which is kept; both static
        unless `capacity` is given.
    collect, placement
        See `fedmcmc.sample`; static, and on one device.
    capacity
        Static maximum number of draws, so that one program runs any number of rounds. Unused
        entries are zero, and draws beyond the capacity are dropped. Schedules are not tabulated.
    keep_from
        With `capacity`: round from which `thinning` counts, by default the round of `state`.
    ahead_bytes
        Static memory per chain for random numbers drawn in advance.

    Raises
    ------
    ValueError
        If a count is not positive, `keep_from` lacks `capacity`, or `placement` needs several
        devices.

    Examples
    --------
    >>> import jax, fedmcmc, jax.numpy as jnp
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> kernel, key = fedmcmc.lsd(posterior, step_size=0.01), jax.random.key(0)
    >>> state = kernel.init(key, jnp.array(0.0), data)
    >>> fedmcmc.rounds.run_rounds(kernel, data, key, state, 100, thinning=5)[1].draws.shape
    (20,)
    """
    kernel, key = as_functions(kernel), as_key(rng_key)
    layout = layout_on_one_device(placement, kernel, data)
    data = data.pooled() if kernel.participation.pooled else data
    # Without a batch axis, one loop serves all chains that are mapped over.
    start = largest_of_batch(state.broadcast.round)
    longest = MAX_BLOCK
    if capacity is None:
        if keep_from is not None:
            raise ValueError("keep_from needs capacity=, the maximum number of draws.")
        longest = positive_integer(num_rounds, "num_rounds")
        capacity = longest // positive_integer(thinning, "thinning")
        kernel = schedules.tabulate(kernel, start, longest)
    keep_from = start if keep_from is None else jnp.asarray(keep_from, jnp.int32)
    program = Program(kernel, data, layout, collect)
    chains: tuple[Array, FederatedState] = jax.tree.map(lambda leaf: leaf[None], (key, state))
    shapes = program.record_shapes(*chains)
    thinning = jnp.asarray(thinning, jnp.int32)
    num_kept = jnp.maximum(start - keep_from, 0) // thinning
    plan = Plan(start, start + num_rounds, keep_from, thinning, num_kept)
    block = min(program.block_length(*chains, ahead_bytes), longest)
    run: Any = partial(_run_chain, block=block, capacity=capacity)
    if program.needs_canonical(*chains):
        program, run = program.one_by_one(), convolutions.canonical(run)
    segment: Segment = run(program, plan, {}, shapes, key, state, {})
    records = jax.tree.map(lambda leaf: leaf[:-1], segment.records)
    return segment.state, Records(records.draw, records.info, segment.first_bad, segment.bits)


@compiled(static_argnames=("block", "capacity", "canonical"))
def run_segment(
    program: Program,
    keys: Array,
    state: FederatedState,
    plan: Plan,
    accumulators: Accumulators,
    accumulator_states: dict[str, ArrayTree],
    *,
    block: int,
    capacity: int,
    canonical: bool,
) -> Segment:
    """Run the rounds of `plan` for all chains.

    `keys`, `state` and `accumulator_states` have a leading chain axis. A `capacity` of zero keeps
    no draws. With `canonical` (`Program.needs_canonical`), convolutions are rewritten, and clients
    and chains run one after the other. With a mesh, each device runs its own chains and
    clients.
    """
    run = partial(_run_chains, block=block, capacity=capacity, canonical=canonical)
    arguments = (program, keys, state, plan, accumulators, accumulator_states)
    layout = program.layout
    mesh = layout.chain_mesh if layout.mesh_layout is None else layout.mesh_layout.mesh
    if mesh is None:
        return run(*arguments)
    replicated: Any = PartitionSpec()
    chains: Any = PartitionSpec(CHAIN_AXIS if CHAIN_AXIS in mesh.shape else None)
    states: Any = chains
    programs: Any = replicated
    if layout.mesh_layout is not None:
        states = state_specs(mesh)
        programs = jax.tree.map(lambda leaf: replicated, program)
        rows = jax.tree.map(lambda leaf: PartitionSpec(CLIENT_AXIS), program.data.rows)
        programs = replace(programs, data=replace(programs.data, rows=rows))
    parallel = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(programs, chains, states, replicated, replicated, chains),
        out_specs=Segment(states, chains, chains, chains, chains),
        check_vma=False,
    )
    result: Segment = parallel(*arguments)
    return result


def _run_chains(
    program: Program,
    keys: Array,
    state: FederatedState,
    plan: Plan,
    accumulators: Accumulators,
    accumulator_states: dict[str, ArrayTree],
    *,
    block: int,
    capacity: int,
    canonical: bool,
) -> Segment:
    shapes = program.record_shapes(keys, state) if capacity else RoundRecord((), {})
    if canonical:
        program = program.one_by_one()  # a batch of clients would make convolutions grouped
    chain = partial(_run_chain, program, plan, accumulators, shapes, block=block, capacity=capacity)
    run = convolutions.canonical(chain) if canonical else chain
    arguments = (keys, state, accumulator_states)
    if program.layout.chains_one_by_one:
        return jax.lax.map(lambda entry: run(*entry), arguments)
    if keys.shape[0] == 1:
        # With an axis of length one, small models run 20 percent slower.
        segment = run(*jax.tree.map(lambda leaf: leaf[0], arguments))
        return jax.tree.map(lambda leaf: leaf[None], segment)
    return jax.vmap(run)(*arguments)


def _run_chain(
    program: Program,
    plan: Plan,
    accumulators: Accumulators,
    shapes: RoundRecord,
    key: Array,
    state: FederatedState,
    accumulator_states: dict[str, ArrayTree],
    *,
    block: int,
    capacity: int,
) -> Segment:
    """Run the rounds of `plan` for one chain; `shapes` are the shapes of a round's record."""
    records = jax.tree.map(lambda s: jnp.zeros((capacity + 1, *s.shape), s.dtype), shapes)
    first_bad = jnp.full((), -1, jnp.int32)
    bits = jnp.zeros((2, 2), jnp.uint32)
    initial = Segment(state, records, bits, first_bad, accumulator_states)

    def run_and_record(
        round_: Array, slot: Array, prepared: tuple[Cohort, RoundDraws], carry: Segment
    ) -> Segment:
        # The round number in the state has a chain axis. The loop's has none, so that schedules
        # and conditions on the round are evaluated once for all chains.
        broadcast = carry.state.broadcast._replace(round=round_)
        state, info, new = program.run(key, carry.state._replace(broadcast=broadcast), *prepared)
        records, accumulated = carry.records, carry.accumulator_states
        if capacity:
            records = jax.tree.map(
                lambda buffer, value: buffer.at[slot].set(value, mode="promise_in_bounds"),
                records,
                new,
            )
        if accumulators:
            index, keeps = _kept(plan, round_)
            # All chains are in the same round, so this remains a branch under `vmap`.
            accumulated = jax.lax.cond(
                keeps,
                lambda before: update_accumulators(accumulators, key, round_, index, new, before),
                lambda before: before,
                accumulated,
            )
        bits = _add_bits(carry.bits, info.bits_up, info.bits_down)
        is_first_bad = (carry.first_bad < 0) & ~trees.all_finite(state.broadcast)
        first_bad = jnp.where(is_first_bad, round_, carry.first_bad)
        return Segment(state, records, bits, first_bad, accumulated)

    def run_block(b: Array, carry: Segment) -> Segment:
        begin = jnp.asarray(b * block, jnp.int32)  # with jax.disable_jit, `b` is an int
        rounds = begin + jnp.arange(block, dtype=jnp.int32)
        prepared = jax.vmap(lambda r: program.prepare(key, state.broadcast, r))(rounds)
        index, keeps = _kept(plan, rounds)
        slots = jnp.where(keeps, jnp.minimum(index - plan.num_kept, capacity), capacity)

        def run_one(number: Array, carry: Segment) -> Segment:
            round_ = jnp.asarray(number, jnp.int32)
            slot, draws = jax.tree.map(lambda leaf: leaf[round_ - begin], (slots, prepared))
            return run_and_record(round_, slot, draws, carry)

        low, high = jnp.maximum(plan.start, begin), jnp.minimum(plan.stop, begin + block)
        return jax.lax.fori_loop(low, high, run_one, carry)

    first_block, last_block = plan.start // block, (plan.stop + block - 1) // block
    return jax.lax.fori_loop(first_block, last_block, run_block, initial)


def _kept(plan: Plan, round_: Array) -> tuple[Array, Array]:
    """Return the indices of the draws after rounds ``[...]``, and true for rounds with a draw."""
    ahead = round_ - plan.keep_from
    return ahead // plan.thinning, (ahead >= 0) & ((ahead + 1) % plan.thinning == 0)


def update_accumulators(
    accumulators: Accumulators,
    rng_key: Array,
    round_: Array,
    index: Array,
    new: RoundRecord,
    before: dict[str, ArrayTree],
) -> dict[str, ArrayTree]:
    """Return the accumulators' states, updated with one more draw."""
    base = stream_key(rng_key, round_)
    return {
        name: accumulators[name].update(jax.random.fold_in(base, i), index, new.draw, state)
        for i, (name, state) in enumerate(sorted(before.items()))
    }


def _add_bits(total: Array, up: Array, down: Array) -> Array:
    # Exact without 64-bit integers: a sum of two words overflowed if it is below one of them.
    new = jnp.stack([_words(up), _words(down)], axis=1)
    low = total[1] + new[1]
    return jnp.stack([total[0] + new[0] + (low < new[1]).astype(jnp.uint32), low])


def _words(bits: Array) -> Array:
    if jnp.issubdtype(bits.dtype, jnp.integer):
        return jnp.stack([jnp.uint32(0), bits.astype(jnp.uint32)])
    high = jnp.floor(bits / 2**32)
    return jnp.stack([high, bits - high * 2**32]).astype(jnp.uint32)
