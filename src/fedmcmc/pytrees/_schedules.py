"""Numbers that may change with the round, without recompilation.

A schedule is a Python function, so a program that called it would be compiled for this function.
Instead, the runner evaluates schedules for the next rounds and passes tables of values to the
kernel. Kernels that differ only in their schedules thus share one program.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.types import ArrayTree, Number, describe, register_dataclass


class Range(NamedTuple):
    """Valid range of a number with its display name; ``None`` stands for a missing bound."""

    name: str
    minimum: float | None
    strict: bool  # if true, the minimum itself is invalid
    maximum: float | None

    def check(self, number: float, where: str = "") -> None:
        """Raise `ValueError` unless `number` is finite and within the bounds."""
        low, high = self.minimum, self.maximum
        too_small = low is not None and (number <= low if self.strict else number < low)
        if not math.isfinite(number) or too_small or (high is not None and number > high):
            bound = "" if low is None else f" {'above' if self.strict else 'at least'} {low:g}"
            expected = f"a finite number{bound}" if high is None else f"in [{low:g}, {high:g}]"
            raise ValueError(f"{self.name} must be {expected}, got {number:g}{where}.")


@register_dataclass
@dataclass(frozen=True, repr=False)
class Scheduled:
    """Schedule of the user, ``round -> []``, with the valid range of its values."""

    fn: Callable[[Array], Array] = field(metadata={"static": True})
    range: Range = field(metadata={"static": True})

    def __repr__(self) -> str:
        """Return the name of the user's function."""
        return describe(self.fn)


@register_dataclass
@dataclass(frozen=True)
class Tabulated:
    """Values of a schedule in consecutive rounds, ``[num_rounds]``, from `start_round` on."""

    values: Array
    start_round: Array


def number(
    x: Number,
    name: str,
    *,
    minimum: float | None = None,
    strict: bool = False,
    maximum: float | None = None,
) -> Any:
    """Return `x` as a leaf of a kernel.

    Raise `TypeError` if `x` is not a number, and `ValueError` if it is not a scalar, not finite or
    out of range. The range of a traced `x` is not checked. The runner checks values of schedules
    before it runs their rounds.
    """
    valid = Range(name, minimum, strict, maximum)
    if callable(x) and not isinstance(x, Array):
        return Scheduled(x, valid)
    try:
        if isinstance(x, str):
            raise TypeError  # NumPy would parse it as a number
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
        valid.check(float(array))
    return array.astype(jnp.result_type(float))


def value(x: Any, round_: Array) -> Array:
    """Return the value of `x` in round `round_`."""
    if isinstance(x, Scheduled):
        return jnp.asarray(x.fn(round_))
    if isinstance(x, Tabulated):
        return x.values[round_ - x.start_round]
    return x


def tabulate(
    tree: ArrayTree, start: int, num_rounds: int, num_used: int | None = None
) -> ArrayTree:
    """Replace all schedules in `tree` by their values in rounds ``[start, start + num_rounds)``.

    Raise `ValueError` if a value is out of range in one of the first `num_used` rounds (by default
    all).
    """
    rounds = start + jnp.arange(num_rounds)

    def tabulate_leaf(leaf: object) -> Any:
        if not isinstance(leaf, Scheduled):
            return leaf
        values = jax.vmap(lambda r: jnp.asarray(leaf.fn(r), jnp.result_type(float)))(rounds)
        if not isinstance(values, jax.core.Tracer):
            for i, x in enumerate(np.asarray(values[:num_used], float)):
                leaf.range.check(float(x), f" in round {start + i}")
        return Tabulated(values, jnp.asarray(start, jnp.int32))

    return jax.tree.map(tabulate_leaf, tree, is_leaf=lambda x: isinstance(x, Scheduled))
