"""All clients but one, as somebody sees them who asks questions."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._types import ArrayTree, Client, FederatedKernel, Federation
from fedmcmc.kernels import Question
from fedmcmc.records import Samples
from fedmcmc.runs import Consortium, Sum


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class AllBut(Question):
    """A question to which one client answers nothing but zeros."""

    question: Question
    index: Any

    def answer(self, content: ArrayTree, client: Client) -> ArrayTree:
        answer = self.question.answer(content, client)
        return jax.tree.map(
            lambda leaf: jnp.where(client.index == self.index, jnp.zeros_like(leaf), leaf), answer
        )

    def answer_like(self, content: ArrayTree) -> ArrayTree:
        return self.question.answer_like(content)

    def check_content(self, content: ArrayTree, federation: Federation) -> None:
        self.question.check_content(content, federation)

    def check_compressor(self, compressor: Any) -> None:
        self.question.check_compressor(compressor)


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
        return self._consortium.ask(AllBut(question.posterior, question, self._index), content)

    def sample(self, rng_key: Array, kernel: FederatedKernel, *args: Any, **kwargs: Any) -> Samples:
        """Raise: a kernel's message may be more than a sum that a client can leave."""
        raise NotImplementedError("All clients but one answer questions, and run no kernel.")
