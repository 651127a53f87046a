"""Several kernels in one round: one after the other, on the same clients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial

from fedmcmc._checks import expect
from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    Exchange,
    FederatedKernel,
    FederatedState,
    Participation,
    Static,
    StepInfo,
    as_functions,
)
from fedmcmc.data import FederatedData
from fedmcmc.pytrees import trees
from fedmcmc.random import part_key

__all__ = ["sequence"]


class _Place(NamedTuple):
    exchange: Exchange
    kernel: Static[int]  # which of the sequence it belongs to
    ends: Static[bool]  # whether it is that kernel's last, and not the sequence's


def sequence(*kernels: FederatedKernel) -> FederatedKernel:
    """Build a kernel whose round is one round of each of `kernels`, on the same clients.

    Each kernel starts from where the one before moved the chain. Bits are those of all.

    Parameters
    ----------
    *kernels
        Two or more, with the same participation. They share the round's number, so schedules count
        rounds of the sequence. Only the last may keep a snapshot that is renewed (`svrg`).

    Raises
    ------
    TypeError
        If one is no `FederatedKernel`.
    ValueError
        If there are fewer than two, one has faults, or their participations differ; and from `init`
        where a kernel but the last keeps a snapshot.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> long = fedmcmc.fa_hmc(posterior, step_size=0.1, num_integration_steps=9, num_local_steps=1)
    >>> kernel = sequence(long, fedmcmc.lsd(posterior, step_size=0.01))
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, 0.0, num_rounds=10, progress=False
    ... )
    >>> int(samples.info["bits_up"][0, 0])
    128
    """
    for i, kernel in enumerate(kernels):
        expect(kernel, FederatedKernel, f"kernels[{i}]")
    if len(kernels) < 2:
        raise ValueError(f"sequence needs two or more kernels, got {len(kernels)}.")
    if any(kernel.participation.guards for kernel in kernels):
        raise ValueError(
            "All kernels of a sequence have their faults together: give faults to the sequence."
        )
    every = tuple(as_functions(kernel) for kernel in kernels)
    for kernel in every[1:]:
        _check_same(every[0].participation, kernel.participation)
    places = [
        _Place(exchange, Static(i), Static(exchange is own[-1] and i < len(every) - 1))
        for i, own in enumerate(kernel.exchanges for kernel in every)
        for exchange in own
    ]
    *before, own = [_exchange(place) for place in places]
    shared = any(kernel.prepare_shared is not None for kernel in every)
    return FederatedKernel(
        init=Partial(_init, every),
        prepare=own.prepare,
        step=own.step,
        aggregate=own.aggregate,
        draw=Partial(_draw, every[-1]),
        participation=every[0].participation,
        constrain_fn=every[-1].constrain_fn,
        prepare_server=own.prepare_server,
        message_fn=own.message_fn,
        prepare_shared=Partial(_prepare_shared, every) if shared else None,
        before=tuple(before),
        commit=own.commit,
        clients_apart=Static(any(kernel.clients_apart.value for kernel in every)),
    )


def _check_same(first: Participation, other: Participation) -> None:
    same = trees.same_structure(first, other) and all(
        isinstance(a, jax.core.Tracer) or np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True)
    )
    if not same:
        raise ValueError(
            "The kernels of a sequence run on the same clients, whose messages are weighted alike: "
            "give them the same participation, and compress all or none with memories of all "
            "clients."
        )


def _exchange(place: _Place) -> Exchange:
    inner = place.exchange
    return Exchange(
        prepare=Partial(_prepare, place),
        step=Partial(_step, place),
        aggregate=Partial(_aggregate, place),
        prepare_server=None if inner.prepare_server is None else Partial(_prepare_server, place),
        message_fn=None if inner.message_fn is None else Partial(_message, place),
        commit=None if inner.commit is None else Partial(_commit, place),
    )


def _own(index: int, broadcast: Broadcast) -> Broadcast:
    """Return the broadcast as the kernel knows it."""
    shared = broadcast.shared
    return broadcast._replace(
        extra=broadcast.extra[index], shared=() if trees.is_empty(shared) else shared[index]
    )


def _set(parts: tuple[Any, ...], index: int, new: Any) -> tuple[Any, ...]:
    return (*parts[:index], new, *parts[index + 1 :])


def _init(
    kernels: tuple[FederatedKernel, ...], rng_key: Array, position: ArrayTree, data: FederatedData
) -> FederatedState:
    keys = jax.random.split(rng_key, len(kernels))
    states = [k.init(key, position, data) for k, key in zip(kernels, keys, strict=True)]
    extras = tuple(state.broadcast.extra for state in states)
    if not trees.is_empty(extras[:-1]):
        raise ValueError("Only the last kernel of a sequence may keep a snapshot.")
    return FederatedState(
        states[0].broadcast._replace(extra=extras),
        tuple(state.server for state in states),
        tuple(state.clients for state in states),
    )


def _prepare(place: _Place, rng_key: Array, like: Broadcast, client: Client) -> ArrayTree:
    # A key of its own: what compresses a kernel within, and the sequence, must not draw the same.
    i = place.kernel.value
    return place.exchange.prepare(part_key(rng_key, i), _own(i, like), client)


def _prepare_server(place: _Place, rng_key: Array, like: Broadcast) -> ArrayTree:
    assert place.exchange.prepare_server is not None
    return place.exchange.prepare_server(rng_key, _own(place.kernel.value, like))


def _message(place: _Place, like: Broadcast) -> ArrayTree:
    assert place.exchange.message_fn is not None
    return place.exchange.message_fn(_own(place.kernel.value, like))


def _prepare_shared(
    kernels: tuple[FederatedKernel, ...], rng_key: Array, like: Broadcast
) -> ArrayTree:
    return tuple(
        ()
        if kernel.prepare_shared is None
        else kernel.prepare_shared(jax.random.fold_in(rng_key, jnp.uint32(i)), _own(i, like))
        for i, kernel in enumerate(kernels)
    )


def _step(
    place: _Place,
    draws: ArrayTree,
    broadcast: Broadcast,
    client_state: tuple[ArrayTree, ...],
    client: Client,
) -> tuple[ArrayTree, tuple[ArrayTree, ...], StepInfo]:
    i = place.kernel.value
    message, own, info = place.exchange.step(draws, _own(i, broadcast), client_state[i], client)
    return message, _set(client_state, i, own), info


def _commit(
    place: _Place, message: ArrayTree, broadcast: Broadcast, client_state: tuple[ArrayTree, ...]
) -> tuple[ArrayTree, ...]:
    i, commit = place.kernel.value, place.exchange.commit
    assert commit is not None
    return _set(client_state, i, commit(message, _own(i, broadcast), client_state[i]))


def _aggregate(
    place: _Place,
    rng_key: Array,
    broadcast: Broadcast,
    server_state: tuple[ArrayTree, ...],
    total: ArrayTree,
) -> tuple[Broadcast, tuple[ArrayTree, ...], ArrayTree]:
    i = place.kernel.value
    own = _own(i, broadcast)
    moved, server, info = place.exchange.aggregate(rng_key, own, server_state[i], total)
    moved = moved._replace(extra=_set(broadcast.extra, i, moved.extra), shared=broadcast.shared)
    if place.ends.value:
        # The round goes on: its number stays, and what was summed is of no use to the next kernel.
        moved = moved._replace(round=broadcast.round, summed=())
    return moved, _set(server_state, i, server), info


def _draw(last: FederatedKernel, rng_key: Array, state: FederatedState) -> ArrayTree:
    broadcast = state.broadcast._replace(extra=state.broadcast.extra[-1])
    return last.draw(rng_key, FederatedState(broadcast, state.server[-1], state.clients[-1]))
