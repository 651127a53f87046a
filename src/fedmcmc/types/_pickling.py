"""Pickling of results that hold functions which pickle may not be able to store.

Pickle stores a function at the top level of a module by name, but it cannot store lambdas and
nested functions. Results then store what the function computed, and a placeholder with the reason.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
from jax.tree_util import Partial

REMEDY = "Define the model and its functions at the top level of a module that can be imported."


class MissingFunction:
    """Placeholder for a function that pickle could not store or load; a call raises.

    Parameters
    ----------
    reason
        Sentence that explains why the function is missing.
    attributes
        Attributes of the function, such as the names of a model's sites.
    """

    def __init__(self, reason: str, attributes: dict[str, Any] | None = None) -> None:
        self.__dict__.update(attributes or {})
        self.reason = reason

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise with the reason."""
        raise RuntimeError(self.reason)

    def __repr__(self) -> str:
        """Return the reason."""
        return f"MissingFunction({self.reason})"


class _Packed(NamedTuple):
    """Value as separate bytes, with a replacement in case that loading fails."""

    content: bytes
    replacement: Any


class WithFunctions:
    """Base of frozen dataclasses with fields that are or contain functions.

    Pickling never fails on these fields: a function that pickle cannot store or load becomes
    `MissingFunction`, and the values that it computes from the draws are stored instead.
    """

    FUNCTIONS: ClassVar[dict[str, str]] = {}
    """Field to the property that its function computes, or to an empty string."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, with functions packed."""
        state = dict(self.__dict__)
        computed: dict[str, Any] = dict(state.get(_COMPUTED, {}))
        for name, property_name in self.FUNCTIONS.items():
            value = state[name]
            state[name] = pack(value)
            if property_name and value is not None and not is_certain(value):
                try:
                    computed[property_name] = getattr(self, property_name)
                except ValueError:  # the run has no such draws
                    continue
        return state | ({_COMPUTED: computed} if computed else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the fields."""
        self.__dict__.update({name: unpack(value) for name, value in state.items()})

    def __copy__(self) -> Any:
        """Return a copy with the same fields."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy that shares functions with the original."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        for name, value in self.__dict__.items():
            is_shared = name in self.FUNCTIONS
            new.__dict__[name] = value if is_shared else copy.deepcopy(value, memo)
        return new

    def with_computed(self, values: dict[str, Any]) -> Any:
        """Return a copy that holds values of properties whose functions are missing."""
        new = copy.copy(self)
        new.__dict__[_COMPUTED] = values
        return new

    def computed(self, property_name: str, absent: MissingFunction) -> Any:
        """Return the values that `absent` computed before pickling, or raise with the reason."""
        computed = self.__dict__.get(_COMPUTED, {})
        return computed[property_name] if property_name in computed else absent()


_COMPUTED = "_computed"


def pack(value: object) -> Any:
    """Return `value` in a form that pickle can store, whatever functions it contains."""
    if value is None or isinstance(value, MissingFunction):
        return value
    content, reason = _pickled(value)
    if reason:
        return _without_functions(value, reason)
    reason = f"{_function_name(value)} could not be loaded: it cannot be imported. {REMEDY}"
    return _Packed(content, _without_functions(value, reason))


def unpack(value: object) -> Any:
    """Return a packed value, with `MissingFunction` functions if it cannot be loaded."""
    if not isinstance(value, _Packed):
        return value
    try:
        return pickle.loads(value.content)
    except Exception:  # the functions' modules may raise any error
        return value.replacement


def is_certain(value: object) -> bool:
    """Return whether pickle stores all functions in `value`, and none is defined in a script."""
    content, reason = _pickled(value)
    return not reason and b"__main__" not in content


def check_picklable(value: object, name: str) -> None:
    """Raise `pickle.PicklingError` if pickle cannot store the function `value`."""
    reason = _pickled(value)[1]
    if reason:
        raise pickle.PicklingError(f"{name} cannot be pickled. {reason}")


def _pickled(value: object) -> tuple[bytes, str]:
    """Return the pickle of `value`, or the reason why there is none."""
    try:
        return pickle.dumps(value), ""
    except Exception as error:  # pickle raises AttributeError, TypeError and PicklingError
        message = str(error)
        if REMEDY in message:
            return b"", message
        return b"", f"{_function_name(value)} is not stored: pickle cannot store it. {REMEDY}"


def _is_function(leaf: object) -> bool:
    return isinstance(leaf, Partial) or (callable(leaf) and not isinstance(leaf, jax.Array))


def _without_functions(value: object, reason: str) -> Any:
    def replace(leaf: object) -> Any:
        if not _is_function(leaf):
            return leaf
        attributes = getattr(getattr(leaf, "func", leaf), "__dict__", {})
        texts = {n: x for n, x in attributes.items() if isinstance(x, str) and n[:1] != "_"}
        return MissingFunction(reason, texts)

    return jax.tree.map(replace, value, is_leaf=_is_function)


def _function_name(value: object) -> str:
    """Return the name of a function, or of the first function in `value`."""
    functions = [x for x in jax.tree.leaves(value, is_leaf=_is_function) if _is_function(x)]
    function: Callable[..., Any] | Any = functions[0] if functions else value
    function = getattr(function, "func", function)
    return f"The function {getattr(function, '__qualname__', type(function).__qualname__)!r}"
