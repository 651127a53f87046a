"""Base classes of kernels: phases, which exchange messages, and samplers made of phases."""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.types._describing import Described, undefined
from fedmcmc.types._parts import Participation
from fedmcmc.types._traits import Disclosure, Traits
from fedmcmc.types._values import (
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
    """Exchange of messages in a round: a client's step, and the server's update from the sum.

    A subclass is a frozen dataclass registered as a pytree, whose fields hold numbers (leaves) and
    structure (static). Its methods are pure. `fedmcmc.rounds` calls them.
    """

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> ArrayTree:
        """Return all random draws of this client's step.

        `like` has the broadcast's shapes without values, so that blocks of rounds can be prepared
        ahead.
        """
        return ()

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        """Return the code that the client sends, its new state and its report; deterministic.

        Without compression, the code is the message itself. A message is a pytree, a term of a sum:
        the server only ever adds it.
        """
        raise undefined(self, "step")

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: ArrayTree, total: ArrayTree
    ) -> tuple[Broadcast, ArrayTree, ArrayTree]:
        """Return the next broadcast, the server's new state and its report.

        `rng_key` is a key or the result of `prepare_server` for that key. Only a kernel's own
        phase, the last one of a round, changes the round's number.
        """
        raise undefined(self, "aggregate")

    def prepare_server(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        """Return all random draws of `aggregate`, so that they can be drawn ahead."""
        return ()

    def message_like(self, like: Broadcast) -> ArrayTree:
        """Return the shapes of a message, given the shapes of a broadcast."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), like.position
        )

    def code_like(self, like: Broadcast) -> ArrayTree:
        """Return the shapes of a code, given the shapes of a broadcast."""
        return self.message_like(like)

    def decode(
        self, code: ArrayTree, sender: Sender | Client, memory: ArrayTree, like: ArrayTree
    ) -> ArrayTree:
        """Return the message that a code represents, shaped as `like`.

        `memory` is the server's copy of the sender's memory, or ``()`` if decoding needs none.
        """
        return code

    @property
    def server_memory(self) -> "ServerMemory | None":
        """Copies of the clients' memories at the server, if `decode` needs them."""
        return None

    def commit(
        self, message: ArrayTree, broadcast: Broadcast, client_state: ArrayTree
    ) -> ArrayTree:
        """Return the client's state, updated with its message after decoding."""
        return client_state


class ServerMemory:
    """Copies of the clients' memories, with which a server decodes their codes."""

    def of_client(self, client_state: ArrayTree) -> ArrayTree:
        """Return the part of a client's state that the server copies."""
        raise undefined(self, "of_client")

    def init(self, like: Broadcast) -> ArrayTree:
        """Return the copy of a client's memory before the first round."""
        raise undefined(self, "init")

    def update(self, code: ArrayTree, sender: Sender | Client, memory: ArrayTree) -> ArrayTree:
        """Return the copy of a client's memory after a code, computed from the code only."""
        raise undefined(self, "update")


def memory_of(phase: Phase, client_state: ArrayTree) -> ArrayTree:
    """Return the memory that decodes a client's code in this phase, often ``()``."""
    memory = phase.server_memory
    return () if memory is None else memory.of_client(client_state)


class SetupPhase(Phase):
    """Phase before the first round, whose messages are sums over the rows of a client.

    Its messages are neither random nor compressed.
    """

    sums_rows: ClassVar[bool] = True
    """True if pooling all rows in one client gives the sum of the clients' messages."""


def setup_message(phase: SetupPhase, broadcast: Broadcast, client: Client) -> ArrayTree:
    """Return a client's decoded message in a setup phase."""
    code, _, _ = phase.step((), broadcast, (), client)
    like = phase.message_like(jax.eval_shape(lambda: broadcast))
    return phase.decode(code, client, (), like)


class FederatedKernel(Phase):
    """Federated sampler: steps of clients and server, and their initial states.

    A subclass is a frozen dataclass registered as a pytree (see `Phase`). It is the last phase of
    its own rounds. If its clients estimate gradients, a subclass of
    `fedmcmc.kernels.EstimatorKernel` is easier to write. A sampler defines `target`, so that
    runs check its draws.

    Attributes
    ----------
    participation
        Participation rule; a field of every subclass.
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
        """Name of the function that builds such a kernel, with the transforms around it."""
        return type(self).__name__

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """All phases of a round; the last one is the kernel itself.

        The same clients take part in all phases of a round. The states of the clients, the
        broadcast and the server's state pass from each phase to the next.
        """
        return (self,)

    @cached_property
    def setup(self) -> tuple[SetupPhase, ...]:
        """Phases before the first round; `server_init` receives their sums over all clients."""
        return ()

    @property
    def model(self) -> Posterior | None:
        """Model of the clients' rows: the field `posterior`, or ``None`` without such a field."""
        return getattr(self, "posterior", None)

    @property
    def target(self) -> Posterior | None:
        """Posterior that draws should follow, or ``None``.

        A run compares its draws with this posterior. If it is ``None``, nothing is compared, and
        `Traits.no_target_reason` gives the reason.
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
        """Return a client's first state, computed from the first broadcast and its own rows."""
        return ()

    def init(self, rng_key: Array, position: ArrayTree, data: object) -> FederatedState:
        """Return the state before the first round, for clients whose rows are all in `data`.

        Raises
        ------
        ValueError
            If model, position and data do not fit together.
        """
        return initial_state(self, rng_key, position, data)

    def prepare_shared(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        """Return the draws that all clients share, which they receive in `Broadcast.shared`."""
        return ()

    def draw(self, rng_key: Array, state: FederatedState) -> ArrayTree:
        """Return the chain's position, or a draw from a fitted distribution.

        A run records `position_fn` of it, in the user's coordinates. A draw uses the broadcast and
        the server's state only, because a deployed server has nothing else.
        """
        return state.broadcast.position


def initial_state(
    kernel: FederatedKernel,
    rng_key: Array,
    position: ArrayTree,
    data: Any,
    clients: Array | None = None,
) -> FederatedState:
    """Return the state before the first round, with the states of all or some clients.

    Parameters
    ----------
    kernel, rng_key, position, data
        See `FederatedKernel.init`.
    clients
        Ids ``[n]`` of the clients whose states are computed; all by default.
    """
    if kernel.setup:
        check_start(kernel, rng_key, position, data.federation)
    start = Broadcast(jnp.zeros((), jnp.int32), position)
    totals = tuple(
        data.sum_over_clients(partial(setup_message, phase, start), apart=not phase.sums_rows)
        for phase in kernel.setup
    )
    broadcast, server = kernel.server_init(rng_key, position, data.federation, totals)
    states = data.map_clients(lambda client: kernel.client_init(broadcast, client), clients)
    return FederatedState(broadcast, server, states)


def check_start(
    kernel: FederatedKernel, rng_key: Array, position: ArrayTree, federation: Federation
) -> None:
    """Raise the `ValueError` of `FederatedKernel.server_init`, if any, without reading any row."""
    start = jax.eval_shape(lambda: Broadcast(jnp.zeros((), jnp.int32), position))
    shapes = tuple(phase.message_like(start) for phase in kernel.setup)

    def init_from_zeros() -> tuple[Broadcast, ArrayTree]:
        totals = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return kernel.server_init(rng_key, position, federation, totals)

    jax.eval_shape(init_from_zeros)


def user_position(kernel: FederatedKernel, position: ArrayTree) -> ArrayTree:
    """Return a sampled position in the user's coordinates, undoing any whitening."""
    model = kernel.model
    if model is None or model.position_fn is None:
        return position
    return model.position_fn(position)


def constrain_fn_of(kernel: FederatedKernel) -> Callable[[ArrayTree], ArrayTree] | None:
    """Return the map from an unconstrained position to the user's parameters, or ``None``."""
    return None if kernel.model is None else kernel.model.constrain_fn


def local_model(kernel: FederatedKernel) -> Local | None:
    """Return the part of the model with latents that clients keep, or ``None`` without latents."""
    if not kernel.traits.keeps_latents or kernel.model is None:
        return None
    return kernel.model.local
