"""Memory: a client compresses the difference between its message and what it said before."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial

from fedmcmc._types import ArrayTree, Client, PerClient, Static
from fedmcmc.compression._simple import chain
from fedmcmc.compression._types import (
    Compressor,
    Memory,
    check_number,
    of_client,
    per_client_number,
)
from fedmcmc.pytrees import trees

__all__ = ["memory"]


class _Config(NamedTuple):
    inner: Compressor
    rate: Any  # [], PerClient of [num_clients], or None


class _State(NamedTuple):
    memory: ArrayTree
    inner: ArrayTree


def memory(
    compressor: Compressor,
    rate: float | Array | None = None,
    *,
    of: Literal["all", "active"] | None = None,
) -> Compressor:
    """Compress the difference between a message and the client's memory of its messages.

    Client ``i`` sends ``g_i = C(m_i - eta_i)`` and moves its memory,
    ``eta_i <- eta_i + rate * g_i``, so that what is compressed shrinks as the messages settle.

    Parameters
    ----------
    compressor
        Of the difference.
    rate
        ``[]``, or ``[num_clients]`` where clients differ, in [0, 1]; ``None`` for
        ``1 / (1 + omega)``, the largest rate of the published theory.
    of
        Whose memory the server adds to what it received: that of ``"all"`` clients
        (``sum_i eta_i + sum_active w_i g_i``, PP2 of Philippenko and Dieuleveut, 2020) or of the
        ``"active"`` ones (``sum_active w_i (eta_i + g_i)``, PP1). Where everyone takes part the
        two are the same. Only the first removes the noise that partial participation makes of
        the clients' heterogeneity. ``None`` (default) is all of them where a kernel weights its
        messages by one over the probability of taking part, and the active ones where it does
        not (a relay).

    Raises
    ------
    ValueError
        If a rate is outside [0, 1], if `rate` is ``None`` for a biased compressor, which has no
        such rate, or if `compressor` has a memory already; and from `init` where a rate is above
        ``2 / (1 + omega)``.

    Notes
    -----
    With an unbiased compressor, ``E |m - eta'|^2 <= (1 - 2 rate + rate^2 (1 + omega)) |m - eta|^2``
    where ``m`` stays: above ``2 / (1 + omega)`` memories may move away from what they remember
    faster than they come back.

    References
    ----------
    Mishchenko et al. (2019), DIANA; Algorithm 2 of Vono et al. (2022).

    Examples
    --------
    >>> import fedmcmc
    >>> compressor = memory(fedmcmc.quantize(16))
    >>> round(1 / (1 + float(compressor.omega(jnp.zeros(784)))), 3)  # its rate
    0.364
    """
    if compressor.memory is not None:
        raise ValueError("memory goes around a compressor that has no memory of its own.")
    if rate is None and not compressor.unbiased.value:
        raise ValueError(
            "memory needs a rate for a biased compressor: 1 / (1 + omega) is for unbiased ones."
        )
    if of not in ("all", "active", None):
        raise ValueError(f'of must be "all", "active" or None, got {of!r}.')
    given = None if rate is None else per_client_number(rate, "rate", low=0.0, high=1.0)
    return _remembering(_Config(compressor, given), Static(of))


def _remembering(config: _Config, of: Static[str | None]) -> Compressor:
    compressor = config.inner
    return Compressor(
        init=Partial(_init, config),
        prepare=compressor.prepare,
        encode=Partial(_encode, config),
        decode=compressor.decode,
        omega=compressor.omega,
        check=Partial(_check, config),
        unbiased=compressor.unbiased,
        memory=Memory(
            Partial(_recall), Partial(_change, config), of, Partial(_followed_by, config, of)
        ),
    )


def _followed_by(config: _Config, of: Static[str | None], outer: Compressor) -> Compressor:
    if config.rate is None and not outer.unbiased.value:
        raise ValueError(
            "A memory with the rate 1 / (1 + omega) cannot be followed by a biased compressor: "
            "that rate is for unbiased ones. Give the memory a rate."
        )
    return _remembering(_Config(chain(config.inner, outer), config.rate), of)


def _init(config: _Config, like: ArrayTree) -> _State:
    return _State(trees.zeros_like(like), config.inner.init(like))


def _rate(config: _Config, like: ArrayTree, client: Client) -> Array:
    if config.rate is not None:
        return of_client(config.rate, client)
    omega = config.inner.omega(like)
    return 1 / (1 + of_client(PerClient(omega) if jnp.ndim(omega) else omega, client))


def _encode(
    config: _Config, draws: ArrayTree, message: ArrayTree, state: _State, client: Client
) -> tuple[ArrayTree, _State]:
    difference = trees.subtract(message, state.memory)
    code, inner = config.inner.encode(draws, difference, state.inner, client)
    change = trees.cast_like(_change(config, code, client), state.memory)
    return code, _State(trees.add(state.memory, change), inner)


def _recall(state: _State) -> ArrayTree:
    return state.memory


def _change(config: _Config, code: ArrayTree, client: Client) -> ArrayTree:
    said = config.inner.decode(code, client)
    return trees.scale(_rate(config, said, client), said)


def _check(config: _Config, like: ArrayTree, num_clients: int) -> None:
    config.inner.check(like, num_clients)
    check_number(config.rate, "rate", num_clients)
    if config.rate is None or not config.inner.unbiased.value:
        return
    rate = config.rate.values if isinstance(config.rate, PerClient) else config.rate
    with jax.ensure_compile_time_eval():
        numbers = jnp.broadcast_arrays(rate, config.inner.omega(like))
        if any(isinstance(x, jax.core.Tracer) for x in numbers):
            return
        rates, omegas = (np.ravel(np.asarray(x, float)) for x in numbers)
    worst = np.argmax(rates * (1 + omegas))
    growth = 1 + omegas[worst]
    if rates[worst] * growth > 2 * (1 + 1e-6):
        raise ValueError(
            f"A memory of rate {rates[worst]:.4g} around a compressor with omega "
            f"{omegas[worst]:.4g} may diverge: rates must be at most 2 / (1 + omega) = "
            f"{2 / growth:.4g}; rate=None takes 1 / (1 + omega) = {1 / growth:.4g}."
        )
