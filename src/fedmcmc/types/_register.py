"""Registration of dataclasses as pytrees whose class is part of their structure."""

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from jax.tree_util import GetAttrKey, register_pytree_with_keys

T = TypeVar("T")


def register_dataclass(cls: type[T]) -> type[T]:
    """Register a dataclass as a pytree; a decorator for kernels and their parts.

    Fields are leaves, except for fields with ``metadata={"static": True}``, which are structure.
    With `jax.tree_util.register_dataclass`, JAX 0.10 compares only the names of fields, so a
    compiled function may run the program of another class with the same field names. Here objects
    of different classes never have the same structure.

    Raises
    ------
    TypeError
        If the class is not a dataclass.

    Examples
    --------
    >>> import jax
    >>> from dataclasses import dataclass
    >>> @register_dataclass
    ... @dataclass(frozen=True)
    ... class Scale:
    ...     factor: float
    >>> jax.tree.map(lambda x: 2 * x, Scale(1.5))
    Scale(factor=3.0)
    """
    is_valid: bool = is_dataclass(cls)  # an annotation, so that mypy does not narrow `cls`
    if not is_valid:
        raise TypeError(
            f"register_dataclass needs a dataclass, but {cls.__name__} is not: write "
            f"@dataclass(frozen=True) between @fedmcmc.types.register_dataclass and the class."
        )
    is_static = {f.name: bool(f.metadata.get("static", False)) for f in fields(cls) if f.init}  # type: ignore[arg-type]
    data = tuple(name for name, static in is_static.items() if not static)
    structure = tuple(name for name, static in is_static.items() if static)

    def flatten(value: object) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return (
            tuple([getattr(value, name) for name in data]),
            tuple([getattr(value, name) for name in structure]),
        )

    def flatten_with_keys(value: object) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        leaves, static = flatten(value)
        return tuple((GetAttrKey(n), x) for n, x in zip(data, leaves, strict=True)), static

    def unflatten(static: tuple[Any, ...], leaves: Any) -> T:
        return cls(
            **dict(zip(data, leaves, strict=True)), **dict(zip(structure, static, strict=True))
        )

    register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls
