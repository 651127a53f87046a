"""One round of communication in simulation, and the `(init, step)` pair made of it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc import streams, trees
from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Cached,
    Cohort,
    FederatedKernel,
    FederatedState,
    Participation,
    StepInfo,
    as_functions,
)
from fedmcmc.data import FederatedData

__all__ = ["RoundInfo", "Simulation", "simulate"]


class RoundInfo(NamedTuple):
    """What happened in one round.

    Attributes
    ----------
    round
        ``[]`` int32, counted from zero.
    num_active
        ``[]`` int32, clients whose messages were summed.
    bits_up, bits_down
        ``[]``, all messages of the round to and from the server, exact (int32) below ``2**31``
        bits a round, else float32.
    gradient_norm
        ``[]``, root mean square over the active clients' gradient calls.
    clients
        `StepInfo` of the cohort, leaves ``[cohort_size, ...]``.
    server
        Whatever the kernel's `aggregate` reports.
    """

    round: Array
    num_active: Array
    bits_up: Array
    bits_down: Array
    gradient_norm: Array
    clients: StepInfo
    server: ArrayTree


class RoundDraws(NamedTuple):
    """All that is random in a round, besides its cohort."""

    clients: list[ArrayTree]  # of `prepare`, one a group, leaves [size, ...] (no axis for one)
    server: ArrayTree  # of `prepare_server`; without one, () until the round's key is needed


class Simulation(NamedTuple):
    """A kernel bound to data, in the shape of a BlackJAX sampling algorithm.

    `init` is ``(position, rng_key=None) -> state``, `step` is
    ``(rng_key, state) -> (state, RoundInfo)``.
    """

    init: Callable[..., FederatedState]
    step: Callable[[Array, FederatedState], tuple[FederatedState, RoundInfo]]


def simulate(kernel: FederatedKernel, data: FederatedData) -> Simulation:
    """Bind `kernel` to `data`: one step is one round of communication.

    Parameters
    ----------
    kernel
        A federated kernel.
    data
        Every client's rows. A compiled caller holds them as constants; `fedmcmc.sample` passes
        them as arguments.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> init, step = simulate(fedmcmc.sgld(posterior, step_size=0.05), data)
    >>> state, info = jax.jit(step)(jax.random.key(0), init(jnp.array(0.0)))
    >>> int(state.broadcast.round), int(info.num_active)
    (1, 1)
    """
    kernel = as_functions(kernel)
    rows = data.pooled() if kernel.participation.pooled else data

    def init(position: ArrayTree, rng_key: Array | None = None) -> FederatedState:
        key = jax.random.key(0) if rng_key is None else as_key(rng_key)
        return kernel.init(key, position, rows)

    def step(rng_key: Array, state: FederatedState) -> tuple[FederatedState, RoundInfo]:
        rng_key = as_key(rng_key)
        prepared = prepare_round(kernel, rows, rng_key, state.broadcast, state.broadcast.round)
        return run_round(kernel, rows, rng_key, state, *prepared)

    return Simulation(init, step)


def as_key(rng_key: Any) -> Array:
    """Return a typed key, also from the raw words of `jax.random.PRNGKey`."""
    if not isinstance(rng_key, jax.Array):
        raise TypeError(
            f"rng_key must be a JAX key, as from jax.random.key(0), got {type(rng_key).__name__}."
        )
    if jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key):
        return rng_key
    return jax.random.wrap_key_data(rng_key)


def prepare_round(
    kernel: FederatedKernel, data: FederatedData, rng_key: Array, like: Broadcast, round_: Array
) -> tuple[Cohort, RoundDraws]:
    """Draw the cohort of a round and all that is random in its steps and at the server."""
    participation = kernel.participation
    shapes = trees.shapes_of(like)
    cohort = participation.prepare(streams.cohort_key(rng_key, round_), data.num_clients)
    server: ArrayTree = ()
    if kernel.prepare_server is not None:
        server = kernel.prepare_server(streams.server_key(rng_key, round_), shapes)

    def prepare(key: Array, client: Any) -> ArrayTree:
        return kernel.prepare(key, shapes, client)

    def prepare_group(ids: Array, weight: Array, bound: int) -> ArrayTree:
        keys = jax.vmap(lambda i: streams.client_key(rng_key, round_, i))(ids)
        if ids.shape[0] == 1:
            return prepare(keys[0], data.client(ids[0], weight[0], bound))
        axes = (0, data.client_axes(bound))
        return jax.vmap(prepare, in_axes=axes)(keys, data.client(ids, weight, bound))

    groups = _groups(kernel, data, cohort)
    draws = [prepare_group(group.ids, group.weight, bound) for group, bound in groups]
    return cohort, RoundDraws(draws, server)


def _groups(
    kernel: FederatedKernel, data: FederatedData, cohort: Cohort
) -> list[tuple[Cohort, int]]:
    """Return the parts of the cohort that are computed together, each with a bound on sizes."""
    if kernel.participation.cohort_size is not None or data.buckets is None:
        return [(cohort, data.max_size)]
    return [
        (jax.tree.map(lambda leaf, ids=ids: leaf[ids], cohort), bound)
        for ids, bound in data.buckets.groups()
    ]


def run_round(
    kernel: FederatedKernel,
    data: FederatedData,
    rng_key: Array,
    state: FederatedState,
    cohort: Cohort,
    draws: RoundDraws,
) -> tuple[FederatedState, RoundInfo]:
    """Run one round: the cohort's steps, the sum of their messages, the server's update."""
    broadcast, round_ = state.broadcast, state.broadcast.round
    total, clients, step_info, most_up = _run_cohort(kernel, data, state, cohort, draws.clients)
    if kernel.prepare_server is None:
        draws = draws._replace(server=streams.server_key(rng_key, round_))
    moved, server, server_info = kernel.aggregate(draws.server, broadcast, state.server, total)
    num_active = jnp.sum(cohort.active.astype(jnp.int32))
    sends = 0 if kernel.participation.silent else 1
    most_down = trees.num_bits(broadcast)
    down = most_down if trees.is_empty(step_info.bits_down) else step_info.bits_down
    square = jnp.where(cohort.active, step_info.gradient_norm**2, 0)
    info = RoundInfo(
        round=round_,
        num_active=num_active,
        bits_up=_sum_bits(
            # A code is at most twice as long as the numbers it codes.
            jnp.where(cohort.active, sends * step_info.bits, 0),
            2 * most_up,
        ),
        bits_down=_sum_bits(
            jnp.where(cohort.active, sends * down, 0), most_down * cohort.active.shape[0]
        ),
        gradient_norm=jnp.sqrt(jnp.sum(square) / jnp.maximum(num_active, 1).astype(square.dtype)),
        clients=step_info,
        server=server_info,
    )
    return FederatedState(moved, server, clients), info


def _run_cohort(
    kernel: FederatedKernel,
    data: FederatedData,
    state: FederatedState,
    cohort: Cohort,
    draws: list[ArrayTree],
) -> tuple[ArrayTree, ArrayTree, StepInfo, int]:
    """Return the sum of messages, all clients' states, the cohort's infos, uncompressed bits."""
    totals, kept, bits = [], [], 0
    groups = _groups(kernel, data, cohort)
    for (group, bound), drawn in zip(groups, draws, strict=True):
        whole = len(groups) == 1 and kernel.participation.cohort_size is None
        old = state.clients
        if not whole:
            old = jax.tree.map(lambda leaf, ids=group.ids: leaf[ids], old)
        message, new, info = _run_group(kernel, data, state, group, bound, drawn, old)
        if kernel.participation.drops:
            new = _kept_by_all(group.active, new, old)
        totals.append(_sum_active(message, group, kernel.participation))
        kept.append((new, info))
        bits += trees.num_bits(message)
    total = functools.reduce(trees.add, totals)
    if len(groups) > 1 and data.buckets is not None:
        place = data.buckets.place
        new, info = jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[place], *kept)
    else:
        new, info = kept[0]
        if kernel.participation.cohort_size is not None:
            new = jax.tree.map(lambda all_, own: all_.at[cohort.ids].set(own), state.clients, new)
    return total, new, info, bits


def _run_group(
    kernel: FederatedKernel,
    data: FederatedData,
    state: FederatedState,
    group: Cohort,
    bound: int,
    draws: ArrayTree,
    old: ArrayTree,
) -> tuple[ArrayTree, ArrayTree, StepInfo]:
    if group.ids.shape[0] == 1:
        outputs = kernel.step(
            draws,
            state.broadcast,
            jax.tree.map(lambda leaf: leaf[0], old),
            data.client(group.ids[0], group.weight[0], bound),
        )
        return jax.tree.map(lambda leaf: leaf[None], outputs)
    step = jax.vmap(kernel.step, in_axes=(0, None, 0, data.client_axes(bound)))
    return step(draws, state.broadcast, old, data.client(group.ids, group.weight, bound))


def _kept_by_all(active: Array, new: ArrayTree, old: ArrayTree) -> ArrayTree:
    """Return the new states of active clients, and of the others the old ones but for caches."""

    def choose(a: Any, b: Any) -> Any:
        return a if isinstance(a, Cached) else jnp.where(_column(active, a), a, b)

    return jax.tree.map(choose, new, old, is_leaf=lambda leaf: isinstance(leaf, Cached))


def _sum_active(message: ArrayTree, cohort: Cohort, participation: Participation) -> ArrayTree:
    def reduce(leaf: Array) -> Array:
        if participation.weighted:
            leaf = leaf * trees.cast(_column(cohort.weight, leaf), leaf)
        if participation.drops:
            leaf = jnp.where(_column(cohort.active, leaf), leaf, 0)
        return jnp.sum(leaf, axis=0)

    return jax.tree.map(reduce, message)


def _column(vector: Array, leaf: Array) -> Array:
    return vector.reshape(vector.shape + (1,) * (leaf.ndim - 1))


def _sum_bits(bits: Array, bound: int) -> Array:
    return jnp.sum(bits) if bound < 2**31 else jnp.sum(bits.astype(jnp.float32))
