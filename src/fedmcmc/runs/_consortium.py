"""Consortia, which give a server sums over its clients, such as log likelihoods and gradients.

Corrections, mode finders and checks of a model use this interface and never see rows. So the same
code serves simulated clients and clients at real sites.
"""

import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax import Array

from fedmcmc.data import CHUNK_ROWS, FederatedData, constructor_of
from fedmcmc.kernels import Question
from fedmcmc.random import as_key
from fedmcmc.records import Samples
from fedmcmc.rounds import Layout, initialize, prepare_round, run_round
from fedmcmc.runs._sample import sample
from fedmcmc.storage import StoredAnswer, answers_of_program, digest_of_call, digest_of_rows
from fedmcmc.transforms import counts_of, with_counts
from fedmcmc.types import (
    ArrayTree,
    FederatedKernel,
    FederatedState,
    Federation,
    as_functions,
    compiled,
)

CLIENTS_AT_A_TIME = 16
"""Number of clients that compute answers together. It bounds the memory for many clients."""
MAX_TRIES = 20
"""Maximum number of rounds until all clients answer a question."""


class Sum(NamedTuple):
    """Sum of all clients' answers, and its cost.

    `rounds` includes rounds in which a client was missing; the bits are totals over all clients.
    """

    value: ArrayTree
    rounds: int
    bits_up: float
    bits_down: float


@runtime_checkable
class Consortium(Protocol):
    """Interface through which a server gets sums over all clients."""

    @property
    def federation(self) -> Federation:
        """Information about the clients that the server has before the first round."""

    def ask(self, question: Question, content: ArrayTree) -> Sum:
        """Return the sum of all clients' answers to `question` about `content`."""

    def sample(self, rng_key: Array, kernel: FederatedKernel, *args: Any, **kwargs: Any) -> Samples:
        """Run a kernel on the clients, as `fedmcmc.sample` does on data."""


class SimulatedConsortium:
    """Simulated clients of a `FederatedData`.

    Parameters
    ----------
    data
        Every client's rows.
    rng_key
        Key for the random numbers of `transform` (quantizers, faults); questions use none.
    transform
        Function ``kernel -> kernel`` applied to questions: `fedmcmc.faults`, `fedmcmc.compress`,
        `fedmcmc.secure_sum`.
    of_runs
        If true, `transform` is also applied to the kernels that `sample` runs. With
        `fedmcmc.secure_sum` and the resolution of a study, this simulates its secure sums.
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
        self._rng_key = None if rng_key is None else as_key(rng_key)
        self._transform, self._of_runs = transform, of_runs
        self._num_rounds = 0
        self._layout = Layout(clients_at_a_time=_clients_at_a_time(data))

    @property
    def federation(self) -> Federation:
        """Information about the clients that the server has before the first round."""
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
            If at least one client was missing in every one of 20 rounds.
        """
        kernel: FederatedKernel = as_functions(question)
        if self._transform is not None:
            kernel = as_functions(self._transform(kernel))
        arguments = kernel, self.data, self._layout, self._rng_key
        answers, digest = answers_of_program(), ""
        if answers is not None:
            digest, like = self._digest(kernel, content)
            if (stored := answers.read(digest, like)) is not None:
                self._num_rounds += stored.numbers["rounds"]
                return Sum(stored.value, **stored.numbers)
        up = down = 0.0
        for tries in range(1, MAX_TRIES + 1):
            number = jax.device_put(np.int32(self._num_rounds))
            if tries == 1:
                result = _first_round(*arguments, content, number)
            else:
                result = _round(*arguments, result.state, number)
            self._num_rounds += 1
            up, down = up + float(result.bits_up), down + float(result.bits_down)
            check_fits_sum(question, result.state.server)
            answered = result.answered
            if answered.whole:
                numbers: dict[str, Any] = {"rounds": tries, "bits_up": up, "bits_down": down}
                if answers is not None:
                    answers.write(digest, StoredAnswer(answered.value, numbers))
                return Sum(answered.value, **numbers)
        raise RuntimeError(
            f"At least one of the {self.data.num_clients} clients was missing in each of "
            f"{MAX_TRIES} rounds. A sum over some of the clients belongs to another posterior: "
            f"lower the rates of fedmcmc.faults."
        )

    def compile_ahead(self, question: Question, content: ArrayTree) -> None:
        """Start to compile the program of `ask`, for `content` of these shapes."""
        if self._transform is None and answers_of_program() is None:
            kernel = as_functions(question)
            number = jax.ShapeDtypeStruct((), np.int32)
            _first_round.compile_ahead(
                kernel, self.data, self._layout, self._rng_key, content, number
            )

    def _digest(self, kernel: FederatedKernel, content: ArrayTree) -> tuple[str, ArrayTree]:
        """Return a digest of a question, and the shapes of its answer."""
        number = jax.device_put(np.int32(self._num_rounds))
        traced = _first_round.trace(kernel, self.data, self._layout, self._rng_key, content, number)
        parts = (kernel, content, self._num_rounds, self._rng_key, self._digest_of_rows)
        return digest_of_call(traced.jaxpr, *parts), traced.out_info.answered.value

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


def _clients_at_a_time(data: FederatedData) -> int | None:
    if data.max_size > CHUNK_ROWS:
        return 1  # each client reads its own number of chunks instead of the largest client's
    return CLIENTS_AT_A_TIME if data.num_clients > CLIENTS_AT_A_TIME else None


def check_fits_sum(question: Question, server_state: ArrayTree) -> None:
    """Check that the answers of a finished round were representable in a secure sum.

    Raise `ValueError` for numbers that are not finite or out of range. If the question marks the
    positions of numbers out of range, only warn about these.
    """
    counts = counts_of(server_state)
    if counts is None:
        return
    name, num = type(question).__name__, int(np.sum(counts.lost))
    if num:
        raise ValueError(
            f"The answers of {num} client(s) to {name} are not finite, which a secure sum cannot "
            "represent: use positions at which the log density is finite."
        )
    num = int(np.sum(counts.saturated))
    if not num:
        return
    text = (
        f"{num} client(s) answered {name} with numbers beyond the range `max_abs` of a secure sum"
    )
    remedy = (
        "Increase `max_abs`, with a coarser resolution (secure.max_abs and secure.resolution of a "
        "study under masks), or scale covariates and start nearer to the mode."
    )
    if not question.traits.marks_range_ends:
        raise ValueError(f"{text}, so the sum is wrong. {remedy}")
    warnings.warn(
        f"{text}; their positions count as impossible (log density minus infinity). {remedy}",
        stacklevel=3,
    )


def as_consortium(data: object) -> Consortium:
    """Return the simulated clients of a `FederatedData`; return a consortium unchanged."""
    if isinstance(data, FederatedData):
        return SimulatedConsortium(data)
    if isinstance(data, Consortium):
        return data
    raise TypeError(
        f"data must be a fedmcmc.FederatedData or a consortium of clients, got "
        f"{type(data).__name__}. {constructor_of(data)}"
    )


class _Result(NamedTuple):
    """State after a round, the answer, and the bits of all clients."""

    state: FederatedState
    answered: Any
    bits_up: Array
    bits_down: Array


@compiled
def _first_round(
    kernel: FederatedKernel,
    data: FederatedData,
    layout: Layout,
    rng_key: Array | None,
    content: ArrayTree,
    number: Array,
) -> _Result:
    """Run a round from the initial state; a single program, because most questions need one."""
    key = _key_of_transforms(rng_key)
    state = initialize(kernel, key, content, data, layout)
    return _run_round(kernel, data, layout, key, state, number)


@compiled
def _round(
    kernel: FederatedKernel,
    data: FederatedData,
    layout: Layout,
    rng_key: Array | None,
    state: FederatedState,
    number: Array,
) -> _Result:
    return _run_round(kernel, data, layout, _key_of_transforms(rng_key), state, number)


def _key_of_transforms(rng_key: Array | None) -> Array:
    return jax.random.key(0) if rng_key is None else rng_key


def _run_round(
    kernel: FederatedKernel,
    data: FederatedData,
    layout: Layout,
    rng_key: Array,
    state: FederatedState,
    number: Array,
) -> _Result:
    state = state._replace(broadcast=state.broadcast._replace(round=number))
    prepared = prepare_round(kernel, data, layout, rng_key, state.broadcast, number)
    state, info = run_round(kernel, data, layout, state, *prepared)
    return _Result(state, kernel.draw(rng_key, state), info.bits_up, info.bits_down)
