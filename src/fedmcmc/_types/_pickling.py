"""Pickling results whose functions pickle may not be able to store.

A function at the top level of a module is stored by name. A lambda, or a function defined in
another one, cannot be stored: results then keep what it computed, and a placeholder with the
reason.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
from jax.tree_util import Partial

REMEDY = "Define the model and its functions at the top level of a module that can be imported."


class Absent:
    """Placeholder for a function that a pickle could not store or load; a call raises.

    Parameters
    ----------
    reason
        Sentence that says why the function is missing.
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
        return f"Absent({self.reason})"


class _Packed(NamedTuple):
    """A value as bytes of its own, so that a value that fails to load does not fail the rest."""

    content: bytes
    otherwise: Any


class WithFunctions:
    """Base of frozen dataclasses some of whose fields are or hold functions.

    Pickling never fails on these fields: a function that pickle cannot store or load becomes
    `Absent`, and what it computes from the draws is stored in its place.
    """

    FUNCTIONS: ClassVar[dict[str, str]] = {}
    """Field to the property that its function computes, or to an empty string."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, with those that hold functions packed."""
        state = dict(self.__dict__)
        computed: dict[str, Any] = dict(state.get(_COMPUTED, {}))
        for name, property_name in self.FUNCTIONS.items():
            value = state[name]
            state[name] = pack(value)
            if property_name and value is not None and not is_certain(value):
                try:
                    computed[property_name] = getattr(self, property_name)
                except ValueError:  # there are no such draws
                    continue
        return state | ({_COMPUTED: computed} if computed else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the fields."""
        self.__dict__.update({name: unpack(value) for name, value in state.items()})

    def __copy__(self) -> Any:
        """Return a copy with the same fields."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy that shares functions with the original."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            shared = name in self.FUNCTIONS
            twin.__dict__[name] = value if shared else copy.deepcopy(value, memo)
        return twin

    def computed(self, property_name: str, absent: Absent) -> Any:
        """Return what `absent` computed before the pickle was written, or raise with the reason."""
        found = self.__dict__.get(_COMPUTED, {})
        return found[property_name] if property_name in found else absent()


_COMPUTED = "_computed"


def pack(value: Any) -> Any:
    """Return `value` in a form that can be pickled, whatever functions it holds."""
    if value is None or isinstance(value, Absent):
        return value
    content, reason = _stored(value)
    if reason:
        return _without_functions(value, reason)
    where = f"{_names(value)} could not be loaded: it is not importable here. {REMEDY}"
    return _Packed(content, _without_functions(value, where))


def unpack(value: Any) -> Any:
    """Return what was packed, with `Absent` functions where it cannot be loaded."""
    if not isinstance(value, _Packed):
        return value
    try:
        return pickle.loads(value.content)
    except Exception:  # whatever the modules of the functions raise
        return value.otherwise


def is_certain(value: Any) -> bool:
    """Return whether pickle stores the functions in `value`, none of them of a script."""
    content, reason = _stored(value)
    return not reason and b"__main__" not in content


def refuse_unstorable(value: Any, name: str) -> None:
    """Raise `pickle.PicklingError` if pickle cannot store the function `value`."""
    reason = _stored(value)[1]
    if reason:
        raise pickle.PicklingError(f"{name} cannot be pickled. {reason}")


def _stored(value: Any) -> tuple[bytes, str]:
    """Return the pickle of `value`, or the reason why there is none."""
    try:
        return pickle.dumps(value), ""
    except Exception as error:  # pickle raises AttributeError, TypeError and PicklingError
        said = str(error)
        if REMEDY in said:
            return b"", said
        return b"", f"{_names(value)} is not stored, as pickle stores no such function. {REMEDY}"


def _is_function(leaf: Any) -> bool:
    return isinstance(leaf, Partial) or (callable(leaf) and not isinstance(leaf, jax.Array))


def _without_functions(value: Any, reason: str) -> Any:
    def replaced(leaf: Any) -> Any:
        if not _is_function(leaf):
            return leaf
        attributes = getattr(getattr(leaf, "func", leaf), "__dict__", {})
        kept = {n: x for n, x in attributes.items() if isinstance(x, str) and n[:1] != "_"}
        return Absent(reason, kept)

    return jax.tree.map(replaced, value, is_leaf=_is_function)


def _names(value: Any) -> str:
    """Return the name of a function, or of the first one in `value`."""
    functions = [x for x in jax.tree.leaves(value, is_leaf=_is_function) if _is_function(x)]
    first: Callable[..., Any] | Any = functions[0] if functions else value
    first = getattr(first, "func", first)
    return f"The function {getattr(first, '__qualname__', type(first).__qualname__)!r}"
