"""Base classes of kernels: an exchange of messages, and a sampler whose rounds are made of them."""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types._describing import Described, undefined
from fedmcmc._types._parts import Participation
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

    def memory(self, client_state: ArrayTree) -> ArrayTree:
        """Return what of a client's state the server needs a copy of in order to decode."""
        return ()

    def first_memory(self, like: Broadcast) -> ArrayTree:
        """Return what `memory` returns of a client before the first round."""
        return ()

    def next_memory(self, code: ArrayTree, sender: Sender | Client, memory: ArrayTree) -> ArrayTree:
        """Return the server's copy of a client's memory after a code, from codes alone."""
        return memory

    def commit(
        self, message: ArrayTree, broadcast: Broadcast, client_state: ArrayTree
    ) -> ArrayTree:
        """Return the client's state with what it keeps of its message as the server reads it."""
        return client_state

    def in_range(self, message: ArrayTree, most: float) -> ArrayTree:
        """Return what a client sends in a secure sum, whose numbers are `most` in size at most.

        Larger ones, and numbers that are not finite, make the sum useless, unless a phase has a
        number within the range for them, as for a density of zero.
        """
        return message

    def from_range(self, total: ArrayTree, most: float) -> ArrayTree:
        """Return a sum of what `in_range` returned as the phase reads any total."""
        return total

    @property
    def sums_rows(self) -> bool:
        """Whether the sum of clients' messages is the message of all their rows as one client's.

        Of a phase of set-up: all rows then take one pass.
        """
        return True

    def setup_message(self, broadcast: Broadcast, client: Client) -> ArrayTree:
        """Return a client's message in a phase of set-up, as a server adds it."""
        code, _, _ = self.step((), broadcast, (), client)
        like = self.message_like(jax.eval_shape(lambda: broadcast))
        return self.decode(code, client, (), like)


class FederatedKernel(Phase):
    """A federated sampler: what a client does, what the server does, where both start.

    A subclass is a frozen dataclass registered as a pytree (see `Phase`). It is the last phase of
    its own rounds. A kernel whose clients estimate gradients is easier to write as a subclass of
    `fedmcmc.EstimatorKernel`. A sampler defines `target`, so that runs check its draws.

    Attributes
    ----------
    participation
        Who takes part in a round; a field of every subclass.
    """

    participation: Participation

    @property
    def before(self) -> tuple[Phase, ...]:
        """Phases that precede the kernel's own in each round.

        The same clients take part in all phases of a round, and their state goes from one to the
        next; so do the broadcast and the server's state.
        """
        return ()

    @cached_property
    def setup(self) -> tuple[Phase, ...]:
        """Phases before the first round, whose sums over all clients `server_init` needs.

        Their messages are sums over a client's rows, neither random nor compressed.
        """
        return ()

    @property
    def constrain_fn(self) -> Callable[[ArrayTree], ArrayTree] | None:
        """Unconstrained position to the user's parameters, if the posterior has that."""
        return None

    @property
    def position_fn(self) -> Callable[[ArrayTree], ArrayTree] | None:
        """Sampled position to the user's, if the posterior is in coordinates of its own."""
        return None

    @property
    def target(self) -> "Posterior | None":
        """Posterior that draws are meant to follow; ``None`` if the kernel does not sample.

        A run compares its draws with this posterior. If it is ``None``, nothing is compared.
        """
        return None

    @property
    def without_target(self) -> str:
        """Reason why `target` is ``None``, such as ``"it trains and does not sample"``.

        Empty if the kernel defines no `target`: a long run then warns that nothing was compared.
        """
        defined = type(self).target is not FederatedKernel.target
        return "its target is None" if defined else ""

    @property
    def local(self) -> Local | None:
        """The part of the model whose latents clients keep; ``None`` where they keep none."""
        return None

    @property
    def approximates(self) -> bool:
        """Whether draws are independent ones of an approximation that the kernel refines."""
        return False

    @property
    def caution(self) -> str:
        """What other than too large steps makes a run diverge, and what to do; often nothing."""
        return ""

    @property
    def clients_apart(self) -> bool:
        """Whether clients move positions of their own, over many gradients per round."""
        return False

    @property
    def needs_everyone(self) -> bool:
        """Whether a round counts only if every client's message is in its sum."""
        return False

    @property
    def phases_apart(self) -> bool:
        """Whether a client may answer one exchange of a round and be missing in the next."""
        return True

    @property
    def takes_late(self) -> bool:
        """Whether a message that comes a round late still means something."""
        return not self.needs_everyone

    def check_compressor(self, compressor: Any) -> None:
        """Raise `ValueError` where messages compressed by this would make draws wrong."""

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """All phases of a round, the kernel's own last."""
        return (*self.before, self)

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

    def check_before_setup(
        self, rng_key: Array, position: ArrayTree, federation: Federation
    ) -> None:
        """Raise what `server_init` raises, before the phases of `setup` pass over any row.

        Raises
        ------
        ValueError
            If model, position and federation do not fit together.
        """
        if self.setup:
            self.check_start(rng_key, position, federation)

    def check_start(self, rng_key: Array, position: ArrayTree, federation: Federation) -> None:
        """Raise what `server_init` raises, and compute nothing.

        Raises
        ------
        ValueError
            If model, position and federation do not fit together.
        """
        first = jax.eval_shape(lambda: Broadcast(jnp.zeros((), jnp.int32), position))
        shapes = [phase.message_like(first) for phase in self.setup]

        def begin() -> tuple[Broadcast, ArrayTree]:
            totals = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tuple(shapes))
            return self.server_init(rng_key, position, federation, totals)

        jax.eval_shape(begin)

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
        return self.init_some(rng_key, position, data, None)

    def init_some(
        self, rng_key: Array, position: ArrayTree, data: Any, clients: Array | None
    ) -> FederatedState:
        """Return what `init` returns, with the states of some clients alone.

        `clients` are their ids, ``[n]``: a store of states makes some at a time.
        """
        self.check_before_setup(rng_key, position, data.federation)
        first = Broadcast(jnp.zeros((), jnp.int32), position)
        totals = tuple(
            data.sum_over_clients(partial(phase.setup_message, first), apart=not phase.sums_rows)
            for phase in self.setup
        )
        broadcast, server = self.server_init(rng_key, position, data.federation, totals)
        states = data.map_clients(lambda client: self.client_init(broadcast, client), clients)
        return FederatedState(broadcast, server, states)

    def prepare_shared(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        """Return what all clients draw alike, which they find in `Broadcast.shared`."""
        return ()

    def draw(self, rng_key: Array, state: FederatedState) -> ArrayTree:
        """Return the chain's position, or a draw from a fitted distribution.

        A run keeps it in the user's coordinates, `position_fn` of it. It reads the broadcast and
        the server's state alone: a deployed server has no other.
        """
        return state.broadcast.position
