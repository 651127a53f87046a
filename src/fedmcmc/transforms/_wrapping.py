"""Base classes of transforms: phases and kernels that forward to other phases and kernels."""

from collections.abc import Callable
from functools import cached_property
from types import UnionType
from typing import Any, TypeVar

import jax
from jax import Array

from fedmcmc.types import (
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

T = TypeVar("T")


class WrappedPhase(Phase):
    """Phase that forwards to another phase, except for the methods that a subclass overrides.

    Attributes
    ----------
    inner
        Wrapped phase; a field of every subclass.
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
    """Kernel that forwards to another kernel, except for the methods that a subclass overrides.

    A transform changes each phase of the wrapped kernel (`wrapped`).

    Attributes
    ----------
    kernel
        Wrapped kernel; a field of every subclass.
    """

    kernel: FederatedKernel

    @cached_property
    def wrapped(self) -> tuple[Phase, ...]:
        """All phases of a round, changed; the last one replaces the kernel's own phase."""
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


def nodes_of(tree: ArrayTree, kind: type | UnionType) -> list[Any]:
    """Return the outermost nodes of a class (or union of classes) in a tree."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def replace_nodes(tree: T, kind: type | UnionType, fn: Callable[[Any], Any]) -> T:
    """Return a tree with ``fn(node)`` for each outermost node of a class (or union of classes)."""
    changed: T = jax.tree.map(
        lambda node: fn(node) if isinstance(node, kind) else node,
        tree,
        is_leaf=lambda node: isinstance(node, kind),
    )
    return changed


def replace_item(parts: tuple[Any, ...], index: int, new: object) -> tuple[Any, ...]:
    """Return `parts` with `new` at `index`."""
    return (*parts[:index], new, *parts[index + 1 :])
