"""Several kernels in one round: one after the other, on the same clients."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._checks import expect
from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    FederatedKernel,
    FederatedState,
    Federation,
    Participation,
    Phase,
    Sender,
    StepInfo,
    as_functions,
)
from fedmcmc.pytrees import trees
from fedmcmc.random import part_key

__all__ = ["sequence"]


class _Within(Phase):
    """A phase of one kernel of a sequence."""

    @property
    def inner(self) -> Phase:
        """The kernel's phase."""
        raise NotImplementedError

    @property
    def index(self) -> int:
        """Which of the kernels it belongs to."""
        raise NotImplementedError

    @property
    def ends(self) -> bool:
        """Whether it is that kernel's last, and not the sequence's."""
        raise NotImplementedError

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> ArrayTree:
        """Draw what the kernel draws, from a key of its own.

        What compresses a kernel within, and the sequence, must not draw the same.
        """
        return self.inner.prepare(part_key(rng_key, self.index), _own(self.index, like), client)

    def step(
        self,
        draws: ArrayTree,
        broadcast: Broadcast,
        client_state: tuple[ArrayTree, ...],
        client: Client,
    ) -> tuple[ArrayTree, tuple[ArrayTree, ...], StepInfo]:
        """Do as the kernel's client does."""
        i = self.index
        code, kernel_state, info = self.inner.step(
            draws, _own(i, broadcast), client_state[i], client
        )
        return code, _set(client_state, i, kernel_state), info

    def decode(
        self, code: ArrayTree, sender: Sender | Client, memory: ArrayTree, like: ArrayTree
    ) -> ArrayTree:
        """Decode as the kernel does."""
        return self.inner.decode(code, sender, memory, like)

    def memory(self, client_state: tuple[ArrayTree, ...]) -> ArrayTree:
        """Return what the kernel's server needs a copy of."""
        return self.inner.memory(client_state[self.index])

    def first_memory(self, like: Broadcast) -> ArrayTree:
        """Return the kernel's first."""
        return self.inner.first_memory(_own(self.index, like))

    def next_memory(self, code: ArrayTree, sender: Sender | Client, memory: ArrayTree) -> ArrayTree:
        """Move the copy as the kernel does."""
        return self.inner.next_memory(code, sender, memory)

    def message_like(self, like: Broadcast) -> ArrayTree:
        """Return the shapes of the kernel's messages."""
        return self.inner.message_like(_own(self.index, like))

    def code_like(self, like: Broadcast) -> ArrayTree:
        """Return the shapes of the kernel's codes."""
        return self.inner.code_like(_own(self.index, like))

    def commit(
        self, message: ArrayTree, broadcast: Broadcast, client_state: tuple[ArrayTree, ...]
    ) -> tuple[ArrayTree, ...]:
        """Keep of a message what the kernel's client keeps."""
        i = self.index
        kernel_state = self.inner.commit(message, _own(i, broadcast), client_state[i])
        return _set(client_state, i, kernel_state)

    def prepare_server(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        """Draw what the kernel's server draws."""
        return self.inner.prepare_server(rng_key, _own(self.index, like))

    def aggregate(
        self,
        rng_key: ArrayTree,
        broadcast: Broadcast,
        server_state: tuple[ArrayTree, ...],
        total: ArrayTree,
    ) -> tuple[Broadcast, tuple[ArrayTree, ...], ArrayTree]:
        """Do as the kernel's server does."""
        i = self.index
        kernel_broadcast = _own(i, broadcast)
        moved, server, info = self.inner.aggregate(
            rng_key, kernel_broadcast, server_state[i], total
        )
        extra = _set(broadcast.extra, i, moved.extra)
        moved = moved._replace(extra=extra, shared=broadcast.shared)
        if self.ends:
            # The round goes on: its number stays, and what was summed is of no use to the next
            # kernel.
            moved = moved._replace(round=broadcast.round, summed=())
        return moved, _set(server_state, i, server), info


@register_dataclass
@dataclass(frozen=True, eq=False)
class _WithinBefore(_Within):
    """A phase before the last kernel's own."""

    phase: Phase
    kernel_index: int = field(metadata={"static": True})
    is_last: bool = field(metadata={"static": True})

    @property
    def inner(self) -> Phase:
        """The kernel's phase."""
        return self.phase

    @property
    def index(self) -> int:
        """Which of the kernels it belongs to."""
        return self.kernel_index

    @property
    def ends(self) -> bool:
        """Whether it is that kernel's last."""
        return self.is_last


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Sequence(_Within, FederatedKernel):
    """Kernels one after the other in each round; see `sequence`."""

    kernels: tuple[FederatedKernel, ...]
    participation: Participation

    @property
    def inner(self) -> Phase:
        """The last kernel."""
        return self.kernels[-1]

    @property
    def index(self) -> int:
        """That of the last kernel."""
        return len(self.kernels) - 1

    @property
    def ends(self) -> bool:
        """The last phase of a sequence ends the round."""
        return False

    @property
    def before(self) -> tuple[Phase, ...]:
        """All phases of all kernels but the last one's own."""
        every = [
            _WithinBefore(phase, i, number == len(kernel.before))
            for i, kernel in enumerate(self.kernels)
            for number, phase in enumerate(kernel.phases)
        ]
        return tuple(every[:-1])

    @cached_property
    def setup(self) -> tuple[Phase, ...]:
        """Those of all kernels."""
        return tuple(phase for kernel in self.kernels for phase in kernel.setup)

    @property
    def constrain_fn(self) -> Callable[[ArrayTree], ArrayTree] | None:
        """The last kernel's."""
        return self.kernels[-1].constrain_fn

    @property
    def clients_apart(self) -> bool:
        """Whether they do in any of the kernels."""
        return any(kernel.clients_apart for kernel in self.kernels)

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, tuple[ArrayTree, ...]]:
        """Start all kernels at `position`."""
        rest, broadcasts, servers = iter(totals), [], []
        keys = jax.random.split(rng_key, len(self.kernels))
        for kernel, key in zip(self.kernels, keys, strict=True):
            kernel_totals = tuple(next(rest) for _ in kernel.setup)
            broadcast, server = kernel.server_init(key, position, federation, kernel_totals)
            broadcasts.append(broadcast)
            servers.append(server)
        extras = tuple(broadcast.extra for broadcast in broadcasts)
        if not trees.is_empty(extras[:-1]):
            raise ValueError("Only the last kernel of a sequence may keep a snapshot.")
        return broadcasts[0]._replace(extra=extras), tuple(servers)

    def client_init(self, broadcast: Broadcast, client: Client) -> tuple[ArrayTree, ...]:
        """Return what the client keeps for each kernel."""
        return tuple(
            kernel.client_init(_own(i, broadcast), client) for i, kernel in enumerate(self.kernels)
        )

    def prepare_shared(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        """Draw what the clients of each kernel draw alike; ``()`` if none draws anything."""
        drawn = tuple(
            kernel.prepare_shared(jax.random.fold_in(rng_key, jnp.uint32(i)), _own(i, like))
            for i, kernel in enumerate(self.kernels)
        )
        return () if trees.is_empty(drawn) else drawn

    def draw(self, rng_key: Array, state: FederatedState) -> ArrayTree:
        """Draw as the last kernel does."""
        broadcast = state.broadcast._replace(extra=state.broadcast.extra[-1])
        last = FederatedState(broadcast, state.server[-1], ())
        return self.kernels[-1].draw(rng_key, last)


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
    return Sequence(every, every[0].participation)


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


def _own(index: int, broadcast: Broadcast) -> Broadcast:
    """Return the broadcast as the kernel knows it."""
    shared = broadcast.shared
    return broadcast._replace(
        extra=broadcast.extra[index], shared=() if trees.is_empty(shared) else shared[index]
    )


def _set(parts: tuple[Any, ...], index: int, new: Any) -> tuple[Any, ...]:
    return (*parts[:index], new, *parts[index + 1 :])
