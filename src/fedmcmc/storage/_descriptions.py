"""What a kernel is made of, in words: its numbers and its structure by the names of its parts.

A digest tells that two kernels differ; a description, which the manifest holds, tells where.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import jax
import numpy as np

from fedmcmc._types import ArrayTree, Static
from fedmcmc.pytrees import is_key, schedules
from fedmcmc.storage._digests import digest

__all__ = ["describe", "first_difference"]

NUMBERS = jax.Array | np.ndarray | np.generic | int | float
ADDRESS = re.compile(r" (at )?0x[0-9a-f]+")
LONGEST_TEXT = 120


class _Node(NamedTuple):
    """A part of a kernel. Nodes are equal where all within them is."""

    text: str
    is_number: bool = False
    children: tuple[tuple[str, "_Node"], ...] = ()


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


def first_difference(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return where two descriptions first differ and how, or an empty string.

    Examples
    --------
    >>> first_difference({"rate": "0.1", "batch_size": "8"}, {"rate": "0.1", "batch_size": "4"})
    'batch_size: 8, now 4'
    """
    for path in [*now, *then]:
        before, after = then.get(path, "nothing"), now.get(path, "nothing")
        if before != after:
            return f"{path or 'kernel'}: {before}, now {after}"
    return ""


def _node(x: Any, static: bool, texts: dict[int, str]) -> _Node:
    """Return the node of `x`; `texts` are those of arrays, by identity, as they may come often."""
    if isinstance(x, Static):
        return _node(x.value, True, texts)
    if isinstance(x, schedules.Tabulated):
        return _Node(f"schedule of {_node(x.values, False, texts).text}", True)
    if isinstance(x, NUMBERS) and not static:
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
    return ADDRESS.sub("", repr(x))[:LONGEST_TEXT]


def _text_of_number(x: Any) -> str:
    array = np.asarray(jax.random.key_data(x) if is_key(x) else x)
    if array.size == 1:
        return str(array.reshape(-1)[0])
    few = ", ".join(str(entry) for entry in array.reshape(-1)[:3])
    return f"{array.dtype}{list(array.shape)} {few}, ... (digest {digest(array)[:8]})"
