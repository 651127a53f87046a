"""Parts of a checkpoint: a tree of arrays in an ``.npz`` file, and the label of its run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc._types import ArrayTree
from fedmcmc.pytrees import is_key
from fedmcmc.storage._files import CheckpointError, DamagedFileError, checksum_of, write_whole

__all__ = ["Part", "arrays_of", "read_part", "write_part"]

LABEL = "run"


class Part(NamedTuple):
    """What a manifest says of a part."""

    name: str  # of the file
    checksum: str
    num_draws: int = 0  # per chain


def arrays_of(tree: ArrayTree, *, copy: bool) -> dict[str, np.ndarray]:
    """Return the leaves of `tree` as NumPy arrays by name, typed random keys as their data.

    The name of a key says of which generator it is. Arrays of a type that NumPy has no name for
    (bfloat16) become bytes. With `copy`, arrays that a caller may change are copied.
    """
    return {name: _as_bytes(leaf, copy) for name, leaf in _plain(tree).items()}


def write_part(path: Path, arrays: Mapping[str, np.ndarray], run: str) -> str:
    """Write a part of the run with the digest `run`; return its checksum."""
    named: dict[str, Any] = {LABEL: np.asarray(run), **arrays}
    return write_whole(path, lambda file: np.savez(file, allow_pickle=False, **named))


def read_part(directory: Path, part: Part, run: str, like: ArrayTree) -> ArrayTree:
    """Return the tree in a part, in the structure and of the types of `like`.

    Raises
    ------
    DamagedFileError
        If the file is missing, is not what was written, or is of another run.
    CheckpointError
        If it holds other arrays than `like`.
    """
    path = directory / part.name
    if checksum_of(path) != part.checksum:
        raise DamagedFileError(f"{path} is damaged (its checksum is not that of the manifest).")
    expected = _plain(like)
    with np.load(path, allow_pickle=False) as stored:
        if LABEL not in stored or str(stored[LABEL]) != run:
            raise DamagedFileError(f"{path} is a part of another run.")
        if set(stored.files) != {LABEL, *expected}:
            raise CheckpointError(
                f"{path} holds the arrays {sorted(stored.files)}, {sorted(expected)} were expected."
            )
        arrays = {name: _from_bytes(stored[name], leaf) for name, leaf in expected.items()}
    leaves, treedef = jax.tree.flatten(like)
    named = [(arrays[_name(i, leaf)], leaf) for i, leaf in enumerate(leaves)]
    typed = [
        jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(leaf))
        if is_key(leaf)
        else data
        for data, leaf in named
    ]
    return jax.tree.unflatten(treedef, typed)


def _plain(tree: ArrayTree) -> dict[str, Any]:
    leaves = enumerate(jax.tree.leaves(tree))
    return {
        _name(i, leaf): jax.random.key_data(leaf) if is_key(leaf) else leaf for i, leaf in leaves
    }


def _name(index: int, leaf: Any) -> str:
    return f"leaf_{index}" + (f"_key_{jax.random.key_impl(leaf)}" if is_key(leaf) else "")


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
