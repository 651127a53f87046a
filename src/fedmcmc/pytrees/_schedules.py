"""Numbers that may change with the round, kept out of a program's structure.

A schedule is a Python function, so a program that calls it is compiled for it. The runner
instead evaluates schedules ahead, over the rounds of a segment, and hands the kernel tables:
another schedule then needs no other program.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, Number, describe, register_dataclass


class Range(NamedTuple):
    """Which numbers are in order, and what they are called; bounds of ``None`` are none."""

    name: str
    minimum: float | None
    strict: bool  # whether the minimum itself is out of range
    maximum: float | None

    def check(self, number: float, where: str = "") -> None:
        """Raise `ValueError` unless `number` is finite and within the bounds."""
        low, high = self.minimum, self.maximum
        too_small = low is not None and (number <= low if self.strict else number < low)
        if not math.isfinite(number) or too_small or (high is not None and number > high):
            bound = "" if low is None else f" {'above' if self.strict else 'at least'} {low:g}"
            wanted = f"a finite number{bound}" if high is None else f"in [{low:g}, {high:g}]"
            raise ValueError(f"{self.name} must be {wanted}, got {number:g}{where}.")


@register_dataclass
@dataclass(frozen=True, repr=False)
class Scheduled:
    """A schedule as the user gave it, ``round -> []``, and the range its values must lie in."""

    fn: Callable[[Array], Array] = field(metadata={"static": True})
    range: Range = field(metadata={"static": True})

    def __repr__(self) -> str:
        """Name the user's function."""
        return describe(self.fn)


@register_dataclass
@dataclass(frozen=True)
class Tabulated:
    """A schedule's values over consecutive rounds, ``[num_rounds]``, from round `first` on."""

    values: Array
    first: Array


def number(
    x: Number,
    name: str,
    *,
    minimum: float | None = None,
    strict: bool = False,
    maximum: float | None = None,
) -> Any:
    """Return `x` as a leaf of a kernel, after checking its shape and, where concrete, its range.

    The values of a schedule are checked by the runner, before the rounds that use them.

    Raises
    ------
    ValueError
        If `x` is not a scalar, not finite, or below `minimum` (not above it, if `strict`).
    TypeError
        If it is no number at all.
    """
    allowed = Range(name, minimum, strict, maximum)
    if callable(x) and not isinstance(x, Array):
        return Scheduled(x, allowed)
    try:
        if isinstance(x, str):
            raise TypeError  # NumPy would read a number out of it
        array = jnp.asarray(x)
    except TypeError:
        raise TypeError(
            f"{name} must be a scalar number or a schedule of the round, got {x!r}."
        ) from None
    if array.ndim != 0 or not jnp.issubdtype(array.dtype, jnp.number):
        raise ValueError(
            f"{name} must be a scalar number or a schedule of the round, got an array of shape "
            f"{array.shape} and dtype {array.dtype}."
        )
    if not isinstance(array, jax.core.Tracer):
        allowed.check(float(array))
    return array.astype(jnp.result_type(float))


def value(x: Any, round_: Array) -> Array:
    """Return the number `x` has in round `round_`."""
    if isinstance(x, Scheduled):
        return jnp.asarray(x.fn(round_))
    if isinstance(x, Tabulated):
        return x.values[round_ - x.first]
    return x


def tabulate(
    tree: ArrayTree, first: int, num_rounds: int, num_used: int | None = None
) -> ArrayTree:
    """Replace every schedule in `tree` by its values over ``[first, first + num_rounds)``.

    Raises
    ------
    ValueError
        If a value is out of range in one of the first `num_used` rounds (by default all).
    """
    rounds = first + jnp.arange(num_rounds)

    def table(leaf: Any) -> Any:
        if isinstance(leaf, Scheduled):
            values = jax.vmap(lambda r: jnp.asarray(leaf.fn(r), jnp.result_type(float)))(rounds)
            if not isinstance(values, jax.core.Tracer):
                for i, x in enumerate(np.asarray(values[:num_used], float)):
                    leaf.range.check(float(x), f" in round {first + i}")
            return Tabulated(values, jnp.asarray(first, jnp.int32))
        return leaf

    return jax.tree.map(table, tree, is_leaf=lambda x: isinstance(x, Scheduled))
