"""Federated data: rows of all clients in one array, sorted by client, without padding."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from fedmcmc.data._columns import (
    concatenate_clients,
    count_all_rows,
    order_by_client,
    take_rows,
    write_column,
)
from fedmcmc.data._dictionary import Dictionary, with_roles
from fedmcmc.data._groups import (
    Grouped,
    GroupLabels,
    as_labels,
    count_groups,
    number_groups,
    own_groups,
    pool_groups,
    row_values,
)
from fedmcmc.data._inputs import group_column, is_table, refuse_groupby
from fedmcmc.data._legend import MAX_SHOWN, Legend, describe_columns
from fedmcmc.data._levels import report_similar
from fedmcmc.data._rows import (
    Levels,
    as_array,
    check_finite,
    count_rows,
    first_rows,
    host_view,
)
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Client, Federation, html_table, register_dataclass

CHUNK_ROWS = 4096
"""Maximal number of rows that a full pass over a client reads at once."""


@register_dataclass
@dataclass(frozen=True, repr=False)
class FederatedData:
    """Rows of all clients.

    Build it with `from_dataframe`, `from_clients` or `from_arrays`. Its ``repr`` shows sizes, types
    and names, but never a row.

    Attributes
    ----------
    rows
        Rows sorted by client, leaves ``[num_rows, ...]``; with `groups`, also the rows' groups.
    start, size
        ``[num_clients]`` int32; client ``i`` owns rows ``[start[i], start[i] + size[i])``.
    share
        ``[num_clients]``, ``size / num_rows``.
    max_size
        Static size of the largest client.
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
        df: object,
        *,
        client: str | None = None,
        columns: Sequence[str] | None = None,
        groups: str | None = None,
        allow_nonfinite: bool = False,
        dictionary: Dictionary | None = None,
    ) -> "FederatedData":
        """Build from one table with the rows of all clients in any order.

        Parameters
        ----------
        df
            Table of pandas, Polars or another library that narwhals reads. Rows become a dictionary
            of columns, ``[num_rows]`` each. Booleans become 0 and 1. Text and categories become
            codes ``0, 1, ...`` of levels (`coding`). Declared categories keep their order; other
            text is sorted alphabetically, capital letters first (`orders`).
        client
            Name of the column with each row's client. Its sorted values become `labels`. Required
            unless the dictionary names it.
        columns
            Names of the columns to keep; by default all except for `client` and `groups`.
        groups
            Name of the column with each row's group within its client, such as the patient, for
            models with an effect per group.
        allow_nonfinite
            If true, floats may be missing (then NaN), NaN or infinite. Not used with a dictionary.
        dictionary
            Dictionary that names columns of clients and groups, checks each client's rows, and
            alone determines the codes of text.

        Raises
        ------
        ValueError
            If a column is missing or holds missing values, numbers written as text, or values that
            are neither numbers nor text, if two of its levels differ only in white space, or if the
            rows do not agree with the dictionary (`Dictionary.check`).

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
        from fedmcmc.data._frames import read_columns, read_owners  # narwhals is slow to import

        if dictionary is not None:
            dictionary = with_roles(dictionary, client, groups)
            client, groups = dictionary.client, dictionary.group
        if client is None:
            raise TypeError("client must name the column that holds each row's client.")
        ids, labels = read_owners(df, client)
        excluded = [client] if groups is None else [client, groups]
        order, sizes, group_of_row = order_by_client(ids), np.bincount(ids), None
        if groups is not None:
            numbers, levels = read_owners(df, groups, "group")
            group_of_row = _split(np.array(levels, object)[numbers], order, sizes)
        if dictionary is not None:
            from fedmcmc.data._dictionary_rows import code_parts

            positions = _split(np.arange(len(ids)), order, sizes)
            rows = code_parts(dictionary, df, labels, positions, columns)
            legend = Legend(labels, dictionary.levels, orders=dictionary.orders)
            return _assemble(rows, sizes, legend, group_of_row, allow_nonfinite=True)
        rows, coding, orders = read_columns(
            [df], columns, excluded, allow_nonfinite=allow_nonfinite, order=order
        )
        legend = Legend(labels, coding, orders=orders)
        return _assemble(rows, sizes, legend, group_of_row, allow_nonfinite)

    @classmethod
    def from_clients(
        cls,
        clients: Sequence[ArrayTree] | Mapping[Any, ArrayTree],
        *,
        groups: str | Sequence[Any] | None = None,
        allow_nonfinite: bool = False,
        dictionary: Dictionary | None = None,
    ) -> "FederatedData":
        """Build from one pytree of rows per client, or one table per client.

        Parameters
        ----------
        clients
            Pytrees with leaves ``[n_c, ...]``, or tables as for `from_dataframe`. The keys of a
            mapping become `labels`. Orders of categories that clients declare are merged.
        groups
            Groups of rows within clients, such as patients, for models with an effect per group:
            the name of a column, which is then not part of the rows, or one array of labels per
            client. By default a client is one group.
        allow_nonfinite
            If true, floats may be NaN or infinite. Not used with a dictionary.
        dictionary
            Dictionary as for `from_dataframe`. Clients are then tables or mappings of columns.

        Raises
        ------
        ValueError
            If there is no client, a client has no rows, leaves differ in their number of rows,
            clients differ in structure, row shapes or the order of categories, a float is not
            finite, or rows do not agree with the dictionary.
        """
        labels: Levels | None = None
        if is_table(clients):
            raise TypeError(
                "from_clients takes one table per client, got a single table. Call "
                "from_dataframe(table, client=...) with the name of the column that holds each "
                "row's client, or pass [table] if all rows belong to one client."
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
        if dictionary is not None:
            dictionary = with_roles(dictionary, None, column)
            column = dictionary.group if groups is None else column
        if column is not None:
            groups = [
                group_column(x, column, owner) for owner, x in zip(owners, clients, strict=True)
            ]
        if dictionary is not None:
            from fedmcmc.data._dictionary_rows import code_clients

            rows, sizes = code_clients(dictionary, clients, owners, are_named=labels is not None)
            legend = Legend(labels, dictionary.levels, orders=dictionary.orders)
            return _assemble(rows, sizes, legend, groups, allow_nonfinite=True)
        tables = [is_table(x) for x in clients]
        legend = Legend(labels)
        if any(tables) and not all(tables):
            raise TypeError(
                f"Clients need rows of one kind: client {owners[tables.index(True)]!r} has a "
                f"table, client {owners[tables.index(False)]!r} has none. Turn all into tables."
            )
        if any(tables):
            from fedmcmc.data._frames import read_columns

            excluded = [] if column is None else [column]
            rows, coding, orders = read_columns(
                clients, None, excluded, allow_nonfinite=allow_nonfinite, owners=owners
            )
            sizes = np.array([len(frame) for frame in clients])
            legend = Legend(labels, coding, orders=orders)
        else:
            if column is not None:
                clients = [{k: v for k, v in x.items() if k != column} for x in clients]
            rows, sizes = concatenate_clients(clients.__getitem__, owners, count_all_rows(clients))
        return _assemble(rows, sizes, legend, groups, allow_nonfinite)

    @classmethod
    def from_arrays(
        cls,
        tree: ArrayTree,
        client_ids: object,
        *,
        num_clients: int | None = None,
        groups: object = None,
        allow_nonfinite: bool = False,
    ) -> "FederatedData":
        """Build from rows in any order and one client id per row.

        Parameters
        ----------
        tree
            Rows, leaves ``[num_rows, ...]``. Rows of one client keep their order.
        client_ids
            ``[num_rows]``, integers from 0 to ``num_clients - 1`` (by default the largest id), or
            names, which are sorted and become `labels`. Each client needs at least one row.
        groups
            ``[num_rows]``, labels of the groups within clients.
        num_clients, allow_nonfinite
            Number of clients; if true, floats may be NaN or infinite.

        Raises
        ------
        ValueError
            In the cases of `from_clients`, and if ids are neither integers nor names, or out of
            range.
        """
        ids, labels = as_labels(client_ids), None
        if ids.dtype.kind in "UO" and ids.ndim == 1 and all(isinstance(x, str) for x in ids):
            names, ids = np.unique(ids.astype(str), return_inverse=True)
            labels = tuple(names.tolist())
            report_similar(dict.fromkeys(labels), "client_ids", "labels")
        paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
        leaves = [as_array(leaf, "the data") for _, leaf in paths]
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
        order = order_by_client(ids)
        columns = [
            write_column(path, take_rows(leaf, order), num_rows)
            for (path, _), leaf in zip(paths, leaves, strict=True)
        ]
        rows = jax.tree.unflatten(treedef, columns)
        sizes = np.bincount(ids, minlength=count)
        if groups is not None:
            groups = as_labels(groups)
            if groups.shape != ids.shape:
                raise ValueError(
                    f"groups must hold one label per row, shape ({num_rows},), got shape "
                    f"{groups.shape}."
                )
            groups = _split(groups, order, sizes)
        return _assemble(rows, sizes, Legend(labels), groups, allow_nonfinite)

    def __repr__(self) -> str:
        """Return sizes, types and names, but no rows."""
        columns = ", ".join(
            f"{name}: {kind}" for name, kind in describe_columns(self.rows, self.legend).items()
        )
        return f"FederatedData({self._describe_counts()}; {columns})"

    def _repr_html_(self) -> str:
        """Return an HTML table for notebooks with one row per column of the data."""
        return html_table(
            f"FederatedData: {self._describe_counts()}", describe_columns(self.rows, self.legend)
        )

    def _describe_counts(self) -> str:
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
        """Labels of the clients, by default their numbers."""
        labels = self.legend.labels
        return tuple(range(self.num_clients)) if labels is None else labels

    @property
    def coding(self) -> Mapping[str, Levels]:
        """Levels of each column of text; code ``i`` stands for level ``i``."""
        return self.legend.coding

    @property
    def orders(self) -> Mapping[str, str]:
        """Name of the order of each coded column's levels.

        ``"ordered"`` and ``"as declared"`` are declared orders of categories; ``"alphabetical"``
        and ``"numerical"`` apply to levels without a declared order.
        """
        return self.legend.orders

    @property
    def group_labels(self) -> GroupLabels | None:
        """Labels of each client's groups in the order of their numbers; ``None`` without groups."""
        return self.legend.group_labels

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return self.size.shape[0]

    @property
    def num_rows(self) -> int:
        """Number of rows that `rows` holds."""
        return jax.tree.leaves(self.rows)[0].shape[0]

    @property
    def num_groups(self) -> np.ndarray | None:
        """Number of groups per client, ``[num_clients]`` int32; ``None`` without groups."""
        return count_groups(self.rows, self.start, self.size)

    @property
    def group_mask(self) -> np.ndarray:
        """Mask of the groups that each client has, ``[num_clients, max_groups]`` bool."""
        counts = self.num_groups
        counts = np.ones(self.num_clients, int) if counts is None else counts
        max_groups = self.rows.max_groups if isinstance(self.rows, Grouped) else 1
        return np.asarray(np.arange(max_groups) < counts[:, None])

    @property
    def sizes(self) -> Array:
        """Number of rows per client, ``[num_clients]`` int32."""
        return self.size

    def client(
        self, index: ArrayLike, weight: ArrayLike = 1.0, max_size: int | None = None
    ) -> Client:
        """Return client `index` as a step sees it; `weight` is one over its probability.

        With indices ``[n]``, all fields except for `rows` get this axis; see `client_axes`.
        `max_size` may be a smaller bound on the sizes of these clients.
        """
        if isinstance(index, int) and not 0 <= index < self.num_clients:
            raise IndexError(f"There is no client {index}, only 0 to {self.num_clients - 1}.")
        index = jnp.asarray(index, jnp.int32)
        fields = _fields_of_clients(self.start, self.size, self.share, index, weight)
        start, size, shares, weights = fields
        max_size = self.max_size if max_size is None else max_size
        return Client(self.rows, start, size, index, shares, weights, max_size)

    def everyone(self, clients: Array | None = None) -> Client:
        """Return all clients, or the clients with these ids, with a leading axis per field."""
        ids = np.arange(self.num_clients, dtype=np.int32) if clients is None else clients
        return self.client(ids)

    @property
    def federation(self) -> Federation:
        """Facts about the clients that a server has before the first round."""
        values = row_values(self.rows)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), values)
        return Federation(self.num_clients, self.num_rows, self.size, shapes)

    def map_clients(
        self, fn: Callable[[Client], ArrayTree], clients: Array | None = None
    ) -> ArrayTree:
        """Return ``fn(client)`` of all clients, or of the clients with these ids, stacked."""
        return jax.vmap(fn, in_axes=(self.client_axes(),))(self.everyone(clients))

    def sum_over_clients(
        self, fn: Callable[[Client], ArrayTree], *, apart: bool = False
    ) -> ArrayTree:
        """Return the sum of ``fn(client)`` over all clients, for an `fn` that is a sum over rows.

        Unless `apart` is true, all rows are pooled into one client.
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
        """Return the rows of one client, leaves ``[n_c, ...]``, outside of compiled code."""
        begin = int(np.asarray(self.start)[index])
        end = begin + int(np.asarray(self.size)[index])
        return jax.tree.map(lambda leaf: host_view(leaf)[begin:end], row_values(self.rows))

    def pooled(self, *, groups: bool = False) -> "FederatedData":
        """Return the same rows as the rows of a single client.

        With `groups`, this client has the groups of all clients (each client without groups is
        one); otherwise it is a single group.
        """
        rows: ArrayTree = row_values(self.rows)
        if groups:
            rows = pool_groups(self.rows, self.start, self.num_rows)
        fields = _as_fields(np.zeros(1), np.array([self.num_rows]), np.ones(1), self.share.dtype)
        start, size, share = map(jnp.asarray, fields)
        return FederatedData(rows, start, size, share, self.num_rows)


@partial(jax.jit, inline=True)
def _fields_of_clients(
    start: Array, size: Array, share: Array, index: Array, weight: ArrayLike
) -> tuple[Array, Array, Array, Array]:
    """Return the fields of the clients `index`, computed by one program instead of several."""
    shares = share[index]
    weights = jnp.broadcast_to(trees.cast(weight, shares), shares.shape)
    return start[index], size[index], shares, weights


def _split(column: np.ndarray, order: np.ndarray | None, sizes: np.ndarray) -> list[np.ndarray]:
    """Return the entries of each client from a column, which `order` sorts by client."""
    return np.split(column if order is None else column[order], np.cumsum(sizes)[:-1])


def _assemble(
    rows: ArrayTree,
    sizes: np.ndarray,
    legend: Legend,
    groups: Sequence[Any] | None,
    allow_nonfinite: bool,
) -> FederatedData:
    """Return data of rows that are sorted by client; `groups` holds each client's labels."""
    labels = range(len(sizes)) if legend.labels is None else legend.labels
    if groups is not None:
        rows, names = number_groups(rows, groups, sizes, labels)
        legend = replace(legend, group_labels=names)
    data = from_sorted(rows, sizes, allow_nonfinite, labels=labels)
    return replace(data, legend=legend)


def from_sorted(
    rows: ArrayTree,
    sizes: np.ndarray,
    allow_nonfinite: bool,
    clients: Sequence[int] | None = None,
    labels: Sequence[Any] | None = None,
) -> FederatedData:
    """Return data of clients with these `sizes` from rows that are sorted by client.

    With `clients`, only the rows of these clients are present, and `start` is zero for others.
    Messages use `labels` for clients, by default their numbers.
    """
    clients = range(len(sizes)) if clients is None else clients
    labels = range(len(sizes)) if labels is None else labels
    owners = [labels[client] for client in clients]
    start = np.zeros(len(sizes), np.int32)
    start[clients] = starts = first_rows(sizes[clients], owners)
    if not allow_nonfinite:
        check_finite(row_values(rows), starts, owners)
    arrays = _as_fields(start, sizes, sizes / sizes.sum(), jnp.result_type(float))
    # `device_put` may share memory with the host, as no other code uses these arrays.
    rows, start, size, share = jax.tree.map(jax.device_put, (rows, *arrays))
    return FederatedData(rows, start, size, share, int(sizes.max()))


def _as_fields(
    start: ArrayLike, size: ArrayLike, share: ArrayLike, dtype: DTypeLike
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return fields of clients as new arrays; NumPy compiles no programs for conversions."""
    return np.array(start, np.int32), np.array(size, np.int32), np.array(share, dtype)


def single_chunk(client: Client) -> bool:
    """Return whether a full pass over any client takes only one chunk (static)."""
    return client.max_size <= CHUNK_ROWS


@partial(jax.jit, inline=True)
def gather(client: Client, offsets: Array) -> ArrayTree:
    """Return the client's rows at `offsets` in ``[0, size)``, leaves ``[*offsets.shape, ...]``."""
    return jax.tree.map(lambda leaf: leaf[client.start + offsets], row_values(client.rows))


def own_rows(client: Client, start: int | Array = 0) -> tuple[ArrayTree, Array]:
    """Return a chunk of the client's rows from `start` on, and the mask of rows that exist.

    Rows after the client's last row are copies of its first row. Rows of other clients therefore
    never enter a computation, not even under a mask, which would not stop a NaN in a gradient.
    """
    offsets = start + jnp.arange(min(client.max_size, CHUNK_ROWS), dtype=jnp.int32)
    mask = offsets < client.size
    return gather(client, jnp.where(mask, offsets, 0)), mask


def own_rows_in_groups(client: Client, start: int | Array = 0) -> tuple[ArrayTree, Array, Array]:
    """Return the rows and the mask of `own_rows`, and the group of each row, ``[chunk]`` int32.

    Groups are numbers from 0 to ``max_groups(client) - 1``. Rows that do not exist have the group
    of the client's first row.
    """
    rows, mask = own_rows(client, start)
    offsets = start + jnp.arange(mask.shape[0], dtype=jnp.int32)
    return rows, mask, own_groups(client, jnp.where(mask, offsets, 0))


def fold(fn: Callable[[ArrayTree, Array], ArrayTree], client: Client) -> ArrayTree:
    """Return the sum of ``fn(rows, mask)`` over chunks of the client's rows.

    `fn` takes rows with leaves ``[chunk, ...]`` and a bool mask ``[chunk]``, and must return a
    pytree of sums over the rows in the mask.
    """
    if single_chunk(client):
        return fn(*own_rows(client))
    num_chunks = (client.size + CHUNK_ROWS - 1) // CHUNK_ROWS
    shapes = jax.eval_shape(fn, *jax.eval_shape(own_rows, client))

    def body(i: Array, total: ArrayTree) -> ArrayTree:
        return trees.add(total, fn(*own_rows(client, i * CHUNK_ROWS)))

    return jax.lax.fori_loop(0, num_chunks, body, trees.zeros_like(shapes))
