"""The compiled part of a run: many rounds in one program.

Rounds are prepared in blocks that lie at multiples of the block's length, wherever a segment
starts or ends. A round is thus computed by the same instructions in an interrupted run and in an
uninterrupted one, and its numbers are the same to the last bit.
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
from fedmcmc._types import (
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
from fedmcmc.data import FederatedData
from fedmcmc.hierarchy import locals_in
from fedmcmc.pytrees import convolutions, largest_of_batch, schedules, trees
from fedmcmc.random import as_key, draw_key, stream_key
from fedmcmc.rounds._arrangement import (
    AXIS,
    CHAINS,
    Arrangement,
    PlacementLike,
    arranged,
    state_specs,
)
from fedmcmc.rounds._simulate import RoundDraws, RoundInfo, prepare_round, run_round
from fedmcmc.streaming import Accumulator

PREPARED_BYTES = 2**22
"""Memory for the draws of the rounds that are prepared ahead, all chains together."""
MAX_BLOCK = 1024
"""Rounds prepared ahead at most."""

Collect = Callable[[FederatedState, RoundInfo], ArrayTree]
"""What is kept of a round, beside draws: a function of its state and its counts."""
Accumulators = dict[str, Accumulator]
"""What takes in the draws of a run on the device, by name."""


class Plan(NamedTuple):
    """Which rounds a segment runs and keeps; all ``[]`` int32."""

    first: Array  # the segment's first round
    last: Array  # one behind its last round
    keep_from: Array  # the first round after burn-in
    thinning: Array
    num_kept: Array  # draws kept in earlier segments


class RoundRecord(NamedTuple):
    """What is kept of a round."""

    draw: ArrayTree
    info: dict[str, Array]
    latents: ArrayTree = ()  # of all clients' groups, where they are kept


class Records(NamedTuple):
    """What `run_rounds` keeps.

    Attributes
    ----------
    draws
        Draws, or what `collect` returned, leaves ``[num_kept, ...]``.
    info
        ``[num_kept]`` each: `round`, `num_active`, `bits_up`, `bits_down`, `gradient_norm`.
    first_bad
        ``[]`` int32, the first round, kept or not, after which the state was not finite, or -1.
    bits
        ``[2, 2]`` uint32, sums over all rounds, kept or not: rows in units of ``2**32`` and of 1,
        columns up and down.
    """

    draws: ArrayTree
    info: dict[str, Array]
    first_bad: Array
    bits: Array


class Segment(NamedTuple):
    """What a segment returns, every leaf with a leading chain axis."""

    state: FederatedState
    # Leaves [capacity + 1, ...]; the last slot takes what is not kept; empty if none is.
    records: RoundRecord
    bits: Array  # [2, 2] uint32, rows in units of 2**32 and of 1, columns up and down
    first_bad: Array  # [] int32, the first non-finite round, or -1
    accumulator_states: dict[str, ArrayTree]  # the accumulators' states


@register_dataclass
@dataclass(frozen=True)
class Program:
    """What rounds compute: a kernel, its data, how clients are computed, and what is kept.

    The methods take all chains' keys ``[num_chains]`` and a state with a leading chain axis, of
    which shapes are enough.
    """

    kernel: FederatedKernel
    data: FederatedData
    arrangement: Arrangement
    collect: Collect | None = field(default=None, metadata={"static": True})
    keeps_latents: bool = field(default=False, metadata={"static": True})

    def prepared_bytes(self, keys: Array, state: FederatedState) -> int:
        """Return the size of what is drawn for one round of one chain."""
        prepared = _prepare_first.trace(self, keys, state).out_info
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(prepared))

    def block_length(
        self, keys: Array, state: FederatedState, num_bytes: int = PREPARED_BYTES
    ) -> int:
        """Return how many rounds are prepared at a time; depends on shapes alone."""
        size = self.prepared_bytes(keys, state) * keys.shape[0]
        return int(min(max(num_bytes // max(size, 1), 1), MAX_BLOCK))

    def traced_round(self, keys: Array, state: FederatedState) -> Any:
        """Return the trace of one round of one chain: its `jaxpr`, and the shapes of its record."""
        return _run_first.trace(self, keys, state)

    def record_shapes(self, keys: Array, state: FederatedState) -> RoundRecord:
        """Return the shapes of what one round of one chain keeps."""
        shapes: RoundRecord = self.traced_round(keys, state).out_info
        return shapes

    def needs_canonical(self, keys: Array, state: FederatedState) -> bool:
        """Return whether a round holds convolutions and runs where a loop makes those slow."""
        traced = isinstance(keys, jax.core.Tracer)
        on = {jax.default_backend()} if traced else {device.platform for device in keys.devices()}
        return on == {"cpu"} and convolutions.holds_convolution(
            self.traced_round(keys, state).jaxpr
        )

    def one_by_one(self) -> "Program":
        """Return the program that computes clients one by one."""
        return replace(self, arrangement=replace(self.arrangement, clients_at_a_time=1))

    def prepare(self, rng_key: Array, like: Broadcast, round_: Array) -> tuple[Cohort, RoundDraws]:
        """Draw all that is random in a round."""
        return prepare_round(self.kernel, self.data, self.arrangement, rng_key, like, round_)

    def run(
        self, rng_key: Array, state: FederatedState, cohort: Cohort, draws: RoundDraws
    ) -> tuple[FederatedState, RoundInfo, RoundRecord]:
        """Run a round that was prepared, and return what is kept of it besides."""
        state, info = run_round(self.kernel, self.data, self.arrangement, state, cohort, draws)
        if self.collect is None:
            draw = self.kernel.draw(draw_key(rng_key, info.round), state)
            draw = user_position(self.kernel, draw)
        else:
            draw = self.collect(state, info)
        names = ("round", "num_active", "bits_up", "bits_down", "gradient_norm")
        figures = {name: getattr(info, name) for name in names}
        of_some = ("num_lost", "num_excluded", "shift", "acceptance")
        some = {name: getattr(info, name) for name in of_some}
        figures |= {name: figure for name, figure in some.items() if not trees.is_empty(figure)}
        found = locals_in(state.clients) if self.keeps_latents else None
        latents = () if found is None else found.latents
        return state, info, RoundRecord(draw, figures, latents)


# Never run: traced for their shapes, and jit remembers the trace.
@compiled
def _prepare_first(program: Program, keys: Array, state: FederatedState) -> ArrayTree:
    broadcast = jax.tree.map(lambda leaf: leaf[0], state.broadcast)
    return program.prepare(keys[0], broadcast, broadcast.round)


@compiled
def _run_first(program: Program, keys: Array, state: FederatedState) -> RoundRecord:
    key, first = keys[0], jax.tree.map(lambda leaf: leaf[0], state)
    prepared = program.prepare(key, first.broadcast, first.broadcast.round)
    return program.run(key, first, *prepared)[2]


def first_accumulator_states(
    shapes: RoundRecord, num_chains: int, accumulators: Accumulators
) -> dict[str, ArrayTree]:
    """Return the accumulators' first states, leaves ``[num_chains, ...]``."""
    zeros = trees.zeros_like(shapes.draw)
    first = {name: accumulator.init(zeros) for name, accumulator in accumulators.items()}
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_chains, *leaf.shape)), first)


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
    """Run rounds of one chain: a pure function, to be compiled, mapped and composed.

    `fedmcmc.sample` is a loop on the host around the same program, with the same numbers for the
    same key and state.

    Parameters
    ----------
    kernel
        A federated kernel.
    data
        Every client's rows.
    rng_key
        Key of the chain, from which each round derives its own: that of chain ``c`` of
        `fedmcmc.sample` is ``fold_in(rng_key, c)``.
    state
        Where to start: ``kernel.init(rng_key, position, data)``, or the state that another call
        returned. Under `jax.vmap` all states are in the same round.
    num_rounds
        Static, unless `capacity` is given: then it may be traced.
    thinning
        Of every `thinning` rounds the last is kept; static or not as `num_rounds`.
    collect
        ``(state, RoundInfo) -> pytree``, what is kept of a round; by default the kernel's draw.
    placement
        Static. A `fedmcmc.Placement` on one device: how many clients are computed together
        (`clients_at_a_time`), and in how many groups of similar size (`num_buckets`).
    capacity
        Static: how many rounds the records have room for, so that one program runs any number of
        rounds. Places behind those that are kept are zero, and rounds beyond are not kept.
        Schedules are called in each round then, not tabulated before.
    keep_from
        With `capacity`: the first round of the first `thinning`, by default that of `state`. A
        later one makes the rounds before burn-in. An earlier one goes on with a run that began
        there, whatever the round that it was cut at.
    ahead_bytes
        Static: memory for the random numbers of coming rounds, which are drawn together. It is that
        of one chain, so give less where many keys are mapped over.

    Returns
    -------
    state
        After the last round.
    records
        `Records` of ``num_rounds // thinning`` rounds, or with `capacity` places.

    Raises
    ------
    ValueError
        If a count is no positive integer, there is `keep_from` without `capacity`, or `placement`
        asks for more than one device.

    Examples
    --------
    Four step sizes and two chains in one program:

    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> @jax.jit
    ... def run(step_size, key):
    ...     kernel = fedmcmc.lsd(posterior, step_size=step_size)
    ...     state = kernel.init(key, jnp.array(0.0), data)
    ...     return fedmcmc.rounds.run_rounds(kernel, data, key, state, 100, thinning=5)[1].draws
    >>> steps, keys = jnp.geomspace(0.01, 0.08, 4), jax.random.split(jax.random.key(0), 2)
    >>> jax.vmap(jax.vmap(run, in_axes=(None, 0)), in_axes=(0, None))(steps, keys).shape
    (4, 2, 20)
    """
    kernel, key = as_functions(kernel), as_key(rng_key)
    arrangement = arranged(placement, kernel, data)
    data = data.pooled() if kernel.participation.pooled else data
    # One loop for all chains that are mapped over, whose rounds are the same.
    first = largest_of_batch(state.broadcast.round)
    longest = MAX_BLOCK
    if capacity is None:
        if keep_from is not None:
            raise ValueError("keep_from needs capacity, the number of rounds to have room for.")
        longest = positive_integer(num_rounds, "num_rounds")
        capacity = longest // positive_integer(thinning, "thinning")
        kernel = schedules.tabulate(kernel, first, longest)
    keep_from = first if keep_from is None else jnp.asarray(keep_from, jnp.int32)
    program = Program(kernel, data, arrangement, collect)
    chains: tuple[Array, FederatedState] = jax.tree.map(lambda leaf: leaf[None], (key, state))
    shapes = program.record_shapes(*chains)
    thinning = jnp.asarray(thinning, jnp.int32)
    num_kept = jnp.maximum(first - keep_from, 0) // thinning
    plan = Plan(first, first + num_rounds, keep_from, thinning, num_kept)
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
    no draws. With `canonical`, which `Program.needs_canonical` tells, convolutions are rewritten,
    and clients and chains run one after the other.

    Where the arrangement has a layout, each device of its mesh runs its own chains and clients.
    """
    run = partial(_run_chains, block=block, capacity=capacity, canonical=canonical)
    arguments = (program, keys, state, plan, accumulators, accumulator_states)
    layout = program.arrangement.layout
    if layout is None:
        return run(*arguments)
    whole = PartitionSpec()
    chains: Any = PartitionSpec(CHAINS if CHAINS in layout.mesh.shape else None)
    states = state_specs(layout.mesh)
    everywhere = jax.tree.map(lambda leaf: whole, program)
    rows = jax.tree.map(lambda leaf: PartitionSpec(AXIS), program.data.rows)
    programs = replace(everywhere, data=replace(everywhere.data, rows=rows))
    parallel = jax.shard_map(
        run,
        mesh=layout.mesh,
        in_specs=(programs, chains, states, whole, whole, chains),
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
        program = program.one_by_one()  # batched over positions, convolutions become grouped ones
    chain = partial(_run_chain, program, plan, accumulators, shapes, block=block, capacity=capacity)
    if canonical:
        run = convolutions.canonical(chain)
        return jax.lax.map(lambda arguments: run(*arguments), (keys, state, accumulator_states))
    if keys.shape[0] == 1:
        # An axis of length one costs a fifth of the speed on small models.
        only = chain(keys[0], *jax.tree.map(lambda leaf: leaf[0], (state, accumulator_states)))
        return jax.tree.map(lambda leaf: leaf[None], only)
    return jax.vmap(chain)(keys, state, accumulator_states)


def _run_chain(
    program: Program,
    plan: Plan,
    accumulators: Accumulators,
    shapes: RoundRecord,
    key: Array,
    start: FederatedState,
    before: dict[str, ArrayTree],
    *,
    block: int,
    capacity: int,
) -> Segment:
    """Run the rounds of `plan` for one chain; `shapes` are those of what a round keeps."""
    records = jax.tree.map(lambda s: jnp.zeros((capacity + 1, *s.shape), s.dtype), shapes)
    none = jnp.full((), -1, jnp.int32)
    first = Segment(start, records, jnp.zeros((2, 2), jnp.uint32), none, before)

    def run_block(b: Array, carry: Segment) -> Segment:
        begin = jnp.asarray(b * block, jnp.int32)  # a loop that is not compiled counts in Python
        rounds = begin + jnp.arange(block, dtype=jnp.int32)
        prepared = jax.vmap(lambda r: program.prepare(key, start.broadcast, r))(rounds)

        def one_round(number: Array, carry: Segment) -> Segment:
            round_ = jnp.asarray(number, jnp.int32)
            drawn = jax.tree.map(lambda leaf: leaf[round_ - begin], prepared)
            return _advance(program, plan, accumulators, capacity, key, round_, drawn, carry)

        low, high = jnp.maximum(plan.first, begin), jnp.minimum(plan.last, begin + block)
        return jax.lax.fori_loop(low, high, one_round, carry)

    first_block, last_block = plan.first // block, (plan.last + block - 1) // block
    return jax.lax.fori_loop(first_block, last_block, run_block, first)


def _advance(
    program: Program,
    plan: Plan,
    accumulators: Accumulators,
    capacity: int,
    key: Array,
    round_: Array,
    prepared: tuple[Cohort, RoundDraws],
    carry: Segment,
) -> Segment:
    # The state's own round number has a chain axis; with the loop's, which has none, a schedule or
    # a condition on the round stays one for all chains.
    broadcast = carry.state.broadcast._replace(round=round_)
    state, info, new = program.run(key, carry.state._replace(broadcast=broadcast), *prepared)
    ahead = round_ - plan.keep_from
    keeps = (ahead >= 0) & ((ahead + 1) % plan.thinning == 0)
    records = carry.records
    if capacity:
        slot = jnp.where(keeps, ahead // plan.thinning - plan.num_kept, capacity)
        records = jax.tree.map(lambda buffer, value: buffer.at[slot].set(value), records, new)
    accumulator_states = carry.accumulator_states
    if accumulators:
        # All chains are in the same round, so that this stays a branch under `vmap`.
        accumulator_states = jax.lax.cond(
            keeps,
            lambda before: take_in(accumulators, key, round_, ahead // plan.thinning, new, before),
            lambda before: before,
            accumulator_states,
        )
    bits = _add_bits(carry.bits, info.bits_up, info.bits_down)
    bad = (carry.first_bad < 0) & ~trees.all_finite(state.broadcast)
    return Segment(
        state, records, bits, jnp.where(bad, round_, carry.first_bad), accumulator_states
    )


def take_in(
    accumulators: Accumulators,
    rng_key: Array,
    round_: Array,
    index: Array,
    new: RoundRecord,
    before: dict[str, ArrayTree],
) -> dict[str, ArrayTree]:
    """Return the accumulators' states with one draw more."""
    base = stream_key(rng_key, round_)
    return {
        name: accumulators[name].update(jax.random.fold_in(base, i), index, new.draw, state)
        for i, (name, state) in enumerate(sorted(before.items()))
    }


def _add_bits(total: Array, up: Array, down: Array) -> Array:
    # Exact without 64-bit integers: a sum of two words that is below one of them has overflowed.
    new = jnp.stack([_words(up), _words(down)], axis=1)
    low = total[1] + new[1]
    return jnp.stack([total[0] + new[0] + (low < new[1]).astype(jnp.uint32), low])


def _words(bits: Array) -> Array:
    if jnp.issubdtype(bits.dtype, jnp.integer):
        return jnp.stack([jnp.uint32(0), bits.astype(jnp.uint32)])
    high = jnp.floor(bits / 2**32)
    return jnp.stack([high, bits - high * 2**32]).astype(jnp.uint32)
