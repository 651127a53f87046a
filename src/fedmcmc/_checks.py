"""Checks of arguments that many rooms make."""

from typing import Any

__all__ = ["expect", "positive_integer"]


def expect(value: Any, kind: type, name: str) -> None:
    """Raise `TypeError` unless `given` is a `kind`, which a trace would tell late and badly."""
    if not isinstance(value, kind):
        # The room that exports it: `fedmcmc.inference._types` is written `fedmcmc.inference`.
        parts = kind.__module__.split(".")
        room = "inference." if parts[1:2] == ["inference"] else ""
        raise TypeError(
            f"{name} must be a fedmcmc.{room}{kind.__name__}, got {type(value).__name__}."
        )


def positive_integer(x: Any, name: str) -> int:
    """Return `x` as an int.

    Raises
    ------
    ValueError
        If it is not a positive integer.
    """
    try:
        is_integer = int(x) == x
    except (TypeError, ValueError, OverflowError):
        is_integer = False
    if not is_integer or x < 1:
        raise ValueError(f"{name} must be a positive integer, got {x!r}.")
    return int(x)
