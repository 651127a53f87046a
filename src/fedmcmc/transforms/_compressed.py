"""Compression of a kernel's messages: a transform of any kernel."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

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
    StepInfo,
)
from fedmcmc.compression import Compressor, Remembering, WithExact, message_bits
from fedmcmc.gradients import importance
from fedmcmc.pytrees import trees
from fedmcmc.random import compressor_key

__all__ = ["arrived_late", "compress", "holds_pooled_memory"]


class _Draws(NamedTuple):
    kernel: ArrayTree
    compressor: ArrayTree


class _Clients(NamedTuple):
    kernel: ArrayTree
    compressor: ArrayTree
    before: tuple[ArrayTree, ...] = ()  # likewise, of the phases before the kernel's own


class _Server(NamedTuple):
    kernel: ArrayTree
    memory: ArrayTree  # the sum of all clients' memories, or ()
    before: tuple[ArrayTree, ...] = ()


class _Message(NamedTuple):
    said: ArrayTree  # weighted, where the kernel's messages are
    change: ArrayTree  # of the client's memory, never weighted


class _Coding(Phase):
    """Phase number `place` of a compressed kernel."""

    @property
    def outer(self) -> "Compressed":
        """The compressed kernel."""
        raise NotImplementedError

    @property
    def place(self) -> int:
        """Which of the kernel's phases is coded, -1 for its own, -2 for the one before."""
        raise NotImplementedError

    @property
    def _inner(self) -> Phase:
        return self.outer.kernel.phases[self.place]

    @property
    def _copied(self) -> Remembering | None:
        """The compressor, where the server keeps copies of single clients' memories."""
        compressor = self.outer.compressor
        if not isinstance(compressor, Remembering) or self.outer.pooled_memory:
            return None
        return compressor

    def _part(self, last: ArrayTree, before: tuple[ArrayTree, ...]) -> ArrayTree:
        """Return what belongs to this phase."""
        return last if self.place == -1 else before[self.place + 1]

    def _with_part(
        self, new: ArrayTree, last: ArrayTree, before: tuple[ArrayTree, ...]
    ) -> tuple[ArrayTree, tuple[ArrayTree, ...]]:
        if self.place == -1:
            return new, before
        at = len(before) + self.place + 1
        return last, (*before[:at], new, *before[at + 1 :])

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> _Draws:
        """Draw what the kernel draws uncompressed, and what the compressor draws."""
        own_key = compressor_key(rng_key, self.outer.depth)
        message = _without_exact(self._inner.message_like(like))
        drawn = self.outer.compressor.prepare(own_key, message, client)
        return _Draws(self._inner.prepare(rng_key, like, client), drawn)

    def step(
        self, draws: _Draws, broadcast: Broadcast, client_state: _Clients, client: Client
    ) -> tuple[WithExact, _Clients, StepInfo]:
        """Return the code of the kernel's message."""
        inner, compressor = self._inner, self.outer.compressor
        inner_code, kernel_state, info = inner.step(
            draws.kernel, broadcast, client_state.kernel, client
        )
        like = inner.message_like(trees.shapes_of(broadcast))
        memory = inner.memory(client_state.kernel)
        whole = inner.decode(inner_code, client, memory, like)
        state = self._part(client_state.compressor, client_state.before)
        code, state = compressor.encode(draws.compressor, _without_exact(whole), state, client)
        exact = _exact_parts(whole)
        info = info._replace(bits=message_bits(code) + trees.num_bits(exact))
        after = self._with_part(state, client_state.compressor, client_state.before)
        return WithExact(code, exact), _Clients(kernel_state, *after), info

    def decode(
        self, code: WithExact, sender: Sender | Client, memory: ArrayTree, like: ArrayTree
    ) -> ArrayTree:
        """Return the message; with pooled memories also the change of the sender's."""
        compressor, pooled = self.outer.compressor, self.outer.pooled_memory
        whole = like.said if pooled else like
        numbers = _without_exact(whole)
        decoded = trees.cast_like(compressor.decode(code.code, sender), numbers)
        if self._copied is not None:
            decoded = trees.add(memory, decoded)
        message = _with_exact(decoded, whole, code.exact)
        if not pooled:
            return message
        assert isinstance(compressor, Remembering)
        change = trees.cast_like(compressor.change(code.code, sender), numbers)
        return _Message(importance(sender, message), change)

    def memory(self, client_state: _Clients) -> ArrayTree:
        """Return the client's memory, where the server adds those of the active clients."""
        if self._copied is None:
            return ()
        return self._copied.recall(self._part(client_state.compressor, client_state.before))

    def first_memory(self, like: Broadcast) -> ArrayTree:
        """Return the memory with which a client begins, where the server needs a copy."""
        if self._copied is None:
            return ()
        message = trees.shapes_of(_without_exact(self._inner.message_like(like)))
        return self._copied.recall(self._copied.init(message))

    def next_memory(self, code: WithExact, sender: Sender | Client, memory: ArrayTree) -> ArrayTree:
        """Move the copy of the sender's memory as the sender moved it."""
        if self._copied is None:
            return memory
        return trees.add(memory, trees.cast_like(self._copied.change(code.code, sender), memory))

    def message_like(self, like: Broadcast) -> ArrayTree:
        """Return the shapes of a decoded message."""
        whole = self._inner.message_like(like)
        return _Message(whole, _without_exact(whole)) if self.outer.pooled_memory else whole

    def code_like(self, like: Broadcast) -> ArrayTree:
        """Return the shapes of a code."""
        whole, compressor = self._inner.message_like(like), self.outer.compressor
        numbers = trees.shapes_of(_without_exact(whole))

        def code_of(rng_key: Array, message: ArrayTree) -> ArrayTree:
            zero, one = jnp.zeros((), jnp.int32), jnp.ones(())
            client = Client((), zero, zero + 1, zero, one, one, 1)
            draws = compressor.prepare(rng_key, message, client)
            return compressor.encode(draws, message, compressor.init(message), client)[0]

        code = jax.eval_shape(code_of, jax.eval_shape(lambda: jax.random.key(0)), numbers)
        exact = _exact_parts(whole)
        return WithExact(code, exact)

    def commit(self, message: ArrayTree, broadcast: Broadcast, client_state: _Clients) -> _Clients:
        """Let the kernel keep the message as the server reads it."""
        return client_state._replace(
            kernel=self._inner.commit(message, broadcast, client_state.kernel)
        )

    def prepare_server(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        """Draw what the kernel's server draws."""
        return self._inner.prepare_server(rng_key, like)

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: _Server, total: ArrayTree
    ) -> tuple[Broadcast, _Server, ArrayTree]:
        """Add the memories, where the server keeps their sum, and do as the kernel does."""
        memory = self._part(server_state.memory, server_state.before)
        if self.outer.pooled_memory:
            numbers = trees.add(memory, _without_exact(total.said))
            exact = _exact_parts(total.said)
            total, memory = (
                _with_exact(numbers, total.said, exact),
                trees.add(memory, total.change),
            )
        moved, server, info = self._inner.aggregate(rng_key, broadcast, server_state.kernel, total)
        memories = self._with_part(memory, server_state.memory, server_state.before)
        return moved, _Server(server, *memories), info


@register_dataclass
@dataclass(frozen=True, eq=False)
class _CodedBefore(_Coding):
    """A phase before the kernel's own."""

    compressed: "Compressed"
    number: int = field(metadata={"static": True})

    @property
    def outer(self) -> "Compressed":
        """The compressed kernel."""
        return self.compressed

    @property
    def place(self) -> int:
        """The number of the phase, counted from the end."""
        return self.number


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Compressed(_Coding, FederatedKernel):
    """A kernel whose messages are compressed; see `compress`."""

    kernel: FederatedKernel
    compressor: Compressor
    participation: Participation
    pooled_memory: bool = field(metadata={"static": True})
    depth: int = field(metadata={"static": True})  # compressions of the kernel itself

    @property
    def outer(self) -> "Compressed":
        """The kernel itself."""
        return self

    @property
    def place(self) -> int:
        """The kernel's own phase is the last."""
        return -1

    @property
    def before(self) -> tuple[Phase, ...]:
        """The kernel's, each compressed."""
        num = len(self.kernel.before)
        return tuple(_CodedBefore(self, i - num - 1) for i in range(num))

    @cached_property
    def setup(self) -> tuple[Phase, ...]:
        """The kernel's, not compressed."""
        return self.kernel.setup

    @property
    def constrain_fn(self) -> Callable[[ArrayTree], ArrayTree] | None:
        """The kernel's."""
        return self.kernel.constrain_fn

    @property
    def clients_apart(self) -> bool:
        """The kernel's."""
        return self.kernel.clients_apart

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, _Server]:
        """Start as the kernel does, with memories of zero."""
        broadcast, server = self.kernel.server_init(rng_key, position, federation, totals)
        memories: list[ArrayTree] = []
        for like in self._coded_like(broadcast):
            self.compressor.check(like, federation.num_clients)
            memories.append(trees.zeros_like(like) if self.pooled_memory else ())
        return broadcast, _Server(server, memories[-1], tuple(memories[:-1]))

    def client_init(self, broadcast: Broadcast, client: Client) -> _Clients:
        """Start as the kernel's client does, with what the compressor keeps."""
        states = [self.compressor.init(like) for like in self._coded_like(broadcast)]
        return _Clients(self.kernel.client_init(broadcast, client), states[-1], tuple(states[:-1]))

    def _coded_like(self, broadcast: Broadcast) -> list[ArrayTree]:
        """Return the shapes of what is coded, one entry per phase."""
        shapes = trees.shapes_of(broadcast)
        return [
            trees.shapes_of(_without_exact(phase.message_like(shapes)))
            for phase in self.kernel.phases
        ]

    def prepare_shared(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        """Draw what the kernel's clients draw alike."""
        return self.kernel.prepare_shared(rng_key, like)

    def draw(self, rng_key: Array, state: FederatedState) -> ArrayTree:
        """Draw as the kernel does."""
        inner = FederatedState(state.broadcast, state.server.kernel, ())
        return self.kernel.draw(rng_key, inner)


def compress(kernel: FederatedKernel, compressor: Compressor) -> FederatedKernel:
    """Compress the messages of `kernel`.

    A client encodes what its step returns, the server sums what it decodes. With a memory, the
    server adds the sum of the clients' memories, which it moves by what the clients said.
    `RoundInfo.bits_up` counts the bits of the codes, exactly as `fedmcmc.wire` writes them, also
    where the kernel is a centralized reference, which by itself sends nothing.

    Parameters
    ----------
    kernel
        Any kernel.
    compressor
        See `fedmcmc.quantize`, `sparsify`, `top_k`, `clip`, `chain`, `memory`, `identity`.

    Returns
    -------
    FederatedKernel
        Its ``state.clients`` and ``state.server`` hold the kernel's own as ``.kernel``.

    Raises
    ------
    ValueError
        If the kernel has faults, if all clients' memories are to be added where messages are not
        weighted by one over the probability of taking part, if the server adds them already and
        `compressor` has another memory; and from `init` where the compressor does not fit the data.

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
    if kernel.participation.guards:
        raise ValueError(
            "Faults happen to messages as they are sent: compress the kernel first, and then give "
            "it faults."
        )
    if isinstance(kernel, Compressed) and kernel.pooled_memory:
        before = kernel.compressor
        assert isinstance(before, Remembering)
        if isinstance(compressor, Remembering):
            raise ValueError(
                "The server of this kernel adds the memories of its clients already: compress its "
                "messages by a compressor without another memory."
            )
        return compress(kernel.kernel, before.followed_by(compressor))
    if not isinstance(kernel, Compressed) and holds_pooled_memory(kernel):
        raise ValueError(
            "The servers of kernels in this sequence add the memories of their clients: compress "
            "each kernel as far as you want it, then put them in a sequence."
        )
    weighted = kernel.participation.weighted
    of = compressor.of if isinstance(compressor, Remembering) else "active"
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

    def is_compressed(node: object) -> bool:
        return isinstance(node, Compressed)

    if isinstance(kernel, Compressed):
        return kernel.pooled_memory or holds_pooled_memory(kernel.kernel)
    nodes = jax.tree.leaves(kernel, is_leaf=is_compressed)
    return any(isinstance(node, Compressed) and holds_pooled_memory(node) for node in nodes)


def arrived_late(total: ArrayTree) -> ArrayTree:
    """Return a sum of late messages in the form in which the server adds it, one round later.

    A message is relative to its client's memory. The client moved that memory when it sent the
    message, while the server's sum of memories moves only after the message has arrived. So the
    change of the memories is added here.
    """
    if not isinstance(total, _Message):
        return total
    numbers = trees.add(_without_exact(total.said), total.change)
    exact = _exact_parts(total.said)
    return total._replace(said=_with_exact(numbers, total.said, exact))


def _is_exact(node: object) -> bool:
    return isinstance(node, Exact)


def _exact_parts(message: ArrayTree) -> tuple[Exact, ...]:
    return tuple(x for x in jax.tree.leaves(message, is_leaf=_is_exact) if _is_exact(x))


def _without_exact(message: ArrayTree) -> ArrayTree:
    """Return what of a message a compressor sees."""
    return jax.tree.map(lambda x: () if _is_exact(x) else x, message, is_leaf=_is_exact)


def _with_exact(values: ArrayTree, like: ArrayTree, exact: tuple[Exact, ...]) -> ArrayTree:
    """Return `values`, of the structure of ``_without_exact(like)``, with the `exact` parts."""
    leaves, treedef = jax.tree.flatten(like, is_leaf=_is_exact)
    numbers, parts = iter(jax.tree.leaves(values)), iter(exact)
    return jax.tree.unflatten(
        treedef, [next(parts) if _is_exact(x) else next(numbers) for x in leaves]
    )
