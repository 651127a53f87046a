"""Questions whose answers the server reads client by client."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from fedmcmc.kernels._questions import Question
from fedmcmc.types import ArrayTree, Client, Disclosure, Uncompressed


@dataclass(frozen=True, eq=False, repr=False)
class PerClientQuestion(Question):
    """Question with one answer per client, such as a surrogate.

    A message is still a term of a sum: a table with one row per client, in which the client fills
    its row and leaves zeros elsewhere. It has `num_clients` times the bits of an answer. A subclass
    defines `own` and `own_like`. The sum has leaves ``[num_clients, ...]`` in `Exact`, because no
    average over clients would reduce the error of a compressor.
    """

    num_clients: int = field(kw_only=True, metadata={"static": True})

    disclosure = Disclosure(
        reason="it is a table with a row per site, which only that site fills",
        warning="the server reads the answer of each site. If a site has few rows, its answer can "
        "reveal these rows. The server may send the answers to all sites.",
    )

    def own(self, content: ArrayTree, client: Client) -> ArrayTree:
        """Return the client's answer."""
        raise NotImplementedError

    def own_like(self, content: ArrayTree) -> ArrayTree:
        """Return the shapes of a client's answer to content of these shapes."""
        raise NotImplementedError

    def answer(self, content: ArrayTree, client: Client) -> Uncompressed:
        def to_table(leaf: jax.Array) -> jax.Array:
            rows = jnp.zeros((self.num_clients, *leaf.shape), leaf.dtype)
            return rows.at[client.index].set(leaf)

        return Uncompressed(jax.tree.map(to_table, self.own(content, client)))

    def answer_like(self, content: ArrayTree) -> Uncompressed:
        def table_like(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.num_clients, *leaf.shape), leaf.dtype)

        return Uncompressed(jax.tree.map(table_like, self.own_like(content)))
