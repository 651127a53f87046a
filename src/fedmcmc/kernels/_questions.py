"""Questions: rounds in which all clients answer, whose whole result is the sum of the answers.

Every client answers, or the round is void and the same question is asked again. A sum without one
client would be that of another posterior.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    Exact,
    FederatedKernel,
    FederatedState,
    Federation,
    Participation,
    Posterior,
    StepInfo,
    Traits,
)
from fedmcmc.participation import full
from fedmcmc.pytrees import in_single_precision, trees

IMPOSSIBLE = -1e30
"""What a client sends for a log likelihood of minus infinity, so that sums stay finite."""
BELOW = -1e29
"""Sums below this are read as minus infinity."""
EVERYONE = replace(full(), weighted=False)


class Answer(NamedTuple):
    """A client's message: its answer, and one, whose sum says how many answered."""

    value: ArrayTree
    one: Exact


class Answered(NamedTuple):
    """What a server knows after a question: the sum of the answers, and whether it is whole."""

    value: ArrayTree
    whole: Array


class _Server(NamedTuple):
    answered: Answered
    num_clients: Array


@dataclass(frozen=True, eq=False, repr=False)
class Question(FederatedKernel):
    """A question to all clients; `draw` of its state is `Answered`.

    What is asked about (points, a center) is the broadcast's position, any pytree. A subclass
    writes `answer` and `check_content`.
    """

    posterior: Posterior
    participation: Participation = field(default=EVERYONE, kw_only=True)

    traits = Traits(needs_all_clients=True, accepts_late_messages=False)

    @property
    def model(self) -> None:
        """None: the sum of the answers is no position of the model."""
        return None

    def answer(self, content: ArrayTree, client: Client) -> ArrayTree:
        """Return the client's term of the sum."""
        raise NotImplementedError

    def answer_like(self, content: ArrayTree) -> ArrayTree:
        """Return the shapes of an answer, from those of the content."""
        raise NotImplementedError

    def check_content(self, content: ArrayTree, federation: Federation) -> None:
        """Raise `ValueError` unless model, content and rows fit together."""

    def encode(self, content: ArrayTree, message: Answer, client: Client) -> tuple[Any, Array]:
        """Return what leaves the client, which `decode` reads, and its bits, ``[]`` int32."""
        return message, jnp.asarray(trees.num_bits(message), jnp.int32)

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, _Server]:
        self.check_content(position, federation)
        like = self.answer_like(trees.shapes_of(position))
        nothing = Answered(trees.zeros_like(like), jnp.zeros((), bool))
        count = jnp.asarray(federation.num_clients, jnp.result_type(float))
        return Broadcast(jnp.zeros((), jnp.int32), position), _Server(nothing, count)

    @in_single_precision
    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[Any, ArrayTree, StepInfo]:
        content = broadcast.position
        message = Answer(self.answer(content, client), Exact(jnp.ones((), jnp.result_type(float))))
        code, bits = self.encode(content, message, client)
        return code, client_state, StepInfo(bits, jnp.zeros((), jnp.result_type(float)))

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: _Server, total: Answer
    ) -> tuple[Broadcast, _Server, ArrayTree]:
        whole = total.one.value == server_state.num_clients
        value = trees.select(whole, total.value, server_state.answered.value)
        server = _Server(Answered(value, whole), server_state.num_clients)
        return broadcast._replace(round=broadcast.round + 1), server, ()

    def message_like(self, like: Broadcast) -> ArrayTree:
        count = jax.ShapeDtypeStruct((), jnp.result_type(float))
        return Answer(self.answer_like(like.position), Exact(count))

    def draw(self, rng_key: Array, state: FederatedState) -> Answered:
        answered: Answered = state.server.answered
        return answered


def below_range(value: Array, most: float) -> Array:
    """Return where log likelihoods mean a density of zero in a secure sum of this range."""
    return value < -trees.cast(most, value)


def impossible_in_sum(value: Array, most: float) -> Array:
    """Return where a sum is that of log likelihoods of which one was sent as the lowest number.

    The others cannot make up for it: they are differences to a center that is not far off.
    """
    return value < -trees.cast(most, value) / 2
