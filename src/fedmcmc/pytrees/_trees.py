"""Leafwise arithmetic on pytrees; scalars take the dtype of the leaf they meet."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree


def cast(number: Any, leaf: Array) -> Array:
    """Return `number` in the dtype of `leaf`."""
    return jnp.asarray(number).astype(leaf.dtype)


def cast_like(tree: ArrayTree, like: ArrayTree) -> ArrayTree:
    """Return `tree` with each leaf in the dtype of its counterpart in `like`."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)


def as_float(leaf: Any) -> Array:
    """Return `leaf` as a floating-point array; integers take the default float type."""
    if isinstance(leaf, np.ndarray) and not jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = leaf.astype(jnp.result_type(float))  # by NumPy, which compiles nothing
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array.astype(jnp.result_type(float))


def as_floats(tree: ArrayTree, name: str) -> ArrayTree:
    """Return a tree of a user's numbers with `as_float` of every leaf.

    Raises
    ------
    TypeError
        If a leaf is text or something else that is no real number.

    Examples
    --------
    >>> as_floats({"scale": "big"}, "position")
    Traceback (most recent call last):
    TypeError: position['scale'] must be a number or an array of numbers, got 'big' (str).
    """

    def one(path: Any, leaf: Any) -> Array:
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        if not (jnp.issubdtype(dtype, np.bool) or jnp.issubdtype(dtype, jnp.number)):
            place = name + jax.tree_util.keystr(path)
            raise TypeError(
                f"{place} must be a number or an array of numbers, got {repr(leaf)[:80]} "
                f"({type(leaf).__name__})."
            )
        return as_float(leaf)

    return jax.tree_util.tree_map_with_path(one, tree)


def strong(leaf: Any) -> Any:
    """Return an array whose type is not weak; NumPy arrays as they are."""
    return leaf if isinstance(leaf, np.ndarray) else jnp.asarray(leaf, jnp.result_type(leaf))


def add(a: ArrayTree, b: ArrayTree) -> ArrayTree:
    """Return ``a + b``."""
    return jax.tree.map(jnp.add, a, b)


def subtract(a: ArrayTree, b: ArrayTree) -> ArrayTree:
    """Return ``a - b``."""
    return jax.tree.map(jnp.subtract, a, b)


def scale(number: Any, tree: ArrayTree) -> ArrayTree:
    """Return ``number * tree``."""
    return jax.tree.map(lambda leaf: cast(number, leaf) * leaf, tree)


def add_scaled(a: ArrayTree, number: Any, b: ArrayTree) -> ArrayTree:
    """Return ``a + number * b``."""
    return jax.tree.map(lambda x, y: x + cast(number, x) * y, a, b)


def map_in_lots(fn: Callable[[ArrayTree], ArrayTree], items: ArrayTree, size: int) -> ArrayTree:
    """Return ``fn(item)`` of each item, leaves ``[num, ...]``, `size` of them at a time.

    The last lot is filled up with the last item: a lot of another size would be another copy of
    the program, as `jax.lax.map` makes it.
    """
    num = jax.tree.leaves(items)[0].shape[0]
    if num <= size:
        return jax.vmap(fn)(items)
    places = jnp.minimum(jnp.arange(-(-num // size) * size), num - 1)
    filled = jax.tree.map(lambda leaf: leaf[places], items)
    found = jax.lax.map(fn, filled, batch_size=size)
    return jax.tree.map(lambda leaf: leaf[:num], found)


def zeros_like(like: ArrayTree) -> ArrayTree:
    """Return zeros of the shapes and dtypes of `like` (arrays or shapes)."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)


def select(condition: Array, a: ArrayTree, b: ArrayTree) -> ArrayTree:
    """Return `a` where the scalar `condition` holds, else `b`."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def squared_norm(tree: ArrayTree) -> Array:
    """Return the squared Euclidean norm over all leaves, ``[]`` float32."""
    # Flat, because XLA sums a matrix on CPU one number at a time.
    flat = [widen(jnp.ravel(leaf)) for leaf in jax.tree.leaves(tree)]
    terms = [jnp.sum(jnp.square(leaf)).astype(jnp.float32) for leaf in flat]
    return sum(terms, jnp.zeros((), jnp.float32))


def norm(tree: ArrayTree) -> Array:
    """Return the Euclidean norm over all leaves, ``[]`` float32; not finite if an entry is not.

    Squares are of entries relative to the largest, so none overflows, and the norm of one number
    is that number, exactly.
    """
    leaves = [widen(leaf) for leaf in jax.tree.leaves(tree) if leaf.size]
    if not leaves:
        return jnp.zeros((), jnp.float32)
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x)).astype(jnp.float32) for x in leaves]))
    safe = jnp.where(largest > 0, largest, 1)
    return largest * jnp.sqrt(squared_norm([x / cast(safe, x) for x in leaves]))


def widen(leaf: Array) -> Array:
    """Return `leaf` in float32 at least: sums of squares of sixteen bits overflow."""
    return leaf if leaf.dtype.itemsize >= 4 else leaf.astype(jnp.float32)


def ravel(tree: ArrayTree) -> Array:
    """Return all numbers of `tree` in one vector ``[num_elements]``, in the widest dtype."""
    leaves = jax.tree.leaves(tree)
    if len(leaves) == 1:
        return leaves[0].reshape(-1)
    widest = max((leaf.dtype for leaf in leaves), key=lambda dtype: dtype.itemsize)
    return jnp.concatenate([leaf.astype(widest).reshape(-1) for leaf in leaves])


def unravel(flat: Array, like: ArrayTree) -> ArrayTree:
    """Return the numbers of `flat` ``[..., num_elements]`` in the shapes of `like`.

    Leading axes of `flat` come first in every leaf; the dtype stays.
    """
    leaves, treedef = jax.tree.flatten(like)
    if len(leaves) == 1:
        pieces = [flat]
    else:
        ends = [num_elements(leaves[: i + 1]) for i in range(len(leaves) - 1)]
        pieces = jnp.split(flat, ends, axis=-1)
    shaped = [
        piece.reshape(flat.shape[:-1] + leaf.shape)
        for piece, leaf in zip(pieces, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, shaped)


@partial(jax.jit, inline=True)
def all_finite(tree: ArrayTree) -> Array:
    """Return whether every inexact leaf is finite, ``[]`` bool."""
    finite = jnp.array(True)
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            finite = finite & jnp.all(jnp.isfinite(jnp.ravel(leaf)))
    return finite


def shapes_of(tree: ArrayTree) -> ArrayTree:
    """Return `tree` with each leaf replaced by its `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def is_key(leaf: Any) -> bool:
    """Return whether `leaf` is an array of typed random keys."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def shapes_but_keys(tree: ArrayTree) -> ArrayTree:
    """Return `shapes_of` of `tree`, typed keys as they are: their shapes do not tell their kind."""
    return jax.tree.map(lambda leaf: leaf if is_key(leaf) else shapes_of(leaf), tree)


def same_structure(a: ArrayTree, b: ArrayTree) -> bool:
    """Return whether `a` and `b` have the same tree structure, whatever their leaves."""
    first: Any = jax.tree.structure(a)
    return bool(first == jax.tree.structure(b))


def same_shapes(a: ArrayTree, b: ArrayTree) -> bool:
    """Return whether `a` and `b` have the same structure and leaves of the same shapes."""
    return same_structure(a, b) and all(
        jnp.shape(x) == jnp.shape(y)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def first_difference(wanted: ArrayTree, actual: ArrayTree) -> str:
    """Return where two trees first differ in structure, shape or dtype; empty if nowhere.

    Examples
    --------
    >>> first_difference({"a": jnp.zeros(2)}, {"a": jnp.zeros(3)})
    'a must be float32[2], got float32[3]'
    >>> first_difference({"a": jnp.zeros(2)}, {"b": jnp.zeros(2)})
    'expected a, which is missing'
    """
    places = [
        {
            jax.tree_util.keystr(path, simple=True, separator="."): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(shapes_of(tree))
        }
        for tree in (wanted, actual)
    ]
    for name, leaf in places[0].items():
        if name not in places[1]:
            return f"expected {name or 'one array'}, which is missing"
        other = places[1][name]
        if (leaf.shape, leaf.dtype) != (other.shape, other.dtype):
            descriptions = [f"{x.dtype}{list(x.shape)}" for x in (leaf, other)]
            return f"{name or 'it'} must be {descriptions[0]}, got {descriptions[1]}"
    extra = [name for name in places[1] if name not in places[0]]
    if extra:
        return f"{extra[0] or 'one array'} is not part of it"
    return (
        "" if same_structure(wanted, actual) else "other types hold its arrays, as another kernel's"
    )


def is_empty(tree: ArrayTree) -> bool:
    """Return whether `tree` holds no array."""
    return not jax.tree.leaves(tree)


def num_elements(tree: ArrayTree) -> int:
    """Return the number of scalars in `tree` (arrays or shapes)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def descend(
    optimizer: Any, gradient: ArrayTree, state: ArrayTree, position: ArrayTree
) -> tuple[ArrayTree, ArrayTree]:
    """Return an optax optimizer's updates and its new state, also under strict promotion.

    Some of them raise a float to an integer count, which strict promotion forbids.
    """
    with jax.numpy_dtype_promotion("standard"):
        updates, state = optimizer.update(gradient, state, position)
    return updates, state


def named_leaves(tree: ArrayTree, default: str = "theta") -> dict[str, Any]:
    """Return the leaves of `tree` by name: dict keys and positions joined by dots."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        named[jax.tree_util.keystr(path, simple=True, separator=".") or default] = leaf
    return named


def variables(named: dict[str, Any]) -> dict[str, Any]:
    """Return values by names that ArviZ and xarray take for variables: "/" becomes ".".

    A model in NumPyro's `scope` has sites such as ``"hospital/effect"``; a ``DataTree`` takes "/"
    for a path. Everything that hands draws to ArviZ or Zarr calls this function.

    Raises
    ------
    ValueError
        If two names become one.

    Examples
    --------
    >>> variables({"hospital/effect": 1, "scale": 2})
    {'hospital.effect': 1, 'scale': 2}
    """
    renamed: dict[str, Any] = {}
    for name, value in named.items():
        new = name.replace("/", ".")
        if new in renamed:
            raise ValueError(
                f"Two parameters would both be named {new!r} in ArviZ, which takes no '/' in names "
                f"(of {', '.join(named)}): rename one of them."
            )
        renamed[new] = value
    return renamed


def element_names(tree: ArrayTree, places: Sequence[np.ndarray] | None = None) -> list[str]:
    """Return a name for each number of the raveled tree.

    `places` are, for each leaf, those of its raveled numbers that are to be named; by default all.

    Examples
    --------
    >>> element_names({"a": jnp.zeros(()), "b": jnp.zeros(2)}), element_names(jnp.zeros(1))
    (['a', 'b[0]', 'b[1]'], ['coordinate 0'])
    """
    names = []
    for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        stem = jax.tree_util.keystr(path, simple=True, separator=".")
        own = np.arange(math.prod(leaf.shape)) if places is None else places[i]
        shape = leaf.shape or (1,)
        for indices in np.stack(np.unravel_index(own, shape), axis=-1).tolist():
            index = ", ".join(map(str, indices)) if leaf.shape else ""
            inside = f"[{index}]" if index else ""
            plain = f"coordinate {index}" if index else "the coordinate"
            names.append(stem + inside if stem else plain)
    return names


def num_bytes(tree: ArrayTree) -> int:
    """Return the memory of all leaves of `tree`."""
    return sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def num_bits(tree: ArrayTree) -> int:
    """Return the bits of all inexact leaves of `tree`, uncompressed: 32 a float32.

    Integers (a round number, a seed) steer a round and are not counted.
    """
    leaves = jax.tree.leaves(tree)
    return 8 * num_bytes([leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)])
