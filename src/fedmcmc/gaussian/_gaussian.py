"""Gaussians over pytrees in natural parameters, up to a constant factor.

``log q(theta) = precision_mean' theta - theta' precision theta / 2 + const``. Products add,
quotients subtract and powers scale natural parameters, so surrogates of likelihoods and the sites
of expectation propagation are the same objects, proper or not.

In expectation propagation (Guo et al. 2023, section 2.1) the global approximation is the product
of the prior's site and one site per client, ``q = q_0 * prod_k q_k``. A client's cavity is
``q / q_k``; its likelihood times the cavity is the tilted distribution, and the change of the
global natural parameters that a Gaussian for it asks for is the client's message.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._types import ArrayTree, Described, register_dataclass
from fedmcmc.pytrees import trees
from fedmcmc.random import normals

STRUCTURES = ("scaled_identity", "diagonal", "dense")
"""What a precision may be: one number, one per coordinate, a matrix."""


@register_dataclass
@dataclass(frozen=True, repr=False)
class Gaussian(Described):
    """A Gaussian, or one per client where every leaf has a leading client axis.

    Attributes
    ----------
    precision_mean
        Precision times mean, a pytree shaped as a position, leaves ``[*event]``.
    precision
        ``[]`` for a scaled identity; a pytree shaped as a position for a diagonal; ``[d, d]`` over
        the raveled position for a dense precision.
    structure
        ``"scaled_identity"``, ``"diagonal"`` or ``"dense"``, static.
    labels
        Labels of the clients, of what `fedmcmc.surrogates` returns; else ``None``. A computation
        with the Gaussian drops them.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> q = Gaussian.from_moments(jnp.array([1.0, 2.0]), variance=jnp.array([0.5, 0.25]))
    >>> q.precision.tolist(), q.precision_mean.tolist()
    ([2.0, 4.0], [2.0, 8.0])
    >>> (q * q / q).mean().tolist()
    [1.0, 2.0]
    """

    precision_mean: ArrayTree
    precision: ArrayTree
    structure: str = field(metadata={"static": True})
    labels: ClassVar[tuple[Any, ...] | None] = None

    @classmethod
    def from_moments(
        cls, mean: ArrayTree, covariance: Any = None, *, variance: ArrayTree | None = None
    ) -> "Gaussian":
        """Build from a mean and either a covariance matrix or variances.

        Parameters
        ----------
        mean
            A pytree, leaves ``[*event]`` or ``[num_clients, *event]``.
        covariance
            ``[d, d]`` or ``[num_clients, d, d]`` over the raveled position.
        variance
            A scalar (or ``[num_clients]``) for a scaled identity, or a pytree shaped as `mean`.
            Also taken from `covariance` where that has the shape of `mean`.

        Raises
        ------
        ValueError
            If neither or both are given, shapes do not fit, or (for concrete values) a
            covariance is not positive definite.
        """
        if (covariance is None) == (variance is None):
            raise ValueError("Give either covariance= or variance=, and not both.")
        mean = jax.tree.map(trees.as_float, mean)
        if covariance is not None:
            matrix = _as_matrix(mean, covariance)
            if matrix is not None:
                return cls._from_covariance(mean, *matrix)
            variance = covariance
        variance = jax.tree.map(trees.as_float, variance)
        if isinstance(variance, Array) and _is_scaled(mean, variance):
            _check_positive(variance)
            eta = jax.tree.map(lambda m: m / _expand(variance, m), mean)
            return cls(eta, 1 / variance, "scaled_identity")
        if trees.shapes_of(variance) != trees.shapes_of(mean):
            raise ValueError(
                f"The second argument is neither a covariance matrix over the raveled mean nor "
                f"variances shaped as the mean: mean {_shapes(mean)}, got {_shapes(variance)}."
            )
        _check_positive(variance)
        return cls(
            jax.tree.map(jnp.divide, mean, variance),
            jax.tree.map(lambda v: 1 / v, variance),
            "diagonal",
        )

    @classmethod
    def _from_covariance(cls, mean: ArrayTree, matrix: Array, batched: bool) -> "Gaussian":
        if not isinstance(matrix, jax.core.Tracer):
            # In NumPy: inside jit the same in jax.numpy would be traced, concrete or not.
            smallest = float(np.linalg.eigvalsh(np.asarray(matrix)).min())
            if not smallest > 0:
                raise ValueError(
                    f"A covariance must be positive definite, got a smallest eigenvalue of "
                    f"{smallest:.3g}."
                )

        def one(mean_: ArrayTree, matrix_: Array) -> "Gaussian":
            precision = jnp.linalg.inv(matrix_)
            return with_mean(mean_, (precision + precision.T) / 2, "dense")

        return (jax.vmap(one) if batched else one)(mean, matrix)

    @classmethod
    def uniform(cls, like: ArrayTree, structure: str = "diagonal") -> "Gaussian":
        """Return the improper constant, zero natural parameters shaped for positions as `like`."""
        eta = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.result_type(x)), like)
        if structure == "dense":
            size = trees.num_elements(like)
            return cls(eta, jnp.zeros((size, size), ravel_pytree(eta)[0].dtype), structure)
        if structure == "diagonal":
            return cls(eta, trees.zeros_like(eta), structure)
        if structure == "scaled_identity":
            return cls(eta, jnp.zeros((), jnp.result_type(float)), structure)
        raise ValueError(f"structure must be one of {STRUCTURES}, got {structure!r}.")

    def __mul__(self, other: "Gaussian") -> "Gaussian":
        """Product of densities: natural parameters add."""
        return self._combine(jnp.add, other)

    def __truediv__(self, other: "Gaussian") -> "Gaussian":
        """Quotient of densities: natural parameters subtract."""
        return self._combine(jnp.subtract, other)

    def __pow__(self, power: Any) -> "Gaussian":
        """Power of a density: natural parameters scale."""
        return trees.scale(power, self)

    def _combine(self, fn: Any, other: "Gaussian") -> "Gaussian":
        if self.structure != other.structure:
            raise ValueError(
                f"Cannot combine Gaussians of different structure: {self.structure} and "
                f"{other.structure}."
            )
        return jax.tree.map(fn, self, other)

    def sum(self) -> "Gaussian":
        """Return the product over the leading client axis."""
        return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), self)

    def apply_precision(self, vector: ArrayTree) -> ArrayTree:
        """Return precision times `vector`, a pytree shaped as a position."""
        if self.structure == "scaled_identity":
            return trees.scale(self.precision, vector)
        if self.structure == "diagonal":
            return jax.tree.map(jnp.multiply, self.precision, vector)
        flat, unravel = ravel_pytree(vector)
        return unravel(self.precision @ flat)

    def grad_log(self, position: ArrayTree) -> ArrayTree:
        """Return the gradient of ``log q``: ``precision_mean - precision @ position``."""
        return trees.subtract(self.precision_mean, self.apply_precision(position))

    def mean(self) -> ArrayTree:
        """Return the mean; meaningful where the precision is invertible."""
        if self.structure == "scaled_identity":
            return jax.tree.map(
                lambda eta: eta / trees.cast(self.precision, eta), self.precision_mean
            )
        if self.structure == "diagonal":
            return jax.tree.map(jnp.divide, self.precision_mean, self.precision)
        flat, unravel = ravel_pytree(self.precision_mean)
        return unravel(jnp.linalg.solve(self.precision, flat))

    def sds(self) -> Array:
        """Return the standard deviations over the raveled position, ``[d]``."""
        if self.structure == "dense":
            return jnp.sqrt(jnp.diagonal(self.covariance()))
        return jax.lax.rsqrt(_diagonal(self))

    def covariance(self) -> Array:
        """Return the covariance over the raveled position, ``[d, d]``."""
        if self.structure == "dense":
            return jnp.linalg.inv(self.precision)
        return jnp.diag(1 / _diagonal(self))

    def draw(self, rng_key: Array) -> ArrayTree:
        """Draw a position; meaningful where the precision is positive definite."""
        mean = self.mean()
        noise = jax.tree.map(lambda x: x[0], normals(rng_key, mean, 1))
        if self.structure == "scaled_identity":
            return trees.add_scaled(mean, jax.lax.rsqrt(self.precision), noise)
        if self.structure == "diagonal":
            return jax.tree.map(
                lambda m, p, z: m + jax.lax.rsqrt(p) * z, mean, self.precision, noise
            )
        flat, unravel = ravel_pytree(noise)
        factor = jnp.linalg.cholesky(self.precision)
        return trees.add(
            mean, unravel(jax.scipy.linalg.solve_triangular(factor.T, flat, lower=False))
        )

    @property
    def num_clients(self) -> int:
        """Length of the leading client axis.

        Raises
        ------
        ValueError
            If there is none.
        """
        leaves = jax.tree.leaves(self.precision_mean)
        lengths = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
        if len(lengths) != 1 or None in lengths:
            raise ValueError(
                f"Need one Gaussian per client, with a leading client axis; precision_mean has "
                f"shapes {_shapes(self.precision_mean)}."
            )
        return leaves[0].shape[0]

    def check_clients(self, position: ArrayTree, num_clients: int) -> None:
        """Raise `ValueError` unless this is one Gaussian per client, shaped as `position`."""
        wanted = jax.tree.map(lambda x: (num_clients, *jnp.shape(x)), position)
        size = trees.num_elements(jax.tree.map(jnp.asarray, position))
        precisions = {
            "scaled_identity": (num_clients,),
            "diagonal": wanted,
            "dense": (num_clients, size, size),
        }
        shapes = _shapes(self.precision_mean), _shapes(self.precision)
        if shapes != (wanted, precisions[self.structure]):
            raise ValueError(
                f"Need one Gaussian per client: {num_clients} clients with positions of shapes "
                f"{_shapes(position)}; the surrogates ({self.structure}) have precision_mean of "
                f"shapes {shapes[0]} and precision of shapes {shapes[1]} (the first axis is the "
                f"client)."
            )


def _as_matrix(mean: ArrayTree, covariance: Any) -> tuple[Array, bool] | None:
    if not trees.same_structure(covariance, 0):
        return None
    matrix = trees.as_float(covariance)
    leaves = jax.tree.leaves(mean)
    size = sum(leaf.size for leaf in leaves)
    shaped = len(leaves) == 1 and leaves[0].ndim > 1 and leaves[0].shape == matrix.shape
    if matrix.shape == (size, size) and not shaped:
        return matrix, False
    lead = {leaf.shape[:1] for leaf in leaves}
    if len(lead) == 1 and () not in lead:
        (num,) = lead.pop()
        if matrix.shape == (num, size // num, size // num):
            return matrix, True
    return None


def _is_scaled(mean: ArrayTree, variance: Array) -> bool:
    if variance.ndim == 0:
        return True
    leaves = jax.tree.leaves(mean)
    shaped = trees.same_structure(mean, 0) and variance.shape == leaves[0].shape
    return variance.ndim == 1 and not shaped and all(x.shape[:1] == variance.shape for x in leaves)


def _expand(variance: Array, leaf: Array) -> Array:
    return variance.reshape(variance.shape + (1,) * (leaf.ndim - variance.ndim)).astype(leaf.dtype)


def _check_positive(variance: ArrayTree) -> None:
    for leaf in jax.tree.leaves(variance):
        if not isinstance(leaf, jax.core.Tracer) and not np.all(np.asarray(leaf) > 0):
            smallest = np.asarray(leaf).min()
            raise ValueError(f"Variances must be positive, got a smallest one of {smallest:.3g}.")


def _shapes(tree: ArrayTree) -> Any:
    return jax.tree.map(lambda x: jnp.shape(x), tree)


def is_proper(q: Gaussian) -> Array:
    """Return whether `q` is finite with a positive definite precision, ``[]`` bool."""
    finite = trees.all_finite(q)
    if q.structure == "dense":
        # Cholesky marks a matrix that is not positive definite by NaN.
        return finite & jnp.all(jnp.isfinite(jnp.linalg.cholesky(q.precision)))
    lowest = [jnp.min(leaf) > 0 for leaf in jax.tree.leaves(q.precision) if leaf.size]
    return finite & jnp.all(jnp.array(lowest))


def symmetric(q: Gaussian) -> Gaussian:
    """Return `q` with a dense precision that is symmetric beyond rounding."""
    if q.structure != "dense":
        return q
    return replace(q, precision=(q.precision + q.precision.T) / 2)


def flat_precision(q: Gaussian) -> Array:
    """Return the precision as ``[]``, ``[d]`` or ``[d, d]``, by structure."""
    return trees.ravel(q.precision) if q.structure == "diagonal" else jnp.asarray(q.precision)


def with_mean(mean: ArrayTree, precision: ArrayTree, structure: str) -> Gaussian:
    """Return the Gaussian with this mean and precision."""
    q = Gaussian(mean, precision, structure)
    return replace(q, precision_mean=q.apply_precision(mean))


def from_flat(mean: ArrayTree, precision: Array, structure: str) -> Gaussian:
    """Return the Gaussian with this mean and a precision as of `flat_precision`."""
    shaped = ravel_pytree(mean)[1](precision) if structure == "diagonal" else precision
    return with_mean(mean, shaped, structure)


def _diagonal(q: Gaussian) -> Array:
    """Return the diagonal ``[d]`` of a precision that is not dense."""
    return trees.ravel(q.apply_precision(jax.tree.map(jnp.ones_like, q.precision_mean)))


def as_dense(q: Gaussian) -> Gaussian:
    """Return `q` with a dense precision ``[d, d]``."""
    if q.structure == "dense":
        return q
    return Gaussian(q.precision_mean, jnp.diag(_diagonal(q)), "dense")


def project(q: Gaussian, structure: str) -> Gaussian:
    """Return the Gaussian of this structure with the mean of `q` and the variances nearest to its.

    Moment matching, which minimizes the divergence ``KL(q || .)`` within the family: a diagonal
    covariance keeps the variances, a scaled identity their mean.

    Examples
    --------
    >>> q = Gaussian.from_moments(jnp.zeros(2), jnp.array([[2.0, 1.0], [1.0, 4.0]]))
    >>> [float(1 / x) for x in project(q, "diagonal").precision.round(5)]
    [2.0, 4.0]
    >>> round(1 / float(project(q, "scaled_identity").precision), 5)
    3.0
    """
    if q.structure == structure:
        return q
    if structure == "dense":
        return as_dense(q)
    variances = jnp.diagonal(q.covariance())
    matched = variances if structure == "diagonal" else jnp.mean(variances)
    return from_flat(q.mean(), 1 / matched, structure)


def plus_precision(q: Gaussian, number: Array) -> Gaussian:
    """Return `q` with `number` added to its precision in every direction, precision mean as it is.

    The product with a Gaussian of mean zero and precision `number`.
    """
    if q.structure == "dense":
        eye = jnp.eye(q.precision.shape[0], dtype=q.precision.dtype)
        return replace(q, precision=q.precision + trees.cast(number, eye) * eye)
    added = jax.tree.map(lambda leaf: leaf + trees.cast(number, leaf), q.precision)
    return replace(q, precision=added)
