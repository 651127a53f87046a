"""Questions: kernels whose result is the sum of the answers of all clients.

If the answer of a client is missing, the round changes nothing, and the next round repeats it: the
sum would belong to another posterior.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.compression import Memory
from fedmcmc.participation import full
from fedmcmc.pytrees import in_single_precision, trees
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Client,
    FederatedKernel,
    FederatedState,
    Federation,
    Participation,
    Posterior,
    StepInfo,
    Traits,
    Uncompressed,
)

IMPOSSIBLE = -1e30
"""Finite number that a client sends for a log likelihood of minus infinity."""
LOG_ZERO_THRESHOLD = -1e29
"""Threshold below which a sum of log likelihoods counts as minus infinity."""
EVERYONE = replace(full(), weighted=False)


class Answer(NamedTuple):
    """Message of a client: its answer, and the number 1, so that the sum counts the answers."""

    value: ArrayTree
    one: Uncompressed


class Answered(NamedTuple):
    """Sum of the answers, and a flag that is true if every client's answer is in it."""

    value: ArrayTree
    whole: Array


class _QuestionServer(NamedTuple):
    answered: Answered
    num_clients: Array


@dataclass(frozen=True, eq=False, repr=False)
class Question(FederatedKernel):
    """Question to all clients; `draw` of its state returns `Answered`.

    The content of the question, such as points and a center, is the broadcast's position, any
    pytree. A subclass defines `answer`, `answer_like` and `check_content`.
    """

    posterior: Posterior
    participation: Participation = field(default=EVERYONE, kw_only=True)

    traits = Traits(needs_all_clients=True, accepts_late_messages=False)

    @property
    def model(self) -> None:
        """None, because the sum of the answers is no position of the model."""
        return None

    def answer(self, content: ArrayTree, client: Client) -> ArrayTree:
        """Return the client's term of the sum."""
        raise NotImplementedError

    def answer_like(self, content: ArrayTree) -> ArrayTree:
        """Return the shapes of an answer to a question with content of these shapes."""
        raise NotImplementedError

    def check_content(self, content: ArrayTree, federation: Federation) -> None:
        """Raise `ValueError` unless model, content and rows fit together."""

    def encode(self, content: ArrayTree, message: Answer, client: Client) -> tuple[Any, Array]:
        """Return the code that `decode` reads and its number of bits, ``[]`` int32."""
        return message, jnp.asarray(trees.num_bits(message), jnp.int32)

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, _QuestionServer]:
        self.check_content(position, federation)
        like = self.answer_like(trees.shapes_of(position))
        no_answer = Answered(trees.zeros_like(like), jnp.zeros((), bool))
        count = jnp.asarray(federation.num_clients, jnp.result_type(float))
        return Broadcast(jnp.zeros((), jnp.int32), position), _QuestionServer(no_answer, count)

    @in_single_precision
    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[Any, ArrayTree, StepInfo]:
        content = broadcast.position
        message = Answer(
            self.answer(content, client), Uncompressed(jnp.ones((), jnp.result_type(float)))
        )
        code, bits = self.encode(content, message, client)
        return code, client_state, StepInfo(bits, jnp.zeros((), jnp.result_type(float)))

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: _QuestionServer, total: Answer
    ) -> tuple[Broadcast, _QuestionServer, ArrayTree]:
        is_complete = total.one.value == server_state.num_clients
        value = trees.select(is_complete, total.value, server_state.answered.value)
        server = _QuestionServer(Answered(value, is_complete), server_state.num_clients)
        return broadcast._replace(round=broadcast.round + 1), server, ()

    def message_like(self, like: Broadcast) -> ArrayTree:
        count = jax.ShapeDtypeStruct((), jnp.result_type(float))
        return Answer(self.answer_like(like.position), Uncompressed(count))

    def draw(self, rng_key: Array, state: FederatedState) -> Answered:
        answered: Answered = state.server.answered
        return answered


def require_unbiased(kernel: object, compressor: Any) -> None:
    """Raise `ValueError` unless the compressor is unbiased and has no memory."""
    if not compressor.unbiased or isinstance(compressor, Memory):
        raise ValueError(
            "Log likelihoods and their derivatives need an unbiased compressor without memory "
            "(quantize, with many levels): other errors depend on the point and bias the result."
        )


def below_range(value: Array, limit: float) -> Array:
    """Return a mask of the log likelihoods that a secure sum counts as a density of zero."""
    return value < -trees.cast(limit, value)


def impossible_in_sum(value: Array, limit: float) -> Array:
    """Return a mask of the sums that contain a client's density of zero, sent as ``-limit``.

    Other clients cannot raise such a sum above ``-limit / 2``, because their log likelihoods are
    differences to a center near the mode.
    """
    return value < -trees.cast(limit, value) / 2
