"""Arrays on a mesh of several processes: construction, and transfer to the host.

Every process runs the same program on the same numbers. Values that may differ (the time) come from
the first process. All processes must call the functions of this module in the same order.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from fedmcmc.pytrees import is_key
from fedmcmc.types import ArrayTree


def has_other_processes() -> bool:
    """Return true if other processes take part."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Return true in the process that writes files.

    Examples
    --------
    >>> import fedmcmc
    >>> fedmcmc.distributed.is_first()
    True
    """
    return jax.process_index() == 0


def broadcast_from_first(number: float) -> float:
    """Return the first process's `number` (in float32) after all processes have called this.

    Use it for numbers that may differ between processes, such as the time or a file's size.

    Examples
    --------
    >>> import fedmcmc
    >>> fedmcmc.distributed.broadcast_from_first(3.0)
    3.0
    """
    if not has_other_processes():
        return number
    return float(_gather(np.float32(number))[0])


def all_equal(number: int) -> bool:
    """Return true if all processes have the same `number`."""
    if not has_other_processes():
        return True
    return len(set(_gather(np.int32(number)).tolist())) == 1


def _gather(array: ArrayLike) -> np.ndarray:
    """Return the arrays of all processes, ``[num_processes, ...]``."""
    host = np.asarray(array)[None]
    # One device per process: processes may have several devices, in any order.
    by_process = {device.process_index: device for device in reversed(jax.devices())}
    devices = [by_process[process] for process in sorted(by_process)]
    mesh = Mesh(np.asarray(devices), ("processes",))
    shape = (len(devices), *host.shape[1:])
    sharding = NamedSharding(mesh, PartitionSpec("processes"))
    with jax.ensure_compile_time_eval():  # a transformation may be in progress
        spread = jax.make_array_from_callback(shape, sharding, lambda index: host)
        return np.asarray(_replicate(mesh)([spread])[0])


def merge_processes(words: np.ndarray) -> np.ndarray:
    """Merge all processes' `words`, each zero in the entries of other processes."""
    if not has_other_processes():
        return words
    result: np.ndarray = np.bitwise_or.reduce(_gather(words), axis=0)
    return result


def on_words(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that applies `fn` to arrays, and to the words of typed keys."""

    def apply(leaf: ArrayTree) -> Any:
        if not is_key(leaf):
            return fn(leaf)
        words = fn(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))

    return apply


def put(tree: ArrayTree, mesh: Mesh, spec: PartitionSpec) -> ArrayTree:
    """Spread the arrays of `tree` over `mesh`; every process has them in full."""
    sharding = NamedSharding(mesh, spec)

    def spread(leaf: ArrayTree) -> Array:
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(on_words(spread), tree)


def on_host(tree: ArrayTree, mesh: Mesh) -> ArrayTree:
    """Return the full arrays of `tree` as NumPy arrays, in every process.

    Typed keys stay typed keys.
    """
    leaves, treedef = jax.tree.flatten(tree)
    spread = [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)
    ]
    if spread:
        replicated = _replicate(mesh)([leaves[i] for i in spread])
        for i, leaf in zip(spread, replicated, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(treedef, map(on_words(np.asarray), leaves))


@cache
def _replicate(mesh: Mesh) -> Any:
    return jax.jit(lambda leaves: leaves, out_shardings=NamedSharding(mesh, PartitionSpec()))
