"""What tells a run from another, so that a checkpoint is not taken for that of another run."""

import hashlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState
from fedmcmc.data import FederatedData
from fedmcmc.pytrees import schedules
from fedmcmc.rounds import Collect, Streams, traced_round
from fedmcmc.streaming import Accumulator

__all__ = ["digest", "digests_of_clients", "fingerprint"]

SCHEDULED_ROUNDS = 64
"""Rounds in which schedules are compared."""
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_SET = re.compile(r"frozenset\(\{([^}]*)\}\)")


def fingerprint(
    kernel: FederatedKernel,
    data: FederatedData,
    rows: str,
    keys: Array,
    state: FederatedState,
    collect: Collect | None,
    accumulators: Streams,
    found: dict[str, ArrayTree],
) -> dict[str, str]:
    """Return a digest of each thing that a run's draws depend on, by what it is called.

    Parameters
    ----------
    kernel, data, keys, state, collect, accumulators, found
        Of the run; `state` and `found` (of the accumulators) are its first. Of `data` and of the
        clients' states shapes are enough.
    rows
        The digest of the rows.
    """
    first = int(np.asarray(state.broadcast.round).reshape(-1)[0])
    numbers = schedules.tabulate(kernel, first, SCHEDULED_ROUNDS, 0)
    traced = traced_round(schedules.tabulate(kernel, 0, 1, 0), data, keys, state, collect)
    program, draw = traced.jaxpr, traced.out_info.draw
    return {
        "rows of the data": rows,
        "numbers of the kernel": digest(numbers),
        "model or kind of kernel": _of_program(program),
        "rng_key": digest(jax.random.key_data(keys)),
        "start": digest(state.broadcast),
        "streams": " ".join(
            f"{name} {_of_accumulator(accumulators[name], found[name], draw)}"
            for name in sorted(accumulators)
        ),
    }


def _of_accumulator(accumulator: Accumulator, found: ArrayTree, draw: ArrayTree) -> str:
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), found)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return _of_program(jax.make_jaxpr(accumulator.update)(key, index, draw, one))


def _of_program(program: Any) -> str:
    text = _ADDRESS.sub("", str(program.jaxpr))
    text = _SET.sub(lambda found: str(sorted(found[1].split(", "))), text)
    return digest((np.frombuffer(text.encode(), np.uint8), list(program.consts)))


def digests_of_clients(data: FederatedData, ids: np.ndarray) -> np.ndarray:
    """Return a digest of the rows of each of the clients `ids`, the others' zero.

    ``[num_clients, 4]`` uint32: what several processes can tell each other of rows.
    """
    words = np.zeros((data.num_clients, 4), np.uint32)
    for client in ids:
        own = digest(data.client_rows(int(client)))
        words[client] = np.frombuffer(bytes.fromhex(own), np.uint32)
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
