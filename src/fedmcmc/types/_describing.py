"""Short representations of kernels and their parts: class name and settings in one line."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import Partial

from fedmcmc.types._html import html_table
from fedmcmc.types._values import PerClient, Posterior, Static


class Described:
    """Base of dataclasses that print as a name with settings, with large arrays as shapes.

    A subclass is declared with ``repr=False``. The representation omits fields that hold their
    default, are empty, hold the model, or are declared with ``repr=False``.
    """

    def __repr__(self) -> str:
        """Return the name of the class and the settings that are not defaults."""
        return describe(self)

    def _repr_html_(self) -> str:
        """Return the representation for notebooks, with one row per setting."""
        shown = {name: describe(part) for name, part in _settings(self)}
        return html_table(type(self).__name__, shown)


def undefined(part: object, method: str) -> NotImplementedError:
    """Return the error for a method that a subclass must define."""
    return NotImplementedError(
        f"{type(part).__name__} does not define the method {method}; see docs/guides/extend.md."
    )


def describe(value: Any) -> str:
    """Return one line about a setting or object, with arrays of several numbers as shapes.

    Examples
    --------
    >>> describe({"step": np.float32(0.5), "weights": np.zeros((3, 2))})
    '{step: 0.5, weights: float64[3, 2]}'
    """
    if isinstance(value, jax.core.Tracer):
        return "traced"
    if isinstance(value, float | np.generic):
        return f"{value:g}" if np.issubdtype(type(value), np.floating) else str(value)
    if isinstance(value, np.ndarray | jax.Array):
        return _describe_array(value)
    if isinstance(value, Partial) or (callable(value) and hasattr(value, "__name__")):
        name = getattr(value.func if isinstance(value, Partial) else value, "__name__", "")
        return name if name.isidentifier() else "a function"
    if isinstance(value, Static):
        return describe(value.value)
    if isinstance(value, PerClient):
        return f"{describe(value.values)} per client"
    if is_dataclass(value) and not isinstance(value, type) and _prints_fields(value):
        return _describe_fields(value, _settings(value))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {describe(part)}' for key, part in value.items())}}}"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _describe_named_tuple(value)
    if type(value) in (tuple, list):
        return f"({', '.join(describe(part) for part in value)})"
    return repr(value)


def _describe_array(value: Any) -> str:
    if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        return "a key"
    if value.size == 1 and getattr(value, "is_fully_addressable", True):
        number = np.asarray(value).reshape(())
        return (
            f"{float(number):g}"
            if jax.numpy.issubdtype(value.dtype, jax.numpy.floating)
            else str(number)
        )
    return f"{value.dtype}{list(value.shape)}"


def _prints_fields(value: object) -> bool:
    """Return whether a dataclass has no custom representation."""
    method: Any = type(value).__repr__
    return method is Described.__repr__ or getattr(method, "__wrapped__", None) is not None


def _settings(value: Any) -> list[tuple[str, Any]]:
    """Return names and values of the shown fields of a dataclass."""
    parts = ((field, getattr(value, field.name)) for field in fields(value) if field.repr)
    return [(field.name, part) for field, part in parts if not _is_default(part, field.default)]


def _describe_named_tuple(value: Any) -> str:
    if type(value).__repr__.__module__ != "collections":  # a custom representation
        return repr(value)
    parts = zip(value._fields, value, strict=True)
    defaults = value._field_defaults
    shown = [
        (name, part)
        for name, part in parts
        if not callable(part) and not _is_default(part, defaults.get(name, MISSING))
    ]
    return _describe_fields(value, shown)


def _describe_fields(value: object, parts: list[tuple[str, Any]]) -> str:
    settings = ", ".join(f"{name}={describe(part)}" for name, part in parts)
    return f"{type(value).__name__}({settings})"


def _is_default(part: object, default: object) -> bool:
    is_empty = isinstance(part, tuple | dict) and not part
    if part is None or part is default or is_empty or isinstance(part, Posterior):
        return True
    return default is not MISSING and isinstance(part, int | float | str) and part == default
