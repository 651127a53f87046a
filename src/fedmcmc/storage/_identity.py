"""The identity of a run: what its draws depend on, and how two runs differ."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState
from fedmcmc.data import FederatedData
from fedmcmc.pytrees import schedules
from fedmcmc.rounds import Arrangement, Collect, Program, Streams
from fedmcmc.storage._descriptions import describe, first_difference
from fedmcmc.storage._digests import digest
from fedmcmc.streaming import Accumulator

__all__ = ["differences", "digest_of_identity", "fingerprint"]

SCHEDULED_ROUNDS = 64
"""Rounds in which schedules are compared."""
ROWS, START, NUMBERS = "rows of the data", "start", "numbers of the kernel"
PROGRAM, DESCRIPTION = "model or kind of kernel", "kernel"
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_SET = re.compile(r"frozenset\(\{([^}]*)\}\)")


def fingerprint(
    kernel: FederatedKernel,
    data: FederatedData,
    arrangement: Arrangement,
    rows: str,
    keys: Array,
    state: FederatedState,
    collect: Collect | None,
    accumulators: Streams,
    found: dict[str, ArrayTree],
) -> dict[str, Any]:
    """Return a digest of each thing that a run's draws depend on, by what it is called.

    The entry `DESCRIPTION` is the kernel in words: it decides nothing, and names what differs.

    Parameters
    ----------
    kernel, data, arrangement, keys, state, collect, accumulators, found
        Of the run; `state` and `found` (of the accumulators) are its first. Of `data` and of the
        clients' states shapes are enough.
    rows
        The digest of the rows.
    """
    first = int(np.asarray(state.broadcast.round).reshape(-1)[0])
    numbers = schedules.tabulate(kernel, first, SCHEDULED_ROUNDS, 0)
    rounds = Program(schedules.tabulate(kernel, 0, 1, 0), data, arrangement, collect)
    traced = rounds.traced_round(keys, state)
    program, draw = traced.jaxpr, traced.out_info.draw
    return {
        ROWS: rows,
        NUMBERS: digest(numbers),
        PROGRAM: _of_program(program),
        "rng_key": digest(jax.random.key_data(keys)),
        START: digest(state.broadcast),
        "streams": " ".join(
            f"{name} {_of_accumulator(accumulators[name], found[name], draw)}"
            for name in sorted(accumulators)
        ),
        DESCRIPTION: describe(numbers),
    }


def digest_of_identity(identity: Mapping[str, Any]) -> str:
    """Return the digest by which the parts of a checkpoint say whose they are."""
    names = sorted(identity.keys() - {DESCRIPTION})
    return digest([np.frombuffer(f"{n}={identity[n]}".encode(), np.uint8) for n in names])


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return in what two identities differ, in words; empty if they are those of one run."""
    changed = [n for n in now if n != DESCRIPTION and then.get(n) != now[n]]
    kernel_then, kernel_now = then.get(DESCRIPTION, {}), now.get(DESCRIPTION, {})

    def in_kernel(part: str) -> str:
        return first_difference(kernel_then.get(part, {}), kernel_now.get(part, {}))

    words = []
    for name in changed:
        if name == NUMBERS:
            where = in_kernel("numbers")
            words.append(f"{name} ({where})" if where else name)
        elif name == PROGRAM:
            where = in_kernel("structure")
            if where:
                words.append(f"structure of the kernel ({where})")
            elif not {ROWS, NUMBERS, START} & {*changed}:  # whose shapes change the program
                words.append(f"{name} (functions of the same names compute something else)")
        elif isinstance(now[name], int | bool):
            words.append(f"{name} ({then.get(name)}, now {now[name]})")
        else:
            words.append(name)
    return words


def _of_accumulator(accumulator: Accumulator, found: ArrayTree, draw: ArrayTree) -> str:
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), found)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return _of_program(jax.make_jaxpr(accumulator.update)(key, index, draw, one))


def _of_program(program: Any) -> str:
    text = _ADDRESS.sub("", str(program.jaxpr))
    text = _SET.sub(lambda found: str(sorted(found[1].split(", "))), text)
    return digest((np.frombuffer(text.encode(), np.uint8), list(program.consts)))
