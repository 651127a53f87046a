"""Initial states for clients that are computed in batches or spread over processes."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.data import FederatedData
from fedmcmc.pytrees import trees
from fedmcmc.rounds._layout import SINGLE_DEVICE, Layout
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Client,
    FederatedKernel,
    FederatedState,
    check_start,
    initial_state,
    setup_message,
)

TABLE_BYTES = 2**26
"""Memory for a batch of clients' terms."""

Combine = Callable[[np.ndarray], np.ndarray]
"""Function that merges the processes' arrays, each zero in the entries of other processes."""


def initialize(
    kernel: FederatedKernel,
    rng_key: Array,
    position: ArrayTree,
    data: FederatedData,
    layout: Layout = SINGLE_DEVICE,
    *,
    combine: Combine | None = None,
) -> FederatedState:
    """Return the state before the first round, as ``kernel.init(rng_key, position, data)`` does.

    Clients are computed as in the rounds of `layout`, so a client's numbers do not depend on
    which other clients are in the same process. If the layout has `members`, only their states
    are returned.

    Parameters
    ----------
    kernel, rng_key, position, data
        See `FederatedKernel.init`.
    layout
        Layout of the clients.
    combine
        Function that merges the processes' arrays, if the layout is `partial`.
    """
    if layout.clients_at_a_time is None and not layout.partial:
        return initial_state(kernel, rng_key, position, data, layout.members)
    federation = data.federation
    if layout.partial:
        federation = federation._replace(num_rows=int(np.asarray(data.size).sum()))
    if kernel.setup:
        check_start(kernel, rng_key, position, federation)
    initial = Broadcast(jnp.zeros((), jnp.int32), position)
    totals = tuple(
        _sum_over_clients(
            partial(setup_message, phase, initial),
            data,
            layout,
            combine,
            apart=not phase.sums_rows,
        )
        for phase in kernel.setup
    )
    broadcast, server = kernel.server_init(rng_key, position, federation, totals)
    clients = _map_clients(lambda client: kernel.client_init(broadcast, client), data, layout)
    return FederatedState(broadcast, server, clients)


def _map_clients(
    fn: Callable[[Client], ArrayTree], data: FederatedData, layout: Layout
) -> ArrayTree:
    """Return ``fn(client)`` for all clients or all members, with a leading client axis."""
    at_a_time, members = layout.clients_at_a_time, layout.members
    if at_a_time is None:
        return data.map_clients(fn, members)
    batch_size = None if at_a_time == 1 else at_a_time
    ids = data.everyone(members).index
    return jax.lax.map(lambda index: fn(data.client(index)), ids, batch_size=batch_size)


def _sum_over_clients(
    fn: Callable[[Client], ArrayTree],
    data: FederatedData,
    layout: Layout,
    combine: Combine | None,
    *,
    apart: bool,
) -> ArrayTree:
    """Return the sum of ``fn(client)`` over all clients, where `fn` is a sum over rows.

    By default `fn` is called once, with all rows as one client. Terms are computed per client if
    `apart` is set, if clients are computed one by one, or if only some are in this process (with a
    `ClientLoader`). In the last two cases they are added in client order, so that the sum does not
    depend on the devices or processes.
    """
    if not layout.partial and layout.clients_at_a_time != 1:
        return data.sum_over_clients(fn, apart=apart)

    def term(index: Array) -> ArrayTree:
        return fn(data.client(index))

    shapes = jax.eval_shape(term, jnp.int32(0))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    local = np.asarray(layout.members) if layout.partial else np.arange(data.num_clients)
    step = max(TABLE_BYTES // max(size, 1), 1)
    total = trees.zeros_like(shapes)
    for start in range(0, data.num_clients, step):
        ids = local[(local >= start) & (local < start + step)]
        stop = min(start + step, data.num_clients)
        table = jax.lax.map(term, jnp.asarray(ids, jnp.int32))
        if layout.partial:
            assert combine is not None
            table = _add_remote_terms(table, shapes, ids - start, stop - start, combine)
        total = jax.tree.map(
            lambda t, leaf: t + jnp.sum(leaf, axis=0, dtype=leaf.dtype), total, table
        )
    return total


def _add_remote_terms(
    table: ArrayTree, shapes: ArrayTree, local: np.ndarray, num: int, combine: Combine
) -> ArrayTree:
    """Return the terms of `num` clients; this process computed the entries `local`."""

    def merge(shape: jax.ShapeDtypeStruct, leaf: Array) -> Array:
        full = np.zeros((num, *shape.shape), shape.dtype)
        full[local] = np.asarray(leaf)
        words = combine(np.ascontiguousarray(full).view(np.uint8))
        return jnp.asarray(words.view(full.dtype).reshape(full.shape))

    return jax.tree.map(merge, shapes, table)
