"""Federated data: all rows in one flat store, sorted by client, without padding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.tree_util import register_dataclass

from fedmcmc._types import ArrayTree, Client, Federation
from fedmcmc.data._buckets import Buckets, by_size
from fedmcmc.data._layouts import Layout
from fedmcmc.data._rows import as_row_type, check_finite, count_rows, gathered, joined, starts_of
from fedmcmc.data._totals import total_of_clients
from fedmcmc.pytrees import trees

__all__ = ["CHUNK_ROWS", "FederatedData", "fold", "gather", "own_rows", "single_chunk"]

CHUNK_ROWS = 4096
"""Rows that a full pass over a client takes at a time."""


@register_dataclass
@dataclass(frozen=True)
class FederatedData:
    """The rows of every client.

    Build it with `from_clients` or `from_arrays`.

    Attributes
    ----------
    rows
        Leaves ``[num_rows, ...]``, sorted by client.
    start, size
        ``[num_clients]`` int32: client ``i`` owns rows ``[start[i], start[i] + size[i])``.
    share
        ``[num_clients]``, ``size / num_rows``.
    max_size
        The size of the largest client, static.
    buckets
        Clients grouped by size, if `bucketed`.
    at_a_time
        How many clients are computed together, if `chunked`, static; else all of a group.
    mesh
        Devices over which clients are spread, if `sharded`, static.
    members
        Clients whose states a kernel's `init` builds, if not all's (a store builds some at a time).
    slots
        ``[num_clients]``, where a client's state lies, if not in its own order (with a store).
    layout
        Which device holds which clients, if ``sample(..., mesh=...)`` laid them out; `start` then
        counts among the rows of a client's device.
    partial
        Whether `rows` are those of the `members` alone (of a `ClientLoader`), static.

    Examples
    --------
    >>> import numpy as np
    >>> data = FederatedData.from_clients([np.ones((3, 2)), np.zeros((1, 2))])
    >>> data.num_clients, data.num_rows, data.sizes.tolist()
    (2, 4, [3, 1])
    """

    rows: ArrayTree
    start: Array
    size: Array
    share: Array
    max_size: int = field(metadata={"static": True})
    buckets: Buckets | None = None
    at_a_time: int | None = field(default=None, metadata={"static": True})
    mesh: Mesh | None = field(default=None, metadata={"static": True})
    members: Array | None = None
    slots: Array | None = None
    layout: Layout | None = None
    partial: bool = field(default=False, metadata={"static": True})

    @classmethod
    def from_clients(
        cls, clients: Sequence[ArrayTree], *, allow_nonfinite: bool = False
    ) -> "FederatedData":
        """Build from one pytree of rows a client, leaves ``[n_c, ...]``.

        Raises
        ------
        ValueError
            If there is no client, a client has no rows, leaves disagree about the number of rows,
            clients disagree about structure or row shapes, or (unless `allow_nonfinite`) a float
            is not finite.
        """
        return cls._from_sorted(*joined(clients), allow_nonfinite)

    @classmethod
    def from_arrays(
        cls,
        tree: ArrayTree,
        client_ids: Any,
        *,
        num_clients: int | None = None,
        allow_nonfinite: bool = False,
    ) -> "FederatedData":
        """Build from rows in any order, leaves ``[num_rows, ...]``, and an integer id a row.

        Ids run from 0 to ``num_clients - 1`` (by default the largest id), each with at least one
        row. The order of rows within a client is kept.

        Raises
        ------
        ValueError
            As `from_clients`, and if ids are not integers, negative, or too large.
        """
        ids = np.asarray(client_ids)
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        num_rows = count_rows(leaves, "the data")
        if ids.shape != (num_rows,) or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"client_ids must be one integer a row, shape ({num_rows},), got shape "
                f"{ids.shape} and dtype {ids.dtype}."
            )
        count = int(ids.max()) + 1 if num_clients is None else num_clients
        if ids.min() < 0 or ids.max() >= count:
            raise ValueError(
                f"client_ids must lie in [0, {count}), got [{ids.min()}, {ids.max()}]."
            )
        order = np.argsort(ids, kind="stable")
        rows = jax.tree.map(lambda leaf: gathered(np.asarray(leaf), order), tree)
        return cls._from_sorted(rows, np.bincount(ids, minlength=count), allow_nonfinite)

    @classmethod
    def _from_sorted(
        cls, rows: ArrayTree, sizes: np.ndarray, allow_nonfinite: bool
    ) -> "FederatedData":
        start = starts_of(sizes)
        rows = jax.tree_util.tree_map_with_path(as_row_type, rows)
        if not allow_nonfinite:
            check_finite(rows, start)
        return cls(
            # Shares memory with the host where it can; the arrays are nobody else's.
            rows=jax.tree.map(jax.device_put, rows),
            start=jnp.asarray(start, jnp.int32),
            size=jnp.asarray(sizes, jnp.int32),
            share=jnp.asarray(sizes / sizes.sum(), jnp.result_type(float)),
            max_size=int(sizes.max()),
        )

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return self.size.shape[0]

    @property
    def num_rows(self) -> int:
        """Number of rows of all clients."""
        if self.layout is not None:
            return self.layout.num_rows
        if self.partial:
            return int(np.asarray(self.size).sum())
        return jax.tree.leaves(self.rows)[0].shape[0]

    @property
    def sizes(self) -> Array:
        """Rows of each client, ``[num_clients]`` int32."""
        return self.size

    def bucketed(self, num_buckets: int = 4) -> "FederatedData":
        """Return the same data with clients grouped by size, to be computed group by group.

        Where all clients take part in a round and what they compute grows with their size (full
        gradients, minibatches that are a fraction of the rows), each is padded to the largest of
        its group instead of the largest of all. A client's draws are the same; sums over its rows
        differ by rounding. Each group adds to the compile time.

        Parameters
        ----------
        num_buckets
            At most; the groups' ends are chosen so that the padded rows are fewest.

        Examples
        --------
        >>> import numpy as np
        >>> data = FederatedData.from_clients([np.ones(n) for n in (900, 10, 12, 11)])
        >>> [(ids.tolist(), size) for ids, size in data.bucketed(2).buckets.groups()]
        [([1, 3, 2], 12), ([0], 900)]
        """
        if int(num_buckets) != num_buckets or num_buckets < 1:
            raise ValueError(f"num_buckets must be a positive integer, got {num_buckets!r}.")
        return replace(self, buckets=by_size(np.asarray(self.size), int(num_buckets)))

    def client(self, index: Any, weight: Any = 1.0, max_size: int | None = None) -> Client:
        """Return client `index` as a step sees it; `weight` is one over its probability.

        With indices ``[n]`` every field but `rows` gets that axis; see `client_axes`. `max_size`
        is a smaller bound on their sizes, where one is known.
        """
        if isinstance(index, int) and not 0 <= index < self.num_clients:
            raise IndexError(f"There is no client {index}, only 0 to {self.num_clients - 1}.")
        index = jnp.asarray(index, jnp.int32)
        share = self.share[index]
        return Client(
            self.rows,
            self.start[index],
            self.size[index],
            index,
            share,
            jnp.broadcast_to(trees.cast(weight, share), share.shape),
            self.max_size if max_size is None else max_size,
        )

    def everyone(self) -> Client:
        """Return all clients, or all members, with a leading client axis; see `client_axes`."""
        return self.client(jnp.arange(self.num_clients) if self.members is None else self.members)

    @property
    def federation(self) -> Federation:
        """What a server knows of these clients."""
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.rows)
        return Federation(self.num_clients, self.num_rows, self.size, shapes)

    def map_clients(self, fn: Callable[[Client], ArrayTree]) -> ArrayTree:
        """Return ``fn(client)`` of all clients, or all members, with a leading client axis."""
        if self.at_a_time is None:
            return jax.vmap(fn, in_axes=(self.client_axes(),))(self.everyone())
        # As many together as in a round: then a client's numbers are the same whoever else is
        # there.
        batch_size = None if self.at_a_time == 1 else self.at_a_time
        ids = self.everyone().index
        return jax.lax.map(lambda index: fn(self.client(index)), ids, batch_size=batch_size)

    def sum_over_clients(self, fn: Callable[[Client], ArrayTree]) -> ArrayTree:
        """Return the sum of ``fn(client)`` over all clients, where `fn` is a sum over rows."""
        return total_of_clients(fn, self)

    def slot(self, ids: Array) -> Array:
        """Return where the states of clients `ids` lie on the leading axis."""
        if self.layout is not None:
            return self.layout.own_slot(ids)
        return ids if self.slots is None else self.slots[ids]

    def client_axes(self, max_size: int | None = None) -> Client:
        """Return the ``in_axes`` with which `jax.vmap` maps over ``client(indices)``."""
        bound = self.max_size if max_size is None else max_size
        return Client(None, 0, 0, 0, 0, 0, bound)  # type: ignore[arg-type]

    def client_rows(self, index: int) -> ArrayTree:
        """Return the rows of one client, leaves ``[n_c, ...]`` (outside of compiled code)."""
        begin, end = int(self.start[index]), int(self.start[index] + self.size[index])
        return jax.tree.map(lambda leaf: leaf[begin:end], self.rows)

    def chunked(self, clients_at_a_time: int) -> "FederatedData":
        """Return the same data, whose clients are computed so many at a time.

        Results are the same up to rounding. All together is the default and mostly the fastest,
        until memory runs out. Clients that move positions of their own over all their rows are
        fastest one at a time where each core is a device (`sharded`), as their rows then stay in
        the cache; `fedmcmc.sample` chooses so by itself for large rows.

        Raises
        ------
        ValueError
            If it is not a positive integer.
        """
        if int(clients_at_a_time) != clients_at_a_time or clients_at_a_time < 1:
            raise ValueError(
                f"clients_at_a_time must be a positive integer, got {clients_at_a_time!r}."
            )
        return replace(self, at_a_time=int(clients_at_a_time))

    def sharded(self, mesh: Mesh) -> "FederatedData":
        """Return the same data, whose clients are spread over the devices of a mesh.

        Draws and steps of a round's clients are computed by all devices at once, the rest of the
        round by each; every device holds all rows. Results are the same up to rounding. On CPU, one
        device a core (``XLA_FLAGS=--xla_force_host_platform_device_count=2``) lets a run use all
        cores.

        Parameters
        ----------
        mesh
            With an axis named ``clients``; others are left alone.

        Raises
        ------
        ValueError
            If the mesh has no such axis.

        Examples
        --------
        >>> import jax, numpy as np
        >>> data = FederatedData.from_clients([np.ones(3), np.zeros(5)])
        >>> mesh = jax.make_mesh((1,), ("clients",))
        >>> data.sharded(mesh).mesh.shape["clients"]
        1
        """
        if "clients" not in mesh.shape:
            raise ValueError(
                f"The mesh needs an axis named 'clients', got axes {tuple(mesh.shape)}."
            )
        # With axes whose sharding the compiler chooses, also where the mesh's are explicit.
        return replace(self, mesh=Mesh(mesh.devices, mesh.axis_names))

    def pooled(self) -> "FederatedData":
        """Return the same rows as those of a single client."""
        total = jax.tree.leaves(self.rows)[0].shape[0]
        return FederatedData(
            self.rows,
            jnp.zeros(1, jnp.int32),
            jnp.full(1, total, jnp.int32),
            jnp.ones(1, self.share.dtype),
            total,
        )


def single_chunk(client: Client) -> bool:
    """Return whether a full pass takes one chunk whatever the client (static)."""
    return client.max_size <= CHUNK_ROWS


def gather(client: Client, offsets: Array) -> ArrayTree:
    """Return the client's rows at `offsets` in ``[0, size)``, leaves ``[*offsets.shape, ...]``."""
    return jax.tree.map(lambda leaf: leaf[client.start + offsets], client.rows)


def own_rows(client: Client, first: Any = 0) -> tuple[ArrayTree, Array]:
    """Return a chunk of the client's rows from `first` on, and the mask of those that exist.

    The rows behind the client's last are copies of its first, so that a row of another client
    never enters a computation, not even masked (a NaN would survive a mask in a gradient).
    """
    offsets = first + jnp.arange(min(client.max_size, CHUNK_ROWS), dtype=jnp.int32)
    mask = offsets < client.size
    return gather(client, jnp.where(mask, offsets, 0)), mask


def fold(fn: Callable[[ArrayTree, Array], ArrayTree], client: Client) -> ArrayTree:
    """Return the sum of ``fn(rows, mask)`` over chunks of the client's rows.

    Parameters
    ----------
    fn
        Takes rows with leaves ``[chunk, ...]`` and a bool mask ``[chunk]``; must return a pytree
        that is a sum over the rows where the mask holds.
    client
        Whose rows.
    """
    if single_chunk(client):
        return fn(*own_rows(client))
    num_chunks = (client.size + CHUNK_ROWS - 1) // CHUNK_ROWS
    shapes = jax.eval_shape(fn, *jax.eval_shape(own_rows, client))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def body(i: Array, total: ArrayTree) -> ArrayTree:
        return trees.add(total, fn(*own_rows(client, i * CHUNK_ROWS)))

    return jax.lax.fori_loop(0, num_chunks, body, zeros)
