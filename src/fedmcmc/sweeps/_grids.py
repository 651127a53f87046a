"""Grids of settings: their points, their labels, and the kernels made of them."""

import itertools
import re
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedmcmc._types import FederatedKernel, as_functions
from fedmcmc.pytrees import schedules

__all__ = ["Grid", "group", "make_kernels", "read_grid", "structure"]

RESERVED = ("seed", "chain", "draw", "round")
"""Names of other dimensions and coordinates of a sweep's results."""


class Grid(NamedTuple):
    """A full product of settings; its points are in the order of nested loops, last name fastest.

    `values` are passed to kernels, `labels` name them in results: one array a name.
    """

    names: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]
    labels: tuple[np.ndarray, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of values a name."""
        return tuple(len(values) for values in self.values)

    def points(self) -> list[dict[str, Any]]:
        """Return the settings of every point."""
        return [
            dict(zip(self.names, values, strict=True)) for values in itertools.product(*self.values)
        ]

    def labelled_points(self) -> list[dict[str, Any]]:
        """Return the labels of every point, by name."""
        labels = (column.tolist() for column in self.labels)
        return [dict(zip(self.names, point, strict=True)) for point in itertools.product(*labels)]

    def describe(self, index: int) -> str:
        """Return the point `index` in words."""
        point = self.labelled_points()[index]
        return ", ".join(f"{name}={label}" for name, label in point.items()) or "the only point"


def read_grid(grid: Mapping[str, Any]) -> Grid:
    """Check a grid and find labels for its values.

    Raises
    ------
    TypeError
        If `grid` is no mapping, or values are neither numbers nor strings and have no labels.
    ValueError
        If a name is taken or no identifier, or values are missing or not distinct.
    """
    if not isinstance(grid, Mapping):
        raise TypeError(f"grid must be a mapping of names to values, got {type(grid).__name__}.")
    values, labels = [], []
    for name, given in grid.items():
        if not (isinstance(name, str) and name.isidentifier()) or name in RESERVED:
            raise ValueError(
                f"A name of the grid must be an argument of kernel_fn, and none of "
                f"{', '.join(RESERVED)}; got {name!r}."
            )
        values.append(_values(name, given))
        labels.append(_labels(name, list(given)))
    return Grid(tuple(grid), tuple(values), tuple(labels))


def _values(name: str, given: Any) -> tuple[Any, ...]:
    if isinstance(given, str) or not hasattr(given, "__len__"):
        raise TypeError(f"The values of {name} must be a sequence or a mapping, got {given!r}.")
    if len(given) == 0:
        raise ValueError(f"There must be at least one value of {name}.")
    return tuple(given.values() if isinstance(given, Mapping) else given)


def _labels(name: str, given: list[Any]) -> np.ndarray:
    plain = [np.asarray(x).item() if np.ndim(x) == 0 else x for x in given]
    for x in plain:
        if not isinstance(x, bool | int | float | str):
            raise TypeError(
                f"A value of {name} is neither a number nor a string ({x!r}): give a mapping of "
                f"labels to values."
            )
    if len(set(plain)) < len(plain):
        raise ValueError(f"The values of {name} must differ, got {plain}.")
    texts = {isinstance(x, str) for x in plain}
    return np.asarray(plain if len(texts) == 1 else [str(x) for x in plain])


def make_kernels(
    kernel_fn: Callable[..., FederatedKernel], grid: Grid, num_rounds: int
) -> list[FederatedKernel]:
    """Build the kernels of all points, so that bad settings raise before anything is compiled.

    Raises
    ------
    ValueError, TypeError
        What `kernel_fn` raises, with the point in front of the message; if it returns no kernel;
        or if a schedule leaves its range in one of the rounds.
    """
    kernels = []
    for i, point in enumerate(grid.points()):
        try:
            kernel = kernel_fn(**point)
            if not isinstance(kernel, FederatedKernel):
                raise TypeError(
                    f"kernel_fn must return a FederatedKernel, got {type(kernel).__name__}."
                )
            kernel = as_functions(kernel)
            schedules.tabulate(kernel, 0, num_rounds)
        except (ValueError, TypeError) as error:
            kind = ValueError if isinstance(error, ValueError) else TypeError
            raise kind(f"At {grid.describe(i)}: {error}") from error
        kernels.append(kernel)
    return kernels


def structure(kernel: FederatedKernel) -> Hashable:
    """Return what two kernels must have in common to run in one program.

    Schedules are left out: a program takes their values.
    """
    leaves, treedef = jax.tree.flatten(schedules.tabulate(kernel, 0, 1, 0))
    return treedef, tuple(jax.typeof(leaf) for leaf in leaves)


def group(kernels: Sequence[FederatedKernel]) -> list[list[int]]:
    """Return which kernels can share a program, as lists of their indices."""
    groups: dict[Hashable, list[int]] = {}
    for i, kernel in enumerate(kernels):
        groups.setdefault(structure(kernel), []).append(i)
    # Where functions are new at each call, the trees differ in nothing but their addresses.
    alike = {re.sub(r" at 0x[0-9a-f]+", "", str(key)) for key in groups}
    if len(alike) < len(groups) == len(kernels):
        warnings.warn(
            f"Each of the {len(kernels)} points is compiled by itself, though {len(alike)} "
            f"{'program' if len(alike) == 1 else 'programs'} would do: kernel_fn makes functions "
            "anew at each call (a log density, a lambda), and functions are the same only if they "
            "are the same object. Define them outside of kernel_fn; numbers that they need can be "
            "bound by jax.tree_util.Partial.",
            RuntimeWarning,
            stacklevel=3,
        )
    return list(groups.values())
