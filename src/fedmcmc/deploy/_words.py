"""Kernels and positions as words and numbers, in place of pickles.

Words name what is to be built: dataclasses and named tuples of this package, and the functions of
the study's model. Nothing else can be built from them, and no code is in them.
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
from fedmcmc._types import ArrayTree, Disclosure, FederatedKernel, GradientEstimator, Shapes
from fedmcmc.deploy._frames import FrameError, Refused
from fedmcmc.gradients import FullGradient
from fedmcmc.pytrees import trees

PACKAGES = (
    "_types",
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
"""Packages whose classes words may name: kernels are made of these."""
DEEPEST = 64
Functions = Mapping[str, Callable[..., Any]]


def to_words(tree: ArrayTree, functions: Functions) -> tuple[Any, bytes]:
    """Return a tree as JSON and its arrays as bytes; of shapes there are none.

    Parameters
    ----------
    tree
        A kernel, or any tree of arrays, numbers and this package's dataclasses.
    functions
        Those that may be in it, by the names that both sides know.

    Raises
    ------
    Refused
        If the tree holds what has no name on the other side.
    """
    names = {id(plain(fn)): name for name, fn in functions.items()}
    arrays: list[Any] = []

    def write(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return {"array": [str(x.dtype), list(x.shape)]}
        if isinstance(x, jax.Array | np.ndarray | np.generic):
            if trees.is_key(x):
                raise Refused("A random key is no number that can be sent in a kernel.")
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
        if isinstance(x, Shapes):  # they are structure, and have no bytes
            return {"shapes": to_words(x.tree, {})[0]}
        if id(plain(x)) in names:
            return {"function": names[id(plain(x))]}
        kind = f"{type(x).__module__}:{type(x).__qualname__}"
        if _class_of(kind) is None:
            raise Refused(
                f"{getattr(x, '__qualname__', type(x).__qualname__)} cannot be named to the sites: "
                "they build what the study's files say and what this package has. Put a kernel "
                "with functions of its own (optimizers, schedules, custom steps) into the study."
            )
        return {"class": kind, "fields": {n: write(getattr(x, n)) for n in _names_of(type(x))}}

    words = write(tree)
    return words, wire.encode(arrays)


def from_words(words: Any, body: bytes | None, functions: Functions) -> ArrayTree:
    """Return what `to_words` wrote; without its bytes the shapes of its arrays.

    Raises
    ------
    FrameError
        If words or bytes are not such.
    """
    shapes: list[Any] = []
    _collect(words, shapes, DEEPEST)
    try:
        arrays = iter(shapes)
        if body is not None:
            arrays = iter([jnp.asarray(leaf) for leaf in wire.decode(body, shapes)])
    except (ValueError, TypeError) as error:
        raise FrameError(f"Numbers do not fit the words that came with them: {error}") from None

    def read(node: Any) -> Any:
        ((what, content), *_) = node.items()
        match what:
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
                    raise FrameError(f"{content} is no class that a kernel may be built of.")
                return cls(**{name: read(part) for name, part in node["fields"].items()})

    try:
        return read(words)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, FrameError):
            raise
        raise FrameError(f"Words that nothing can be built from: {error!r}.") from None


def name_of_class(words: Any) -> str:
    """Return the name of the class that words begin with, without its module."""
    kind = words.get("class") if isinstance(words, dict) else None
    return kind.rpartition(":")[2] if isinstance(kind, str) else ""


def class_names(words: Any) -> set[str]:
    """Return the names of all classes that words name, without their modules."""
    if isinstance(words, list):
        return set().union(*map(class_names, words))
    if not isinstance(words, dict):
        return set()
    own = {str(words["class"]).rpartition(":")[2]} if "class" in words else set()
    return own.union(*map(class_names, words.values()))


def askable_kernels() -> dict[str, Disclosure]:
    """Return the kernels of this package for which a study may let its server ask, by name."""
    return {cls.__name__: cls.disclosure for cls in _classes_below(FederatedKernel)}


def askable_estimators() -> dict[str, Disclosure]:
    """Return the gradient estimators of this package that do not use all rows exactly, by name."""
    classes = _classes_below(GradientEstimator)
    return {cls.__name__: cls.disclosure for cls in classes if cls is not FullGradient}


def disclosures() -> dict[str, Disclosure]:
    """Return what the messages of all kernels and gradient estimators disclose, by class name."""
    return askable_kernels() | askable_estimators()


def _classes_below(base: type[Any]) -> list[type[Any]]:
    """Return the pytrees among the classes of this package that extend `base`, by their names."""
    classes: list[type[Any]] = []
    for cls in base.__subclasses__():
        package = cls.__module__.removeprefix("fedmcmc.").partition(".")[0]
        if cls.__module__.startswith("fedmcmc.") and package in PACKAGES:
            # Base classes alone are no pytrees.
            is_base = jax.tree_util.all_leaves([object.__new__(cls)])
            classes += [*_classes_below(cls), *([] if is_base else [cls])]
    return sorted(set(classes), key=lambda cls: cls.__name__)


def plain(fn: Any) -> Any:
    """Return the function within a `Partial` that holds nothing else."""
    while isinstance(fn, Partial) and not fn.args and not fn.keywords:
        fn = fn.func
    return fn


def _collect(node: Any, shapes: list[Any], depth: int) -> None:
    """Gather the shapes of all arrays in order, checking the form of the words."""
    if depth == 0 or not isinstance(node, dict) or not node:
        raise FrameError("Words that nothing can be built from.")
    what, content = next(iter(node.items()))
    try:
        match what:
            case "array":
                dtype, shape = content
                if not all(type(n) is int and n >= 0 for n in shape):
                    raise FrameError("Words with an array of no shape.")
                shapes.append(jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype)))
            case "value":
                if not (content is None or isinstance(content, bool | int | float | str)):
                    raise FrameError("Words with a value that is none.")
            case "tuple" | "list":
                for part in content:
                    _collect(part, shapes, depth - 1)
            case "dict":
                for part in content.values():
                    _collect(part, shapes, depth - 1)
            case "class":
                for part in node["fields"].values():
                    _collect(part, shapes, depth - 1)
            case "function":
                pass
            case "shapes":
                _collect(content, [], depth - 1)
            case _:
                raise FrameError(f"Words of an unknown kind: {what!r}.")
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        if isinstance(error, FrameError):
            raise
        raise FrameError(f"Words that nothing can be built from: {error!r}.") from None


def _class_of(kind: Any) -> type | None:
    """Return the class of this name, ``None`` if words may not name it."""
    module, _, name = str(kind).partition(":")
    parts = module.split(".")
    found: Any = None
    if len(parts) > 1 and parts[0] == "fedmcmc" and parts[1] in PACKAGES:
        found = sys.modules.get(module) or (
            importlib.import_module(module) if _is_installed(module) else None
        )
        found = vars(found).get(name) if found is not None else None
    if not isinstance(found, type) or found.__module__ != module:
        return None
    return found if is_dataclass(found) or _is_named_tuple(found) else None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _is_named_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def _names_of(cls: Any) -> tuple[str, ...]:
    if _is_named_tuple(cls):
        return tuple(cls._fields)
    return tuple(field.name for field in fields(cls))
