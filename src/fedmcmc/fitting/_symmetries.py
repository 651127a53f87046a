"""Symmetric modes: images of a mode under permutations and reflections of parameters.

The density does not change if components of a mixture are permuted or if all loadings of a factor
change sign. A search from a few starts finds only some of the resulting modes. This module computes
the remaining modes from one of them.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc.pytrees import named_leaves
from fedmcmc.types import ArrayTree, Posterior, as_functions, compiled

MAX_IMAGES = 24
"""Largest number of images of a mode: the permutations of four exchangeable components."""
MAX_LENGTH = 8
"""Length of an axis up to which all its transpositions are tried."""
MAX_SUBSET_MEMBERS, MAX_PAIR_MEMBERS = 4, 16
"""Numbers of sites with a common axis up to which all subsets, or all pairs, are tried."""
BATCH_SIZE = 32
"""Number of images per call of a compiled program."""
TOLERANCE = 1e-3
"""Relative and absolute difference below which two images are equal."""

Member = tuple[Any, int | None]
"""Name of a site and an axis, or names of scalar sites and ``None``."""

Values = dict[str, np.ndarray]
"""Parameters by name, in the space in which they can be permuted."""


@dataclass(frozen=True)
class Symmetry:
    """Group of transformations of the parameters that may preserve the posterior density.

    If `kind` is ``"permute"``, the `length` entries along the axes of all members are permuted
    together; if ``"reflect"``, they change sign together; if ``"negate"``, entire parameters do.
    """

    members: tuple[Member, ...]
    kind: str
    length: int = 1

    def generators(self) -> Iterator[Callable[[Values], Values]]:
        """Yield maps whose compositions are all maps of this symmetry."""
        if self.kind == "negate":
            yield lambda values: self._with_sign(values, None)
        elif self.kind == "reflect":
            for entry in range(self.length):
                yield lambda values, entry=entry: self._with_sign(values, entry)  # type: ignore[misc]
        else:
            for pair in itertools.combinations(range(self.length), 2):
                yield lambda values, pair=pair: self._permuted(values, pair)  # type: ignore[misc]

    def example(self, values: Values) -> Values:
        """Return the image under the generator with the largest effect."""
        if self.kind == "negate":
            return self._with_sign(values, None)
        along = self._along(values, self.members[0]).reshape(self.length, -1)
        if self.kind == "reflect":
            return self._with_sign(values, int(np.argmax(np.abs(along).max(1))))
        gaps = np.abs(along[:, None] - along[None]).max(-1)
        pair = np.unravel_index(int(np.argmax(gaps)), gaps.shape)
        return self._permuted(values, (int(pair[0]), int(pair[1])))

    def _along(self, values: Values, member: Member) -> np.ndarray:
        """Return the entries of a member, ``[length, ...]``."""
        names, axis = member
        if axis is None:
            return np.stack([values[name] for name in names])
        return np.moveaxis(values[names], axis, 0)

    def _changed(self, values: Values, change: Callable[[np.ndarray], np.ndarray]) -> Values:
        out = dict(values)
        for member in self.members:
            names, axis = member
            entries = change(self._along(values, member))
            if axis is None:
                out |= dict(zip(names, entries, strict=True))
            else:
                out[names] = np.moveaxis(entries, 0, axis)
        return out

    def _permuted(self, values: Values, pair: tuple[int, int]) -> Values:
        order = np.arange(self.length)
        order[list(pair)] = order[list(pair[::-1])]
        return self._changed(values, lambda entries: entries[order])

    def _with_sign(self, values: Values, entry: int | None) -> Values:
        if entry is None:
            return values | {name: -values[name] for name, _ in self.members}
        sign = np.where(np.arange(self.length) == entry, -1.0, 1.0)
        return self._changed(
            values, lambda entries: entries * sign.reshape(-1, *(1,) * (entries.ndim - 1))
        )


def list_symmetries(values: Values) -> list[Symmetry]:
    """Return permutations along common axes, then reflections, larger groups first."""
    axes: dict[int, list[Member]] = {}
    for name, value in values.items():
        for axis, length in enumerate(value.shape):
            if 2 <= length <= MAX_LENGTH:
                axes.setdefault(length, []).append((name, axis))
    for names in _group_scalars(values):
        if len(names) <= MAX_LENGTH:
            axes.setdefault(len(names), []).append((names, None))
    by_length = [(length, subset) for length, x in axes.items() for subset in _list_subsets(x)]
    parameters: list[Member] = [(name, 0) for name in values]
    return [
        *(Symmetry(subset, "permute", length) for length, subset in by_length),
        *(Symmetry(subset, "negate") for subset in _list_subsets(parameters)),
        *(Symmetry(subset, "reflect", length) for length, subset in by_length),
    ]


def _group_scalars(values: Values) -> list[tuple[str, ...]]:
    """Return groups of scalars whose names differ in a final number or letter: ``mu1, mu2``."""
    stems: dict[str, list[str]] = {}
    for name, value in values.items():
        match = re.fullmatch(r"(.*?)[_.]?(\d+|[a-z])", name)
        if value.ndim == 0 and match and match[1]:
            stems.setdefault(match[1], []).append(name)
    return [tuple(sorted(names)) for names in stems.values() if len(names) > 1]


def _list_subsets(members: list[Member]) -> list[tuple[Member, ...]]:
    """Return subsets of the members, larger subsets first; fewer sizes if there are many members.

    Up to four members have all their subsets; up to 16 members have the full set, the sets without
    one member, pairs and singletons; more members have the full set and singletons.
    """
    num = len(members)
    sizes: Sequence[int] = (num, num - 1, 2, 1) if num <= MAX_PAIR_MEMBERS else (num, 1)
    if num <= MAX_SUBSET_MEMBERS:
        sizes = range(num, 0, -1)
    return [subset for size in sizes for subset in itertools.combinations(members, size)]


class Images:
    """Images of a position under symmetries.

    If the posterior maps constrained parameters back to a position (`from_numpyro`), symmetries act
    on constrained parameters, else on sampled positions.
    """

    def __init__(self, posterior: Posterior, position: ArrayTree) -> None:
        self.position = position
        self.unconstrain = getattr(posterior.constrain_fn, "unconstrain", None)
        if self.unconstrain is None:
            leaves, self.treedef = jax.tree.flatten(position)
            self.names = list(named_leaves(position))
            self.values = dict(zip(self.names, map(np.asarray, leaves), strict=True))
        else:
            constrained = _constrained(as_functions(posterior.constrain_fn), position)
            self.values = {name: np.asarray(constrained[name], np.float64) for name in position}

    def flat(self, images: list[Values]) -> np.ndarray:
        """Return images as raveled positions, ``[num, d]`` float64."""
        num = BATCH_SIZE * -(-len(images) // BATCH_SIZE)  # few shapes need few programs
        stacked = {
            name: np.resize([image[name] for image in images], (num, *value.shape))
            for name, value in self.values.items()
        }
        if self.unconstrain is not None:
            dtype = jnp.result_type(float)
            constrained = jax.tree.map(lambda leaf: leaf.astype(dtype), stacked)
            positions = _unconstrained(as_functions(self.unconstrain), self.position, constrained)
        else:
            positions = jax.tree.unflatten(self.treedef, [stacked[name] for name in self.names])
        leaves = [
            np.asarray(leaf, np.float64).reshape(num, -1) for leaf in jax.tree.leaves(positions)
        ]
        return np.concatenate(leaves, axis=1)[: len(images)]

    def closure(self, symmetries: list[Symmetry]) -> tuple[list[Values], bool]:
        """Return the images under all compositions, and true if no image is missing."""
        generators = [fn for symmetry in symmetries for fn in symmetry.generators()]
        images = [self.values]
        for values in images:  # the loop also visits the images that it appends
            for generator in generators:
                image = generator(values)
                if not any(_are_close(image, previous) for previous in images):
                    if len(images) > MAX_IMAGES:
                        return images[1:], False
                    images.append(image)
        return images[1:], len(images) <= MAX_IMAGES


@compiled
def _constrained(fn: Callable[..., Any], position: ArrayTree) -> ArrayTree:
    return fn(position)


@compiled
def _unconstrained(fn: Callable[..., Any], position: ArrayTree, values: ArrayTree) -> ArrayTree:
    return jax.vmap(lambda image: fn(position, image))(values)


def _are_close(a: Values, b: Values) -> bool:
    return all(np.allclose(a[name], b[name], rtol=TOLERANCE, atol=TOLERANCE) for name in a)
