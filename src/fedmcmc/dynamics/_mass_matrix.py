"""Mass matrices of Hamiltonian dynamics, diagonal or dense."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._types import ArrayTree
from fedmcmc.pytrees import trees

__all__ = ["MassMatrix"]


@register_dataclass
@dataclass(frozen=True, eq=False)
class MassMatrix:
    """An inverse mass matrix and its roots; all ``()`` for the identity.

    A diagonal is a pytree shaped as a position; a dense matrix is ``[d, d]`` over the raveled
    position. Which of the two it is shows when it meets a position, as that may be a matrix too.
    """

    inverse: ArrayTree
    roots: ArrayTree  # of every entry, for a diagonal
    factor: ArrayTree  # Cholesky's, of what may be a dense matrix, else ()

    @classmethod
    def of(cls, inverse_mass_matrix: ArrayTree | None) -> "MassMatrix":
        """Build from ``None``, a diagonal or a dense matrix; `check` says whether it is one."""
        if inverse_mass_matrix is None:
            return cls((), (), ())
        inverse = jax.tree.map(trees.as_float, inverse_mass_matrix)
        factor: ArrayTree = ()
        if (
            isinstance(inverse, Array)
            and inverse.ndim == 2
            and inverse.shape[0] == inverse.shape[1]
        ):
            factor = jnp.linalg.cholesky(inverse)
        return cls(inverse, jax.tree.map(jnp.sqrt, inverse), factor)

    def velocity(self, normals: ArrayTree) -> ArrayTree:
        """Return a velocity of covariance `inverse` from standard normals."""
        return _times(self.roots if self._is_diagonal(normals) else self.factor, normals)

    def acceleration(self, gradient: ArrayTree) -> ArrayTree:
        """Return ``inverse * gradient``."""
        return _times(self.inverse, gradient)

    def check(self, position: ArrayTree) -> None:
        """Raise `ValueError` unless the matrix fits the position and is positive definite."""
        if trees.is_empty(self.inverse):
            return
        size = trees.num_elements(position)
        concrete = not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(self.inverse))
        if self._is_diagonal(position):
            leaves = jax.tree.leaves(self.inverse)
            if concrete and not all(bool(np.all(np.asarray(leaf) > 0)) for leaf in leaves):
                raise ValueError("inverse_mass_matrix must be positive in every coordinate.")
        elif trees.same_structure(self.inverse, 0) and self.inverse.shape == (size, size):
            matrix = np.asarray(self.inverse, np.float64) if concrete else np.eye(1)
            symmetric = np.allclose(matrix, matrix.T, rtol=1e-4)
            if not (symmetric and np.linalg.eigvalsh(matrix).min() > 0):
                raise ValueError("inverse_mass_matrix must be symmetric and positive definite.")
        else:
            raise ValueError(
                f"inverse_mass_matrix must be shaped as the position, "
                f"{jax.tree.map(jnp.shape, position)}, or be a matrix {(size, size)}, got "
                f"{jax.tree.map(jnp.shape, self.inverse)}."
            )

    def _is_diagonal(self, like: ArrayTree) -> bool:
        return _shaped_alike(self.inverse, like)


def _shaped_alike(a: ArrayTree, b: ArrayTree) -> bool:
    return trees.same_structure(a, b) and all(
        jnp.shape(x) == jnp.shape(y)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def _times(matrix: ArrayTree, vector: ArrayTree) -> ArrayTree:
    if trees.is_empty(matrix):
        return vector
    if _shaped_alike(matrix, vector):
        return jax.tree.map(lambda m, x: m.astype(x.dtype) * x, matrix, vector)
    flat = jnp.matmul(matrix, trees.ravel(vector), precision="highest")
    return trees.cast_like(trees.unravel(flat, vector), vector)
