"""Symmetric modes: images of a mode under permutations and reflections of parameters.

Components of a mixture can change places, and loadings of a factor their signs, without a change of
the density. A search from a few starts finds some of the modes that this makes; here the others are
computed from one that was found.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc._types import ArrayTree, Posterior, as_functions, compiled
from fedmcmc.pytrees import named_leaves

MOST_IMAGES = 24
"""Images of a mode that are computed; four exchangeable components have so many."""
MOST_LENGTH = 8
"""Entries of an axis up to which all their transpositions are tried."""
MOST_MEMBERS, MOST_PAIRED = 4, 16
"""Sites that share an axis, up to which all their subsets and all their pairs are tried."""
NUM_IMAGES = 32
"""Images that are mapped at a time."""
SAME = 1e-3
"""Relative difference below which two images are one."""

Values = dict[str, np.ndarray]
"""Parameters by name, in the space in which they can be exchanged."""


@dataclass(frozen=True)
class Symmetry:
    """A map of parameters to parameters that may leave the posterior's density as it is.

    Attributes
    ----------
    members
        Names and axes; axis ``None`` of a scalar that is one of several with a common stem.
    kind
        ``"permute"``: entries along the axes change places together; ``"reflect"``: entries along
        the axes change sign together; ``"negate"``: whole parameters do.
    """

    members: tuple[tuple[Any, int | None], ...]
    kind: str
    length: int = 1

    def generators(self) -> Iterator[Callable[[Values], Values]]:
        """Yield maps of which all of this symmetry's are compositions."""
        if self.kind == "negate":
            yield lambda values: self._with_sign(values, None)
        elif self.kind == "reflect":
            for place in range(self.length):
                yield lambda values, place=place: self._with_sign(values, place)  # type: ignore[misc]
        else:
            for pair in itertools.combinations(range(self.length), 2):
                yield lambda values, pair=pair: self._permuted(values, pair)  # type: ignore[misc]

    def example(self, values: Values) -> Values:
        """Return the image under the generator that moves most."""
        first = next(iter(self.generators()))
        if self.kind == "negate":
            return first(values)
        along = self._along(values, self.members[0]).reshape(self.length, -1)
        if self.kind == "reflect":
            return self._with_sign(values, int(np.argmax(np.abs(along).max(1))))
        gaps = np.abs(along[:, None] - along[None]).max(-1)
        pair = np.unravel_index(int(np.argmax(gaps)), gaps.shape)
        return self._permuted(values, (int(pair[0]), int(pair[1])))

    def _along(self, values: Values, member: tuple[Any, int | None]) -> np.ndarray:
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

    def _with_sign(self, values: Values, place: int | None) -> Values:
        if place is None:
            return values | {name: -values[name] for name, _ in self.members}
        sign = np.where(np.arange(self.length) == place, -1.0, 1.0)
        return self._changed(
            values, lambda entries: entries * sign.reshape(-1, *(1,) * (entries.ndim - 1))
        )


def candidate_symmetries(values: Values) -> list[Symmetry]:
    """Return permutations along common axes and reflections, those of most parameters first."""
    axes: dict[int, list[tuple[Any, int | None]]] = {}
    for name, value in values.items():
        for axis, length in enumerate(value.shape):
            if 2 <= length <= MOST_LENGTH:
                axes.setdefault(length, []).append((name, axis))
    for names in _families(values):
        if 2 <= len(names) <= MOST_LENGTH:
            axes.setdefault(len(names), []).append((names, None))
    found: list[Symmetry] = []
    for length, members in axes.items():
        for subset in _subsets(members):
            found.append(Symmetry(subset, "permute", length))
    whole: list[tuple[Any, int | None]] = [(name, 0) for name in values]
    found += [Symmetry(subset, "negate") for subset in _subsets(whole)]
    for length, members in axes.items():
        for subset in _subsets(members):
            found.append(Symmetry(subset, "reflect", length))
    return found


def _families(values: Values) -> list[tuple[str, ...]]:
    """Return scalars whose names differ by a number or a letter at the end: ``mu1, mu2``."""
    stems: dict[str, list[str]] = {}
    for name, value in values.items():
        match = re.fullmatch(r"(.*?)[_.]?(\d+|[a-z])", name)
        if value.ndim == 0 and match and match[1]:
            stems.setdefault(match[1], []).append(name)
    return [tuple(sorted(names)) for names in stems.values() if len(names) > 1]


def _subsets(members: list[Any]) -> list[tuple[Any, ...]]:
    """Return all subsets of few members; of more all, all but one, pairs and single ones.

    Of very many, whose pairs would be thousands, all and single ones.
    """
    num = len(members)
    sizes: Any = (num, num - 1, 2, 1) if num <= MOST_PAIRED else (num, 1)
    if num <= MOST_MEMBERS:
        sizes = range(num, 0, -1)
    return [subset for size in sizes for subset in itertools.combinations(members, size)]


class Images:
    """Images of one position under symmetries, as positions.

    Parameters
    ----------
    posterior
        Parameters change places in the user's own space if the model can map them back to a
        position (`from_numpyro`), else as they are sampled.
    position
        A mode.
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
        num = NUM_IMAGES * -(-len(images) // NUM_IMAGES)  # few sizes, of few programs
        stacked = {
            name: np.resize([image[name] for image in images], (num, *value.shape))
            for name, value in self.values.items()
        }
        if self.unconstrain is not None:
            dtype = jnp.result_type(float)
            given = jax.tree.map(lambda leaf: leaf.astype(dtype), stacked)
            positions = _unconstrained(as_functions(self.unconstrain), self.position, given)
        else:
            positions = jax.tree.unflatten(self.treedef, [stacked[name] for name in self.names])
        leaves = [
            np.asarray(leaf, np.float64).reshape(num, -1) for leaf in jax.tree.leaves(positions)
        ]
        return np.concatenate(leaves, axis=1)[: len(images)]

    def closure(self, symmetries: list[Symmetry]) -> tuple[list[Values], bool]:
        """Return all images under compositions, without the position, and whether these are all."""
        generators = [fn for symmetry in symmetries for fn in symmetry.generators()]
        found = [self.values]
        for values in found:  # grows
            for generator in generators:
                image = generator(values)
                if not any(_same(image, other) for other in found):
                    if len(found) > MOST_IMAGES:
                        return found[1:], False
                    found.append(image)
        return found[1:], len(found) <= MOST_IMAGES


@compiled
def _constrained(fn: Callable[..., Any], position: ArrayTree) -> ArrayTree:
    return fn(position)


@compiled
def _unconstrained(fn: Callable[..., Any], position: ArrayTree, values: ArrayTree) -> ArrayTree:
    return jax.vmap(lambda own: fn(position, own))(values)


def _same(one: Values, two: Values) -> bool:
    return all(np.allclose(one[name], two[name], rtol=SAME, atol=SAME) for name in one)
