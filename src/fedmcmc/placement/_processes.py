"""Arrays of a mesh that several processes share: how they come to be, and back to the host.

Every process runs the same program on the same numbers; what could differ (the time) is told by
the first. All functions here are to be called by all processes alike.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedmcmc._types import ArrayTree
from fedmcmc.pytrees import is_key


def several() -> bool:
    """Return whether other processes take part."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Return whether this process is the one that writes files.

    Examples
    --------
    >>> import fedmcmc
    >>> fedmcmc.distributed.is_first()
    True
    """
    return jax.process_index() == 0


def agreed(number: float) -> float:
    """Return the first process's `number` (to float32), once all processes ask for it.

    For what may differ between processes, such as the time or what is on a disk.

    Examples
    --------
    >>> import fedmcmc
    >>> fedmcmc.distributed.agreed(3.0)
    3.0
    """
    if not several():
        return number
    return float(_of_all(np.float32(number))[0])


def all_equal(number: int) -> bool:
    """Return whether all processes have the same `number`."""
    if not several():
        return True
    return len(set(_of_all(np.int32(number)).tolist())) == 1


def _of_all(array: Any) -> np.ndarray:
    """Return what each process gives, ``[num_processes, ...]``."""
    host = np.asarray(array)[None]
    # One device of each process: they may have different numbers of them, in any order.
    first = {device.process_index: device for device in reversed(jax.devices())}
    devices = [first[process] for process in sorted(first)]
    mesh = Mesh(np.asarray(devices), ("processes",))
    shape = (len(devices), *host.shape[1:])
    where = NamedSharding(mesh, PartitionSpec("processes"))
    with jax.ensure_compile_time_eval():  # also where a transformation is under way
        spread = jax.make_array_from_callback(shape, where, lambda index: host)
        return np.asarray(_replicate(mesh)([spread])[0])


def combined(words: np.ndarray) -> np.ndarray:
    """Return all processes' `words` in one array; what a process does not know is zero."""
    if not several():
        return words
    result: np.ndarray = np.bitwise_or.reduce(_of_all(words), axis=0)
    return result


def on_words(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `fn`, applied to the words of typed keys and to other arrays as they are."""

    def one(leaf: Any) -> Any:
        if not is_key(leaf):
            return fn(leaf)
        words = fn(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))

    return one


def put(tree: ArrayTree, mesh: Mesh, spec: PartitionSpec) -> ArrayTree:
    """Return the arrays of `tree`, which every process has whole, laid out over `mesh`."""
    place = NamedSharding(mesh, spec)

    def one(leaf: Any) -> Array:
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, place, lambda index: host[index])

    return jax.tree.map(on_words(one), tree)


def on_host(tree: ArrayTree, mesh: Mesh) -> ArrayTree:
    """Return the arrays of `tree` whole, as NumPy arrays, in every process.

    Typed keys stay typed keys.
    """
    leaves, treedef = jax.tree.flatten(tree)
    apart = [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)
    ]
    if apart:
        everywhere = _replicate(mesh)([leaves[i] for i in apart])
        for i, leaf in zip(apart, everywhere, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(treedef, map(on_words(np.asarray), leaves))


@cache
def _replicate(mesh: Mesh) -> Any:
    return jax.jit(lambda leaves: leaves, out_shardings=NamedSharding(mesh, PartitionSpec()))
