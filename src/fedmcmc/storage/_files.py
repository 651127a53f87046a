"""Files that are there whole or not at all, and trees of arrays in them."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc._types import ArrayTree
from fedmcmc.pytrees import is_key

__all__ = ["plain_leaves", "read_npz", "tree_of_plain", "write_whole", "written_npz"]


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


def plain_leaves(tree: ArrayTree) -> dict[str, Any]:
    """Return the leaves of `tree` by names of their own, typed random keys as their data.

    The name of a key says of which generator it is.
    """
    leaves = enumerate(jax.tree.leaves(tree))
    return {
        _name(i, leaf): jax.random.key_data(leaf) if is_key(leaf) else leaf for i, leaf in leaves
    }


def tree_of_plain(found: Mapping[str, Any], like: ArrayTree) -> ArrayTree:
    """Return the tree of which `found` are the plain leaves; `like` has its structure and types."""
    leaves, treedef = jax.tree.flatten(like)
    named = [(found[_name(i, leaf)], leaf) for i, leaf in enumerate(leaves)]
    typed = [
        jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(leaf))
        if is_key(leaf)
        else data
        for data, leaf in named
    ]
    return jax.tree.unflatten(treedef, typed)


def _name(index: int, leaf: Any) -> str:
    return f"leaf_{index}" + (f"_key_{jax.random.key_impl(leaf)}" if is_key(leaf) else "")


def written_npz(tree: ArrayTree, copy: bool) -> Callable[[Path], None]:
    """Return what writes the leaves of `tree` as a new ``.npz`` file.

    With `copy`, arrays that a caller may change are copied at once. Arrays of a type that NumPy
    has no name for (bfloat16) are written as bytes.
    """
    named: dict[str, Any] = {
        name: _as_bytes(leaf, copy) for name, leaf in plain_leaves(tree).items()
    }

    def write(path: Path) -> None:
        write_whole(path, lambda file: np.savez(file, allow_pickle=False, **named))

    return write


def read_npz(path: Path, like: ArrayTree) -> ArrayTree:
    """Return the tree in an ``.npz`` file, in the structure and of the types of `like`.

    Raises
    ------
    ValueError
        If it holds other arrays.
    """
    wanted = plain_leaves(like)
    with np.load(path, allow_pickle=False) as stored:
        if set(stored.files) != set(wanted):
            raise ValueError(
                f"{path} holds the arrays {sorted(stored.files)}, {sorted(wanted)} were expected."
            )
        found = {name: _from_bytes(stored[name], leaf) for name, leaf in wanted.items()}
    return tree_of_plain(found, like)


def _as_bytes(leaf: Any, copy: bool) -> np.ndarray:
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
