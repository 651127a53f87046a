"""Questions whose answers a server reads client by client: what it is told by design."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from fedmcmc._types import ArrayTree, Client, Disclosure, Exact
from fedmcmc.kernels._questions import Question


@dataclass(frozen=True, eq=False, repr=False)
class Separate(Question):
    """A question whose answers are not added up: a surrogate per client, say.

    What leaves a client is a term of a sum, as ever: a table with a row per client, of which it
    fills its own, and zeros elsewhere. So whoever can ask for sums can ask this, at `num_clients`
    times the bits of an answer. A subclass writes `own` and `own_like`; the sum has leaves
    ``[num_clients, ...]``, in `Exact`, since a compressor's error would be a client's alone.
    """

    num_clients: int = field(kw_only=True, metadata={"static": True})

    disclosure = Disclosure(
        reason="it is a table with a row per site, which only that site fills",
        warning="each site answers for itself alone. For a site with few rows, such an answer can "
        "reveal the rows. The server may send the answers to all sites.",
    )

    def own(self, content: ArrayTree, client: Client) -> ArrayTree:
        """Return the client's answer."""
        raise NotImplementedError

    def own_like(self, content: ArrayTree) -> ArrayTree:
        """Return the shapes of a client's answer, from those of the content."""
        raise NotImplementedError

    def answer(self, content: ArrayTree, client: Client) -> Exact:
        def table(leaf: jax.Array) -> jax.Array:
            rows = jnp.zeros((self.num_clients, *leaf.shape), leaf.dtype)
            return rows.at[client.index].set(leaf)

        return Exact(jax.tree.map(table, self.own(content, client)))

    def answer_like(self, content: ArrayTree) -> Exact:
        def table(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.num_clients, *leaf.shape), leaf.dtype)

        return Exact(jax.tree.map(table, self.own_like(content)))
