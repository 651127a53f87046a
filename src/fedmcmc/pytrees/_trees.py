"""Leafwise arithmetic on pytrees; scalars are cast to the dtype of each leaf."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from fedmcmc.types import ArrayTree


def cast(number: object, leaf: Array) -> Array:
    """Return `number` in the dtype of `leaf`."""
    return jnp.asarray(number).astype(leaf.dtype)


def cast_like(tree: ArrayTree, like: ArrayTree) -> ArrayTree:
    """Return `tree` with each leaf in the dtype of the corresponding leaf of `like`."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)


def as_float(leaf: ArrayLike) -> Array:
    """Return `leaf` as a floating-point array; integers become the default float type."""
    if isinstance(leaf, np.ndarray) and not jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = leaf.astype(jnp.result_type(float))  # NumPy compiles nothing
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array.astype(jnp.result_type(float))


def as_floats(tree: ArrayTree, name: str) -> ArrayTree:
    """Return a user's pytree with floating-point arrays as leaves.

    Raise `TypeError` if a leaf does not hold numbers; the message starts with `name`.

    Examples
    --------
    >>> as_floats({"scale": "big"}, "position")
    Traceback (most recent call last):
    TypeError: position['scale'] must be a number or an array of numbers, got 'big' (str).
    """

    def convert(path: KeyPath, leaf: Any) -> Array:
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        if not any(jnp.issubdtype(dtype, kind) for kind in (np.bool, jnp.number)):
            raise TypeError(
                f"{name}{jax.tree_util.keystr(path)} must be a number or an array of numbers, got "
                f"{repr(leaf)[:80]} ({type(leaf).__name__})."
            )
        return as_float(leaf)

    return jax.tree_util.tree_map_with_path(convert, tree)


def strip_weak_type(leaf: object) -> Any:
    """Return `leaf` as an array whose type is not weak; NumPy arrays are returned unchanged."""
    return leaf if isinstance(leaf, np.ndarray) else jnp.asarray(leaf, jnp.result_type(leaf))


def add(a: ArrayTree, b: ArrayTree) -> ArrayTree:
    """Return ``a + b``."""
    return jax.tree.map(jnp.add, a, b)


def subtract(a: ArrayTree, b: ArrayTree) -> ArrayTree:
    """Return ``a - b``."""
    return jax.tree.map(jnp.subtract, a, b)


def scale(number: ArrayLike, tree: ArrayTree) -> ArrayTree:
    """Return ``number * tree``."""
    return jax.tree.map(lambda leaf: cast(number, leaf) * leaf, tree)


def add_scaled(a: ArrayTree, number: ArrayLike, b: ArrayTree) -> ArrayTree:
    """Return ``a + number * b``."""
    return jax.tree.map(lambda x, y: x + cast(number, x) * y, a, b)


def map_in_batches(fn: Callable[[ArrayTree], ArrayTree], items: ArrayTree, size: int) -> ArrayTree:
    """Return ``fn(item)`` of each item, leaves ``[num, ...]``, in batches of `size` items.

    The last batch is padded with the last item, because `jax.lax.map` would compile a second copy
    of the program for a smaller batch.
    """
    num = jax.tree.leaves(items)[0].shape[0]
    if num <= size:
        return jax.vmap(fn)(items)
    indices = jnp.minimum(jnp.arange(-(-num // size) * size), num - 1)
    padded = jax.tree.map(lambda leaf: leaf[indices], items)
    results = jax.lax.map(fn, padded, batch_size=size)
    return jax.tree.map(lambda leaf: leaf[:num], results)


def zeros_like(like: ArrayTree) -> ArrayTree:
    """Return zeros with the shapes and dtypes of `like` (arrays or shapes)."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)


def select(condition: Array, a: ArrayTree, b: ArrayTree) -> ArrayTree:
    """Return `a` if the scalar `condition` is true, else `b`."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def squared_norm(tree: ArrayTree) -> Array:
    """Return the squared Euclidean norm over all leaves, ``[]`` float32."""
    # Ravel, because on CPU XLA sums a matrix number by number.
    flat = [widen(jnp.ravel(leaf)) for leaf in jax.tree.leaves(tree)]
    terms = [jnp.sum(jnp.square(leaf)).astype(jnp.float32) for leaf in flat]
    return sum(terms, jnp.zeros((), jnp.float32))


def norm(tree: ArrayTree) -> Array:
    """Return the Euclidean norm over all leaves, ``[]`` float32; not finite if an entry is not.

    Entries are divided by the largest one before they are squared. Squares therefore do not
    overflow, and the norm of a single number is exactly its absolute value.
    """
    leaves = [widen(leaf) for leaf in jax.tree.leaves(tree) if leaf.size]
    if not leaves:
        return jnp.zeros((), jnp.float32)
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x)).astype(jnp.float32) for x in leaves]))
    safe = jnp.where(largest > 0, largest, 1)
    return largest * jnp.sqrt(squared_norm([x / cast(safe, x) for x in leaves]))


def widen(leaf: Array) -> Array:
    """Return `leaf` in float32 or wider, because sums of squares overflow in 16 bits."""
    return leaf if leaf.dtype.itemsize >= 4 else leaf.astype(jnp.float32)


def ravel(tree: ArrayTree) -> Array:
    """Return all numbers of `tree` in a vector ``[num_elements]`` of the widest dtype.

    The vector of NumPy arrays is a NumPy array.
    """
    leaves = jax.tree.leaves(tree)
    if len(leaves) == 1:
        return leaves[0].reshape(-1)
    widest = max((leaf.dtype for leaf in leaves), key=lambda dtype: dtype.itemsize)
    is_on_host = all(isinstance(leaf, np.ndarray) for leaf in leaves)
    concatenate: Any = np.concatenate if is_on_host else jnp.concatenate
    flat: Array = concatenate([leaf.astype(widest).reshape(-1) for leaf in leaves])
    return flat


def unravel(flat: Array | np.ndarray, like: ArrayTree) -> ArrayTree:
    """Return the numbers of `flat` ``[..., num_elements]`` as a tree with the shapes of `like`.

    Each leaf has the leading axes and the dtype of `flat`, and is a NumPy array if `flat` is one.
    """
    leaves, treedef = jax.tree.flatten(like)
    ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves])[:-1]
    split: Any = np.split if isinstance(flat, np.ndarray) else jnp.split
    pieces = split(flat, ends, axis=-1) if len(leaves) > 1 else [flat]
    shaped = [
        piece.reshape(flat.shape[:-1] + leaf.shape)
        for piece, leaf in zip(pieces, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, shaped)


def restore(flat: Array | np.ndarray, like: ArrayTree) -> ArrayTree:
    """Return the numbers of `flat` ``[..., num_elements]`` with the shapes and dtypes of `like`.

    Each leaf has the leading axes of `flat`, and is a NumPy array if `flat` is one: that compiles
    nothing.
    """
    return cast_like(unravel(flat, like), like)


@partial(jax.jit, inline=True)
def all_finite(tree: ArrayTree) -> Array:
    """Return whether all inexact leaves are finite, ``[]`` bool."""
    finite = jnp.array(True)
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            finite = finite & jnp.all(jnp.isfinite(jnp.ravel(leaf)))
    return finite


def shapes_of(tree: ArrayTree) -> ArrayTree:
    """Return `tree` with each leaf replaced by its `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def is_key(leaf: object) -> bool:
    """Return whether `leaf` is an array of typed random keys."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def shapes_but_keys(tree: ArrayTree) -> ArrayTree:
    """Return `shapes_of` of `tree`, but keep typed keys, whose shapes do not identify them."""
    return jax.tree.map(lambda leaf: leaf if is_key(leaf) else shapes_of(leaf), tree)


def same_structure(a: ArrayTree, b: ArrayTree) -> bool:
    """Return whether `a` and `b` have the same tree structure, with any leaves."""
    structure: Any = jax.tree.structure(a)
    return bool(structure == jax.tree.structure(b))


def same_shapes(a: ArrayTree, b: ArrayTree) -> bool:
    """Return whether `a` and `b` have the same structure and leaves of the same shapes."""
    return same_structure(a, b) and all(
        jnp.shape(x) == jnp.shape(y)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def first_difference(expected: ArrayTree, actual: ArrayTree) -> str:
    """Describe the first difference in structure, shape or dtype; empty if there is none.

    Examples
    --------
    >>> first_difference({"a": jnp.zeros(2)}, {"a": jnp.zeros(3)})
    'a must be float32[2], got float32[3]'
    >>> first_difference({"a": jnp.zeros(2)}, {"b": jnp.zeros(2)})
    'expected a, which is missing'
    """
    expected_leaves, actual_leaves = (
        named_leaves(shapes_of(tree), "") for tree in (expected, actual)
    )
    for name, leaf in expected_leaves.items():
        if name not in actual_leaves:
            return f"expected {name or 'one array'}, which is missing"
        shapes = [f"{x.dtype}{list(x.shape)}" for x in (leaf, actual_leaves[name])]
        if shapes[0] != shapes[1]:
            return f"{name or 'it'} must be {shapes[0]}, got {shapes[1]}"
    extra = [name for name in actual_leaves if name not in expected_leaves]
    if extra:
        return f"{extra[0] or 'one array'} is unexpected"
    if not same_structure(expected, actual):
        return "its arrays are in containers of other types, as in the state of another kernel"
    return ""


def is_empty(tree: ArrayTree) -> bool:
    """Return whether `tree` has no leaves."""
    return not jax.tree.leaves(tree)


def num_elements(tree: ArrayTree) -> int:
    """Return the number of scalars in `tree` (arrays or shapes)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def descend(
    optimizer: Any, gradient: ArrayTree, state: ArrayTree, position: ArrayTree
) -> tuple[ArrayTree, ArrayTree]:
    """Return the updates and the new state of an optax optimizer, also under strict promotion.

    Some optimizers raise a float to the power of an integer, which strict promotion forbids.
    """
    with jax.numpy_dtype_promotion("standard"):
        updates, state = optimizer.update(gradient, state, position)
    return updates, state


def named_leaves(tree: ArrayTree, default: str = "theta") -> dict[str, Any]:
    """Return the leaves of `tree` by name: keys and indices joined by dots."""
    return {
        jax.tree_util.keystr(path, simple=True, separator=".") or default: leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def variables(named: dict[str, Any]) -> dict[str, Any]:
    """Return values by names that are valid for variables of ArviZ and Zarr: "/" becomes ".".

    A NumPyro model with `scope` has sites such as ``"hospital/effect"``, and a ``DataTree``
    interprets "/" as a path. Raise `ValueError` if two names become equal.

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
                f"Two parameters would both be named {new!r} in ArviZ, which does not allow '/' in "
                f"names: rename one of them (all names: {', '.join(named)})."
            )
        renamed[new] = value
    return renamed


def element_names(tree: ArrayTree, indices: Sequence[np.ndarray] | None = None) -> list[str]:
    """Return a name for each number of the raveled tree.

    `indices` selects numbers of each raveled leaf; by default all numbers are named.

    Examples
    --------
    >>> element_names({"a": jnp.zeros(()), "b": jnp.zeros(2)}), element_names(jnp.zeros(1))
    (['a', 'b[0]', 'b[1]'], ['coordinate 0'])
    """
    names = []
    for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        stem = jax.tree_util.keystr(path, simple=True, separator=".")
        selected = np.arange(math.prod(leaf.shape)) if indices is None else indices[i]
        shape = leaf.shape or (1,)
        for entry in np.stack(np.unravel_index(selected, shape), axis=-1).tolist():
            index = ", ".join(map(str, entry)) if leaf.shape else ""
            if stem:
                names.append(f"{stem}[{index}]" if index else stem)
            else:
                names.append(f"coordinate {index}" if index else "the coordinate")
    return names


def num_bytes(tree: ArrayTree) -> int:
    """Return the number of bytes of all leaves of `tree`."""
    return sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def num_bits(tree: ArrayTree) -> int:
    """Return the number of bits of all inexact leaves of `tree`: 32 per float32.

    Integers, such as a round number or a seed, are not counted.
    """
    leaves = jax.tree.leaves(tree)
    return 8 * num_bytes([leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)])
