"""Clients whose rows are loaded where they are computed with, and nowhere else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fedmcmc._types import ArrayTree
from fedmcmc.data._federated import FederatedData, from_sorted
from fedmcmc.data._rows import count_rows, joined, starts_of


@dataclass(frozen=True, repr=False)
class ClientLoader:
    """Clients of known sizes, and a function that loads the rows of one.

    ``sample(..., loader, mesh=mesh)`` loads the clients of this process's devices and no others:
    of a run over several processes, none needs all rows. Without a mesh all are loaded. Draws are
    those of `FederatedData.from_clients`.

    Parameters
    ----------
    sizes
        Rows of every client.
    load_fn
        ``client_id -> rows``, a pytree with leaves ``[sizes[client_id], ...]``; called once for
        each client that is needed.
    allow_nonfinite
        Whether rows may hold NaN or infinite values.

    Raises
    ------
    ValueError
        If a client has no rows; when loading, as `FederatedData.from_clients`, and where a client's
        rows are not as many as `sizes` says.

    Examples
    --------
    >>> import numpy as np
    >>> loader = ClientLoader([3, 1], lambda client_id: np.full((3 - 2 * client_id, 2), 1.0))
    >>> loader.num_clients, loader.load().num_rows
    (2, 4)
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
        starts_of(sizes)
        object.__setattr__(self, "sizes", sizes)

    def __repr__(self) -> str:
        """Return sizes; no row is loaded."""
        sizes = np.asarray(self.sizes)
        least, most = int(sizes.min()), int(sizes.max())
        return (
            f"ClientLoader({self.num_clients} clients, {int(sizes.sum())} rows, {least} to {most} "
            f"per client)"
        )

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.sizes)

    def load(self, clients: Sequence[int] | np.ndarray | None = None) -> FederatedData:
        """Return all clients' data, or data that hold the rows of some `clients` alone.

        The latter know the sizes of all, but `start` says nothing of the others.
        """
        ids = [int(i) for i in (range(self.num_clients) if clients is None else clients)]
        rows, _ = joined([self._loaded(i) for i in ids], ids)
        return from_sorted(rows, np.asarray(self.sizes), self.allow_nonfinite, ids)

    def _loaded(self, client: int) -> Any:
        rows = self.load_fn(client)
        num = count_rows([np.asarray(leaf) for leaf in jax.tree.leaves(rows)], f"client {client}")
        if num != self.sizes[client]:
            raise ValueError(
                f"load_fn({client}) returned {num} rows, sizes says {self.sizes[client]}."
            )
        return rows
