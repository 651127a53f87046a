"""Which entries of the rows a network reads, and what its log likelihood must fulfill."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, Posterior
from fedmcmc.data import FederatedData
from fedmcmc.interop._flax_module import Shapes

__all__ = ["Column", "Columns", "check_rows", "check_terms", "example_rows"]

Column = str | int

CHECKED_ROWS = 3
ROW_TOLERANCE = 1e-3
"""Largest relative change of a row's log likelihood with the other rows of its batch."""


@dataclass(frozen=True)
class Columns:
    """Keys of the module's arguments and of the outcome."""

    inputs: tuple[Column, ...]
    outcome: Any

    @classmethod
    def of(cls, inputs: Column | Sequence[Column], outcome: Column | None) -> "Columns":
        return cls((inputs,) if isinstance(inputs, (str, int)) else tuple(inputs), outcome)

    def check(self, rows: Any) -> None:
        known = list(rows) if isinstance(rows, dict) else list(range(len(rows)))
        for name, key in [*(("inputs", key) for key in self.inputs), ("outcome", self.outcome)]:
            if key not in known:
                raise ValueError(
                    f"{name}={key!r} is not among the keys of the rows, {known}. Rows of other "
                    f"keys need the arguments inputs and outcome."
                )
        if not isinstance(rows[self.outcome], np.ndarray):
            raise ValueError(f"outcome={self.outcome!r} must be one array of the rows.")

    def arguments(self, rows: Any) -> tuple[ArrayTree, ...]:
        return tuple(rows[key] for key in self.inputs)

    def input_shapes(self, rows: Any) -> Shapes:
        flat = [jax.tree.flatten(tree) for tree in self.arguments(rows)]
        return tuple((treedef, tuple((x.shape[1:], x.dtype) for x in xs)) for xs, treedef in flat)

    def replace_outcome(self, rows: Any, drawn: Array) -> ArrayTree:
        drawn = drawn.astype(rows[self.outcome].dtype)
        if isinstance(rows, dict):
            return {**rows, self.outcome: drawn}
        return tuple(drawn if i == self.outcome else x for i, x in enumerate(rows))


def example_rows(example: ArrayTree | FederatedData) -> Any:
    """Return the rows of `example` as a dict or tuple of NumPy arrays, in the dtypes JAX gives."""
    rows = example.client_rows(0) if isinstance(example, FederatedData) else example
    if not isinstance(rows, dict) and type(rows) is not tuple:
        raise TypeError(
            f"Rows must be a dict or a tuple of arrays for inputs and outcomes, got "
            f"{type(rows).__name__}."
        )
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(rows)]
    if len({shape[:1] for shape in shapes}) != 1 or shapes[0][:1] in ((), (0,)):
        raise ValueError(
            f"example must hold rows, arrays with the same number of rows (at least one) on their "
            f"first axis; got shapes {shapes}."
        )
    arrays = jax.tree.map(np.asarray, rows)
    return jax.tree.map(lambda x: x.astype(jax.dtypes.canonicalize_dtype(x.dtype)), arrays)


def check_terms(posterior: Posterior, position: ArrayTree, rows: ArrayTree) -> None:
    """Check without compiling that the log likelihood has one real term per row."""
    num = jax.tree.leaves(rows)[0].shape[0]
    terms = jax.eval_shape(posterior.loglikelihood_fn, position, rows)
    shape = getattr(terms, "shape", None)
    if shape != (num,) or not jnp.issubdtype(terms.dtype, jnp.floating):
        raise ValueError(
            f"The likelihood must return one real term per row, shape ({num},), got {terms}."
        )


def check_rows(posterior: Posterior, rows: ArrayTree) -> None:
    """Check that a row's log likelihood does not depend on the rows beside it or their number."""
    few = jax.tree.map(_vary, rows)

    @jax.jit
    def compare(batch: ArrayTree) -> tuple[Array, Array]:
        position = posterior.init_fn(jax.random.key(0))  # type: ignore[misc]
        # Layers that start at zero would hide what is behind them.
        position = jax.tree.map(
            lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape),
            position,
        )
        first = jax.tree.map(lambda leaf: leaf[:1], batch)
        fn = posterior.loglikelihood_fn
        return fn(position, batch)[0], fn(position, first)[0]

    together, alone = (float(x) for x in compare(few))
    if not np.isclose(together, alone, ROW_TOLERANCE, ROW_TOLERANCE, equal_nan=True):
        raise ValueError(
            f"A row's log likelihood depends on the other rows of its batch: the first row of the "
            f"example has {alone:.6g} alone and {together:.6g} among {CHECKED_ROWS}. Minibatches "
            f"and clients would then disagree about it: normalize over features, not over rows, "
            f"and do not divide by their number (check=False turns this off)."
        )


def _vary(leaf: np.ndarray) -> np.ndarray:
    # The first row as it is, and others that are sure to differ from it.
    few = np.resize(leaf, (CHECKED_ROWS, *leaf.shape[1:]))
    if not np.issubdtype(leaf.dtype, np.floating):
        return few
    return few + np.arange(CHECKED_ROWS, dtype=leaf.dtype).reshape(-1, *[1] * (leaf.ndim - 1))
