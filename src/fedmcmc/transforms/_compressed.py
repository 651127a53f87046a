"""Transform that compresses a kernel's messages."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect
from fedmcmc.compression import Compressor, Memory, Quantize, WithExact, chain, message_bits
from fedmcmc.gradients import importance
from fedmcmc.kernels import Langevin
from fedmcmc.pytrees import trees
from fedmcmc.random import compressor_key
from fedmcmc.transforms._wrapping import (
    WrappedKernel,
    WrappedPhase,
    nodes_of,
    replace_item,
    replace_nodes,
)
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
    ServerMemory,
    StepInfo,
    Uncompressed,
    memory_of,
    register_dataclass,
)


class _CompressionDraws(NamedTuple):
    kernel: ArrayTree
    compressor: ArrayTree


class _Clients(NamedTuple):
    kernel: ArrayTree
    compressor: ArrayTree  # state for the kernel's own phase
    before: tuple[ArrayTree, ...]  # states for the previous phases


class _CompressedServer(NamedTuple):
    kernel: ArrayTree
    memory: ArrayTree  # the sum of all clients' memories, or ()
    before: tuple[ArrayTree, ...]  # sums for the previous phases


State = TypeVar("State", _Clients, _CompressedServer)


def _phase_part(state: _Clients | _CompressedServer, number: int) -> ArrayTree:
    """Return the compressor's part of a state for a phase."""
    return (*state.before, state[1])[number]


def _updated(state: State, kernel_state: ArrayTree, number: int, phase_part: ArrayTree) -> State:
    """Return a state with a new kernel state and a new compressor's part for a phase."""
    parts = replace_item((*state.before, state[1]), number, phase_part)
    return type(state)(kernel_state, parts[-1], parts[:-1])


class _Pooled(NamedTuple):
    """Message with a change of memory, if the server stores the sum of all clients' memories."""

    message: ArrayTree  # weighted if the kernel's messages are
    change: ArrayTree  # change of the client's memory, never weighted


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class _Coded(WrappedPhase):
    """Phase `number` of a kernel, with compressed messages."""

    inner: Phase
    compressor: Compressor
    pooled_memory: bool = field(metadata={"static": True})
    depth: int = field(metadata={"static": True})
    number: int = field(metadata={"static": True})

    @property
    def _copied(self) -> Memory | None:
        """The compressor if the server stores copies of single clients' memories, else ``None``."""
        if not isinstance(self.compressor, Memory) or self.pooled_memory:
            return None
        return self.compressor

    def coded_like(self, like: Broadcast) -> ArrayTree:
        """Return the shapes of the compressed part of a message."""
        return trees.shapes_of(_without_exact(self.inner.message_like(like)))

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> _CompressionDraws:
        # The compressor has a separate key, so compression leaves the kernel's draws unchanged.
        key = compressor_key(rng_key, self.depth)
        draws = self.compressor.prepare(key, self.coded_like(like), client)
        return _CompressionDraws(self.inner.prepare(rng_key, like, client), draws)

    def step(
        self, draws: _CompressionDraws, broadcast: Broadcast, client_state: _Clients, client: Client
    ) -> tuple[WithExact, _Clients, StepInfo]:
        inner, compressor = self.inner, self.compressor
        inner_code, kernel_state, info = inner.step(
            draws.kernel, broadcast, client_state.kernel, client
        )
        like = inner.message_like(trees.shapes_of(broadcast))
        memory = memory_of(inner, client_state.kernel)
        message = inner.decode(inner_code, client, memory, like)
        state = _phase_part(client_state, self.number)
        code, state = compressor.encode(draws.compressor, _without_exact(message), state, client)
        exact = _exact_parts(message)
        info = info._replace(bits=message_bits(code) + trees.num_bits(exact))
        client_state = _updated(client_state, kernel_state, self.number, state)
        return WithExact(code, exact), client_state, info

    def decode(
        self, code: WithExact, sender: Sender | Client, memory: ArrayTree, like: ArrayTree
    ) -> ArrayTree:
        compressor = self.compressor
        message_like = like.message if self.pooled_memory else like
        numbers = _without_exact(message_like)
        decoded = trees.cast_like(compressor.decode(code.code, sender), numbers)
        if self._copied is not None:
            decoded = trees.add(memory, decoded)
        message = _with_exact(decoded, message_like, code.exact)
        if not self.pooled_memory:
            return message
        assert isinstance(compressor, Memory)
        change = trees.cast_like(compressor.change(code.code, sender), numbers)
        return _Pooled(importance(sender, message), change)

    @property
    def server_memory(self) -> ServerMemory | None:
        return None if self._copied is None else _CodeMemory(self, self._copied)

    def message_like(self, like: Broadcast) -> ArrayTree:
        shapes = self.inner.message_like(like)
        return _Pooled(shapes, _without_exact(shapes)) if self.pooled_memory else shapes

    def code_like(self, like: Broadcast) -> ArrayTree:
        compressor = self.compressor

        def code_of(rng_key: Array, message: ArrayTree) -> ArrayTree:
            zero, one = jnp.zeros((), jnp.int32), jnp.ones(())
            client = Client((), zero, zero + 1, zero, one, one, 1)
            draws = compressor.prepare(rng_key, message, client)
            return compressor.encode(draws, message, compressor.init(message), client)[0]

        key_like = jax.eval_shape(lambda: jax.random.key(0))
        code = jax.eval_shape(code_of, key_like, self.coded_like(like))
        return WithExact(code, _exact_parts(self.inner.message_like(like)))

    def commit(self, message: ArrayTree, broadcast: Broadcast, client_state: _Clients) -> _Clients:
        kernel_state = self.inner.commit(message, broadcast, client_state.kernel)
        return client_state._replace(kernel=kernel_state)

    def aggregate(
        self,
        rng_key: ArrayTree,
        broadcast: Broadcast,
        server_state: _CompressedServer,
        total: ArrayTree,
    ) -> tuple[Broadcast, _CompressedServer, ArrayTree]:
        memory = _phase_part(server_state, self.number)
        if self.pooled_memory:
            numbers = trees.add(memory, _without_exact(total.message))
            memory = trees.add(memory, total.change)
            total = _with_exact(numbers, total.message, _exact_parts(total.message))
        moved, kernel_state, info = self.inner.aggregate(
            rng_key, broadcast, server_state.kernel, total
        )
        return moved, _updated(server_state, kernel_state, self.number, memory), info


@dataclass(frozen=True)
class _CodeMemory(ServerMemory):
    """Copies of the clients' compressor memories."""

    phase: _Coded
    compressor: Memory

    def of_client(self, client_state: _Clients) -> ArrayTree:
        return _phase_part(client_state, self.phase.number).memory

    def init(self, like: Broadcast) -> ArrayTree:
        return self.compressor.init(self.phase.coded_like(like)).memory

    def update(self, code: WithExact, sender: Sender | Client, memory: ArrayTree) -> ArrayTree:
        change = self.compressor.change(code.code, sender)
        return trees.add(memory, trees.cast_like(change, memory))


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Compressed(WrappedKernel):
    """Kernel with compressed messages; see `compress`."""

    kernel: FederatedKernel
    compressor: Compressor
    participation: Participation = field(repr=False)
    pooled_memory: bool = field(repr=False, metadata={"static": True})
    depth: int = field(repr=False, metadata={"static": True})  # number of compressions of `kernel`

    @property
    def name(self) -> str:
        name = self.kernel.name
        compressors = {"lsd": Quantize, "lsd_star": Quantize, "lsd_pp": Memory}
        is_langevin = isinstance(self.kernel, Langevin)  # `lsd` of latents is another kernel
        if is_langevin and isinstance(self.compressor, compressors.get(name, ())):
            return f"q{name}"
        return f"compress({name})"

    @cached_property
    def wrapped(self) -> tuple[_Coded, ...]:
        return tuple(
            _Coded(phase, self.compressor, self.pooled_memory, self.depth, number)
            for number, phase in enumerate(self.kernel.phases)
        )

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, _CompressedServer]:
        broadcast, kernel_state = super().server_init(rng_key, position, federation, totals)
        memories: list[ArrayTree] = []
        for phase in self.wrapped:
            like = phase.coded_like(trees.shapes_of(broadcast))
            self.compressor.check(like, federation.num_clients)
            memories.append(trees.zeros_like(like) if self.pooled_memory else ())
        return broadcast, _CompressedServer(kernel_state, memories[-1], tuple(memories[:-1]))

    def client_init(self, broadcast: Broadcast, client: Client) -> _Clients:
        shapes = trees.shapes_of(broadcast)
        states = [self.compressor.init(phase.coded_like(shapes)) for phase in self.wrapped]
        kernel_state = super().client_init(broadcast, client)
        return _Clients(kernel_state, states[-1], tuple(states[:-1]))

    def draw(self, rng_key: Array, state: FederatedState) -> ArrayTree:
        return super().draw(rng_key, state._replace(server=state.server.kernel, clients=()))


def compress(kernel: FederatedKernel, compressor: Compressor) -> FederatedKernel:
    """Compress the messages of `kernel`.

    The server sums the decoded messages. With a memory, it adds the sum of the clients' memories,
    which it updates from their codes. `RoundInfo.bits_up` counts the bits of the codes exactly as
    `fedmcmc.wire` writes them. Numbers by which the server divides are sent uncompressed.

    Parameters
    ----------
    kernel
        Any kernel. If it has memories of all clients, `compressor` is applied inside them:
        ``compress(compress(k, memory(a)), b)`` equals ``compress(k, memory(chain(a, b)))``.
    compressor
        Compressor of the messages: `fedmcmc.quantize`, `sparsify`, `top_k`, `clip`, `chain`,
        `memory`, `identity`, or `per_client` for different compressors at different clients.

    Returns
    -------
    FederatedKernel
        Kernel whose ``state.clients`` and ``state.server`` contain the states of `kernel` as
        ``.kernel``.

    Raises
    ------
    ValueError
        If the kernel has faults, or compressed messages would make its draws wrong; if a memory of
        all clients meets messages that are not weighted by one over the probability of taking part,
        or a second memory; from `init`, if the compressor does not fit the data.

    Examples
    --------
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> compress(fedmcmc.lsd(posterior, step_size=0.01), fedmcmc.quantize(4)).name
    'qlsd'
    """
    expect(kernel, FederatedKernel, "kernel")
    expect(compressor, Compressor, "compressor")
    kernel.traits.check_compressor(kernel, compressor)
    if kernel.participation.excludes_broken_messages:
        raise ValueError(
            "Faults happen when messages are sent: compress the kernel first, then apply faults."
        )
    if isinstance(kernel, Compressed) and kernel.pooled_memory:
        memory = kernel.compressor
        assert isinstance(memory, Memory)
        if isinstance(compressor, Memory):
            raise ValueError(
                "The server of this kernel adds the memories of its clients already: compress its "
                "messages with a compressor without a memory."
            )
        if memory.rate is None and not compressor.unbiased:
            raise ValueError(
                "The default rate of a memory, 1 / (1 + omega), needs unbiased compressors: use "
                "one, or set the memory's rate."
            )
        both = chain(memory.compressor, compressor)
        return compress(kernel.kernel, replace(memory, compressor=both))
    if holds_pooled_memory(kernel):
        raise ValueError(
            "The servers of kernels in this sequence add the memories of their clients: compress "
            "each kernel first, then put the kernels in a sequence."
        )
    weighted = kernel.participation.weighted
    of = compressor.of if isinstance(compressor, Memory) else "active"
    pooled = of != "active"
    if pooled and (not weighted or kernel.participation.may_repeat):
        if of == "all":
            reason = (
                "a client that is drawn twice updates its memory once"
                if weighted
                else "messages are not weighted by one over the probability of taking part"
            )
            raise ValueError(
                f"With this kernel {reason}, so the server's sum of memories would differ from the "
                'sum at the clients: set of="active".'
            )
        pooled = False
    participation = replace(kernel.participation, weighted=weighted and not pooled, silent=False)
    depth = kernel.depth + 1 if isinstance(kernel, Compressed) else 0
    return Compressed(kernel, compressor, participation, pooled, depth)


def holds_pooled_memory(kernel: FederatedKernel) -> bool:
    """Return whether a server within `kernel` adds the memories of all its clients."""
    # Further compression becomes part of such a memory, so only outermost nodes can have one.
    return any(node.pooled_memory for node in nodes_of(kernel, Compressed))


def arrived_late(total: ArrayTree) -> ArrayTree:
    """Return the sum of late messages that the server adds one round later.

    A message is relative to its client's memory. The client updated that memory when it sent the
    message, but the server's sum of memories changes only when the message arrives. So this
    function adds the change of the memories.
    """
    if not isinstance(total, _Pooled):
        return total
    message = total.message
    numbers = trees.add(_without_exact(message), total.change)
    return total._replace(message=_with_exact(numbers, message, _exact_parts(message)))


def _exact_parts(message: ArrayTree) -> tuple[Uncompressed, ...]:
    return tuple(nodes_of(message, Uncompressed))


def _without_exact(message: ArrayTree) -> ArrayTree:
    """Return the part of a message that is compressed."""
    return replace_nodes(message, Uncompressed, lambda _: ())


def _with_exact(values: ArrayTree, like: ArrayTree, exact: tuple[Uncompressed, ...]) -> ArrayTree:
    """Return `values`, structured as ``_without_exact(like)``, with the `exact` parts inserted."""
    parts = iter(exact)
    return jax.tree.map(
        lambda node, value: next(parts) if isinstance(node, Uncompressed) else value,
        like,
        values,
        is_leaf=lambda node: isinstance(node, Uncompressed),
    )
