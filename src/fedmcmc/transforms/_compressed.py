"""Compression of a kernel's messages: a transform of any kernel."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from fedmcmc._checks import expect
from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    Exact,
    Exchange,
    FederatedKernel,
    FederatedState,
    Static,
    StepInfo,
)
from fedmcmc.compression import Compressor, message_bits
from fedmcmc.data import FederatedData
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
    before: tuple[ArrayTree, ...] = ()  # likewise, of the exchanges before the kernel's own


class _Server(NamedTuple):
    kernel: ArrayTree
    memory: ArrayTree  # the sum of all clients' memories, or ()
    before: tuple[ArrayTree, ...] = ()


class _Message(NamedTuple):
    said: ArrayTree  # weighted, where the kernel's messages are
    change: ArrayTree  # of the client's memory, never weighted


class _Parts(NamedTuple):
    kernel: FederatedKernel
    compressor: Compressor
    pooled_memory: Static[bool]
    depth: Static[int]  # compressions of the kernel itself
    place: Static[int] = Static(-1)  # of the exchange, the kernel's own is the last

    @property
    def exchange(self) -> Exchange:
        return self.kernel.exchanges[self.place.value]


def compress(kernel: FederatedKernel, compressor: Compressor) -> FederatedKernel:
    """Compress the messages of `kernel`.

    A client encodes what its step returns, the server sums what it decodes. With a memory, the
    server adds the sum of the clients' memories, which it moves by what the clients said.
    `RoundInfo.bits_up` counts the bits of the codes, exactly as `fedmcmc.wire` writes them, also
    where the kernel is a centralised reference, which by itself sends nothing.

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
    are, at 32 bits a number.

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
    compressed = _compressed(kernel)
    if compressed is not None and compressed.pooled_memory.value:
        before = compressed.compressor.memory
        assert before is not None
        if compressor.memory is not None:
            raise ValueError(
                "The server of this kernel adds the memories of its clients already: compress its "
                "messages by a compressor without another memory."
            )
        return compress(compressed.kernel, before.followed_by(compressor))
    if compressed is None and holds_pooled_memory(kernel):
        raise ValueError(
            "The servers of kernels in this sequence add the memories of their clients: compress "
            "each kernel as far as you want it, then put them in a sequence."
        )
    memory, weighted = compressor.memory, kernel.participation.weighted
    pooled = memory is not None and memory.of.value != "active"
    if pooled and (not weighted or kernel.participation.repeats):
        if memory is not None and memory.of.value == "all":
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
    parts = _Parts(kernel, compressor, Static(pooled), Static(_depth(kernel)))
    participation = replace(kernel.participation, weighted=weighted and not pooled, silent=False)
    num = len(kernel.exchanges)
    exchanges = [_exchange(parts._replace(place=Static(i - num))) for i in range(num)]
    own = exchanges[-1]
    return kernel._replace(
        init=Partial(_init, parts),
        prepare=own.prepare,
        step=own.step,
        aggregate=own.aggregate,
        draw=Partial(_draw, parts),
        participation=participation,
        message_fn=own.message_fn,
        before=tuple(exchanges[:-1]),
        commit=own.commit,
    )


def holds_pooled_memory(kernel: FederatedKernel) -> bool:
    """Return whether a server within `kernel` adds the memories of all its clients."""

    def is_parts(node: object) -> bool:
        return isinstance(node, _Parts)

    nodes = jax.tree.leaves(kernel, is_leaf=is_parts)
    return any(isinstance(node, _Parts) and node.pooled_memory.value for node in nodes)


def arrived_late(total: ArrayTree) -> ArrayTree:
    """Return a sum of messages as the server has to take it in a round after they were sent.

    Memories moved when they were sent, and the server's sum of them does not know: until it does,
    what is said relative to those memories lacks the change.
    """
    if not isinstance(total, _Message):
        return total
    said = trees.add(_without_exact(total.said), total.change)
    return total._replace(said=_with_exact(said, total.said))


def _exchange(parts: _Parts) -> Exchange:
    inner = parts.exchange
    return Exchange(
        prepare=Partial(_prepare, parts),
        step=Partial(_step, parts),
        aggregate=Partial(_aggregate, parts),
        prepare_server=inner.prepare_server,
        message_fn=Partial(_shapes, parts) if parts.pooled_memory.value else inner.message_fn,
        commit=None if inner.commit is None else Partial(_commit, parts),
    )


def _depth(kernel: FederatedKernel) -> int:
    inner = _compressed(kernel)
    return 0 if inner is None else inner.depth.value + 1


def _compressed(kernel: FederatedKernel) -> _Parts | None:
    step = kernel.step
    if not isinstance(step, Partial) or step.func is not _step:
        return None
    parts: _Parts = step.args[0]
    return parts


def _whole_like(exchange: Exchange, like: Broadcast) -> ArrayTree:
    return like.position if exchange.message_fn is None else exchange.message_fn(like)


def _message_like(exchange: Exchange, like: Broadcast) -> ArrayTree:
    return _without_exact(_whole_like(exchange, like))


def _shapes(parts: _Parts, like: Broadcast) -> ArrayTree:
    whole = _whole_like(parts.exchange, like)
    return _Message(whole, _without_exact(whole))


def _is_exact(node: object) -> bool:
    return isinstance(node, Exact)


def _without_exact(message: ArrayTree) -> ArrayTree:
    """Return what of a message a compressor sees."""
    return jax.tree.map(lambda x: () if _is_exact(x) else x, message, is_leaf=_is_exact)


def _with_exact(values: ArrayTree, message: ArrayTree) -> ArrayTree:
    """Return `values`, of the structure of `_without_exact`, with the exact parts of `message`."""
    leaves, treedef = jax.tree.flatten(message, is_leaf=_is_exact)
    rest = iter(jax.tree.leaves(values))
    return jax.tree.unflatten(treedef, [x if _is_exact(x) else next(rest) for x in leaves])


def _exact_bits(message: ArrayTree) -> int:
    return trees.num_bits([x for x in jax.tree.leaves(message, is_leaf=_is_exact) if _is_exact(x)])


def _part(parts: _Parts, own: ArrayTree, before: tuple[ArrayTree, ...]) -> ArrayTree:
    """Return what belongs to this exchange."""
    return own if parts.place.value == -1 else before[len(before) + parts.place.value + 1]


def _with_part(
    parts: _Parts, new: ArrayTree, own: ArrayTree, before: tuple[ArrayTree, ...]
) -> tuple[ArrayTree, tuple[ArrayTree, ...]]:
    if parts.place.value == -1:
        return new, before
    at = len(before) + parts.place.value + 1
    return own, (*before[:at], new, *before[at + 1 :])


def _init(
    parts: _Parts, rng_key: Array, position: ArrayTree, data: FederatedData
) -> FederatedState:
    kernel, compressor = parts.kernel, parts.compressor
    state = kernel.init(rng_key, position, data)
    shapes = trees.shapes_of(state.broadcast)
    kept, totals = [], []
    for exchange in kernel.exchanges:
        like = trees.shapes_of(_message_like(exchange, shapes))
        compressor.check(like, data.num_clients)
        own = compressor.init(like)
        kept.append(
            jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (data.num_states, *leaf.shape)), own)
        )
        totals.append(trees.zeros_like(like) if parts.pooled_memory.value else ())
    return FederatedState(
        state.broadcast,
        _Server(state.server, totals[-1], tuple(totals[:-1])),
        _Clients(state.clients, kept[-1], tuple(kept[:-1])),
    )


def _prepare(parts: _Parts, rng_key: Array, like: Broadcast, client: Client) -> _Draws:
    # The kernel draws what it draws uncompressed.
    own_key = compressor_key(rng_key, parts.depth.value)
    exchange = parts.exchange
    message = trees.shapes_of(_message_like(exchange, like))
    drawn = parts.compressor.prepare(own_key, message, client)
    return _Draws(exchange.prepare(rng_key, like, client), drawn)


def _step(
    parts: _Parts, draws: _Draws, broadcast: Broadcast, client_state: _Clients, client: Client
) -> tuple[ArrayTree, _Clients, StepInfo]:
    exchange, compressor = parts.exchange, parts.compressor
    whole, kept, info = exchange.step(draws.kernel, broadcast, client_state.kernel, client)
    message = _without_exact(whole)
    before = _part(parts, client_state.compressor, client_state.before)
    code, after = compressor.encode(draws.compressor, message, before, client)
    said = trees.cast_like(compressor.decode(code, client), message)
    info = info._replace(bits=message_bits(code) + _exact_bits(whole))
    state = _Clients(kept, *_with_part(parts, after, client_state.compressor, client_state.before))
    if compressor.memory is None:
        return _with_exact(said, whole), state, info
    if not parts.pooled_memory.value:
        return _with_exact(trees.add(compressor.memory.recall(before), said), whole), state, info
    change = trees.cast_like(compressor.memory.change(code, client), message)
    return _Message(importance(client, _with_exact(said, whole)), change), state, info


def _commit(
    parts: _Parts, message: ArrayTree, broadcast: Broadcast, client_state: _Clients
) -> _Clients:
    """Let the kernel keep the message as the server reads it."""
    commit = parts.exchange.commit
    assert commit is not None
    return client_state._replace(kernel=commit(message, broadcast, client_state.kernel))


def _aggregate(
    parts: _Parts, rng_key: Array, broadcast: Broadcast, server_state: _Server, total: ArrayTree
) -> tuple[Broadcast, _Server, ArrayTree]:
    memory = _part(parts, server_state.memory, server_state.before)
    if parts.pooled_memory.value:
        said = trees.add(memory, _without_exact(total.said))
        total, memory = _with_exact(said, total.said), trees.add(memory, total.change)
    moved, server, info = parts.exchange.aggregate(rng_key, broadcast, server_state.kernel, total)
    kept = _with_part(parts, memory, server_state.memory, server_state.before)
    return moved, _Server(server, *kept), info


def _draw(parts: _Parts, rng_key: Array, state: FederatedState) -> ArrayTree:
    inner = FederatedState(state.broadcast, state.server.kernel, state.clients.kernel)
    return parts.kernel.draw(rng_key, inner)
