"""Questions to all clients but one, or about simulated outcomes."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.data import gather
from fedmcmc.kernels import Dithered, Question
from fedmcmc.records import Samples
from fedmcmc.runs import Consortium, Sum
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Client,
    Disclosure,
    FederatedKernel,
    Federation,
    Posterior,
    Sender,
    Traits,
    as_functions,
    register_dataclass,
)


@dataclass(frozen=True, eq=False, repr=False)
class WrappedQuestion(Question):
    """Question that changes the clients to which the wrapped `question` refers."""

    question: Question

    @property
    def traits(self) -> Traits:  # type: ignore[override]  # an attribute of the base class
        return self.question.traits

    def answer_like(self, content: ArrayTree) -> ArrayTree:
        return self.question.answer_like(content)

    def check_content(self, content: ArrayTree, federation: Federation) -> None:
        self.question.check_content(content, federation)

    def encode(self, content: ArrayTree, message: ArrayTree, client: Client) -> tuple[Any, Array]:
        return self.question.encode(content, message, client)

    def decode(
        self, code: ArrayTree, sender: Sender | Client, memory: ArrayTree, like: ArrayTree
    ) -> ArrayTree:
        return self.question.decode(code, sender, memory, like)

    def code_like(self, like: Broadcast) -> ArrayTree:
        return self.question.code_like(like)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class LeaveOneOutQuestion(WrappedQuestion):
    """Question to which the client `index` answers zeros."""

    index: int | Array

    disclosure = Disclosure(
        "another question of this list, without the rows of one site. The difference to the answer "
        "with these rows is the answer of that site alone",
        warning="the server can subtract two sums. The difference is the answer of one site alone.",
        reason="the sum without one site, less the sum with it, is that site's answer",
    )

    def answer(self, content: ArrayTree, client: Client) -> ArrayTree:
        answer = self.question.answer(content, client)
        return jax.tree.map(
            lambda leaf: jnp.where(client.index == self.index, jnp.zeros_like(leaf), leaf), answer
        )


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Redrawn(WrappedQuestion):
    """Question about outcomes that clients draw from the model at their covariates.

    Attributes
    ----------
    truth
        Position at which outcomes are drawn.
    words
        ``[2]`` uint32, Threefry key from which each client derives its key.
    """

    truth: ArrayTree
    words: Array

    disclosure = Disclosure(
        "the answer to another question of this list, with outcomes that the site draws from the "
        "model instead of the observed outcomes. The other columns are the site's real columns"
    )

    def answer(self, content: ArrayTree, client: Client) -> ArrayTree:
        key = jax.random.wrap_key_data(self.words, impl="threefry2x32")
        rows = redraw_rows(self.posterior, key, self.truth, client)
        return self.question.answer(
            content, replace(client, rows=rows, start=jnp.zeros_like(client.start))
        )


def redraw_rows(
    posterior: Posterior, rng_key: Array, position: ArrayTree, client: Client
) -> ArrayTree:
    """Return a client's rows with outcomes drawn at `position`, leaves ``[max_size, ...]``."""
    offsets = jnp.arange(client.max_size, dtype=jnp.int32)
    rows = gather(client, jnp.where(offsets < client.size, offsets, 0))
    assert posterior.resample_fn is not None
    drawn = posterior.resample_fn(jax.random.fold_in(rng_key, client.index), position, rows)
    return jax.tree.map(lambda new, old: new.astype(old.dtype), drawn, rows)


class ReplicatedConsortium:
    """Consortium whose clients answer questions about simulated outcomes; runs no kernels."""

    def __init__(
        self, consortium: Consortium, posterior: Posterior, rng_key: Array, truth: ArrayTree
    ) -> None:
        self._consortium, self._posterior, self._truth = consortium, as_functions(posterior), truth
        self._words = jax.random.bits(rng_key, (2,), jnp.uint32)

    @property
    def federation(self) -> Federation:
        """Federation of the original consortium; the numbers of rows are the same."""
        return self._consortium.federation

    def ask(self, question: Question, content: ArrayTree) -> Sum:
        """Return the sum of the clients' answers about their simulated outcomes."""
        redrawn = Redrawn(self._posterior, as_functions(question), self._truth, self._words)
        return self._consortium.ask(redrawn, content)

    def sample(self, rng_key: Array, kernel: FederatedKernel, *args: Any, **kwargs: Any) -> Samples:
        """Raise `NotImplementedError`: kernels run only on observed rows."""
        raise NotImplementedError(
            "Remote clients answer questions about simulated outcomes, but run no kernel on them: "
            "calibrate a fit that asks questions (fedmcmc.correct), or simulate with a "
            "FederatedData."
        )


class LeaveOneOutConsortium:
    """Consortium without client `index`; it answers questions but runs no kernels."""

    def __init__(self, consortium: Consortium, index: int) -> None:
        self._consortium, self._index = consortium, index

    @property
    def federation(self) -> Federation:
        """Federation without the client."""
        full = self._consortium.federation
        sizes = np.asarray(full.sizes)
        return Federation(
            full.num_clients - 1,
            full.num_rows - int(sizes[self._index]),
            jnp.asarray(np.delete(sizes, self._index)),
            full.rows,
        )

    def ask(self, question: Question, content: ArrayTree) -> Sum:
        """Return the sum of the answers of all clients except for `index`, which answers zeros."""
        if isinstance(content, Dithered):
            raise ValueError("Questions to all clients but one do not support dither.")
        return self._consortium.ask(
            LeaveOneOutQuestion(question.posterior, question, self._index), content
        )

    def sample(self, rng_key: Array, kernel: FederatedKernel, *args: Any, **kwargs: Any) -> Samples:
        """Raise `NotImplementedError`: a kernel may need more than sums over clients."""
        raise NotImplementedError("All clients but one answer questions but run no kernel.")
