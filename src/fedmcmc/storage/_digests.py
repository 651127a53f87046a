"""Digests of arrays: what tells one tree from another."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree
from fedmcmc.data import FederatedData

__all__ = ["digest", "digests_of_clients"]


def digests_of_clients(data: FederatedData, ids: np.ndarray) -> np.ndarray:
    """Return a digest of the rows of each of the clients `ids`, the others' zero.

    ``[num_clients, 4]`` uint32: what several processes can tell each other of rows.
    """
    words = np.zeros((data.num_clients, 4), np.uint32)
    for client in ids:
        rows_digest = digest(data.client_rows(int(client)))
        words[client] = np.frombuffer(bytes.fromhex(rows_digest), np.uint32)
    return words


def digest(tree: ArrayTree) -> str:
    """Return a digest of the arrays of a tree: places, shapes, types and values."""
    whole = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if not hasattr(leaf, "dtype"):
            leaf = np.asarray(leaf)
        array = np.ascontiguousarray(leaf)
        name = jax.tree_util.keystr(path)
        whole.update(f"{name} {array.dtype} {array.shape}".encode())
        whole.update(array.reshape(-1).view(np.uint8).data)
    return whole.hexdigest()[:32]
