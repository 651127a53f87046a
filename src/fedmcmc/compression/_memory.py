"""Compressor with memory: clients compress differences to their previous messages."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.compression._numbers import as_per_client, check_num_clients, value_for
from fedmcmc.compression._types import Compressor
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Client, PerClient, Sender, register_dataclass


class _MemoryState(NamedTuple):
    memory: ArrayTree
    inner: ArrayTree  # state of the compressor of differences


def memory(
    compressor: Compressor,
    rate: float | Array | None = None,
    *,
    of: Literal["all", "active"] | None = None,
) -> Compressor:
    """Compress the difference between a message and the client's memory of its messages.

    Client ``i`` sends ``g_i = C(m_i - eta_i)`` and updates its memory,
    ``eta_i <- eta_i + rate * g_i``. The compressed differences shrink as the messages settle.

    Parameters
    ----------
    compressor
        Compressor ``C`` of the difference.
    rate
        Rate ``[]``, or ``[num_clients]`` if clients differ, in [0, 1]; ``None`` for
        ``1 / (1 + omega)``, the largest rate of the published theory.
    of
        Clients whose memories the server adds: ``"all"`` (``sum_i eta_i + sum_active w_i g_i``, PP2
        of Philippenko and Dieuleveut, 2020) or ``"active"`` (``sum_active w_i (eta_i + g_i)``,
        PP1). Only ``"all"`` removes the noise that partial participation adds when clients differ.
        ``None`` means ``"all"`` if the kernel weights messages by one over the probability of
        taking part, and otherwise ``"active"`` (a relay).

    Raises
    ------
    ValueError
        If a rate is outside [0, 1], if `rate` is ``None`` and the compressor is biased, or if
        `compressor` has a memory already. Also raised by `init` if a rate exceeds
        ``2 / (1 + omega)``, above which memories may diverge.

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
    if isinstance(compressor, Memory):
        raise ValueError("memory needs a compressor without a memory.")
    if rate is None and not compressor.unbiased:
        raise ValueError(
            "memory needs a rate for a biased compressor: 1 / (1 + omega) is for unbiased ones."
        )
    if of not in ("all", "active", None):
        raise ValueError(f'of must be "all", "active" or None, got {of!r}.')
    checked_rate = None if rate is None else as_per_client(rate, "rate", low=0.0, high=1.0)
    return Memory(compressor, checked_rate, of)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Memory(Compressor):
    """Compressor of differences to a memory that client and server update; see `memory`."""

    compressor: Compressor  # of the difference
    rate: Array | PerClient | None  # None for 1 / (1 + omega)
    of: str | None = field(metadata={"static": True})

    @property
    def unbiased(self) -> bool:
        return self.compressor.unbiased

    def init(self, like: ArrayTree) -> _MemoryState:
        return _MemoryState(trees.zeros_like(like), self.compressor.init(like))

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
        return self.compressor.prepare(rng_key, like, client)

    def encode(
        self, draws: ArrayTree, message: ArrayTree, state: _MemoryState, client: Client
    ) -> tuple[ArrayTree, _MemoryState]:
        """Return the code of the difference, and the updated memory."""
        difference = trees.subtract(message, state.memory)
        code, inner = self.compressor.encode(draws, difference, state.inner, client)
        change = trees.cast_like(self.change(code, client), state.memory)
        return code, _MemoryState(trees.add(state.memory, change), inner)

    def decode(self, code: ArrayTree, sender: Sender | Client) -> ArrayTree:
        return self.compressor.decode(code, sender)

    def change(self, code: ArrayTree, sender: Sender | Client) -> ArrayTree:
        """Return the change of the sender's memory for a code."""
        decoded = self.compressor.decode(code, sender)
        return trees.scale(self._rate(decoded, sender), decoded)

    def omega(self, like: ArrayTree) -> Array:
        return self.compressor.omega(like)

    def check(self, like: ArrayTree, num_clients: int) -> None:
        """Check the compressor of differences, and that memories cannot diverge."""
        self.compressor.check(like, num_clients)
        check_num_clients(self.rate, "rate", num_clients)
        if self.rate is None or not self.unbiased:
            return
        rate = self.rate.values if isinstance(self.rate, PerClient) else self.rate
        with jax.ensure_compile_time_eval():
            numbers = jnp.broadcast_arrays(rate, self.omega(like))
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

    def _rate(self, like: ArrayTree, client: Sender | Client) -> Array:
        if self.rate is not None:
            return value_for(self.rate, client)
        omega = self.omega(like)
        return 1 / (1 + value_for(PerClient(omega) if jnp.ndim(omega) else omega, client))
