"""Mass matrices of Hamiltonian dynamics, diagonal or dense."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc import trees
from fedmcmc._types import ArrayTree, Static

__all__ = ["MassMatrix"]


class MassMatrix(NamedTuple):
    """An inverse mass matrix and a root of it; both ``()`` for the identity.

    A diagonal is a pytree shaped as a position; a dense matrix is ``[d, d]`` over the raveled
    position.
    """

    inverse_mass: ArrayTree
    root: ArrayTree
    dense: Static[bool]

    @classmethod
    def of(cls, inverse_mass_matrix: ArrayTree | None) -> "MassMatrix":
        """Build from ``None``, a diagonal or a dense matrix.

        Raises
        ------
        ValueError
            If concrete entries of a diagonal are not positive, or a matrix is not symmetric and
            positive definite.
        """
        if inverse_mass_matrix is None:
            return cls((), (), Static(False))
        inverse = jax.tree.map(trees.as_float, inverse_mass_matrix)
        if not (isinstance(inverse, Array) and inverse.ndim == 2):
            _check_diagonal(inverse)
            return cls(inverse, jax.tree.map(jnp.sqrt, inverse), Static(False))
        _check_dense(inverse)
        return cls(inverse, jnp.linalg.cholesky(inverse), Static(True))

    def velocity(self, normals: ArrayTree) -> ArrayTree:
        """Return a velocity of covariance `inverse_mass` from standard normals."""
        return _times(self.root, normals, self.dense.value)

    def acceleration(self, gradient: ArrayTree) -> ArrayTree:
        """Return ``inverse_mass * gradient``."""
        return _times(self.inverse_mass, gradient, self.dense.value)

    def check(self, position: ArrayTree) -> None:
        """Raise `ValueError` unless the matrix fits the position."""
        if trees.is_empty(self.inverse_mass):
            return
        given = jax.tree.map(jnp.shape, self.inverse_mass)
        wanted = jax.tree.map(jnp.shape, position)
        size = trees.num_elements(position)
        if self.dense.value:
            fits = given == (size, size)
        else:
            fits = trees.same_structure(self.inverse_mass, position) and given == wanted
        if not fits:
            raise ValueError(
                f"inverse_mass_matrix must be shaped as the position, {wanted}, or be a matrix "
                f"{(size, size)}, got {given}."
            )


def _check_diagonal(inverse: ArrayTree) -> None:
    for leaf in jax.tree.leaves(inverse):
        if not isinstance(leaf, jax.core.Tracer) and not bool(np.all(np.asarray(leaf) > 0)):
            raise ValueError("inverse_mass_matrix must be positive in every coordinate.")


def _check_dense(inverse: Array) -> None:
    if inverse.shape[0] != inverse.shape[1]:
        raise ValueError(f"inverse_mass_matrix must be square, got shape {inverse.shape}.")
    if isinstance(inverse, jax.core.Tracer):
        return
    matrix = np.asarray(inverse, np.float64)
    if not np.allclose(matrix, matrix.T, rtol=1e-4) or not np.linalg.eigvalsh(matrix).min() > 0:
        raise ValueError("inverse_mass_matrix must be symmetric and positive definite.")


def _times(matrix: ArrayTree, vector: ArrayTree, dense: bool) -> ArrayTree:
    if trees.is_empty(matrix):
        return vector
    if not dense:
        return jax.tree.map(jnp.multiply, matrix, vector)
    flat = jnp.matmul(matrix, trees.ravel(vector), precision="highest")
    return trees.cast_like(trees.unravel(flat, vector), vector)
