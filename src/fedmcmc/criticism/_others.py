"""Questions about clients as they are not: all but one, or with outcomes drawn anew."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import (
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
from fedmcmc.data import gather
from fedmcmc.kernels import Dithered, Question
from fedmcmc.records import Samples
from fedmcmc.runs import Consortium, Sum


@dataclass(frozen=True, eq=False, repr=False)
class Around(Question):
    """Another question, asked of clients as they are not."""

    question: Question

    @property
    def traits(self) -> Traits:  # type: ignore[override]  # an attribute elsewhere
        return self.question.traits

    def answer_like(self, content: ArrayTree) -> ArrayTree:
        return self.question.answer_like(content)

    def check_content(self, content: ArrayTree, federation: Federation) -> None:
        self.question.check_content(content, federation)

    def encode(self, content: ArrayTree, message: Any, client: Client) -> tuple[Any, Array]:
        return self.question.encode(content, message, client)

    def decode(
        self, code: Any, sender: Sender | Client, memory: ArrayTree, like: ArrayTree
    ) -> ArrayTree:
        return self.question.decode(code, sender, memory, like)

    def code_like(self, like: Broadcast) -> ArrayTree:
        return self.question.code_like(like)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class AllBut(Around):
    """A question to which one client answers nothing but zeros."""

    index: Any

    disclosure = Disclosure(
        "another question of this list, without the rows of one site. Subtracted from the answers "
        "with these rows, it gives the server the answer of that site alone",
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
class Redrawn(Around):
    """A question about outcomes that clients draw from the model, at their own covariates.

    Attributes
    ----------
    truth
        The position at which they are drawn.
    words
        ``[2]`` uint32, a key of the Threefry generator, from which each client makes its own.
    """

    truth: ArrayTree
    words: Array

    disclosure = Disclosure(
        "the answer to another question of this list, with outcomes that the site draws from the "
        "model in place of its own. The other columns are the site's own"
    )

    def answer(self, content: ArrayTree, client: Client) -> ArrayTree:
        key = jax.random.wrap_key_data(self.words, impl="threefry2x32")
        rows = redrawn(self.posterior, key, self.truth, client)
        return self.question.answer(
            content, replace(client, rows=rows, start=jnp.zeros_like(client.start))
        )


def redrawn(posterior: Posterior, rng_key: Array, position: ArrayTree, client: Client) -> ArrayTree:
    """Return a client's rows with outcomes drawn at `position`, leaves ``[max_size, ...]``."""
    offsets = jnp.arange(client.max_size, dtype=jnp.int32)
    rows = gather(client, jnp.where(offsets < client.size, offsets, 0))
    assert posterior.resample_fn is not None
    drawn = posterior.resample_fn(jax.random.fold_in(rng_key, client.index), position, rows)
    return jax.tree.map(lambda new, old: new.astype(old.dtype), drawn, rows)


class Outcomes:
    """A consortium whose clients have drawn outcomes anew; it answers questions alone."""

    def __init__(
        self, consortium: Consortium, posterior: Posterior, rng_key: Array, truth: ArrayTree
    ) -> None:
        self._consortium, self._posterior, self._truth = consortium, as_functions(posterior), truth
        self._words = jax.random.bits(rng_key, (2,), jnp.uint32)

    @property
    def federation(self) -> Federation:
        """What the server knows of the clients, whose numbers of rows are as before."""
        return self._consortium.federation

    def ask(self, question: Question, content: ArrayTree) -> Sum:
        """Return the sum of the clients' answers about the outcomes that they have drawn."""
        asked = Redrawn(self._posterior, as_functions(question), self._truth, self._words)
        return self._consortium.ask(asked, content)

    def sample(self, rng_key: Array, kernel: FederatedKernel, *args: Any, **kwargs: Any) -> Samples:
        """Raise: a kernel runs on the rows that clients have."""
        raise NotImplementedError(
            "Clients elsewhere answer questions about outcomes that they draw, and run no kernel "
            "on them: calibrate a fit that asks (fedmcmc.correct), or simulate with a "
            "FederatedData."
        )


class Others:
    """A consortium without client `index`, which answers questions alone."""

    def __init__(self, consortium: Consortium, index: int) -> None:
        self._consortium, self._index = consortium, index

    @property
    def federation(self) -> Federation:
        """What the server knows of the others."""
        whole = self._consortium.federation
        sizes = np.asarray(whole.sizes)
        return Federation(
            whole.num_clients - 1,
            whole.num_rows - int(sizes[self._index]),
            jnp.asarray(np.delete(sizes, self._index)),
            whole.rows,
        )

    def ask(self, question: Question, content: ArrayTree) -> Sum:
        """Return the sum of the others' answers; the client takes part, and answers zeros."""
        if isinstance(content, Dithered):
            raise ValueError("The dither of all clients but one is not known: ask without dither.")
        return self._consortium.ask(AllBut(question.posterior, question, self._index), content)

    def sample(self, rng_key: Array, kernel: FederatedKernel, *args: Any, **kwargs: Any) -> Samples:
        """Raise: a kernel's message may be more than a sum that a client can leave."""
        raise NotImplementedError("All clients but one answer questions, and run no kernel.")
