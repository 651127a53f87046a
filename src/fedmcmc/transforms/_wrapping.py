"""Phases and kernels that do as others do, but for what a transform changes."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

from jax import Array

from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    FederatedKernel,
    FederatedState,
    Federation,
    Local,
    Phase,
    Posterior,
    Sender,
    StepInfo,
)


class WrappedPhase(Phase):
    """A phase that does as another does, but for what a subclass changes.

    Attributes
    ----------
    inner
        The other; a field of every subclass.
    """

    inner: Phase

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> ArrayTree:
        return self.inner.prepare(rng_key, like, client)

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        return self.inner.step(draws, broadcast, client_state, client)

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: ArrayTree, total: ArrayTree
    ) -> tuple[Broadcast, ArrayTree, ArrayTree]:
        return self.inner.aggregate(rng_key, broadcast, server_state, total)

    def prepare_server(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        return self.inner.prepare_server(rng_key, like)

    def message_like(self, like: Broadcast) -> ArrayTree:
        return self.inner.message_like(like)

    def code_like(self, like: Broadcast) -> ArrayTree:
        return self.inner.code_like(like)

    def decode(
        self, code: ArrayTree, sender: Sender | Client, memory: ArrayTree, like: ArrayTree
    ) -> ArrayTree:
        return self.inner.decode(code, sender, memory, like)

    def memory(self, client_state: ArrayTree) -> ArrayTree:
        return self.inner.memory(client_state)

    def first_memory(self, like: Broadcast) -> ArrayTree:
        return self.inner.first_memory(like)

    def next_memory(self, code: ArrayTree, sender: Sender | Client, memory: ArrayTree) -> ArrayTree:
        return self.inner.next_memory(code, sender, memory)

    def commit(
        self, message: ArrayTree, broadcast: Broadcast, client_state: ArrayTree
    ) -> ArrayTree:
        return self.inner.commit(message, broadcast, client_state)

    def in_range(self, message: ArrayTree, most: float) -> ArrayTree:
        return self.inner.in_range(message, most)

    def from_range(self, total: ArrayTree, most: float) -> ArrayTree:
        return self.inner.from_range(total, most)

    @property
    def sums_rows(self) -> bool:
        return self.inner.sums_rows


class WrappedKernel(WrappedPhase, FederatedKernel):
    """A kernel whose phases are those of another, each changed by a transform.

    What a subclass leaves out is done as `kernel` does it.

    Attributes
    ----------
    kernel
        The other; a field of every subclass.
    """

    kernel: FederatedKernel

    @cached_property
    def wrapped(self) -> tuple[Phase, ...]:
        """All phases of a round, changed; the last one does what the kernel's own phase does."""
        raise NotImplementedError

    @cached_property
    def inner(self) -> Phase:  # type: ignore[override]  # a field elsewhere
        return self.wrapped[-1]

    @property
    def before(self) -> tuple[Phase, ...]:
        return self.wrapped[:-1]

    @cached_property
    def setup(self) -> tuple[Phase, ...]:
        return self.kernel.setup

    @property
    def constrain_fn(self) -> Callable[[ArrayTree], ArrayTree] | None:
        return self.kernel.constrain_fn

    @property
    def position_fn(self) -> Callable[[ArrayTree], ArrayTree] | None:
        return self.kernel.position_fn

    @property
    def target(self) -> Posterior | None:
        return self.kernel.target

    @property
    def without_target(self) -> str:
        return self.kernel.without_target

    @property
    def local(self) -> Local | None:
        return self.kernel.local

    @property
    def approximates(self) -> bool:
        return self.kernel.approximates

    @property
    def caution(self) -> str:
        return self.kernel.caution

    @property
    def clients_apart(self) -> bool:
        return self.kernel.clients_apart

    @property
    def needs_everyone(self) -> bool:
        return self.kernel.needs_everyone

    @property
    def phases_apart(self) -> bool:
        return self.kernel.phases_apart

    @property
    def takes_late(self) -> bool:
        return self.kernel.takes_late

    def check_compressor(self, compressor: Any) -> None:
        self.kernel.check_compressor(compressor)

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, ArrayTree]:
        return self.kernel.server_init(rng_key, position, federation, totals)

    def client_init(self, broadcast: Broadcast, client: Client) -> ArrayTree:
        return self.kernel.client_init(broadcast, client)

    def prepare_shared(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        return self.kernel.prepare_shared(rng_key, like)

    def draw(self, rng_key: Array, state: FederatedState) -> ArrayTree:
        return self.kernel.draw(rng_key, state)


def replaced(parts: tuple[Any, ...], index: int, new: Any) -> tuple[Any, ...]:
    """Return `parts` with `new` at `index`."""
    return (*parts[:index], new, *parts[index + 1 :])
