"""Files that are there whole or not at all, and trees of arrays in them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc._types import ArrayTree

__all__ = ["read_npz", "write_whole", "written_npz"]


def write_whole(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Call ``write(file)`` on a new file, and give it its name once it is on the disk."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    if os.name != "posix":
        return
    # The new name, too, is to survive a crash of the machine.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def written_npz(tree: ArrayTree, copy: bool) -> Callable[[Path], None]:
    """Return what writes the leaves of `tree` as a new ``.npz`` file.

    With `copy`, arrays that a caller may change are copied at once. Arrays of a type that NumPy
    has no name for (bfloat16) are written as bytes.
    """
    leaves = [_as_bytes(leaf, copy) for leaf in jax.tree.leaves(tree)]
    named: dict[str, Any] = {f"leaf_{i}": leaf for i, leaf in enumerate(leaves)}

    def write(path: Path) -> None:
        write_whole(path, lambda file: np.savez(file, allow_pickle=False, **named))

    return write


def read_npz(path: Path, like: ArrayTree) -> ArrayTree:
    """Return the tree in an ``.npz`` file, in the structure and of the types of `like`.

    Raises
    ------
    ValueError
        If it holds another number of arrays.
    """
    leaves, treedef = jax.tree.flatten(like)
    with np.load(path, allow_pickle=False) as stored:
        if len(stored.files) != len(leaves):
            raise ValueError(
                f"{path} holds {len(stored.files)} arrays, {len(leaves)} were expected."
            )
        found = [_from_bytes(stored[f"leaf_{i}"], leaf) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(treedef, found)


def _as_bytes(leaf: Any, copy: bool) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise TypeError(
            "A state that holds typed random keys cannot be written: keep jax.random.key_data."
        )
    # Only NumPy arrays (states on the host) may change.
    array = np.array(leaf) if copy and isinstance(leaf, np.ndarray) else np.asarray(leaf)
    if array.dtype.kind == "V":
        array = np.ascontiguousarray(array)
        return array.reshape(-1).view(np.uint8).reshape(*array.shape, array.dtype.itemsize)
    return array


def _from_bytes(array: np.ndarray, like: Any) -> np.ndarray:
    dtype = np.dtype(like.dtype)
    if dtype.kind == "V":
        return array.reshape(-1).view(dtype).reshape(array.shape[:-1])
    return array
