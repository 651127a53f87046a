"""Secure sums: messages as integers modulo 2^64, which can be added under masks.

A simulation adds the integers without masks. Masks cancel in the sum of a deployed round, whose
total therefore has the same bits.
"""

import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect
from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    FederatedKernel,
    FederatedState,
    Federation,
    Participation,
    Phase,
    Sender,
    SetupPhase,
    StepInfo,
    Traits,
    memory_of,
    register_dataclass,
)
from fedmcmc.compression import WORD_BITS, Grid, Limbs, Word, carry, limbs
from fedmcmc.gradients import importance
from fedmcmc.pytrees import trees
from fedmcmc.transforms._compressed import Compressed
from fedmcmc.transforms._wrapping import WrappedKernel, WrappedPhase

FEWEST_SITES = 3
"""Of two, each subtracts its own message from the total and has the other's."""


class Counts(NamedTuple):
    """How many messages were out of the ordinary; who sent them, nobody learns.

    Attributes
    ----------
    saturated
        Messages with a number beyond the range, which is sent as its end, or with none at all.
    lost
        Messages that were not finite or of no use, in place of which zeros are sent.
    """

    saturated: ArrayTree
    lost: ArrayTree


class Words(NamedTuple):
    """A message as integers modulo 2^64, or a sum of such.

    Attributes
    ----------
    numbers
        Shaped as the message: a `compression.Word` for each array as it crosses, and a
        `compression.Limbs` as it is summed.
    counts
        `Counts` in two words.
    """

    numbers: ArrayTree
    counts: Counts


class _Server(NamedTuple):
    kernel: ArrayTree
    counts: Counts  # [] int32 each, of all rounds


@runtime_checkable
class Ranged(Protocol):
    """Part of a message with numbers that may lie outside the range of a secure sum.

    A log likelihood of minus infinity is such a number. Numbers outside the range make a secure sum
    useless, unless the message has a number within the range that stands for them.
    """

    def to_range(self, limit: float) -> Any:
        """Return the message with numbers up to `limit` in absolute value."""

    def from_range(self, limit: float) -> Any:
        """Return a sum of what `to_range` returned as the server reads any sum of messages."""


def _to_range(message: ArrayTree, limit: float) -> ArrayTree:
    return jax.tree.map(
        lambda node: node.to_range(limit) if isinstance(node, Ranged) else node,
        message,
        is_leaf=lambda node: isinstance(node, Ranged),
    )


def _from_range(total: ArrayTree, limit: float) -> ArrayTree:
    return jax.tree.map(
        lambda node: node.from_range(limit) if isinstance(node, Ranged) else node,
        total,
        is_leaf=lambda node: isinstance(node, Ranged),
    )


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class _Summed(WrappedPhase):
    """A phase of a kernel whose messages are words."""

    inner: Phase
    grid: Grid
    weighted: bool = field(metadata={"static": True})  # messages by one over the probability

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[Words, ArrayTree, StepInfo]:
        inner = self.inner
        code, kept, info = inner.step(draws, broadcast, client_state, client)
        # Codes do not add up: the client itself decodes, and sends what the server would read.
        like = inner.message_like(trees.shapes_of(broadcast))
        message = inner.decode(code, client, memory_of(inner, client_state), like)
        message = _to_range(message, self.grid.most)
        if self.weighted:
            message = importance(client, message)
        usable = trees.all_finite(message)
        if not trees.is_empty(info.usable):
            usable = usable & info.usable

        def word_of(leaf: Array) -> Word:
            wide = trees.widen(leaf)
            most = trees.cast(self.grid.most, wide)
            return self.grid.encode(jnp.where(usable, jnp.clip(wide, -most, most), 0))

        counts = Counts(~_all_within(message, self.grid.most), ~usable)
        words = Words(jax.tree.map(word_of, message), jax.tree.map(_small_word, counts))
        num_words = trees.num_elements(message) + len(counts)
        bits = jnp.asarray(WORD_BITS * num_words, jnp.int32)
        return words, kept, info._replace(bits=bits, usable=usable)

    def message_like(self, like: Broadcast) -> Words:
        return self._words_like(like, Limbs)

    def code_like(self, like: Broadcast) -> Words:
        return self._words_like(like, Word)

    def _words_like(self, like: Broadcast, kind: type[Limbs] | type[Word]) -> Words:
        def parts(leaf: Any) -> Limbs | Word:
            part: Any = jax.ShapeDtypeStruct(leaf.shape, jnp.uint32)
            return kind(*[part] * len(kind._fields))

        count = parts(jax.ShapeDtypeStruct((), jnp.uint32))
        numbers = jax.tree.map(parts, self.inner.message_like(like))
        return Words(numbers, Counts(count, count))

    def decode(
        self, code: Words, sender: Sender | Client, memory: ArrayTree, like: ArrayTree
    ) -> Words:
        words: Words = jax.tree.map(limbs, code, is_leaf=lambda node: isinstance(node, Word))
        return words

    @property
    def server_memory(self) -> None:
        """None: the words that the server reads are relative to no memory."""
        return None

    def read(self, total: Words, broadcast: Broadcast) -> ArrayTree:
        """Return the sum of the kernel's own messages that words stand for."""
        like = self.inner.message_like(trees.shapes_of(broadcast))
        found = jax.tree.map(
            lambda leaf, word: self.grid.decode(word, leaf.dtype), like, total.numbers
        )
        return _from_range(found, self.grid.most)

    def commit(self, message: Words, broadcast: Broadcast, client_state: ArrayTree) -> ArrayTree:
        return self.inner.commit(self.read(message, broadcast), broadcast, client_state)

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: _Server, total: Words
    ) -> tuple[Broadcast, _Server, ArrayTree]:
        moved, kernel_state, info = self.inner.aggregate(
            rng_key, broadcast, server_state.kernel, self.read(total, broadcast)
        )
        counts = trees.add(server_state.counts, _read_counts(total))
        # A sum of numbers that were cut off is none: like one that is not finite it ends a run.
        position = jax.tree.map(
            lambda leaf: (
                jnp.where(counts.saturated > 0, trees.cast(jnp.nan, leaf), leaf)
                if jnp.issubdtype(leaf.dtype, jnp.floating)
                else leaf
            ),
            moved.position,
        )
        return moved._replace(position=position), _Server(kernel_state, counts), info


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class _SummedSetup(_Summed, SetupPhase):
    """A setup phase of a kernel whose messages are words."""

    sums_rows = False  # the message of each client is rounded


def _refuse_compressor(kernel: FederatedKernel, compressor: Any) -> None:
    raise ValueError(
        "Codes cannot be added under masks, so nothing can follow a secure sum: compress the "
        "kernel first, secure_sum(compress(kernel, compressor)), which sends decoded numbers at "
        "64 bits each."
    )


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Secured(WrappedKernel):
    """A kernel whose messages are integers that masks can hide; see `secure_sum`."""

    kernel: FederatedKernel
    participation: Participation = field(repr=False)
    grid: Grid

    @property
    def traits(self) -> Traits:  # type: ignore[override]  # an attribute elsewhere
        return replace(self.kernel.traits, check_compressor=_refuse_compressor)

    @property
    def name(self) -> str:
        return f"secure_sum({self.kernel.name})"

    @cached_property
    def wrapped(self) -> tuple[_Summed, ...]:
        weighted = self.kernel.participation.weighted
        return tuple(_Summed(phase, self.grid, weighted) for phase in self.kernel.phases)

    @cached_property
    def setup(self) -> tuple[_SummedSetup, ...]:
        return tuple(_SummedSetup(phase, self.grid, weighted=False) for phase in self.kernel.setup)

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[Words, ...],
    ) -> tuple[Broadcast, _Server]:
        num = federation.num_clients
        if num < FEWEST_SITES:
            raise ValueError(
                f"A secure sum needs {FEWEST_SITES} clients or more, got {num}: of two, each "
                "subtracts its own message from the total and has the other's."
            )
        self.grid.check(max(num, self.participation.cohort_size or 0))
        first = Broadcast(jnp.zeros((), jnp.int32), position)
        setup = list(zip(self.setup, totals, strict=True))
        sums = tuple(phase.read(total, first) for phase, total in setup)
        broadcast, server = super().server_init(rng_key, position, federation, sums)
        for phase in self.kernel.phases:
            _check_floats(phase.message_like(trees.shapes_of(broadcast)))
        counts = Counts(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))
        for _, total in setup:
            counts = trees.add(counts, _read_counts(total))
        return broadcast, _Server(server, counts)

    def draw(self, rng_key: Array, state: FederatedState) -> ArrayTree:
        return super().draw(rng_key, state._replace(server=state.server.kernel))


def secure_sum(
    kernel: FederatedKernel,
    *,
    resolution: float = 2.0**-32,
    most: float = 2.0**20,
    allow_differencing: bool = False,
) -> FederatedKernel:
    """Send messages as integers, whose sum is all that a server can be let see.

    Each number of a message becomes the nearest multiple of `resolution`, as an integer modulo
    2^64. In a deployed round sites add masks that cancel in the sum. A simulation adds the
    integers as they are. So the totals of both have the same bits, and these do not depend on the
    order of the clients, on how many are computed together, or on which device of a mesh.

    Parameters
    ----------
    kernel
        Any kernel in which all clients take part, compressed or a sequence too.
    resolution
        A power of two. With the default a float32 above 0.002 in size is sent without error, others
        with one of at most ``1.2e-10``.
    most
        Bound on the size of numbers in messages (gradients, displacements, precisions). A run
        whose messages go beyond it, or are not finite, ends with `fedmcmc.NonFiniteError`.
    allow_differencing
        Whether cohorts may change from round to round. Totals over different cohorts at nearly the
        same position tell single messages by their difference, so this is for simulations. Sites
        under masks refuse it.

    Returns
    -------
    FederatedKernel
        With ``state.server.kernel``, the kernel's own, and ``state.server.counts``: how many
        messages were saturated or lost, in all rounds. `bits_up` is 64 bits per number, and two
        numbers more for these counts.

    Raises
    ------
    TypeError
        If `kernel` is no `FederatedKernel`.
    ValueError
        If there is nothing that a sum could hide (pooled rows, a relay, cohorts of two), cohorts
        change, the kernel has faults or secure sums already, or the grid is too fine for its
        range; and from `init` for fewer than three clients, more than 65,536, more than the
        grid has room for, or messages that hold integers.

    Warns
    -----
    UserWarning
        If the kernel is compressed: a masked message takes 64 bits per number whatever its code.

    Notes
    -----
    Numbers are in range if ``num_clients * (most / resolution + 1) < 2**63``, which is checked, as
    is that ``most / resolution < 2**54``.

    The law is that of `kernel` up to the rounding, which at the default resolution is below that of
    a float32 sum. A coarse grid biases a chain, because the error depends on the position.

    A message that its client reports as of no use (``StepInfo.usable``, as in expectation
    propagation) is sent as zeros and counted as lost.

    Kernels that accept or reject (`hmc`, `mala`) send the log likelihood of wherever a trajectory
    ends. Give them room, as by ``most=2.0**30, resolution=2.0**-22``. A log likelihood below
    ``-most``, minus infinity too, or with a gradient beyond the range, is sent as ``-most``, and
    totals below ``-most / 2`` are read as minus infinity: such proposals are rejected.

    Of questions (`fedmcmc.correct`, `fedmcmc.fit`) the sum of log likelihoods is off by
    ``num_clients * resolution / 2`` nats at most, and so is the logarithm of a weight.

    With a compressor's memory of all clients, the server's sum of memories moves by rounded
    changes, and clients' memories by exact ones, so leave the default resolution there.

    A sum hides whose message it is. What sums over many rounds still tell, and what is not
    promised, is in docs/privacy.md.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5), jnp.zeros(2)])
    >>> kernel = secure_sum(fedmcmc.lsd(posterior, step_size=0.01))
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, 0.0, num_rounds=10, progress=False
    ... )
    >>> int(samples.info["bits_up"][0, 0]), 3 * 64 * (1 + 2)
    (576, 576)
    """
    expect(kernel, FederatedKernel, "kernel")
    grid = Grid.of(resolution, most)
    participation = kernel.participation
    if participation.guards:
        raise ValueError(
            "Under masks a server sees no single message, so it cannot leave one out: give the "
            "secure sum its faults, faults(secure_sum(kernel), drop=..., late=...)."
        )
    if _nodes(kernel, Secured):
        raise ValueError("This kernel has secure sums already.")
    check_cohorts(participation, allow_differencing=allow_differencing)
    if _nodes(kernel, Compressed):
        warnings.warn(
            "A masked message takes 64 bits per number whatever its code: this compressor adds its "
            "error and saves nothing.",
            stacklevel=2,
        )
    return Secured(kernel, replace(participation, weighted=False), grid)


def check_cohorts(participation: Participation, *, allow_differencing: bool = False) -> None:
    """Raise `ValueError` where totals over these cohorts would tell single messages."""
    size = participation.cohort_size
    if participation.pooled:
        raise ValueError("A kernel on pooled rows has one client, and no sum that could hide it.")
    if size is not None and size < FEWEST_SITES:
        what = "a relay, or cohorts of one" if size == 1 else "cohorts of two"
        raise ValueError(
            f"This kernel hears {size} of its clients per round ({what}): the sum of one message "
            "is that message, and of two, each client has the other's. A secure sum hides nothing "
            "here."
        )
    if (size is not None or participation.drops) and not allow_differencing:
        raise ValueError(
            "The cohorts of this kernel change from round to round. Totals over different cohorts "
            "at nearly the same position tell single messages by their difference: use full(), or "
            "in a simulation allow_differencing=True."
        )


def counts_of(state: ArrayTree) -> Counts | None:
    """Return the counts that a server's state holds, of all secure sums in it; ``None`` of none.

    Each shaped as the counts in `state`, such as ``[num_chains]``.
    """
    found = _nodes(state, Counts)
    return Counts(*map(sum, zip(*found, strict=True))) if found else None


def with_counts(kernel: FederatedKernel, state: FederatedState) -> FederatedState:
    """Return a state of the kernel within a secure sum as one of the sum, with nothing counted."""
    if not isinstance(kernel, Secured) or isinstance(state.server, _Server):
        return state
    zero = jnp.zeros_like(state.broadcast.round)  # of one chain or many
    return state._replace(server=_Server(state.server, Counts(zero, zero)))


def check_room(kernel: FederatedKernel, num_terms: int) -> None:
    """Raise `ValueError` unless secure sums within `kernel` have room for so many messages."""
    for node in _nodes(kernel, Secured):
        node.grid.check(num_terms)


def is_secured(kernel: FederatedKernel) -> bool:
    """Return whether some messages of `kernel` are words."""
    return bool(_nodes(kernel, Secured))


def without_secure_sum(kernel: FederatedKernel, grid: Grid) -> FederatedKernel | None:
    """Return the kernel whose secure sum `kernel` is with these numbers, ``None`` if it is none."""
    return kernel.kernel if isinstance(kernel, Secured) and kernel.grid == grid else None


def weights_at_clients(kernel: FederatedKernel) -> bool:
    """Return whether clients weight messages themselves, since integers cannot be."""
    return any(node.kernel.participation.weighted for node in _nodes(kernel, Secured))


def _nodes(tree: ArrayTree, kind: type) -> list[Any]:
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def _check_floats(message: ArrayTree) -> None:
    wrong = [x.dtype for x in jax.tree.leaves(message) if not jnp.issubdtype(x.dtype, jnp.floating)]
    if wrong:
        raise ValueError(
            f"A secure sum adds floating-point numbers, but a message holds {wrong[0]}."
        )


def _all_within(message: ArrayTree, most: float) -> Array:
    """Return whether all numbers are at most `most` in size, which NaN is not."""
    within = jnp.array(True)
    for leaf in jax.tree.leaves(message):
        wide = trees.widen(leaf)
        within = within & jnp.all(jnp.abs(wide) <= trees.cast(most, wide))
    return within


def _small_word(count: Array) -> Word:
    low = count.astype(jnp.uint32)
    return Word(jnp.zeros_like(low), low)


def _read_counts(total: Words) -> Counts:
    """Return counts as numbers, from sums of their words."""

    def number(word: Limbs) -> Array:
        return carry(word).low.astype(jnp.int32)

    return Counts(number(total.counts.saturated), number(total.counts.lost))
