"""Secure sums: messages as integers modulo 2^64, which can be added under masks.

A simulation adds the integers without masks. In a deployed round the masks cancel in the sum, so
its total has the same bits.
"""

import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect
from fedmcmc.compression import WORD_BITS, Grid, Limbs, Word, carry, limbs
from fedmcmc.gradients import importance
from fedmcmc.pytrees import trees
from fedmcmc.transforms._compressed import Compressed
from fedmcmc.transforms._wrapping import WrappedKernel, WrappedPhase, nodes_of, replace_nodes
from fedmcmc.types import (
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

MIN_SITES = 3
"""Smallest number of sites: each of two sites could compute the other's message from the total."""


class MessageCounts(NamedTuple):
    """Numbers of unusual messages, without their senders.

    Attributes
    ----------
    saturated
        Number of messages with NaN, or with a number beyond the range, which is sent as the range's
        end.
    lost
        Number of messages that were not finite or not usable, sent as zeros.
    """

    saturated: ArrayTree
    lost: ArrayTree


class Words(NamedTuple):
    """Message as integers modulo 2^64, or a sum of such messages.

    Attributes
    ----------
    numbers
        Tree shaped as the message: a `compression.Word` per array when it is sent, and a
        `compression.Limbs` when it is summed.
    counts
        `MessageCounts` in two words.
    """

    numbers: ArrayTree
    counts: MessageCounts


class _SecureServer(NamedTuple):
    kernel: ArrayTree
    counts: MessageCounts  # [] int32 each, over all rounds


@runtime_checkable
class Ranged(Protocol):
    """Part of a message with numbers that may lie outside the range of a secure sum.

    A log likelihood of minus infinity is an example. Such numbers make a secure sum useless, unless
    a number within the range stands for them.
    """

    def to_range(self, limit: float) -> Any:
        """Return the message with numbers up to `limit` in absolute value."""

    def from_range(self, limit: float) -> Any:
        """Return the sum of messages, given the sum of the results of `to_range`."""


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class _Summed(WrappedPhase):
    """Phase of a kernel whose messages are words."""

    inner: Phase
    grid: Grid
    weighted: bool = field(metadata={"static": True})  # by one over the probability

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[Words, ArrayTree, StepInfo]:
        inner, limit = self.inner, self.grid.max_abs
        code, state, info = inner.step(draws, broadcast, client_state, client)
        # A sum of codes has no meaning, so the client decodes its own code and sends the message.
        like = inner.message_like(trees.shapes_of(broadcast))
        message = inner.decode(code, client, memory_of(inner, client_state), like)
        message = replace_nodes(message, Ranged, lambda part: part.to_range(limit))
        if self.weighted:
            message = importance(client, message)
        usable = trees.all_finite(message)
        if not trees.is_empty(info.usable):
            usable = usable & info.usable

        def word_of(leaf: Array) -> Word:
            wide = trees.widen(leaf)
            bound = trees.cast(limit, wide)
            return self.grid.encode(jnp.where(usable, jnp.clip(wide, -bound, bound), 0))

        counts = MessageCounts(~_all_within(message, limit), ~usable)
        words = Words(jax.tree.map(word_of, message), jax.tree.map(_small_word, counts))
        num_words = trees.num_elements(message) + len(counts)
        bits = jnp.asarray(WORD_BITS * num_words, jnp.int32)
        return words, state, info._replace(bits=bits, usable=usable)

    def message_like(self, like: Broadcast) -> Words:
        return self._words_like(like, Limbs)

    def code_like(self, like: Broadcast) -> Words:
        return self._words_like(like, Word)

    def _words_like(self, like: Broadcast, kind: type[Limbs] | type[Word]) -> Words:
        def parts(leaf: Array | jax.ShapeDtypeStruct) -> Limbs | Word:
            part: Any = jax.ShapeDtypeStruct(leaf.shape, jnp.uint32)
            return kind(*[part] * len(kind._fields))

        count = parts(jax.ShapeDtypeStruct((), jnp.uint32))
        numbers = jax.tree.map(parts, self.inner.message_like(like))
        return Words(numbers, MessageCounts(count, count))

    def decode(
        self, code: Words, sender: Sender | Client, memory: ArrayTree, like: ArrayTree
    ) -> Words:
        words: Words = jax.tree.map(limbs, code, is_leaf=lambda node: isinstance(node, Word))
        return words

    @property
    def server_memory(self) -> None:
        """None: words are not relative to any memory."""
        return None

    def read(self, total: Words, broadcast: Broadcast) -> ArrayTree:
        """Return the sum of the kernel's own messages, decoded from words."""
        like = self.inner.message_like(trees.shapes_of(broadcast))
        message = jax.tree.map(
            lambda leaf, word: self.grid.decode(word, leaf.dtype), like, total.numbers
        )
        return replace_nodes(message, Ranged, lambda part: part.from_range(self.grid.max_abs))

    def commit(self, message: Words, broadcast: Broadcast, client_state: ArrayTree) -> ArrayTree:
        return self.inner.commit(self.read(message, broadcast), broadcast, client_state)

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: _SecureServer, total: Words
    ) -> tuple[Broadcast, _SecureServer, ArrayTree]:
        moved, kernel_state, info = self.inner.aggregate(
            rng_key, broadcast, server_state.kernel, self.read(total, broadcast)
        )
        counts = trees.add(server_state.counts, _read_counts(total))
        # A sum of clipped numbers is wrong, so it ends a run, like a position that is not finite.
        position = jax.tree.map(
            lambda leaf: (
                jnp.where(counts.saturated > 0, trees.cast(jnp.nan, leaf), leaf)
                if jnp.issubdtype(leaf.dtype, jnp.floating)
                else leaf
            ),
            moved.position,
        )
        return moved._replace(position=position), _SecureServer(kernel_state, counts), info


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class _SummedSetup(_Summed, SetupPhase):
    """Setup phase of a kernel whose messages are words."""

    sums_rows = False  # the message of each client is rounded


def _refuse_compressor(kernel: FederatedKernel, compressor: object) -> None:
    raise ValueError(
        "Codes cannot be added under masks, so a secure sum cannot be compressed: compress the "
        "kernel first, secure_sum(compress(kernel, compressor)), which sends decoded numbers of "
        "64 bits each."
    )


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Secured(WrappedKernel):
    """Kernel whose messages are integers that masks can hide; see `secure_sum`."""

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
    ) -> tuple[Broadcast, _SecureServer]:
        num = federation.num_clients
        if num < MIN_SITES:
            raise ValueError(
                f"A secure sum needs {MIN_SITES} clients or more, got {num}: each of two "
                "clients could compute the other's message from the total."
            )
        self.grid.check(max(num, self.participation.cohort_size or 0))
        start = Broadcast(jnp.zeros((), jnp.int32), position)
        sums = tuple(p.read(total, start) for p, total in zip(self.setup, totals, strict=True))
        broadcast, server = super().server_init(rng_key, position, federation, sums)
        for phase in self.kernel.phases:
            for leaf in jax.tree.leaves(phase.message_like(trees.shapes_of(broadcast))):
                if not jnp.issubdtype(leaf.dtype, jnp.floating):
                    raise ValueError(
                        "A secure sum adds floating-point numbers, but a message contains "
                        f"{leaf.dtype}."
                    )
        counts = MessageCounts(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))
        for total in totals:
            counts = trees.add(counts, _read_counts(total))
        return broadcast, _SecureServer(server, counts)

    def draw(self, rng_key: Array, state: FederatedState) -> ArrayTree:
        return super().draw(rng_key, state._replace(server=state.server.kernel))


def secure_sum(
    kernel: FederatedKernel,
    *,
    resolution: float = 2.0**-32,
    max_abs: float = 2.0**20,
    allow_differencing: bool = False,
) -> FederatedKernel:
    """Send messages as integers, so that masks can hide everything except for their sum.

    Each number of a message becomes the nearest multiple of `resolution`, as an integer modulo
    2^64. In a deployed round, sites add masks that cancel in the sum; a simulation adds the
    integers without masks. Both totals have the same bits. A compressed kernel also sends 64 bits
    per number, with a warning. ``state.server.kernel`` is the state of the kernel, and
    ``state.server.counts`` the numbers of saturated and lost messages. docs/explanation/privacy.md
    explains what sums still reveal, docs/explanation/exact_distributions.md the rounding.

    Parameters
    ----------
    kernel
        Any kernel in which all clients take part, also compressed or a sequence.
    resolution
        Power of two. The default sends a float32 above 0.002 in size without error, and smaller
        numbers with an error of at most ``1.2e-10``. A coarse grid biases a chain.
    max_abs
        Bound on the size of numbers in messages. A message beyond it ends the run with
        `fedmcmc.NonFiniteError`. `fedmcmc.hmc` and `fedmcmc.mala` need ``max_abs=2.0**30,
        resolution=2.0**-22``, for instance.
    allow_differencing
        If true, cohorts may change, in simulations only: differences of totals reveal messages.

    Raises
    ------
    TypeError, ValueError
        If `kernel` is not a `FederatedKernel`, a sum could hide nothing (pooled rows, a relay,
        cohorts of two), cohorts change, or there are faults or secure sums already; if ``max_abs /
        resolution`` is above ``2**54`` or ``2**63 / num_clients``; from `init`, for fewer than
        three clients or integer messages.

    Examples
    --------
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> secure_sum(fedmcmc.lsd(posterior, step_size=0.01)).name
    'secure_sum(lsd)'
    """
    expect(kernel, FederatedKernel, "kernel")
    grid = Grid.of(resolution, max_abs)
    participation = kernel.participation
    if participation.excludes_broken_messages:
        raise ValueError(
            "Under masks a server sees no single message, so it cannot exclude one: apply faults "
            "to the secure sum, faults(secure_sum(kernel), drop=..., late=...)."
        )
    if is_secured(kernel):
        raise ValueError("This kernel has secure sums already.")
    check_cohorts(participation, allow_differencing=allow_differencing)
    if nodes_of(kernel, Compressed):
        warnings.warn(
            "A masked message takes 64 bits per number whatever its code: this compressor adds an "
            "error and saves nothing.",
            stacklevel=2,
        )
    return Secured(kernel, replace(participation, weighted=False), grid)


def check_cohorts(participation: Participation, *, allow_differencing: bool = False) -> None:
    """Raise `ValueError` if totals over these cohorts would reveal single messages."""
    size = participation.cohort_size
    if participation.pooled:
        raise ValueError(
            "A kernel on pooled rows has one client, so a secure sum would hide nothing."
        )
    if size is not None and size < MIN_SITES:
        cohorts = "a relay, or cohorts of one" if size == 1 else "cohorts of two"
        raise ValueError(
            f"This kernel receives {size} of its clients' messages per round ({cohorts}): the sum "
            "of one message is that message, and each of two clients could compute the other's "
            "message. A secure sum would hide nothing."
        )
    if (size is not None or participation.may_drop) and not allow_differencing:
        raise ValueError(
            "The cohorts of this kernel change from round to round. Totals over different cohorts "
            "at nearly the same position reveal single messages by their difference: use full(), "
            "or in a simulation allow_differencing=True."
        )


def counts_of(state: ArrayTree) -> MessageCounts | None:
    """Return the summed counts of all secure sums in a server's state, ``None`` without any.

    Each sum has the shape of the counts in `state`, such as ``[num_chains]``.
    """
    counts = nodes_of(state, MessageCounts)
    return MessageCounts(*map(sum, zip(*counts, strict=True))) if counts else None


def with_counts(kernel: FederatedKernel, state: FederatedState) -> FederatedState:
    """Return a state of the wrapped kernel as a state of the secure sum `kernel`, counts zero."""
    if not isinstance(kernel, Secured) or isinstance(state.server, _SecureServer):
        return state
    zero = jnp.zeros_like(state.broadcast.round)  # for one chain or many
    return state._replace(server=_SecureServer(state.server, MessageCounts(zero, zero)))


def check_overflow(kernel: FederatedKernel, num_terms: int) -> None:
    """Raise `ValueError` if `num_terms` messages could overflow a secure sum within `kernel`."""
    for node in nodes_of(kernel, Secured):
        node.grid.check(num_terms)


def is_secured(kernel: FederatedKernel) -> bool:
    """Return whether some messages of `kernel` are words."""
    return bool(nodes_of(kernel, Secured))


def without_secure_sum(kernel: FederatedKernel, grid: Grid) -> FederatedKernel | None:
    """Return the kernel inside `kernel` if `kernel` is a secure sum on this grid, else ``None``."""
    return kernel.kernel if isinstance(kernel, Secured) and kernel.grid == grid else None


def weights_at_clients(kernel: FederatedKernel) -> bool:
    """Return whether clients weight messages themselves, because integers cannot be weighted."""
    return any(node.kernel.participation.weighted for node in nodes_of(kernel, Secured))


def _all_within(message: ArrayTree, limit: float) -> Array:
    """Return whether all numbers are at most `limit` in size, which is false for NaN."""
    within = jnp.array(True)
    for leaf in jax.tree.leaves(message):
        wide = trees.widen(leaf)
        within = within & jnp.all(jnp.abs(wide) <= trees.cast(limit, wide))
    return within


def _small_word(count: Array) -> Word:
    low = count.astype(jnp.uint32)
    return Word(jnp.zeros_like(low), low)


def _read_counts(total: Words) -> MessageCounts:
    """Return counts as numbers, from sums of their words."""

    def number(word: Limbs) -> Array:
        return carry(word).low.astype(jnp.int32)

    return MessageCounts(number(total.counts.saturated), number(total.counts.lost))
