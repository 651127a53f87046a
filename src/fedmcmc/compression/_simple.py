"""Compressors that send every number, and chains of compressors."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from fedmcmc._types import ArrayTree, Client, Static
from fedmcmc.compression._codes import Dense
from fedmcmc.compression._types import Compressor, no_check, no_draws, no_state
from fedmcmc.pytrees import schedules, trees

__all__ = ["chain", "clip", "identity"]


def identity() -> Compressor:
    """Send a message as it is; ``omega = 0``.

    Examples
    --------
    >>> float(identity().omega(jnp.zeros(3)))
    0.0
    """
    return Compressor(
        init=Partial(no_state),
        prepare=Partial(no_draws),
        encode=Partial(_encode_identity),
        decode=Partial(_decode_dense),
        omega=Partial(_omega_constant, jnp.zeros((), jnp.float32)),
        check=Partial(no_check),
        unbiased=Static(True),
    )


def clip(norm: float | Array) -> Compressor:
    """Scale a message down to at most this Euclidean norm, over all leaves.

    Parameters
    ----------
    norm
        ``[]``, positive.

    Raises
    ------
    ValueError
        If `norm` is not a positive number.

    Notes
    -----
    Biased, and it saves no bits by itself: in a `chain` it bounds what a client can say. The
    declared ``omega = 1`` is that of a message far above the bound.

    Examples
    --------
    >>> code, _ = clip(2.5).encode((), jnp.array([3.0, -4.0]), (), None)
    >>> code.values.tolist()
    [1.5, -2.0]
    """
    bound = schedules.number(norm, "norm", minimum=0.0, strict=True)
    if isinstance(bound, schedules.Scheduled):
        raise TypeError("norm must be a number; a schedule of the round is not supported.")
    return Compressor(
        init=Partial(no_state),
        prepare=Partial(no_draws),
        encode=Partial(_encode_clipped, bound),
        decode=Partial(_decode_dense),
        omega=Partial(_omega_constant, jnp.ones((), jnp.float32)),
        check=Partial(no_check),
        unbiased=Static(False),
    )


def chain(*compressors: Compressor) -> Compressor:
    """Compress by each in turn; what is sent is the last one's code.

    Raises
    ------
    ValueError
        Without any, or with a `memory` inside: that goes around a chain.

    Notes
    -----
    Unbiased if all are, with ``1 + omega = prod(1 + omega_i)``. The last may be `quantize` after
    `sparsify`: its sparse code then pays for the numbers that are left.

    Examples
    --------
    >>> import fedmcmc
    >>> halves = fedmcmc.sparsify(0.5)
    >>> float(chain(halves, halves).omega(jnp.zeros(3)))
    3.0
    """
    if not compressors:
        raise ValueError("chain needs at least one compressor, got none.")
    for inner in compressors:
        if inner.memory is not None:
            raise ValueError(
                "chain holds a memory; write memory(chain(...), rate): the memory is of what the "
                "receiver understands."
            )
    return Compressor(
        init=Partial(_init_chain, compressors),
        prepare=Partial(_prepare_chain, compressors),
        encode=Partial(_encode_chain, compressors),
        decode=compressors[-1].decode,
        omega=Partial(_omega_chain, compressors),
        check=Partial(_check_chain, compressors),
        unbiased=Static(all(inner.unbiased.value for inner in compressors)),
    )


def _encode_identity(
    draws: ArrayTree, message: ArrayTree, state: ArrayTree, client: Client
) -> tuple[Dense, ArrayTree]:
    del draws, client
    return Dense(message), state


def _encode_clipped(
    bound: Any, draws: ArrayTree, message: ArrayTree, state: ArrayTree, client: Client
) -> tuple[Dense, ArrayTree]:
    del draws, client
    norm = trees.norm(message)
    most = bound.astype(norm.dtype)
    return Dense(trees.scale(jnp.where(norm > most, most / norm, 1), message)), state


def _decode_dense(code: Dense, client: Client) -> ArrayTree:
    del client
    return code.values


def _omega_constant(omega: Array, like: ArrayTree) -> Array:
    del like
    return omega


def _init_chain(compressors: tuple[Compressor, ...], like: ArrayTree) -> ArrayTree:
    return tuple(inner.init(like) for inner in compressors)


def _prepare_chain(
    compressors: tuple[Compressor, ...], rng_key: Array, like: ArrayTree, client: Client
) -> ArrayTree:
    keys = jax.random.split(rng_key, len(compressors))
    return tuple(c.prepare(keys[i], like, client) for i, c in enumerate(compressors))


def _encode_chain(
    compressors: tuple[Compressor, ...],
    draws: ArrayTree,
    message: ArrayTree,
    state: ArrayTree,
    client: Client,
) -> tuple[ArrayTree, ArrayTree]:
    states = []
    code: ArrayTree = None
    for i, inner in enumerate(compressors):
        code, new = inner.encode(draws[i], message, state[i], client)
        message = trees.cast_like(inner.decode(code, client), message)
        states.append(new)
    return code, tuple(states)


def _omega_chain(compressors: tuple[Compressor, ...], like: ArrayTree) -> Array:
    # With omega the error so far and w the next one's. Unbiased next: the two errors are
    # orthogonal. Biased next: they may add up.
    omega = jnp.zeros((), jnp.float32)
    for inner in compressors:
        w = inner.omega(like)
        if inner.unbiased.value:
            omega = (1 + omega) * (1 + w) - 1
        else:
            omega = jnp.square(jnp.sqrt(omega) + jnp.sqrt((1 + omega) * w))
    return omega


def _check_chain(compressors: tuple[Compressor, ...], like: ArrayTree, num_clients: int) -> None:
    for inner in compressors:
        inner.check(like, num_clients)
