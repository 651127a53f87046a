"""Clients whose rows are loaded only by the process that computes with them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from fedmcmc.data._columns import concatenate_clients
from fedmcmc.data._federated import FederatedData, from_sorted
from fedmcmc.data._rows import count_rows, first_rows
from fedmcmc.types import ArrayTree


@dataclass(frozen=True, repr=False)
class ClientLoader:
    """Clients of known sizes, with a function that loads the rows of a client.

    ``sample(..., loader, mesh=mesh)`` loads only the clients of this process's devices, so that no
    process of a run needs all rows. Without a mesh, it loads all clients. The draws are the same as
    with `FederatedData.from_clients`.

    Clients are loaded one after the other. Besides the result, only one client's rows and small
    parts are in memory, so `load_fn` may read a file or return memory-mapped arrays. On a CPU the
    device uses the memory of the result without a copy.

    Parameters
    ----------
    sizes
        ``[num_clients]``, number of rows per client.
    load_fn
        ``client_id -> rows``, a pytree with leaves ``[sizes[client_id], ...]``; called once for
        each client that is needed.
    allow_nonfinite
        If true, rows may hold NaN or infinite values.

    Raises
    ------
    ValueError
        If a client has no rows. Loading also raises it in the cases of
        `FederatedData.from_clients`, and if the number of a client's rows differs from `sizes`.

    Examples
    --------
    >>> import numpy as np
    >>> loader = ClientLoader([3, 1], lambda client_id: np.full((3 - 2 * client_id, 2), 1.0))
    >>> loader.num_clients, loader.load().num_rows
    (2, 4)

    Rows of a file, mapped into memory:

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp(), "x.npy")
    >>> np.save(path, np.arange(8.0).reshape(4, 2))
    >>> rows, starts = np.load(path, mmap_mode="r"), [0, 3, 4]
    >>> loader = ClientLoader([3, 1], lambda i: {"x": rows[starts[i] : starts[i + 1]]})
    >>> loader.load()
    FederatedData(2 clients, 4 rows, 1 to 3 per client; x: float32[2])
    """

    sizes: Sequence[int] | np.ndarray
    load_fn: Callable[[int], ArrayTree]
    allow_nonfinite: bool = False

    def __post_init__(self) -> None:
        sizes = np.asarray(self.sizes)
        if sizes.ndim != 1 or not sizes.size or sizes.dtype.kind not in "iu":
            raise ValueError(
                f"sizes must be one integer per client, got shape {sizes.shape} and dtype "
                f"{sizes.dtype}."
            )
        if not callable(self.load_fn):
            raise TypeError(f"load_fn must be a function, got {type(self.load_fn).__name__}.")
        if (sizes < 0).any():
            raise ValueError(f"sizes must not be negative, got {sizes.min()}.")
        first_rows(sizes)
        object.__setattr__(self, "sizes", sizes)

    def __repr__(self) -> str:
        """Return the sizes without loading rows."""
        sizes = np.asarray(self.sizes)
        return (
            f"ClientLoader({self.num_clients} clients, {sizes.sum()} rows, {sizes.min()} to "
            f"{sizes.max()} per client)"
        )

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.sizes)

    def load(self, clients: Sequence[int] | np.ndarray | None = None) -> FederatedData:
        """Return the data of all clients, or data with only the rows of `clients`.

        With `clients`, `sizes` still describes all clients, but `start` is zero for the others.
        """
        ids = [int(i) for i in (range(self.num_clients) if clients is None else clients)]
        sizes = np.asarray(self.sizes)
        num_rows = int(sizes[ids].sum())
        rows, _ = concatenate_clients(lambda i: self._load_client(ids[i]), ids, num_rows)
        return from_sorted(rows, sizes, self.allow_nonfinite, ids)

    def _load_client(self, client: int) -> ArrayTree:
        rows = self.load_fn(client)
        num = count_rows([np.asarray(leaf) for leaf in jax.tree.leaves(rows)], f"client {client}")
        if num != self.sizes[client]:
            raise ValueError(
                f"load_fn({client}) returned {num} rows, expected {self.sizes[client]} (sizes)."
            )
        return rows
