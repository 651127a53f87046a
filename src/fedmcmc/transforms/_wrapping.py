"""Phases and kernels that do as others do, but for what a transform changes."""

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
    Phase,
    Posterior,
    Sender,
    ServerMemory,
    SetupPhase,
    StepInfo,
    Traits,
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

    @property
    def server_memory(self) -> ServerMemory | None:
        return self.inner.server_memory

    def commit(
        self, message: ArrayTree, broadcast: Broadcast, client_state: ArrayTree
    ) -> ArrayTree:
        return self.inner.commit(message, broadcast, client_state)


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

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        return (*self.wrapped[:-1], self)

    @cached_property
    def setup(self) -> tuple[SetupPhase, ...]:
        return self.kernel.setup

    @property
    def traits(self) -> Traits:  # type: ignore[override]  # an attribute elsewhere
        return self.kernel.traits

    @property
    def model(self) -> Posterior | None:
        return self.kernel.model

    @property
    def target(self) -> Posterior | None:
        return self.kernel.target

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
