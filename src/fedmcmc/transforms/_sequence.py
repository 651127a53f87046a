"""Sequences: several kernels in one round, one after the other, on the same clients."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import expect
from fedmcmc.pytrees import trees
from fedmcmc.random import part_key
from fedmcmc.transforms._wrapping import WrappedKernel, WrappedPhase, replace_item
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Client,
    FederatedKernel,
    FederatedState,
    Federation,
    Participation,
    Phase,
    Sender,
    ServerMemory,
    SetupPhase,
    StepInfo,
    Traits,
    as_functions,
    register_dataclass,
)

PerKernel = tuple[ArrayTree, ...]
"""One entry per kernel of a sequence."""


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class _Part(WrappedPhase):
    """Phase of kernel number `index` in a sequence."""

    inner: Phase
    index: int = field(metadata={"static": True})
    ends_kernel: bool = field(metadata={"static": True})  # if another kernel follows

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> ArrayTree:
        # Compressors of this kernel and of the whole sequence must draw from different keys.
        return self.inner.prepare(
            part_key(rng_key, self.index), _for_kernel(self.index, like), client
        )

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: PerKernel, client: Client
    ) -> tuple[ArrayTree, PerKernel, StepInfo]:
        code, kernel_state, info = self.inner.step(
            draws, _for_kernel(self.index, broadcast), client_state[self.index], client
        )
        return code, replace_item(client_state, self.index, kernel_state), info

    @property
    def server_memory(self) -> ServerMemory | None:
        memory = self.inner.server_memory
        return None if memory is None else _PartMemory(memory, self.index)

    def message_like(self, like: Broadcast) -> ArrayTree:
        return self.inner.message_like(_for_kernel(self.index, like))

    def code_like(self, like: Broadcast) -> ArrayTree:
        return self.inner.code_like(_for_kernel(self.index, like))

    def commit(
        self, message: ArrayTree, broadcast: Broadcast, client_state: PerKernel
    ) -> PerKernel:
        kernel_state = self.inner.commit(
            message, _for_kernel(self.index, broadcast), client_state[self.index]
        )
        return replace_item(client_state, self.index, kernel_state)

    def prepare_server(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        return self.inner.prepare_server(rng_key, _for_kernel(self.index, like))

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: PerKernel, total: ArrayTree
    ) -> tuple[Broadcast, PerKernel, ArrayTree]:
        moved, kernel_state, info = self.inner.aggregate(
            rng_key, _for_kernel(self.index, broadcast), server_state[self.index], total
        )
        extra = replace_item(broadcast.extra, self.index, moved.extra)
        moved = moved._replace(extra=extra, shared=broadcast.shared)
        if self.ends_kernel:
            # The round continues, so its number stays. The next kernel needs no previous sums.
            moved = moved._replace(round=broadcast.round, summed=())
        return moved, replace_item(server_state, self.index, kernel_state), info


@dataclass(frozen=True)
class _PartMemory(ServerMemory):
    """Copies of the memories of kernel number `index` in a sequence."""

    inner: ServerMemory
    index: int

    def of_client(self, client_state: PerKernel) -> ArrayTree:
        return self.inner.of_client(client_state[self.index])

    def init(self, like: Broadcast) -> ArrayTree:
        return self.inner.init(_for_kernel(self.index, like))

    def update(self, code: ArrayTree, sender: Sender | Client, memory: ArrayTree) -> ArrayTree:
        return self.inner.update(code, sender, memory)


def _check_each(sequence: "Sequence", compressor: object) -> None:
    for kernel in sequence.kernels:
        kernel.traits.check_compressor(kernel, compressor)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Sequence(WrappedKernel):
    """Kernels that run one after the other in each round; see `sequence`."""

    kernels: tuple[FederatedKernel, ...]
    participation: Participation

    @property
    def kernel(self) -> FederatedKernel:  # type: ignore[override]  # a field elsewhere
        """The last kernel, whose draws are the draws of the sequence."""
        return self.kernels[-1]

    @cached_property
    def wrapped(self) -> tuple[Phase, ...]:
        last_index = len(self.kernels) - 1
        return tuple(
            _Part(phase, i, i < last_index and phase is kernel)
            for i, kernel in enumerate(self.kernels)
            for phase in kernel.phases
        )

    @cached_property
    def setup(self) -> tuple[SetupPhase, ...]:
        return tuple(phase for kernel in self.kernels for phase in kernel.setup)

    @property
    def traits(self) -> Traits:  # type: ignore[override]  # an attribute elsewhere
        all_traits = [kernel.traits for kernel in self.kernels]
        hints = dict.fromkeys(traits.divergence_hint for traits in all_traits)
        return replace(
            all_traits[-1],
            divergence_hint=" ".join(filter(None, hints)),
            has_local_steps=any(traits.has_local_steps for traits in all_traits),
            noise_in_messages=any(traits.noise_in_messages for traits in all_traits),
            phases_independent=all(traits.phases_independent for traits in all_traits),
            check_compressor=_check_each,
        )

    @property
    def name(self) -> str:
        return f"sequence({', '.join(kernel.name for kernel in self.kernels)})"

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, PerKernel]:
        remaining, broadcasts, servers = iter(totals), [], []
        keys = jax.random.split(rng_key, len(self.kernels))
        for kernel, key in zip(self.kernels, keys, strict=True):
            kernel_totals = tuple(next(remaining) for _ in kernel.setup)
            broadcast, server = kernel.server_init(key, position, federation, kernel_totals)
            broadcasts.append(broadcast)
            servers.append(server)
        extras = tuple(broadcast.extra for broadcast in broadcasts)
        if not trees.is_empty(extras[:-1]):
            raise ValueError("Only the last kernel of a sequence may keep a snapshot.")
        return broadcasts[0]._replace(extra=extras), tuple(servers)

    def client_init(self, broadcast: Broadcast, client: Client) -> PerKernel:
        return tuple(
            kernel.client_init(_for_kernel(i, broadcast), client)
            for i, kernel in enumerate(self.kernels)
        )

    def prepare_shared(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        draws = tuple(
            kernel.prepare_shared(jax.random.fold_in(rng_key, jnp.uint32(i)), _for_kernel(i, like))
            for i, kernel in enumerate(self.kernels)
        )
        return () if trees.is_empty(draws) else draws

    def draw(self, rng_key: Array, state: FederatedState) -> ArrayTree:
        broadcast = state.broadcast._replace(extra=state.broadcast.extra[-1])
        return super().draw(rng_key, FederatedState(broadcast, state.server[-1], ()))


def sequence(*kernels: FederatedKernel) -> FederatedKernel:
    """Build a kernel whose round is one round of each of `kernels`, on the same clients.

    Each kernel starts at the position to which the previous one moved the chain. Bits are summed
    over the kernels.

    Parameters
    ----------
    *kernels
        Two or more kernels with the same participation. They share the round's number, so schedules
        count rounds of the sequence. Only the last kernel may keep a snapshot (`svrg`).

    Raises
    ------
    TypeError
        If an argument is not a `FederatedKernel`.
    ValueError
        If there are fewer than two kernels, one has faults, one accepts or rejects proposals, or
        their participations differ; from `init`, if a kernel before the last keeps a snapshot.

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
    if any(kernel.participation.excludes_broken_messages for kernel in kernels):
        raise ValueError(
            "The kernels of a sequence share their faults: apply faults to the sequence."
        )
    if any(kernel.traits.needs_all_clients for kernel in kernels):
        raise ValueError(
            "A kernel that accepts or rejects stores the log density at its position, and another "
            "kernel would move the position: it cannot be part of a sequence."
        )
    kernels = tuple(as_functions(kernel) for kernel in kernels)
    participation = kernels[0].participation
    if not all(_are_same(participation, kernel.participation) for kernel in kernels[1:]):
        raise ValueError(
            "The kernels of a sequence run on the same clients with the same weights: use the same "
            "participation, and compress all or none of them with memories of all clients."
        )
    return Sequence(kernels, participation)


def _are_same(a: Participation, b: Participation) -> bool:
    return trees.same_structure(a, b) and all(
        isinstance(x, jax.core.Tracer) or np.array_equal(x, y)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def _for_kernel(index: int, broadcast: Broadcast) -> Broadcast:
    """Return the broadcast for kernel number `index`."""
    shared = broadcast.shared
    return broadcast._replace(
        extra=broadcast.extra[index], shared=() if trees.is_empty(shared) else shared[index]
    )
