"""A consortium: clients as a server can reach them, who answer questions with sums.

What asks (corrections, modes, checks of a model) sees this alone and never rows, so that the same
code serves a simulation and clients at real sites.
"""

import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import (
    ArrayTree,
    FederatedKernel,
    FederatedState,
    Federation,
    as_functions,
    compiled,
)
from fedmcmc.data import FederatedData, constructor_of
from fedmcmc.kernels import Question
from fedmcmc.random import as_key
from fedmcmc.records import Samples
from fedmcmc.rounds import Arrangement, initialize, prepare_round, run_round
from fedmcmc.runs._sample import sample
from fedmcmc.storage import Answer, answers_of_program, digest_of_call, digest_of_rows
from fedmcmc.transforms import counts_of, with_counts

CLIENTS_AT_A_TIME = 16
"""Of a question about many points, so that memory does not grow with the number of clients."""
MOST_TRIES = 20
"""Rounds in which a question is asked again because a client was missing."""


class Sum(NamedTuple):
    """The sum of all clients' answers, and what it cost.

    `rounds` counts those in which a client was missing, too; bits are those of all clients.
    """

    value: ArrayTree
    rounds: int
    bits_up: float
    bits_down: float


@runtime_checkable
class Consortium(Protocol):
    """All clients, as a server reaches them.

    Attributes
    ----------
    federation
        What the server knows of them before the first round.
    """

    @property
    def federation(self) -> Federation:
        """What the server knows of the clients before the first round."""
        ...

    def ask(self, question: Question, content: ArrayTree) -> Sum:
        """Return the sum of all clients' answers to `question` about `content`."""
        ...

    def sample(self, rng_key: Array, kernel: FederatedKernel, *args: Any, **kwargs: Any) -> Samples:
        """Run a kernel, as `fedmcmc.sample` does on data."""
        ...


class SimulatedConsortium:
    """The clients of a `FederatedData`, simulated.

    Parameters
    ----------
    data
        Every client's rows.
    rng_key
        For what a transform draws (the words of a quantizer, faults); questions draw nothing.
    transform
        What happens to the messages of a question, ``kernel -> kernel``: `fedmcmc.faults`,
        `fedmcmc.compress`, `fedmcmc.secure_sum`.
    of_runs
        Whether it happens to those of kernels that are run, too. With `fedmcmc.secure_sum`, whose
        grid is that of the study, this is a simulation of sites under masks.
    """

    def __init__(
        self,
        data: FederatedData,
        *,
        rng_key: Array | None = None,
        transform: Callable[[FederatedKernel], FederatedKernel] | None = None,
        of_runs: bool = False,
    ) -> None:
        self.data = data
        self._rng_key = jax.random.key(0) if rng_key is None else as_key(rng_key)
        self._transform, self._of_runs = transform, of_runs
        self._num_rounds = 0
        many = data.num_clients > CLIENTS_AT_A_TIME
        self._arrangement = Arrangement(clients_at_a_time=CLIENTS_AT_A_TIME if many else None)

    @property
    def federation(self) -> Federation:
        """What a server knows of these clients before the first round."""
        return self.data.federation

    @property
    def labels(self) -> tuple[Any, ...]:
        """Labels of the clients."""
        return tuple(self.data.labels)

    def ask(self, question: Question, content: ArrayTree) -> Sum:
        """Return the sum of all clients' answers to `question` about `content`.

        Raises
        ------
        ValueError
            If model, content and rows do not fit together, or answers do not fit a secure sum.
        RuntimeError
            If after 20 rounds some client was missing in each.
        """
        kernel: FederatedKernel = as_functions(question)
        if self._transform is not None:
            kernel = as_functions(self._transform(kernel))
        key, arrangement = self._rng_key, self._arrangement
        state = initialize(kernel, key, content, self.data, arrangement)
        answers, digest = answers_of_program(), ""
        if answers is not None:
            digest, like = self._digest(kernel, state)
            if (kept := answers.read(digest, like)) is not None:
                self._num_rounds += kept.numbers["rounds"]
                return Sum(jax.tree.map(jnp.asarray, kept.value), **kept.numbers)
        up = down = 0.0
        for tries in range(1, MOST_TRIES + 1):
            number = jnp.asarray(self._num_rounds, jnp.int32)
            state = state._replace(broadcast=state.broadcast._replace(round=number))
            state, answered, bits = _round(kernel, self.data, arrangement, state, key)
            self._num_rounds += 1
            up, down = up + float(bits[0]), down + float(bits[1])
            check_fits_sum(question, state.server)
            if answered.whole:
                numbers: dict[str, Any] = {"rounds": tries, "bits_up": up, "bits_down": down}
                if answers is not None:
                    answers.write(digest, Answer(answered.value, numbers))
                return Sum(answered.value, **numbers)
        raise RuntimeError(
            f"In none of {MOST_TRIES} rounds did all {self.data.num_clients} clients answer; a sum "
            f"without one of them would be that of another posterior."
        )

    def _digest(self, kernel: FederatedKernel, state: FederatedState) -> tuple[str, ArrayTree]:
        """Return a digest of a question before its first round, and the shapes of its answer."""
        traced = _round.trace(kernel, self.data, self._arrangement, state, self._rng_key)
        parts = (kernel, state, self._num_rounds, self._rng_key, self._digest_of_rows)
        return digest_of_call(traced.jaxpr, *parts), traced.out_info[1].value

    @cached_property
    def _digest_of_rows(self) -> str:
        return digest_of_rows(self.data)

    def sample(self, rng_key: Array, kernel: FederatedKernel, *args: Any, **kwargs: Any) -> Samples:
        """Run a kernel on these clients: `fedmcmc.sample` with their rows."""
        if self._transform is not None and self._of_runs:
            kernel = self._transform(kernel)
            if kwargs.get("state") is not None:
                kwargs["state"] = with_counts(kernel, kwargs["state"])
        return sample(rng_key, kernel, self.data, *args, **kwargs)


def check_fits_sum(question: Question, server_state: ArrayTree) -> None:
    """Raise or warn where answers to a question did not fit a secure sum; others always do.

    Parameters
    ----------
    question
        What was asked.
    server_state
        The server's, after the round.

    Raises
    ------
    ValueError
        If the sum is wrong: numbers beyond the range, or that are not finite.

    Warns
    -----
    UserWarning
        If some places of which the question asks were left out.
    """
    counts = counts_of(server_state)
    if counts is None:
        return
    name, num = type(question).__name__, int(np.sum(counts.lost))
    if num:
        raise ValueError(
            f"The answers of {num} client(s) to {name} are not finite, and a secure sum has no "
            "number for that: ask about other places, where the log density is."
        )
    num = int(np.sum(counts.saturated))
    if not num:
        return
    text = f"{num} client(s) answered {name} with numbers beyond the range of the secure sum, most"
    remedy = (
        "Give it more room, with a coarser resolution (secure.most and secure.resolution of a "
        "study under masks), or scale covariates and start nearer to the mode."
    )
    if not question.traits.marks_range_ends:
        raise ValueError(f"{text}, so that the sum is wrong. {remedy}")
    warnings.warn(f"{text}; the places there count as impossible. {remedy}", stacklevel=3)


def as_consortium(data: Any) -> Consortium:
    """Return the simulated clients of a `FederatedData`; a consortium is returned as it is.

    Raises
    ------
    TypeError
        If it is neither.
    """
    if isinstance(data, FederatedData):
        return SimulatedConsortium(data)
    if isinstance(data, Consortium):
        return data
    raise TypeError(
        f"data must be a fedmcmc.FederatedData or a consortium of clients, got "
        f"{type(data).__name__}. {constructor_of(data)}"
    )


@compiled
def _round(
    kernel: FederatedKernel,
    data: FederatedData,
    arrangement: Arrangement,
    state: FederatedState,
    rng_key: Array,
) -> tuple[FederatedState, Any, tuple[Array, Array]]:
    like, number = state.broadcast, state.broadcast.round
    prepared = prepare_round(kernel, data, arrangement, rng_key, like, number)
    state, info = run_round(kernel, data, arrangement, state, *prepared)
    return state, kernel.draw(rng_key, state), (info.bits_up, info.bits_down)
