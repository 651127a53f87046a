"""Host storage, in memory or in files, for clients' states that do not fit on the device."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from fedmcmc.types import ArrayTree, FederatedState

_CHUNK_BYTES = 2**26


class HostStore:
    """Store of clients' states on the host; only upcoming cohorts are on the device.

    ``sample(..., placement=Placement(client_store=HostStore(directory)))`` runs kernels whose
    clients' states exceed the memory of the device (the sites of a large model, for example). The
    participation must sample a cohort (``uniform(cohort_size)``, ``categorical(...)``). Draws and
    states are bit-identical to a run without a store. States of the next cohorts are read while the
    device computes.

    ``samples.state.clients`` then holds NumPy arrays of the store, leaves ``[num_chains,
    num_clients, ...]``. A run that continues from them changes them in place.

    Parameters
    ----------
    directory
        Directory for the states, one memory-mapped ``.npy`` file per leaf; in memory if ``None``.
        It is created if missing, and must not hold states of another run.
    device_bytes
        Device memory for the states of upcoming cohorts. With more memory more rounds run without
        interruption.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.full(3, float(i)) for i in range(6)])
    >>> inference = fedmcmc.inference.exact_gaussian()
    >>> kernel = fedmcmc.fed_ep(posterior, inference=inference, cohort_size=2)
    >>> run = dict(num_rounds=20, placement=fedmcmc.Placement(client_store=fedmcmc.HostStore()))
    >>> samples = fedmcmc.sample(jax.random.key(0), kernel, data, 0.0, progress=False, **run)
    >>> type(samples.state.clients.site.precision)
    <class 'numpy.ndarray'>
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
        """Return the initial state of a run, with all clients' states in the store.

        `init_fn` returns the state of all chains for the clients with the given ids. It is called
        for one chunk of clients after the other. With `replace_files`, states in the directory are
        replaced.
        """

        def initialize(ids: np.ndarray) -> FederatedState:
            return init_fn(jnp.asarray(ids, jnp.int32))

        num, state = num_clients, initialize(np.arange(1))
        leaves, treedef = jax.tree.flatten(state.clients)
        arrays = [
            self._allocate(i, (leaf.shape[0], num, *leaf.shape[2:]), leaf.dtype, replace_files)
            for i, leaf in enumerate(leaves)
        ]
        bytes_per_client = sum(array.nbytes for array in arrays) // num
        chunk = max(1, min(num, _CHUNK_BYTES // max(bytes_per_client, 1)))
        for start in range(0, num, chunk):
            ids = np.arange(start, min(start + chunk, num))
            for array, leaf in zip(arrays, jax.tree.leaves(initialize(ids).clients), strict=True):
                array[:, ids] = np.asarray(leaf)
        return state._replace(clients=jax.tree.unflatten(treedef, arrays))

    def adopt(self, state: FederatedState, *, replace_files: bool = False) -> FederatedState:
        """Return `state` with its clients' states in this store.

        Arrays of a store are used without a copy; arrays of a run without a store are copied.
        """
        leaves, treedef = jax.tree.flatten(state.clients)
        arrays = []
        for i, leaf in enumerate(leaves):
            array: np.ndarray = leaf
            if not isinstance(leaf, np.ndarray) or not leaf.flags.writeable:
                array = self._allocate(i, leaf.shape, leaf.dtype, replace_files)
                array[...] = np.asarray(leaf)
            arrays.append(array)
        return state._replace(clients=jax.tree.unflatten(treedef, arrays))

    def _allocate(
        self, index: int, shape: tuple[int, ...], dtype: DTypeLike, replace_file: bool = False
    ) -> np.ndarray:
        if self.directory is None:
            return np.empty(shape, dtype)
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"clients_{index}.npy"
        if path.exists() and not replace_file:
            raise FileExistsError(
                f"{path} holds states of another run: give HostStore an empty directory, or "
                "continue from the samples.state of that run."
            )
        return np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=shape)


def read(clients: ArrayTree, ids: np.ndarray, num_slots: int) -> ArrayTree:
    """Return the states of clients `ids`, zero-padded, leaves ``[chains, num_slots, ...]``."""

    def read_leaf(leaf: np.ndarray) -> np.ndarray:
        table = np.zeros((leaf.shape[0], num_slots, *leaf.shape[2:]), leaf.dtype)
        table[:, : len(ids)] = leaf[:, ids]
        return table

    return jax.tree.map(read_leaf, clients)


def write(clients: ArrayTree, ids: np.ndarray, table: ArrayTree) -> None:
    """Write the states of clients `ids` to the store."""
    for leaf, new in zip(jax.tree.leaves(clients), jax.tree.leaves(table), strict=True):
        leaf[:, ids] = np.asarray(new)[:, : len(ids)]
