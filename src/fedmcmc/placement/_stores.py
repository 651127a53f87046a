"""Where clients' states lie that do not fit on the device: on the host, in memory or in files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, FederatedState

_CHUNK_BYTES = 2**26


class HostStore:
    """Keep clients' states on the host, and only those of coming cohorts on the device.

    ``sample(..., placement=Placement(client_store=HostStore(directory)))`` runs a kernel whose
    clients keep more than the device holds (the sites of a large model, say), with a participation
    that chooses a cohort (``uniform(cohort_size)``, ``categorical(...)``). Draws and states are
    those of the run without a store, to the last bit. The states of the next rounds' cohorts are
    read while the device computes.

    ``samples.state.clients`` then holds NumPy arrays of the store, leaves
    ``[num_chains, num_clients, ...]``; a run that goes on from there changes them in place.

    Parameters
    ----------
    directory
        Where to keep the states, one memory-mapped ``.npy`` file per leaf; in memory if ``None``.
        Created if missing; must hold no states of another run.
    device_bytes
        How much of the device's memory the states of coming cohorts may take. More rounds then run
        without a stop.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.full(3, float(i)) for i in range(6)])
    >>> kernel = fedmcmc.fed_ep(
    ...     posterior, inference=fedmcmc.inference.exact_gaussian(), cohort_size=2
    ... )
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, 0.0, num_rounds=20, progress=False,
    ...     placement=fedmcmc.Placement(client_store=fedmcmc.HostStore()),
    ... )
    >>> sites = samples.state.clients.site
    >>> type(sites.precision).__name__, sites.precision.shape
    ('ndarray', (1, 6))
    """

    def __init__(self, directory: str | Path | None = None, *, device_bytes: int = 2**28) -> None:
        if device_bytes <= 0:
            raise ValueError(f"device_bytes must be positive, got {device_bytes!r}.")
        self.directory = None if directory is None else Path(directory)
        self.device_bytes = int(device_bytes)

    def start(
        self,
        init_fn: Callable[[Array], FederatedState],
        num_clients: int,
        *,
        replace_files: bool = False,
    ) -> FederatedState:
        """Return the first state of a run, all clients' states in the store.

        `init_fn` returns the state of all chains with those of the clients whose ids it is given,
        some at a time. With `replace_files`, states that the directory holds are replaced.
        """

        def some(ids: np.ndarray) -> FederatedState:
            return init_fn(jnp.asarray(ids, jnp.int32))

        num = num_clients
        first = some(np.arange(1))
        leaves, treedef = jax.tree.flatten(first.clients)
        arrays = [
            self._allocate(i, (leaf.shape[0], num, *leaf.shape[2:]), leaf.dtype, replace_files)
            for i, leaf in enumerate(leaves)
        ]
        a_client = sum(array.nbytes for array in arrays) // num
        chunk = max(1, min(num, _CHUNK_BYTES // max(a_client, 1)))
        for begin in range(0, num, chunk):
            ids = np.arange(begin, min(begin + chunk, num))
            for array, leaf in zip(arrays, jax.tree.leaves(some(ids).clients), strict=True):
                array[:, ids] = np.asarray(leaf)
        return first._replace(clients=jax.tree.unflatten(treedef, arrays))

    def adopt(self, state: FederatedState, *, replace_files: bool = False) -> FederatedState:
        """Return `state` with its clients' states in this store.

        Arrays of a store are taken as they are; those of a run without one are copied.
        """
        leaves, treedef = jax.tree.flatten(state.clients)
        arrays = []
        for i, leaf in enumerate(leaves):
            array: Any = leaf
            if not isinstance(leaf, np.ndarray) or not leaf.flags.writeable:
                array = self._allocate(i, leaf.shape, leaf.dtype, replace_files)
                array[...] = np.asarray(leaf)
            arrays.append(array)
        return state._replace(clients=jax.tree.unflatten(treedef, arrays))

    def _allocate(
        self, index: int, shape: tuple[int, ...], dtype: Any, replace_file: bool = False
    ) -> np.ndarray:
        if self.directory is None:
            return np.empty(shape, dtype)
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"clients_{index}.npy"
        if path.exists() and not replace_file:
            raise FileExistsError(
                f"{path} holds states of another run: give HostStore an empty directory, or go on "
                "from that run's samples.state."
            )
        return np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=shape)


def read(clients: ArrayTree, ids: np.ndarray, num_slots: int) -> ArrayTree:
    """Return the states of clients `ids`, then zeros: leaves ``[chains, num_slots, ...]``."""

    def some(leaf: np.ndarray) -> np.ndarray:
        table = np.zeros((leaf.shape[0], num_slots, *leaf.shape[2:]), leaf.dtype)
        table[:, : len(ids)] = leaf[:, ids]
        return table

    return jax.tree.map(some, clients)


def write(clients: ArrayTree, ids: np.ndarray, table: ArrayTree) -> None:
    """Put the states of clients `ids` back."""
    for leaf, new in zip(jax.tree.leaves(clients), jax.tree.leaves(table), strict=True):
        leaf[:, ids] = np.asarray(new)[:, : len(ids)]
