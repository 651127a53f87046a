"""Federated data: all rows in one flat store, sorted by client, without padding."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, Client, Federation, html_table, register_dataclass
from fedmcmc.data._groups import (
    Grouped,
    GroupLabels,
    all_groups,
    count_groups,
    grouped,
    label_array,
    own_groups,
    row_values,
)
from fedmcmc.data._inputs import group_column, is_table, refuse_groupby
from fedmcmc.data._legend import MAX_SHOWN, Legend, columns_in_words
from fedmcmc.data._levels import report_similar
from fedmcmc.data._rows import (
    Levels,
    as_array,
    as_row_type,
    check_finite,
    count_rows,
    gathered,
    joined,
    starts_of,
)
from fedmcmc.pytrees import trees

CHUNK_ROWS = 4096
"""Rows that a full pass over a client takes at a time."""


@register_dataclass
@dataclass(frozen=True, repr=False)
class FederatedData:
    """The rows of every client.

    Build it with `from_dataframe`, `from_clients` or `from_arrays`. Printed, it shows sizes, types
    and names, and never a row.

    Attributes
    ----------
    rows
        Leaves ``[num_rows, ...]``, sorted by client; with `groups`, those and the rows' groups.
    start, size
        ``[num_clients]`` int32: client ``i`` owns rows ``[start[i], start[i] + size[i])``.
    share
        ``[num_clients]``, ``size / num_rows``.
    max_size
        The size of the largest client, static.
    legend
        Names of clients, groups and codes, static; see `labels`, `group_labels` and `coding`.

    Examples
    --------
    >>> import numpy as np
    >>> data = FederatedData.from_clients([np.ones((3, 2)), np.zeros((1, 2))])
    >>> data.num_clients, data.num_rows, data.sizes.tolist()
    (2, 4, [3, 1])
    >>> data
    FederatedData(2 clients, 4 rows, 1 to 3 per client; rows: float32[2])
    """

    rows: ArrayTree
    start: Array
    size: Array
    share: Array
    max_size: int = field(metadata={"static": True})
    legend: Legend = field(default_factory=Legend, metadata={"static": True})

    @classmethod
    def from_dataframe(
        cls,
        df: Any,
        *,
        client: str,
        columns: Sequence[str] | None = None,
        groups: str | None = None,
        allow_nonfinite: bool = False,
    ) -> "FederatedData":
        """Build from one table of all rows, in any order, of pandas, Polars or their like.

        Parameters
        ----------
        df
            The table. Rows become a dictionary of its columns, ``[num_rows]`` each. Booleans become
            0 and 1. Text and categories become codes ``0, 1, ...`` of levels (`coding`): ordered
            categories in their order, unordered ones in theirs if all clients declare the same,
            and other text sorted by the alphabet, capital letters first (`orders`).
        client
            The name of the column that holds each row's client. Its values, sorted, are `labels`.
        columns
            Names of the columns to keep; by default all but `client` and `groups`.
        groups
            The name of the column that holds each row's group within its client, such as the
            patient, for models with an effect per group.
        allow_nonfinite
            Whether floats may be missing (then NaN), NaN or infinite.

        Raises
        ------
        ValueError
            If a column is not there, holds missing values, numbers written as text or what is
            neither number nor text, or if two of its levels differ only in white space.

        Examples
        --------
        >>> import pandas as pd
        >>> table = pd.DataFrame(
        ...     {"clinic": ["Bern", "Basel", "Bern"], "age": [50, 61, 72], "sex": ["f", "m", "f"]}
        ... )
        >>> data = FederatedData.from_dataframe(table, client="clinic")
        >>> data
        FederatedData(2 clients ('Basel', 'Bern'), 3 rows, 1 to 2 per client; age: int32,
        sex: int32 (alphabetical: 0 'f', 1 'm'))
        >>> data.labels
        ('Basel', 'Bern')
        """
        from fedmcmc.data._frames import columns_of, owners_of  # narwhals takes a while

        ids, labels = owners_of(df, client)
        beside = [client] if groups is None else [client, groups]
        rows, coding, orders = columns_of([df], columns, beside, allow_nonfinite=allow_nonfinite)
        order = np.argsort(ids, kind="stable")
        rows = {name: gathered(column, order) for name, column in rows.items()}
        sizes = np.bincount(ids)
        names: GroupLabels | None = None
        whole: ArrayTree = rows
        if groups is not None:
            numbers, levels = owners_of(df, groups, "group")
            of_row = np.array(levels, object)[numbers[order]]
            whole, names = grouped(rows, np.split(of_row, np.cumsum(sizes)[:-1]), sizes, labels)
        data = from_sorted(whole, sizes, allow_nonfinite, labels=labels)
        return replace(data, legend=Legend(labels, coding, names, orders))

    @classmethod
    def from_clients(
        cls,
        clients: Sequence[ArrayTree] | Mapping[Any, ArrayTree],
        *,
        groups: str | Sequence[Any] | None = None,
        allow_nonfinite: bool = False,
    ) -> "FederatedData":
        """Build from one pytree of rows per client, leaves ``[n_c, ...]``, or one table each.

        Of a mapping the keys are the clients' `labels`. Tables are those of `from_dataframe`;
        the orders in which clients declare ordered categories are merged.
        `groups` say which of its client's groups (its patients, say) a row belongs to, for models
        with an effect per group: the name of a column, which is then none of the rows, or one
        array of labels per client, which mean nothing outside of it. By default a client is one
        group.

        Raises
        ------
        ValueError
            If there is no client, a client has no rows, leaves disagree about the number of rows,
            clients disagree about structure, row shapes or the order of categories, or (unless
            `allow_nonfinite`) a float is not finite.
        """
        labels: Levels | None = None
        if is_table(clients):
            raise TypeError(
                "from_clients takes one table per client, got a single table. Pass "
                "from_dataframe(table, client=...) the name of the column that holds each row's "
                "client, or [table] if all rows are one client's."
            )
        if isinstance(clients, Mapping):
            labels, clients = tuple(clients), list(clients.values())
            report_similar(dict.fromkeys(labels), "The mapping of clients", "labels")
        elif isinstance(clients, Iterable) and not hasattr(clients, "__getitem__"):
            clients = list(clients)
        elif not hasattr(clients, "__len__") or isinstance(clients, str):
            raise TypeError(
                f"from_clients takes a sequence or a mapping of rows, one entry per client, got "
                f"{type(clients).__name__}."
            )
        refuse_groupby(clients)
        owners = tuple(range(len(clients))) if labels is None else labels
        column = groups if isinstance(groups, str) else None
        if column is not None:
            groups = [
                group_column(x, column, owner) for owner, x in zip(owners, clients, strict=True)
            ]
        tables = [is_table(x) for x in clients]
        legend = Legend(labels)
        if any(tables) and not all(tables):
            raise TypeError(
                f"Clients need rows of one kind: client {owners[tables.index(True)]!r} has a "
                f"table, client {owners[tables.index(False)]!r} has none. Turn all into tables."
            )
        if any(tables):
            from fedmcmc.data._frames import columns_of

            beside = [] if column is None else [column]
            rows, coding, orders = columns_of(
                clients, None, beside, allow_nonfinite=allow_nonfinite, owners=owners
            )
            sizes = np.array([len(frame) for frame in clients])
            legend = Legend(labels, coding, orders=orders)
        else:
            if column is not None:
                clients = [{k: v for k, v in x.items() if k != column} for x in clients]
            rows, sizes = joined(clients, owners)
        whole: ArrayTree = rows
        if groups is not None:
            whole, names = grouped(rows, groups, sizes, owners)
            legend = replace(legend, group_labels=names)
        data = from_sorted(whole, sizes, allow_nonfinite, labels=owners)
        return replace(data, legend=legend)

    @classmethod
    def from_arrays(
        cls,
        tree: ArrayTree,
        client_ids: Any,
        *,
        num_clients: int | None = None,
        groups: Any = None,
        allow_nonfinite: bool = False,
    ) -> "FederatedData":
        """Build from rows in any order, leaves ``[num_rows, ...]``, and one integer id per row.

        Ids run from 0 to ``num_clients - 1`` (by default the largest id), each with at least one
        row. Ids may be names: sorted, they are the clients' `labels`. The order of rows within a
        client is kept. `groups` are labels of the groups within clients, one per row.

        Raises
        ------
        ValueError
            As `from_clients`, and if ids are neither integers nor names, negative, or too large.
        """
        ids, labels = label_array(client_ids), None
        if ids.dtype.kind in "UO" and ids.ndim == 1 and all(isinstance(x, str) for x in ids):
            names, ids = np.unique(ids.astype(str), return_inverse=True)
            labels = tuple(names.tolist())
            report_similar(dict.fromkeys(labels), "client_ids", "labels")
        leaves = [as_array(leaf, "the data") for leaf in jax.tree.leaves(tree)]
        num_rows = count_rows(leaves, "the data")
        if ids.shape != (num_rows,) or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"client_ids must be one integer or one name per row, shape ({num_rows},), got "
                f"shape {ids.shape} and dtype {ids.dtype}."
            )
        count = int(ids.max()) + 1 if num_clients is None else num_clients
        for is_wrong, expected in (
            (ids < 0, "0 or larger"),
            (ids >= count, f"smaller than num_clients={count}"),
        ):
            if is_wrong.any():
                row = int(is_wrong.argmax())
                raise ValueError(f"client_ids must be {expected}, got {ids[row]} in row {row}.")
        order = np.argsort(ids, kind="stable")
        rows = jax.tree.map(lambda leaf: gathered(np.asarray(leaf), order), tree)
        sizes = np.bincount(ids, minlength=count)
        data = from_sorted(rows, sizes, allow_nonfinite, labels=labels)
        data = replace(data, legend=Legend(labels))
        if groups is None:
            return data
        own = label_array(groups)
        if own.shape != ids.shape:
            raise ValueError(
                f"groups must hold one label per row, shape ({num_rows},), got shape {own.shape}."
            )
        parts = np.split(own[order], np.cumsum(sizes)[:-1])
        owners = range(count) if labels is None else labels
        whole, group_labels = grouped(data.rows, parts, sizes, owners)
        return replace(data, rows=whole, legend=Legend(labels, group_labels=group_labels))

    def __repr__(self) -> str:
        """Return sizes, types and names; rows stay where they are."""
        columns = ", ".join(
            f"{name}: {kind}" for name, kind in columns_in_words(self.rows, self.legend).items()
        )
        return f"FederatedData({self._counts()}; {columns})"

    def _repr_html_(self) -> str:
        """Return the same for notebooks, a column per row."""
        return html_table(
            f"FederatedData: {self._counts()}", columns_in_words(self.rows, self.legend)
        )

    def _counts(self) -> str:
        counts = f"{self.num_clients} clients"
        if self.legend.labels is not None and self.num_clients <= MAX_SHOWN:
            counts += f" ({', '.join(map(repr, self.legend.labels))})"
        counts += f", {self.num_rows} rows"
        if not isinstance(self.size, jax.core.Tracer):
            counts += f", {int(self.size.min())} to {int(self.size.max())} per client"
        if self.num_groups is not None:
            counts += f", {int(self.num_groups.sum())} groups"
        return counts

    @property
    def labels(self) -> Levels:
        """What the clients are called, by default their numbers."""
        given = self.legend.labels
        return tuple(range(self.num_clients)) if given is None else given

    @property
    def coding(self) -> Mapping[str, Levels]:
        """The levels of columns that were text, by column: code ``i`` is the level ``i``."""
        return self.legend.coding

    @property
    def orders(self) -> Mapping[str, str]:
        """The order of each coded column's levels.

        ``"ordered"`` and ``"as declared"`` are orders of categories, ``"alphabetical"`` and
        ``"numerical"`` those of levels without a declared order.
        """
        return self.legend.orders

    @property
    def group_labels(self) -> GroupLabels | None:
        """Labels of each client's groups, by their numbers; ``None`` without `groups`."""
        return self.legend.group_labels

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return self.size.shape[0]

    @property
    def num_rows(self) -> int:
        """Number of rows of all clients (that `rows` holds)."""
        return jax.tree.leaves(self.rows)[0].shape[0]

    @property
    def num_groups(self) -> np.ndarray | None:
        """Groups of each client, ``[num_clients]`` int32; ``None`` where none were told."""
        return count_groups(self.rows, self.start, self.size)

    @property
    def group_mask(self) -> np.ndarray:
        """Which groups each client has, ``[num_clients, max_groups]`` bool."""
        counts = self.num_groups
        counts = np.ones(self.num_clients, int) if counts is None else counts
        most = self.rows.most if isinstance(self.rows, Grouped) else 1
        return np.asarray(np.arange(most) < counts[:, None])

    @property
    def sizes(self) -> Array:
        """Rows of each client, ``[num_clients]`` int32."""
        return self.size

    def client(self, index: Any, weight: Any = 1.0, max_size: int | None = None) -> Client:
        """Return client `index` as a step sees it; `weight` is one over its probability.

        With indices ``[n]`` every field but `rows` gets that axis; see `client_axes`. `max_size`
        is a smaller bound on their sizes, where one is known.
        """
        if isinstance(index, int) and not 0 <= index < self.num_clients:
            raise IndexError(f"There is no client {index}, only 0 to {self.num_clients - 1}.")
        index = jnp.asarray(index, jnp.int32)
        start, size, share, weight = _of_clients(self.start, self.size, self.share, index, weight)
        most = self.max_size if max_size is None else max_size
        return Client(self.rows, start, size, index, share, weight, most)

    def everyone(self, clients: Array | None = None) -> Client:
        """Return all clients, or those of these ids, with a leading axis; see `client_axes`."""
        ids = np.arange(self.num_clients, dtype=np.int32) if clients is None else clients
        return self.client(ids)

    @property
    def federation(self) -> Federation:
        """What a server knows of these clients."""
        values = row_values(self.rows)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), values)
        return Federation(self.num_clients, self.num_rows, self.size, shapes)

    def map_clients(
        self, fn: Callable[[Client], ArrayTree], clients: Array | None = None
    ) -> ArrayTree:
        """Return ``fn(client)`` of all clients, or those of these ids, with a leading axis."""
        return jax.vmap(fn, in_axes=(self.client_axes(),))(self.everyone(clients))

    def sum_over_clients(
        self, fn: Callable[[Client], ArrayTree], *, apart: bool = False
    ) -> ArrayTree:
        """Return the sum of ``fn(client)`` over all clients, where `fn` is a sum over rows.

        All rows are taken as those of one client, unless clients are to be computed `apart`.
        """
        if apart:
            terms = self.map_clients(fn)
            return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0, dtype=leaf.dtype), terms)
        return fn(self.pooled(groups=True).client(jnp.zeros((), jnp.int32)))

    def client_axes(self, max_size: int | None = None) -> Client:
        """Return the ``in_axes`` with which `jax.vmap` maps over ``client(indices)``."""
        bound = self.max_size if max_size is None else max_size
        return Client(None, 0, 0, 0, 0, 0, bound)  # type: ignore[arg-type]

    def client_rows(self, index: int) -> ArrayTree:
        """Return the rows of one client, leaves ``[n_c, ...]`` (outside of compiled code)."""
        begin, end = int(self.start[index]), int(self.start[index] + self.size[index])
        return jax.tree.map(lambda leaf: leaf[begin:end], row_values(self.rows))

    def pooled(self, *, groups: bool = False) -> "FederatedData":
        """Return the same rows as those of a single client.

        With `groups`, its groups are all groups of all clients, which are one each if not told;
        else it is one group.
        """
        rows: ArrayTree = row_values(self.rows)
        if groups:
            rows = all_groups(self.rows, self.start, self.num_rows)
        return FederatedData(
            rows,
            *_on_device(np.zeros(1), [self.num_rows], np.ones(1), self.share.dtype),
            self.num_rows,
        )


@partial(jax.jit, inline=True)
def _of_clients(
    start: Array, size: Array, share: Array, index: Array, weight: Any
) -> tuple[Array, Array, Array, Array]:
    """Return what is known of the clients `index`; one program where it is not in another."""
    own = share[index]
    return start[index], size[index], own, jnp.broadcast_to(trees.cast(weight, own), own.shape)


def from_sorted(
    rows: ArrayTree,
    sizes: np.ndarray,
    allow_nonfinite: bool,
    clients: Sequence[int] | None = None,
    labels: Sequence[Any] | None = None,
) -> FederatedData:
    """Return data of clients of these `sizes`, whose rows lie one client after the other.

    Where `clients` are given, the rows are theirs alone, and `start` says nothing of the others.
    Messages name clients by `labels`, by default their numbers.
    """
    clients = range(len(sizes)) if clients is None else clients
    labels = range(len(sizes)) if labels is None else labels
    owners = [labels[client] for client in clients]
    start = np.zeros(len(sizes), np.int32)
    start[clients] = begin = starts_of(sizes[clients], owners)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(row_values(rows))
    cast = []
    for path, leaf in leaves:
        cast.append(as_row_type(path, leaf))
    values = jax.tree.unflatten(treedef, cast)
    if not allow_nonfinite:
        check_finite(values, begin, owners)
    rows = replace(rows, values=values) if isinstance(rows, Grouped) else values
    dtype = jnp.result_type(float)
    start_, size, share = _on_device(start, sizes, sizes / sizes.sum(), dtype)
    return FederatedData(
        # Shares memory with the host where it can; the arrays are nobody else's.
        rows=jax.tree.map(jax.device_put, rows),
        start=start_,
        size=size,
        share=share,
        max_size=int(sizes.max()),
    )


def _on_device(start: Any, size: Any, share: Any, dtype: Any) -> tuple[Array, Array, Array]:
    """Return the arrays of a `FederatedData`, in their types before they are JAX's.

    A conversion there would be a program of its own.
    """
    whole = (np.asarray(start, np.int32), np.asarray(size, np.int32), np.asarray(share, dtype))
    start, size, share = map(jnp.asarray, whole)
    return start, size, share


def single_chunk(client: Client) -> bool:
    """Return whether a full pass takes one chunk whatever the client (static)."""
    return client.max_size <= CHUNK_ROWS


@partial(jax.jit, inline=True)
def gather(client: Client, offsets: Array) -> ArrayTree:
    """Return the client's rows at `offsets` in ``[0, size)``, leaves ``[*offsets.shape, ...]``."""
    return jax.tree.map(lambda leaf: leaf[client.start + offsets], row_values(client.rows))


def own_rows(client: Client, first: Any = 0) -> tuple[ArrayTree, Array]:
    """Return a chunk of the client's rows from `first` on, and the mask of those that exist.

    The rows behind the client's last are copies of its first, so that a row of another client
    never enters a computation, not even masked (a NaN would survive a mask in a gradient).
    """
    offsets = first + jnp.arange(min(client.max_size, CHUNK_ROWS), dtype=jnp.int32)
    mask = offsets < client.size
    return gather(client, jnp.where(mask, offsets, 0)), mask


def own_rows_in_groups(client: Client, first: Any = 0) -> tuple[ArrayTree, Array, Array]:
    """Return what `own_rows` returns, and the group of each row, ``[chunk]`` int32.

    Groups number from 0 to ``max_groups(client) - 1``; rows that do not exist have that of the
    client's first.
    """
    rows, mask = own_rows(client, first)
    offsets = first + jnp.arange(mask.shape[0], dtype=jnp.int32)
    return rows, mask, own_groups(client, jnp.where(mask, offsets, 0))


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
