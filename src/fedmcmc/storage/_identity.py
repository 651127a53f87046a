"""The identity of a run: digests of what its draws depend on, and the kernel in words.

Digests tell that two runs differ; the kernel's description, which the manifest also holds, tells
where. Functions made anew, as in another process, are compared by what they compute.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, FederatedState, Static
from fedmcmc.data import FederatedData
from fedmcmc.placement import merge_processes
from fedmcmc.pytrees import is_key, schedules
from fedmcmc.rounds import Accumulators, Program
from fedmcmc.storage._files import versions
from fedmcmc.streaming import Accumulator

SCHEDULED_ROUNDS = 64
"""Rounds in which schedules are compared."""
ROWS, START, NUMBERS = "rows of the data", "start", "numbers of the kernel"
PROGRAM, DESCRIPTION = "model or kind of kernel", "kernel"
ARRAYS_AND_NUMBERS = jax.Array | np.ndarray | np.generic | int | float
LONGEST_TEXT = 120
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_ADDRESS_OF_OBJECT = re.compile(r" (at )?0x[0-9a-f]+")
_SET = re.compile(r"frozenset\(\{([^}]*)\}\)")


def fingerprint(
    program: Program,
    rows: str,
    keys: Array,
    state: FederatedState,
    accumulators: Accumulators,
    accumulator_states: dict[str, ArrayTree],
) -> dict[str, Any]:
    """Return a digest of each thing that a run's draws depend on, by what it is called.

    The entry `DESCRIPTION` is the kernel in words: it decides nothing, and names what differs.

    Parameters
    ----------
    program
        As one device would run it; of the rows, whose digest is `rows`, shapes are enough.
    keys, state, accumulators, accumulator_states
        Of the run; `state` is its first, and of the clients' states shapes are enough.
    """
    kernel, first = program.kernel, int(np.asarray(state.broadcast.round).reshape(-1)[0])
    numbers = schedules.tabulate(kernel, first, SCHEDULED_ROUNDS, 0)
    # Tabulated, as a run that goes on need not have schedules with a value for round 0.
    like = replace(program, kernel=schedules.tabulate(kernel, 0, 1, 0))
    traced = like.traced_round(keys, state)
    return {
        ROWS: rows,
        NUMBERS: _digest(numbers),
        PROGRAM: _digest_of_program(traced.jaxpr),
        "rng_key": _digest(jax.random.key_data(keys)),
        START: _digest(state.broadcast),
        "streams": " ".join(
            f"{name} "
            + _digest_of_accumulator(
                accumulators[name], accumulator_states[name], traced.out_info.draw
            )
            for name in sorted(accumulators)
        ),
        DESCRIPTION: describe(numbers),
    }


def digest_of_identity(identity: Mapping[str, Any]) -> str:
    """Return the digest by which the parts of a checkpoint say whose they are."""
    names = sorted(identity.keys() - {DESCRIPTION})
    return _digest([np.frombuffer(f"{n}={identity[n]}".encode(), np.uint8) for n in names])


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return in what two identities differ, in words; empty if they are those of one run."""
    changed = [n for n in now if n != DESCRIPTION and then.get(n) != now[n]]
    kernel_then, kernel_now = then.get(DESCRIPTION, {}), now.get(DESCRIPTION, {})

    def in_kernel(part: str) -> str:
        return _first_difference(kernel_then.get(part, {}), kernel_now.get(part, {}))

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


def _first_difference(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    for path in [*now, *then]:
        before, after = then.get(path, "nothing"), now.get(path, "nothing")
        if before != after:
            return f"{path or 'kernel'}: {before}, now {after}"
    return ""


def digest_of_rows(data: FederatedData, clients: np.ndarray | None = None) -> str:
    """Return the digest of the rows of `data`.

    Where a loader gave the rows, it is made of one digest per client, so that it does not depend
    on who loads which: `clients` are the ids of those that this process has, and other processes
    tell those of the rest.
    """
    if clients is None:
        return _digest((data.rows, data.start, data.size))
    words = np.zeros((data.num_clients, 4), np.uint32)
    for client in clients:
        rows = _digest(data.client_rows(int(client)))
        words[client] = np.frombuffer(bytes.fromhex(rows), np.uint32)
    return _digest((merge_processes(words), np.asarray(data.size)))


def digest_of_call(jaxpr: Any, *others: ArrayTree) -> str:
    """Return the digest of a traced call: its program, its arguments, and versions of software.

    `others` are the arguments, with digests in place of large ones.
    """
    arrays = jax.tree.map(
        lambda x: np.frombuffer(x.encode(), np.uint8) if isinstance(x, str) else x, others
    )
    parts = (_digest_of_program(jaxpr), _digest(arrays), *versions().values())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _digest_of_accumulator(accumulator: Accumulator, state: ArrayTree, draw: ArrayTree) -> str:
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return _digest_of_program(jax.make_jaxpr(accumulator.update)(key, index, draw, one))


def _digest_of_program(jaxpr: Any) -> str:
    text = _ADDRESS.sub("", str(jaxpr.jaxpr))
    text = _SET.sub(lambda found: str(sorted(found[1].split(", "))), text)
    return _digest((np.frombuffer(text.encode(), np.uint8), list(jaxpr.consts)))


def _digest(tree: ArrayTree) -> str:
    """Return a digest of the arrays of a tree: places, shapes, types and values."""
    whole = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.ascontiguousarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        whole.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        whole.update(array.reshape(-1).view(np.uint8).data)
    return whole.hexdigest()[:32]


def describe(kernel: ArrayTree) -> dict[str, dict[str, str]]:
    """Return the numbers and the structure of a kernel, ``{path: text}`` each.

    Parameters
    ----------
    kernel
        With tabulated schedules. Functions are told apart by their names alone.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> describe({"step_size": jnp.float32(0.1), "batch_size": Static(8)})
    {'numbers': {'step_size': '0.1'}, 'structure': {'batch_size': '8'}}
    """
    lines: dict[str, dict[str, str]] = {"numbers": {}, "structure": {}}
    paths: dict[_Node, str] = {}

    def add(node: _Node, path: str) -> None:
        # Kernels hold most of their parts several times: each is described once.
        known = paths.setdefault(node, path) if node.children else path
        text = node.text if known == path else f"that of {known}"
        if text:
            lines["numbers" if node.is_number else "structure"][path] = text
        for name, child in node.children if known == path else ():
            add(child, f"{path}.{name}".lstrip("."))

    add(_node(kernel, False, {}), "")
    return lines


class _Node(NamedTuple):
    """A part of a kernel. Nodes are equal where all within them is."""

    text: str
    is_number: bool = False
    children: tuple[tuple[str, "_Node"], ...] = ()


def _node(x: Any, static: bool, texts: dict[int, str]) -> _Node:
    """Return the node of `x`; `texts` are those of arrays, by identity, as they may come often."""
    if isinstance(x, Static):
        return _node(x.value, True, texts)
    if isinstance(x, schedules.Tabulated):
        return _Node(f"schedule of {_node(x.values, False, texts).text}", True)
    if isinstance(x, ARRAYS_AND_NUMBERS) and not static:
        text = texts[id(x)] = texts.get(id(x)) or _text_of_number(x)
        return _Node(text, True)
    parts = tuple((name, _node(part, s, texts)) for name, part, s in _parts(x, static))
    if x is None or type(x) in (tuple, list, dict):
        return _Node("", children=parts)
    if isinstance(x, partial):
        return _Node(_text(x.func), children=parts)
    return _Node(_text(type(x) if parts else x), children=parts)


def _parts(x: Any, static: bool) -> Iterator[tuple[str, Any, bool]]:
    """Yield name and value of each part of `x`, and whether it is structure."""
    if isinstance(x, partial):
        names = x.func.__code__.co_varnames if isinstance(x.func, FunctionType) else ()
        for i, value in enumerate(x.args):
            yield names[i] if i < len(names) else str(i), value, static
        for name, value in x.keywords.items():
            yield name, value, static
    elif is_dataclass(x) and not isinstance(x, type):
        for field in fields(x):
            yield field.name, getattr(x, field.name), static or field.metadata.get("static", False)
    elif isinstance(x, Mapping):
        for name, value in x.items():
            yield str(name), value, static
    elif isinstance(x, tuple | list):
        for name, value in zip(getattr(x, "_fields", range(len(x))), x, strict=True):
            yield str(name), value, static


def _text(x: Any) -> str:
    if callable(x) and hasattr(x, "__qualname__"):
        return f"{x.__module__}.{x.__qualname__}"
    return _ADDRESS_OF_OBJECT.sub("", repr(x))[:LONGEST_TEXT]


def _text_of_number(x: Any) -> str:
    array = np.asarray(jax.random.key_data(x) if is_key(x) else x)
    if array.size == 1:
        return str(array.reshape(-1)[0])
    few = ", ".join(str(entry) for entry in array.reshape(-1)[:3])
    return f"{array.dtype}{list(array.shape)} {few}, ... (digest {_digest(array)[:8]})"
