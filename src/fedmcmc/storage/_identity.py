"""Identity of a run: digests of all inputs of its draws, and a description of its kernel.

Digests show that two runs differ, and the description shows where. Functions that are created
again, as in another process, are compared by their traced programs. Digests include the names of
jitted functions and of fields, so a version of fedmcmc that renames them cannot continue a run.
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
from jax.extend.core import ClosedJaxpr

from fedmcmc.data import FederatedData
from fedmcmc.placement import merge_processes
from fedmcmc.pytrees import is_key, schedules
from fedmcmc.rounds import Accumulators, Program
from fedmcmc.storage._files import versions
from fedmcmc.streaming import Accumulator
from fedmcmc.types import ArrayTree, FederatedState, Static

SCHEDULED_ROUNDS = 64
"""Number of rounds in which schedules are compared."""
ROWS, START, NUMBERS = "rows of the data", "start", "numbers of the kernel"
PROGRAM, DESCRIPTION = "model or kind of kernel", "kernel"
MAX_CHARACTERS = 120
"""Maximal length of the description of a part of a kernel."""
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
    """Return a digest of each input of a run's draws, by its name.

    The entry `DESCRIPTION` describes the kernel. It is not compared, but shows differences.
    `program` is the program of one device; it may hold shapes instead of rows, because `rows` is
    the digest of the rows. `keys` and all states are from the start of the run.
    """
    kernel, start = program.kernel, int(np.asarray(state.broadcast.round).reshape(-1)[0])
    numbers = schedules.tabulate(kernel, start, SCHEDULED_ROUNDS, 0)
    # Tabulate schedules for the trace: in a continued run they may have no value for round 0.
    like = replace(program, kernel=schedules.tabulate(kernel, 0, 1, 0))
    traced = like.traced_round(keys, state)
    draw = traced.out_info.draw
    return {
        ROWS: rows,
        NUMBERS: _digest(numbers),
        PROGRAM: _digest_of_program(traced.jaxpr),
        "rng_key": _digest(jax.random.key_data(keys)),
        START: _digest(state.broadcast),
        "streams": " ".join(
            f"{name} {_digest_of_accumulator(accumulators[name], accumulator_states[name], draw)}"
            for name in sorted(accumulators)
        ),
        DESCRIPTION: describe(numbers),
    }


def digest_of_identity(identity: Mapping[str, Any]) -> str:
    """Return the digest of an identity, which all part files of the run hold."""
    names = sorted(identity.keys() - {DESCRIPTION})
    return _digest([np.frombuffer(f"{n}={identity[n]}".encode(), np.uint8) for n in names])


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe the differences of two identities; empty if they belong to the same run."""
    changed = [n for n in now if n != DESCRIPTION and then.get(n) != now[n]]
    kernel_then, kernel_now = then.get(DESCRIPTION, {}), now.get(DESCRIPTION, {})

    def difference_in_kernel(part: str) -> str:
        lines_then, lines_now = kernel_then.get(part, {}), kernel_now.get(part, {})
        for path in [*lines_now, *lines_then]:
            before, after = lines_then.get(path, "nothing"), lines_now.get(path, "nothing")
            if before != after:
                return f"{path or 'kernel'}: {before}, now {after}"
        return ""

    words = []
    for name in changed:
        if name == NUMBERS:
            difference = difference_in_kernel("numbers")
            words.append(f"{name} ({difference})" if difference else name)
        elif name == PROGRAM:
            if difference := difference_in_kernel("structure"):
                words.append(f"structure of the kernel ({difference})")
            elif not {ROWS, NUMBERS, START} & {*changed}:  # their shapes also change the program
                words.append(f"{name} (functions of the same names compute something else)")
        elif isinstance(now[name], int | bool):
            words.append(f"{name} ({then.get(name)}, now {now[name]})")
        else:
            words.append(name)
    return words


def digest_of_rows(data: FederatedData, clients: np.ndarray | None = None) -> str:
    """Return the digest of the rows of `data`.

    If a loader loads the rows, `clients` are the ids of the clients in this process. The digest
    then combines one digest per client from all processes, and does not depend on which process
    loads which clients.
    """
    if clients is None:
        return _digest((data.rows, data.start, data.size))
    words = np.zeros((data.num_clients, 4), np.uint32)
    for client in clients:
        rows = _digest(data.client_rows(int(client)))
        words[client] = np.frombuffer(bytes.fromhex(rows), np.uint32)
    return _digest((merge_processes(words), np.asarray(data.size)))


def digest_of_call(jaxpr: ClosedJaxpr, *arguments: ArrayTree) -> str:
    """Return the digest of a traced call: its program, its arguments, and versions of software.

    Strings among the arguments may be digests that replace large arguments.
    """
    arrays = jax.tree.map(
        lambda x: np.frombuffer(x.encode(), np.uint8) if isinstance(x, str) else x, arguments
    )
    parts = (_digest_of_program(jaxpr), _digest(arrays), *versions().values())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _digest_of_accumulator(accumulator: Accumulator, state: ArrayTree, draw: ArrayTree) -> str:
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return _digest_of_program(jax.make_jaxpr(accumulator.update)(key, index, draw, like))


def _digest_of_program(jaxpr: ClosedJaxpr) -> str:
    text = _ADDRESS.sub("", str(jaxpr.jaxpr))
    text = _SET.sub(lambda match: str(sorted(match[1].split(", "))), text)
    return _digest((np.frombuffer(text.encode(), np.uint8), list(jaxpr.consts)))


def _digest(tree: ArrayTree) -> str:
    """Return a digest of the arrays of a tree: paths, shapes, types and values."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.ascontiguousarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:32]


def describe(kernel: ArrayTree) -> dict[str, dict[str, str]]:
    """Return descriptions of the numbers and the structure of a kernel, ``{path: text}`` each.

    Schedules of the kernel must be tabulated. Functions are described by their names.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> describe({"step_size": jnp.float32(0.1), "batch_size": Static(8)})
    {'numbers': {'step_size': '0.1'}, 'structure': {'batch_size': '8'}}
    """
    lines: dict[str, dict[str, str]] = {"numbers": {}, "structure": {}}
    paths: dict[_Node, str] = {}

    def add(node: _Node, path: str) -> None:
        # Kernels hold most of their parts several times. Describe each part once.
        described_path = paths.setdefault(node, path) if node.children else path
        text = node.text if described_path == path else f"same as {described_path}"
        if text:
            lines["numbers" if node.is_number else "structure"][path] = text
        for name, child in node.children if described_path == path else ():
            add(child, f"{path}.{name}".lstrip("."))

    add(_node(kernel, False, {}), "")
    return lines


class _Node(NamedTuple):
    """Description of a part of a kernel; nodes are equal if their descriptions are equal."""

    text: str
    is_number: bool = False
    children: tuple[tuple[str, "_Node"], ...] = ()


def _node(x: object, static: bool, texts: dict[int, str]) -> _Node:
    """Return the node of `x`; `texts` caches descriptions of arrays by identity."""
    if isinstance(x, Static):
        return _node(x.value, True, texts)
    if isinstance(x, schedules.Tabulated):
        return _Node(f"schedule of {_node(x.values, False, texts).text}", True)
    if isinstance(x, jax.Array | np.ndarray | np.generic | int | float) and not static:
        text = texts[id(x)] = texts.get(id(x)) or _text_of_number(x)
        return _Node(text, True)
    parts = tuple((name, _node(part, s, texts)) for name, part, s in _parts(x, static))
    if x is None or type(x) in (tuple, list, dict):
        return _Node("", children=parts)
    if isinstance(x, partial):
        return _Node(_text(x.func), children=parts)
    return _Node(_text(type(x) if parts else x), children=parts)


def _parts(x: object, static: bool) -> Iterator[tuple[str, Any, bool]]:
    """Yield the name and the value of each part of `x`, and true if the part is static."""
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


def _text(x: object) -> str:
    if callable(x) and hasattr(x, "__qualname__"):
        return f"{x.__module__}.{x.__qualname__}"
    return _ADDRESS_OF_OBJECT.sub("", repr(x))[:MAX_CHARACTERS]


def _text_of_number(x: Any) -> str:
    array = np.asarray(jax.random.key_data(x) if is_key(x) else x)
    if array.size == 1:
        return str(array.reshape(-1)[0])
    entries = ", ".join(str(entry) for entry in array.reshape(-1)[:3])
    return f"{array.dtype}{list(array.shape)} {entries}, ... (digest {_digest(array)[:8]})"
