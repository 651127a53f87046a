"""Compression of a kernel's messages: a transform of any kernel."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect
from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    Exact,
    FederatedKernel,
    FederatedState,
    Federation,
    Participation,
    Phase,
    Sender,
    ServerMemory,
    StepInfo,
    memory_of,
    register_dataclass,
)
from fedmcmc.compression import Compressor, Memory, Quantize, WithExact, chain, message_bits
from fedmcmc.gradients import importance
from fedmcmc.kernels import Langevin
from fedmcmc.pytrees import trees
from fedmcmc.random import compressor_key
from fedmcmc.transforms._wrapping import WrappedKernel, WrappedPhase, replaced


class _Draws(NamedTuple):
    kernel: ArrayTree
    compressor: ArrayTree


class _Clients(NamedTuple):
    kernel: ArrayTree
    compressor: ArrayTree  # what it keeps for the kernel's own phase
    before: tuple[ArrayTree, ...]  # likewise, for the phases before that


class _Server(NamedTuple):
    kernel: ArrayTree
    memory: ArrayTree  # the sum of all clients' memories, or ()
    before: tuple[ArrayTree, ...]  # likewise, for the phases before the kernel's own


State = TypeVar("State", _Clients, _Server)


def _of_phase(state: _Clients | _Server, number: int) -> ArrayTree:
    """Return what a state holds for a phase."""
    return (*state.before, state[1])[number]


def _moved(state: State, kernel_state: ArrayTree, number: int, of_phase: ArrayTree) -> State:
    """Return a state with a new one of the kernel, and with what it now holds for a phase."""
    parts = replaced((*state.before, state[1]), number, of_phase)
    return type(state)(kernel_state, parts[-1], parts[:-1])


class _Pooled(NamedTuple):
    """What a message is where the server keeps the sum of all clients' memories."""

    message: ArrayTree  # weighted, where the kernel's messages are
    change: ArrayTree  # of the client's memory, never weighted


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
        """The compressor, where the server keeps copies of single clients' memories."""
        if not isinstance(self.compressor, Memory) or self.pooled_memory:
            return None
        return self.compressor

    def coded_like(self, like: Broadcast) -> ArrayTree:
        """Return the shapes of what is coded of a message."""
        return trees.shapes_of(_without_exact(self.inner.message_like(like)))

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> _Draws:
        # The compressor has a key of its own, so that the kernel draws what it draws uncompressed.
        own_key = compressor_key(rng_key, self.depth)
        drawn = self.compressor.prepare(own_key, self.coded_like(like), client)
        return _Draws(self.inner.prepare(rng_key, like, client), drawn)

    def step(
        self, draws: _Draws, broadcast: Broadcast, client_state: _Clients, client: Client
    ) -> tuple[WithExact, _Clients, StepInfo]:
        inner, compressor = self.inner, self.compressor
        inner_code, kernel_state, info = inner.step(
            draws.kernel, broadcast, client_state.kernel, client
        )
        like = inner.message_like(trees.shapes_of(broadcast))
        memory = memory_of(inner, client_state.kernel)
        whole = inner.decode(inner_code, client, memory, like)
        state = _of_phase(client_state, self.number)
        code, state = compressor.encode(draws.compressor, _without_exact(whole), state, client)
        exact = _exact_parts(whole)
        info = info._replace(bits=message_bits(code) + trees.num_bits(exact))
        return WithExact(code, exact), _moved(client_state, kernel_state, self.number, state), info

    def decode(
        self, code: WithExact, sender: Sender | Client, memory: ArrayTree, like: ArrayTree
    ) -> ArrayTree:
        compressor = self.compressor
        whole = like.message if self.pooled_memory else like
        numbers = _without_exact(whole)
        decoded = trees.cast_like(compressor.decode(code.code, sender), numbers)
        if self._copied is not None:
            decoded = trees.add(memory, decoded)
        message = _with_exact(decoded, whole, code.exact)
        if not self.pooled_memory:
            return message
        assert isinstance(compressor, Memory)
        change = trees.cast_like(compressor.change(code.code, sender), numbers)
        return _Pooled(importance(sender, message), change)

    @property
    def server_memory(self) -> ServerMemory | None:
        return None if self._copied is None else _CodeMemory(self, self._copied)

    def message_like(self, like: Broadcast) -> ArrayTree:
        whole = self.inner.message_like(like)
        return _Pooled(whole, _without_exact(whole)) if self.pooled_memory else whole

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
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: _Server, total: ArrayTree
    ) -> tuple[Broadcast, _Server, ArrayTree]:
        memory = _of_phase(server_state, self.number)
        if self.pooled_memory:
            numbers = trees.add(memory, _without_exact(total.message))
            memory = trees.add(memory, total.change)
            total = _with_exact(numbers, total.message, _exact_parts(total.message))
        moved, kernel_state, info = self.inner.aggregate(
            rng_key, broadcast, server_state.kernel, total
        )
        return moved, _moved(server_state, kernel_state, self.number, memory), info


@dataclass(frozen=True)
class _CodeMemory(ServerMemory):
    """Copies of the memories of a compressor at the clients."""

    phase: _Coded
    compressor: Memory

    def of_client(self, client_state: _Clients) -> ArrayTree:
        return _of_phase(client_state, self.phase.number).memory

    def init(self, like: Broadcast) -> ArrayTree:
        return self.compressor.init(self.phase.coded_like(like)).memory

    def update(self, code: WithExact, sender: Sender | Client, memory: ArrayTree) -> ArrayTree:
        change = self.compressor.change(code.code, sender)
        return trees.add(memory, trees.cast_like(change, memory))


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Compressed(WrappedKernel):
    """A kernel whose messages are compressed; see `compress`."""

    kernel: FederatedKernel
    compressor: Compressor
    participation: Participation = field(repr=False)
    pooled_memory: bool = field(repr=False, metadata={"static": True})
    depth: int = field(repr=False, metadata={"static": True})  # compressions of the kernel itself

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
    ) -> tuple[Broadcast, _Server]:
        broadcast, kernel_state = super().server_init(rng_key, position, federation, totals)
        memories: list[ArrayTree] = []
        for phase in self.wrapped:
            like = phase.coded_like(trees.shapes_of(broadcast))
            self.compressor.check(like, federation.num_clients)
            memories.append(trees.zeros_like(like) if self.pooled_memory else ())
        return broadcast, _Server(kernel_state, memories[-1], tuple(memories[:-1]))

    def client_init(self, broadcast: Broadcast, client: Client) -> _Clients:
        shapes = trees.shapes_of(broadcast)
        states = [self.compressor.init(phase.coded_like(shapes)) for phase in self.wrapped]
        kernel_state = super().client_init(broadcast, client)
        return _Clients(kernel_state, states[-1], tuple(states[:-1]))

    def draw(self, rng_key: Array, state: FederatedState) -> ArrayTree:
        return super().draw(rng_key, state._replace(server=state.server.kernel, clients=()))


def compress(kernel: FederatedKernel, compressor: Compressor) -> FederatedKernel:
    """Compress the messages of `kernel`.

    A client encodes what its step returns, the server sums what it decodes. With a memory, the
    server adds the sum of the clients' memories, which it moves by their codes.
    `RoundInfo.bits_up` counts the bits of the codes, exactly as `fedmcmc.wire` writes them, also
    where the kernel is a centralized reference, which by itself sends nothing.

    Parameters
    ----------
    kernel
        Any kernel.
    compressor
        See `fedmcmc.quantize`, `sparsify`, `top_k`, `clip`, `chain`, `memory`, `identity`, and
        `per_client`, by which clients have different ones.

    Returns
    -------
    FederatedKernel
        Its ``state.clients`` and ``state.server`` hold the kernel's own as ``.kernel``.

    Raises
    ------
    ValueError
        If the kernel has faults, if it is not exact with such codes, if all clients' memories are
        to be added where messages are not weighted by one over the probability of taking part, if
        the server adds them already and `compressor` has another memory; and from `init` where the
        compressor does not fit the data.

    Notes
    -----
    Parts of a message that the server divides by (the weights of federated averaging) cross as they
    are, at 32 bits per number.

    Where the server of `kernel` adds all clients' memories, those must stay equal to the clients'
    own, so `compressor` follows the one inside that memory: ``compress(compress(k, memory(a)), b)``
    is ``compress(k, memory(chain(a, b)))``, with the rate of the whole chain if none is given.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * jnp.sum(theta**2),
    ...     lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2, axis=-1),
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones((3, 100)), jnp.zeros((5, 100))])
    >>> kernel = compress(fedmcmc.lsd(posterior, step_size=0.01), fedmcmc.quantize(4))
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, jnp.zeros(100), num_rounds=10, progress=False
    ... )
    >>> bool(samples.info["bits_up"].max() < 2 * 32 * 100 / 5)
    True
    """
    expect(kernel, FederatedKernel, "kernel")
    expect(compressor, Compressor, "compressor")
    kernel.traits.check_compressor(kernel, compressor)
    if kernel.participation.guards:
        raise ValueError(
            "Faults happen to messages as they are sent: compress the kernel first, and then give "
            "it faults."
        )
    if isinstance(kernel, Compressed) and kernel.pooled_memory:
        memory = kernel.compressor
        assert isinstance(memory, Memory)
        if isinstance(compressor, Memory):
            raise ValueError(
                "The server of this kernel adds the memories of its clients already: compress its "
                "messages by a compressor without another memory."
            )
        if memory.rate is None and not compressor.unbiased:
            raise ValueError(
                "A memory with the rate 1 / (1 + omega) cannot be followed by a biased "
                "compressor: that rate is for unbiased ones. Give the memory a rate."
            )
        both = chain(memory.compressor, compressor)
        return compress(kernel.kernel, replace(memory, compressor=both))
    if holds_pooled_memory(kernel):
        raise ValueError(
            "The servers of kernels in this sequence add the memories of their clients: compress "
            "each kernel as far as you want it, then put them in a sequence."
        )
    weighted = kernel.participation.weighted
    of = compressor.of if isinstance(compressor, Memory) else "active"
    pooled = of != "active"
    if pooled and (not weighted or kernel.participation.repeats):
        if of == "all":
            reason = (
                "a client that is drawn twice moves its memory once"
                if weighted
                else "messages are not weighted by one over the probability of taking part"
            )
            raise ValueError(
                f"With this kernel {reason}, so the server's sum of all memories cannot be kept "
                'equal to the clients\': use of="active".'
            )
        pooled = False
    participation = replace(kernel.participation, weighted=weighted and not pooled, silent=False)
    depth = kernel.depth + 1 if isinstance(kernel, Compressed) else 0
    return Compressed(kernel, compressor, participation, pooled, depth)


def holds_pooled_memory(kernel: FederatedKernel) -> bool:
    """Return whether a server within `kernel` adds the memories of all its clients."""
    # What is compressed further around such a memory becomes part of it: none lies deeper.
    nodes = jax.tree.leaves(kernel, is_leaf=lambda node: isinstance(node, Compressed))
    return any(isinstance(node, Compressed) and node.pooled_memory for node in nodes)


def arrived_late(total: ArrayTree) -> ArrayTree:
    """Return a sum of late messages in the form in which the server adds it, one round later.

    A message is relative to its client's memory. The client moved that memory when it sent the
    message, while the server's sum of memories moves only after the message has arrived. So the
    change of the memories is added here.
    """
    if not isinstance(total, _Pooled):
        return total
    message = total.message
    numbers = trees.add(_without_exact(message), total.change)
    return total._replace(message=_with_exact(numbers, message, _exact_parts(message)))


def _is_exact(node: object) -> bool:
    return isinstance(node, Exact)


def _exact_parts(message: ArrayTree) -> tuple[Exact, ...]:
    return tuple(x for x in jax.tree.leaves(message, is_leaf=_is_exact) if _is_exact(x))


def _without_exact(message: ArrayTree) -> ArrayTree:
    """Return what of a message a compressor sees."""
    return jax.tree.map(lambda x: () if _is_exact(x) else x, message, is_leaf=_is_exact)


def _with_exact(values: ArrayTree, like: ArrayTree, exact: tuple[Exact, ...]) -> ArrayTree:
    """Return `values`, of the structure of ``_without_exact(like)``, with the `exact` parts."""
    parts = iter(exact)
    return jax.tree.map(
        lambda x, value: next(parts) if _is_exact(x) else value, like, values, is_leaf=_is_exact
    )
