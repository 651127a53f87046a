"""Where rounds start: first states of clients that are computed some at a time, or elsewhere."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    FederatedKernel,
    FederatedState,
    check_start,
    initial_state,
    setup_message,
)
from fedmcmc.data import FederatedData
from fedmcmc.pytrees import trees
from fedmcmc.rounds._arrangement import TOGETHER, Arrangement

TABLE_BYTES = 2**26
"""Memory for the terms of some clients."""

Combine = Callable[[np.ndarray], np.ndarray]
"""Combines the processes' arrays into one; each is zero where its process knows nothing."""


def initialize(
    kernel: FederatedKernel,
    rng_key: Array,
    position: ArrayTree,
    data: FederatedData,
    arrangement: Arrangement = TOGETHER,
    *,
    combine: Combine | None = None,
) -> FederatedState:
    """Return the state before the first round, as ``kernel.init(rng_key, position, data)`` does.

    Clients are computed as in the rounds of `arrangement`, so that a client's numbers are the same
    whoever else is there. Of its `members`, if there are some, alone are the clients' states.

    Parameters
    ----------
    kernel, rng_key, position, data
        As of `FederatedKernel.init`.
    arrangement
        How clients are computed.
    combine
        How processes tell each other what they know, where the rows are `partial`.
    """
    if arrangement.clients_at_a_time is None and not arrangement.partial:
        return initial_state(kernel, rng_key, position, data, arrangement.members)
    federation = data.federation
    if arrangement.partial:
        federation = federation._replace(num_rows=int(np.asarray(data.size).sum()))
    if kernel.setup:
        check_start(kernel, rng_key, position, federation)
    first = Broadcast(jnp.zeros((), jnp.int32), position)

    totals = tuple(
        total_of_clients(
            partial(setup_message, phase, first),
            data,
            arrangement,
            combine,
            apart=not phase.sums_rows,
        )
        for phase in kernel.setup
    )
    broadcast, server = kernel.server_init(rng_key, position, federation, totals)
    clients = _mapped(lambda client: kernel.client_init(broadcast, client), data, arrangement)
    return FederatedState(broadcast, server, clients)


def _mapped(
    fn: Callable[[Client], ArrayTree], data: FederatedData, arrangement: Arrangement
) -> ArrayTree:
    """Return ``fn(client)`` of all clients, or of all members, with a leading client axis."""
    at_a_time, members = arrangement.clients_at_a_time, arrangement.members
    if at_a_time is None:
        return data.map_clients(fn, members)
    # As many together as in a round.
    batch_size = None if at_a_time == 1 else at_a_time
    ids = data.everyone(members).index
    return jax.lax.map(lambda index: fn(data.client(index)), ids, batch_size=batch_size)


def total_of_clients(
    fn: Callable[[Client], ArrayTree],
    data: FederatedData,
    arrangement: Arrangement = TOGETHER,
    combine: Combine | None = None,
    *,
    apart: bool = False,
) -> ArrayTree:
    """Return the sum of ``fn(client)`` over all clients, where `fn` is a sum over rows.

    All rows are taken as those of one client, unless clients are to be computed `apart`. Where
    clients are computed one by one, or only some are in this process (of a `ClientLoader`), each
    client's term is computed apart too, and terms are added in the order of the clients: the same
    numbers wherever the clients are.
    """
    if not arrangement.partial and arrangement.clients_at_a_time != 1:
        return data.sum_over_clients(fn, apart=apart)

    def one(index: Array) -> ArrayTree:
        return fn(data.client(index))

    shapes = jax.eval_shape(one, jnp.int32(0))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    here = np.asarray(arrangement.members) if arrangement.partial else np.arange(data.num_clients)
    step = max(TABLE_BYTES // max(size, 1), 1)
    total = trees.zeros_like(shapes)
    for begin in range(0, data.num_clients, step):
        ids = here[(here >= begin) & (here < begin + step)]
        end = min(begin + step, data.num_clients)
        table = jax.lax.map(one, jnp.asarray(ids, jnp.int32))
        if arrangement.partial:
            assert combine is not None
            table = _completed(table, shapes, ids - begin, end - begin, combine)
        total = jax.tree.map(
            lambda t, leaf: t + jnp.sum(leaf, axis=0, dtype=leaf.dtype), total, table
        )
    return total


def _completed(
    table: ArrayTree, shapes: ArrayTree, places: np.ndarray, num: int, combine: Combine
) -> ArrayTree:
    """Return the terms of `num` clients, of which this process has those at `places`."""

    def whole(shape: jax.ShapeDtypeStruct, leaf: Array) -> Array:
        full = np.zeros((num, *shape.shape), shape.dtype)
        full[places] = np.asarray(leaf)
        words = combine(np.ascontiguousarray(full).view(np.uint8))
        return jnp.asarray(words.view(full.dtype).reshape(full.shape))

    return jax.tree.map(whole, shapes, table)
