"""Numbers that may change with the round, kept out of a program's structure.

A schedule is a Python function, so a program that calls it is compiled for it. The runner
instead evaluates schedules ahead, over the rounds of a segment, and hands the kernel tables:
another schedule then needs no other program.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._types import ArrayTree, Number

__all__ = ["Scheduled", "Tabulated", "number", "tabulate", "value"]


@register_dataclass
@dataclass(frozen=True)
class Scheduled:
    """A schedule as the user gave it: ``round -> []``."""

    fn: Callable[[Array], Array] = field(metadata={"static": True})


@register_dataclass
@dataclass(frozen=True)
class Tabulated:
    """A schedule's values over consecutive rounds, ``[num_rounds]``, from round `first` on."""

    values: Array
    first: Array


def number(x: Number, name: str, *, minimum: float | None = None, strict: bool = False) -> Any:
    """Return `x` as a leaf of a kernel, after checking its shape and, where concrete, its range.

    Raises
    ------
    ValueError
        If `x` is not a scalar, not finite, or below `minimum` (not above it, if `strict`).
    TypeError
        If it is no number at all.
    """
    if callable(x) and not isinstance(x, Array):
        return Scheduled(x)
    try:
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
        given = float(array)
        too_small = minimum is not None and (given <= minimum if strict else given < minimum)
        if not math.isfinite(given) or too_small:
            bound = "" if minimum is None else f" {'above' if strict else 'at least'} {minimum}"
            raise ValueError(f"{name} must be a finite number{bound}, got {given}.")
    return array.astype(jnp.result_type(float))


def value(x: Any, round_: Array) -> Array:
    """Return the number `x` has in round `round_`."""
    if isinstance(x, Scheduled):
        return jnp.asarray(x.fn(round_))
    if isinstance(x, Tabulated):
        return x.values[round_ - x.first]
    return x


def tabulate(tree: ArrayTree, first: int, num_rounds: int) -> ArrayTree:
    """Replace every schedule in `tree` by its values over ``[first, first + num_rounds)``."""
    rounds = first + jnp.arange(num_rounds)

    def table(leaf: Any) -> Any:
        if isinstance(leaf, Scheduled):
            values = jax.vmap(lambda r: jnp.asarray(leaf.fn(r), jnp.result_type(float)))(rounds)
            return Tabulated(values, jnp.asarray(first, jnp.int32))
        return leaf

    return jax.tree.map(table, tree, is_leaf=lambda x: isinstance(x, Scheduled))
