"""Kernels and positions as JSON (called words) and numbers, in place of pickles.

Words name dataclasses and named tuples of this package, and functions of the study's model. A
receiver can create nothing else from them, and they contain no code.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from fedmcmc import wire
from fedmcmc.deploy._frames import FrameError, Refused
from fedmcmc.gradients import FullGradient
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Disclosure, FederatedKernel, GradientEstimator, Shapes

PACKAGES = (
    "types",
    "pytrees",
    "gaussian",
    "gradients",
    "dynamics",
    "participation",
    "compression",
    "hierarchy",
    "inference",
    "surrogates",
    "kernels",
    "transforms",
    "criticism",
)
"""Packages whose classes words may name; kernels consist of these classes."""
MAX_NESTING = 64
Functions = Mapping[str, Callable[..., Any]]


def to_words(tree: ArrayTree, functions: Functions) -> tuple[Any, bytes]:
    """Return a tree as JSON and its arrays as bytes; shapes have no bytes.

    A tree may contain arrays, numbers, this package's dataclasses, and `functions`, which have the
    same names on both sides. Raise `Refused` if it contains anything else.
    """
    names = {id(plain(fn)): name for name, fn in functions.items()}
    arrays: list[Any] = []

    def write(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return {"array": [str(x.dtype), list(x.shape)]}
        if isinstance(x, jax.Array | np.ndarray | np.generic):
            if trees.is_key(x):
                raise Refused("A random key in a kernel cannot be sent.")
            arrays.append(x)
            return {"array": [str(x.dtype), list(x.shape)]}
        if x is None or isinstance(x, bool | int | float | str):
            return {"value": x}
        if type(x) in (tuple, list):
            return {type(x).__name__: [write(part) for part in x]}
        if isinstance(x, dict):
            if not all(isinstance(name, str) for name in x):
                raise Refused("The keys of dictionaries must be text to be sent.")
            return {"dict": {name: write(part) for name, part in x.items()}}
        if isinstance(x, Shapes):  # structure without bytes
            return {"shapes": to_words(x.tree, {})[0]}
        if id(plain(x)) in names:
            return {"function": names[id(plain(x))]}
        kind = f"{type(x).__module__}:{type(x).__qualname__}"
        if _class_of(kind) is None:
            raise Refused(
                f"{getattr(x, '__qualname__', type(x).__qualname__)} has no name at the sites: "
                "they use only this package and the study's files. Put a kernel with its own "
                "functions (optimizers, schedules, custom steps) into the study."
            )
        return {"class": kind, "fields": {n: write(getattr(x, n)) for n in _field_names(type(x))}}

    words = write(tree)
    return words, wire.encode(arrays)


def from_words(words: Any, body: bytes | None, functions: Functions) -> ArrayTree:
    """Return the tree that `to_words` wrote; without `body`, with shapes in place of arrays.

    Raise `FrameError` if words or bytes are not valid.
    """
    shapes: list[Any] = []
    _collect_shapes(words, shapes, MAX_NESTING)
    try:
        arrays = iter(shapes)
        if body is not None:
            arrays = iter([jnp.asarray(leaf) for leaf in wire.decode(body, shapes)])
    except (ValueError, TypeError) as error:
        raise FrameError(f"The numbers do not fit the words: {error}") from None

    def read(node: Any) -> Any:
        ((kind, content), *_) = node.items()
        match kind:
            case "array":
                return next(arrays)
            case "value":
                return content
            case "tuple":
                return tuple(read(part) for part in content)
            case "list":
                return [read(part) for part in content]
            case "dict":
                return {name: read(part) for name, part in content.items()}
            case "function":
                return Partial(plain(functions[content]))
            case "shapes":
                return Shapes(from_words(content, None, {}))
            case _:
                cls = _class_of(content)
                if cls is None:
                    raise FrameError(f"{content} is not a class that a kernel may contain.")
                return cls(**{name: read(part) for name, part in node["fields"].items()})

    try:
        return read(words)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, FrameError):
            raise
        raise FrameError(f"The words are not valid: {error!r}.") from None


def name_of_class(words: object) -> str:
    """Return the name of the outermost class in words, without its module."""
    kind = words.get("class") if isinstance(words, dict) else None
    return kind.rpartition(":")[2] if isinstance(kind, str) else ""


def class_names(words: object) -> set[str]:
    """Return the names of all classes that words name, without their modules."""
    if isinstance(words, list):
        return set().union(*map(class_names, words))
    if not isinstance(words, dict):
        return set()
    names = {str(words["class"]).rpartition(":")[2]} if "class" in words else set()
    return names.union(*map(class_names, words.values()))


def askable_kernels() -> dict[str, Disclosure]:
    """Return the disclosures of this package's kernels that a study may allow, by name."""
    return {cls.__name__: cls.disclosure for cls in _classes_below(FederatedKernel)}


def askable_estimators() -> dict[str, Disclosure]:
    """Return the disclosures of estimators that do not use all rows exactly, by name."""
    classes = _classes_below(GradientEstimator)
    return {cls.__name__: cls.disclosure for cls in classes if cls is not FullGradient}


def disclosures() -> dict[str, Disclosure]:
    """Return the disclosures of all kernels and gradient estimators, by class name."""
    return askable_kernels() | askable_estimators()


def _classes_below(base: type[Any]) -> list[type[Any]]:
    """Return this package's pytree classes that extend `base`, sorted by name."""
    classes: list[type[Any]] = []
    for cls in base.__subclasses__():
        package = cls.__module__.removeprefix("fedmcmc.").partition(".")[0]
        if cls.__module__.startswith("fedmcmc.") and package in PACKAGES:
            # Only base classes are not pytrees.
            is_base = jax.tree_util.all_leaves([object.__new__(cls)])
            classes += [*_classes_below(cls), *([] if is_base else [cls])]
    return sorted(set(classes), key=lambda cls: cls.__name__)


def plain(fn: object) -> Any:
    """Return the function of a `Partial` without arguments."""
    while isinstance(fn, Partial) and not fn.args and not fn.keywords:
        fn = fn.func
    return fn


def _collect_shapes(node: object, shapes: list[Any], depth: int) -> None:
    """Append the shapes of all arrays in order; raise `FrameError` if the words are not valid."""
    if depth == 0 or not isinstance(node, dict) or not node:
        raise FrameError("The words are nested too deeply, or are not a table with an entry.")
    kind, content = next(iter(node.items()))
    try:
        match kind:
            case "array":
                dtype, shape = content
                if not all(type(n) is int and n >= 0 for n in shape):
                    raise FrameError("An array in the words has no valid shape.")
                shapes.append(jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype)))
            case "value":
                if not (content is None or isinstance(content, bool | int | float | str)):
                    raise FrameError("A value in the words is not a number, a text or null.")
            case "tuple" | "list":
                for part in content:
                    _collect_shapes(part, shapes, depth - 1)
            case "dict":
                for part in content.values():
                    _collect_shapes(part, shapes, depth - 1)
            case "class":
                for part in node["fields"].values():
                    _collect_shapes(part, shapes, depth - 1)
            case "function":
                pass
            case "shapes":
                _collect_shapes(content, [], depth - 1)
            case _:
                raise FrameError(f"The words have an unknown kind: {kind!r}.")
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        if isinstance(error, FrameError):
            raise
        raise FrameError(f"The words are not valid: {error!r}.") from None


def _class_of(kind: object) -> type | None:
    """Return the class of this name, ``None`` if words may not name it."""
    module, _, name = str(kind).partition(":")
    parts = module.split(".")
    if len(parts) < 2 or parts[0] != "fedmcmc" or parts[1] not in PACKAGES:
        return None
    loaded: Any = sys.modules.get(module) or (
        importlib.import_module(module) if _is_installed(module) else None
    )
    cls = vars(loaded).get(name) if loaded is not None else None
    if not isinstance(cls, type) or cls.__module__ != module:
        return None
    return cls if is_dataclass(cls) or _is_named_tuple(cls) else None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _is_named_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def _field_names(cls: Any) -> tuple[str, ...]:
    if _is_named_tuple(cls):
        return tuple(cls._fields)
    return tuple(field.name for field in fields(cls))
