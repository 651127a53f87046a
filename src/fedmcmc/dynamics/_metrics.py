"""Constant metrics of Langevin steps, and inverse mass matrices of momenta."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Described, register_dataclass


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Metric(Described):
    """Positive definite matrix ``B`` with a root ``C``, ``B = C C'``; ``()`` for the identity.

    A diagonal is a pytree shaped as the position; a dense matrix is ``[d, d]`` over the raveled
    position. A position may itself be a matrix, so the two are only distinguished when the metric
    is applied to a position.
    """

    matrix: ArrayTree
    roots: ArrayTree  # root of each entry, for a diagonal
    factor: ArrayTree  # Cholesky factor if the matrix may be dense, otherwise ()

    @classmethod
    def of(cls, matrix: ArrayTree | None) -> "Metric":
        """Return the metric for ``None`` (the identity), a diagonal or a dense matrix."""
        if matrix is None:
            return IDENTITY
        matrix = jax.tree.map(trees.as_float, matrix)
        factor: ArrayTree = ()
        if isinstance(matrix, Array) and matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]:
            factor = jnp.linalg.cholesky(matrix)
        return cls(matrix, jax.tree.map(jnp.sqrt, matrix), factor)

    def root_times(self, normals: ArrayTree) -> ArrayTree:
        """Return ``C`` times standard normals, which has the covariance ``B``."""
        return _times(self.roots if self._is_diagonal(normals) else self.factor, normals)

    def transposed_root_times(self, gradient: ArrayTree) -> ArrayTree:
        """Return ``C'`` times a gradient, the gradient in coordinates ``z = inverse(C) x``."""
        if self._is_diagonal(gradient):
            return _times(self.roots, gradient)
        return _times(jax.tree.map(jnp.transpose, self.factor), gradient)

    def times(self, gradient: ArrayTree) -> ArrayTree:
        """Return ``B`` times a gradient."""
        return _times(self.matrix, gradient)

    def check(self, position: ArrayTree, name: str = "metric") -> None:
        """Raise `ValueError` unless the matrix fits the position and is positive definite."""
        if trees.is_empty(self.matrix):
            return
        size = trees.num_elements(position)
        concrete = not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(self.matrix))
        if self._is_diagonal(position):
            leaves = jax.tree.leaves(self.matrix)
            if concrete and not all(bool(np.all(np.asarray(leaf) > 0)) for leaf in leaves):
                raise ValueError(f"{name} must be positive in every coordinate.")
        elif trees.same_structure(self.matrix, 0) and self.matrix.shape == (size, size):
            matrix = np.asarray(self.matrix, np.float64) if concrete else np.eye(1)
            symmetric = np.allclose(matrix, matrix.T, rtol=1e-4)
            if not (symmetric and np.linalg.eigvalsh(matrix).min() > 0):
                raise ValueError(f"{name} must be symmetric and positive definite.")
        else:
            raise ValueError(
                f"{name} must be shaped as the position, "
                f"{jax.tree.map(jnp.shape, position)}, or be a matrix {(size, size)}, got "
                f"{jax.tree.map(jnp.shape, self.matrix)}."
            )

    def _is_diagonal(self, like: ArrayTree) -> bool:
        return trees.same_shapes(self.matrix, like)


IDENTITY = Metric((), (), ())
"""Identity matrix as a metric."""


def _times(matrix: ArrayTree, vector: ArrayTree) -> ArrayTree:
    if trees.is_empty(matrix):
        return vector
    if trees.same_shapes(matrix, vector):
        return jax.tree.map(lambda m, x: m.astype(x.dtype) * x, matrix, vector)
    flat = jnp.matmul(matrix, trees.ravel(vector), precision="highest")
    return trees.cast_like(trees.unravel(flat, vector), vector)
