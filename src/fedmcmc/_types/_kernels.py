"""Base classes of kernels: an exchange of messages, and a sampler whose rounds are made of them."""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types._describing import Described, undefined
from fedmcmc._types._parts import Participation
from fedmcmc._types._traits import Disclosure, Traits
from fedmcmc._types._values import (
    ArrayTree,
    Broadcast,
    Client,
    FederatedState,
    Federation,
    Local,
    Posterior,
    Sender,
    StepInfo,
)


class Phase(Described):
    """One exchange of messages in a round: what clients compute and send, what the server makes.

    A subclass is a frozen dataclass registered as a pytree, whose fields hold numbers (leaves) and
    structure (static). Its methods are pure. `fedmcmc.rounds` calls them.
    """

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> ArrayTree:
        """Return all that is random in this client's step.

        `like` holds the broadcast's shapes, never its values, so that blocks of rounds can be
        prepared ahead.
        """
        return ()

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        """Return the code that leaves the client, its new state and its report; deterministic.

        A phase without compression has the message itself for its code. A message is a pytree, a
        term of a sum: the server only ever adds it.
        """
        raise undefined(self, "step")

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: ArrayTree, total: ArrayTree
    ) -> tuple[Broadcast, ArrayTree, ArrayTree]:
        """Return the next broadcast, the server's new state and its report.

        Instead of the key it also takes what `prepare_server` made of it. Phases that precede a
        kernel's own leave the round's number as it is.
        """
        raise undefined(self, "aggregate")

    def prepare_server(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        """Return all that is random in `aggregate`, so that it can be drawn ahead too."""
        return ()

    def message_like(self, like: Broadcast) -> ArrayTree:
        """Return the shapes of a message, from the broadcast's."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), like.position
        )

    def code_like(self, like: Broadcast) -> ArrayTree:
        """Return the shapes of a code, from the broadcast's."""
        return self.message_like(like)

    def decode(
        self, code: ArrayTree, sender: Sender | Client, memory: ArrayTree, like: ArrayTree
    ) -> ArrayTree:
        """Return the message that a code stands for, shaped as `like`.

        `memory` is the server's copy of the sender's memory, ``()`` where decoding needs none.
        """
        return code

    @property
    def server_memory(self) -> "ServerMemory | None":
        """Copies of the clients' memories at the server, if `decode` needs them."""
        return None

    def commit(
        self, message: ArrayTree, broadcast: Broadcast, client_state: ArrayTree
    ) -> ArrayTree:
        """Return the client's state with what it keeps of its message as the server reads it."""
        return client_state


class ServerMemory:
    """Copies of memories of clients, with which a server decodes their codes."""

    def of_client(self, client_state: ArrayTree) -> ArrayTree:
        """Return the part of a client's state of which the server keeps a copy."""
        raise NotImplementedError

    def init(self, like: Broadcast) -> ArrayTree:
        """Return the copy of a client's memory before the first round."""
        raise NotImplementedError

    def update(self, code: ArrayTree, sender: Sender | Client, memory: ArrayTree) -> ArrayTree:
        """Return the copy of a client's memory after a code, computed from the code alone."""
        raise NotImplementedError


def memory_of(phase: Phase, client_state: ArrayTree) -> ArrayTree:
    """Return the memory with which a client's code in this phase is decoded, often ``()``."""
    memory = phase.server_memory
    return () if memory is None else memory.of_client(client_state)


class SetupPhase(Phase):
    """A phase before the first round, whose messages are sums over the rows of a client.

    Its messages are neither random nor compressed.
    """

    sums_rows: ClassVar[bool] = True
    """Whether the message of all rows as one client's equals the sum of the clients' messages."""


def setup_message(phase: SetupPhase, broadcast: Broadcast, client: Client) -> ArrayTree:
    """Return the message of a client in a setup phase, as the server adds it."""
    code, _, _ = phase.step((), broadcast, (), client)
    like = phase.message_like(jax.eval_shape(lambda: broadcast))
    return phase.decode(code, client, (), like)


class FederatedKernel(Phase):
    """A federated sampler: what a client does, what the server does, where both start.

    A subclass is a frozen dataclass registered as a pytree (see `Phase`). It is the last phase of
    its own rounds. A kernel whose clients estimate gradients is easier to write as a subclass of
    `fedmcmc.EstimatorKernel`. A sampler defines `target`, so that runs check its draws.

    Attributes
    ----------
    participation
        Rule that chooses who takes part in a round; a field of every subclass.
    traits
        Properties that runs and transforms act on.
    disclosure
        Content of a client's message.
    """

    participation: Participation
    traits: Traits = Traits()
    disclosure: ClassVar[Disclosure] = Disclosure()

    @property
    def name(self) -> str:
        """Name of the function that builds such a kernel, with transforms around it."""
        return type(self).__name__

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """All phases of a round; the last one is the kernel itself.

        The same clients take part in all phases of a round. Their states, the broadcast and the
        state of the server pass from each phase to the next.
        """
        return (self,)

    @cached_property
    def setup(self) -> tuple[SetupPhase, ...]:
        """Phases before the first round; `server_init` gets their sums over all clients."""
        return ()

    @property
    def model(self) -> Posterior | None:
        """Model of the clients' rows: the field `posterior`, ``None`` if there is no such field."""
        return getattr(self, "posterior", None)

    @property
    def target(self) -> Posterior | None:
        """Posterior that draws are meant to follow; ``None`` if there is none.

        A run compares its draws with this posterior. If it is ``None``, nothing is compared, and
        `Traits.no_target_reason` says why.
        """
        return None

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, ArrayTree]:
        """Return the first broadcast and the server's first state.

        `totals` are the sums of the messages of `setup`.

        Raises
        ------
        ValueError
            If model, position and federation do not fit together.
        """
        raise undefined(self, "server_init")

    def client_init(self, broadcast: Broadcast, client: Client) -> ArrayTree:
        """Return what a client keeps between rounds, from the first broadcast and its own rows."""
        return ()

    def init(self, rng_key: Array, position: ArrayTree, data: Any) -> FederatedState:
        """Return the state before the first round, of clients whose rows are all in `data`.

        Raises
        ------
        ValueError
            If model, position and data do not fit together.
        """
        return initial_state(self, rng_key, position, data)

    def prepare_shared(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        """Return what all clients draw alike, which they find in `Broadcast.shared`."""
        return ()

    def draw(self, rng_key: Array, state: FederatedState) -> ArrayTree:
        """Return the chain's position, or a draw from a fitted distribution.

        A run keeps it in the user's coordinates, `position_fn` of it. It reads the broadcast and
        the server's state alone: a deployed server has no other.
        """
        return state.broadcast.position


def initial_state(
    kernel: FederatedKernel,
    rng_key: Array,
    position: ArrayTree,
    data: Any,
    clients: Array | None = None,
) -> FederatedState:
    """Return the state before the first round, with the states of all or of some clients.

    Parameters
    ----------
    kernel, rng_key, position, data
        As those of `FederatedKernel.init`.
    clients
        Ids of the clients whose states are made, ``[n]``; all by default.
    """
    if kernel.setup:
        check_start(kernel, rng_key, position, data.federation)
    first = Broadcast(jnp.zeros((), jnp.int32), position)
    totals = tuple(
        data.sum_over_clients(partial(setup_message, phase, first), apart=not phase.sums_rows)
        for phase in kernel.setup
    )
    broadcast, server = kernel.server_init(rng_key, position, data.federation, totals)
    states = data.map_clients(lambda client: kernel.client_init(broadcast, client), clients)
    return FederatedState(broadcast, server, states)


def check_start(
    kernel: FederatedKernel, rng_key: Array, position: ArrayTree, federation: Federation
) -> None:
    """Raise what `FederatedKernel.server_init` raises, without a pass over any row.

    Raises
    ------
    ValueError
        If model, position and federation do not fit together.
    """
    first = jax.eval_shape(lambda: Broadcast(jnp.zeros((), jnp.int32), position))
    shapes = [phase.message_like(first) for phase in kernel.setup]

    def begin() -> tuple[Broadcast, ArrayTree]:
        totals = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tuple(shapes))
        return kernel.server_init(rng_key, position, federation, totals)

    jax.eval_shape(begin)


def user_position(kernel: FederatedKernel, position: ArrayTree) -> ArrayTree:
    """Return a sampled position in the user's coordinates, which whitening changes."""
    model = kernel.model
    if model is None or model.position_fn is None:
        return position
    return model.position_fn(position)


def constrain_fn_of(kernel: FederatedKernel) -> Callable[[ArrayTree], ArrayTree] | None:
    """Return the map from an unconstrained position to the user's parameters, if there is one."""
    return None if kernel.model is None else kernel.model.constrain_fn


def local_model(kernel: FederatedKernel) -> Local | None:
    """Return the part of the model whose latents clients keep; ``None`` if they keep none."""
    if not kernel.traits.keeps_latents or kernel.model is None:
        return None
    return kernel.model.local
