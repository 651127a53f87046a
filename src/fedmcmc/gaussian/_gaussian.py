"""Gaussians over pytrees in natural parameters, up to a constant factor.

``log q(theta) = precision_mean' theta - theta' precision theta / 2 + const``. Products add,
quotients subtract and powers scale natural parameters. Surrogates of likelihoods and the sites of
expectation propagation are therefore the same objects, proper or not.

In expectation propagation (Guo et al. 2023, section 2.1) the global approximation is the product
of the prior's site and one site per client, ``q = q_0 * prod_k q_k``. A client's cavity is
``q / q_k``. The tilted distribution is the client's likelihood times its cavity. The client fits a
Gaussian to the tilted distribution and sends the resulting change in the natural parameters of
``q``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from fedmcmc.pytrees import trees
from fedmcmc.random import normals
from fedmcmc.types import ArrayTree, Described, compiled, register_dataclass

STRUCTURES = ("scaled_identity", "diagonal", "dense")
"""Structures of a precision: one number, one number per coordinate, or a matrix."""


@register_dataclass
@dataclass(frozen=True, repr=False)
class Gaussian(Described):
    """Gaussian in natural parameters, or one per client with a leading client axis.

    Attributes
    ----------
    precision_mean
        Precision times mean, a pytree with the structure of a position, leaves ``[*event]``.
    precision
        Number ``[]`` for a scaled identity; pytree with the shapes of a position for a diagonal;
        matrix ``[d, d]`` over the raveled position for a dense precision.
    structure
        ``"scaled_identity"``, ``"diagonal"`` or ``"dense"``, static.
    labels
        Client labels on the surrogates that `fedmcmc.surrogates` returns, else ``None``. Any
        computation with the Gaussian drops the labels.

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
        cls, mean: ArrayTree, covariance: ArrayTree = None, *, variance: ArrayTree | None = None
    ) -> "Gaussian":
        """Return the Gaussian with this mean and either a covariance matrix or variances.

        Parameters
        ----------
        mean
            Pytree with leaves ``[*event]`` or ``[num_clients, *event]``.
        covariance
            Matrix ``[d, d]`` or ``[num_clients, d, d]`` over the raveled position. If it has the
            shape of `mean`, it is used as `variance`.
        variance
            Scalar (or ``[num_clients]``) for a scaled identity, or a pytree with the shapes of
            `mean`.

        Raises
        ------
        ValueError
            If neither or both are passed, if the shapes do not match, or if a concrete covariance
            is not positive definite.
        """
        if (covariance is None) == (variance is None):
            raise ValueError("Pass either covariance= or variance=, not both.")
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
                f"The second argument must be a covariance matrix over the raveled mean or "
                f"variances with the shapes of the mean, {_shapes(mean)}; got {_shapes(variance)}."
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
            # NumPy, because jax.numpy would trace even a concrete matrix inside jit.
            smallest = float(np.linalg.eigvalsh(np.asarray(matrix)).min())
            if not smallest > 0:
                raise ValueError(
                    f"A covariance must be positive definite; its smallest eigenvalue is "
                    f"{smallest:.3g}."
                )

        return from_covariance(mean, matrix, batched=batched)

    @classmethod
    def uniform(cls, like: ArrayTree, structure: str = "diagonal") -> "Gaussian":
        """Return the improper constant density: zero natural parameters for positions as `like`."""
        eta = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.result_type(x)), like)
        if structure == "dense":
            size = trees.num_elements(like)
            return cls(eta, jnp.zeros((size, size), ravel_pytree(eta)[0].dtype), structure)
        if structure == "diagonal":
            return cls(eta, trees.zeros_like(eta), structure)
        if structure == "scaled_identity":
            return cls(eta, jnp.zeros((), jnp.result_type(float)), structure)
        raise ValueError(f"structure must be one of {STRUCTURES}, got {structure!r}.")

    def __mul__(self, factor: "Gaussian") -> "Gaussian":
        """Multiply densities: natural parameters add."""
        return self._combine(jnp.add, factor)

    def __truediv__(self, divisor: "Gaussian") -> "Gaussian":
        """Divide densities: natural parameters subtract."""
        return self._combine(jnp.subtract, divisor)

    def __pow__(self, power: ArrayLike) -> "Gaussian":
        """Raise the density to a power: natural parameters scale."""
        return trees.scale(power, self)

    def _combine(self, fn: Callable[[Array, Array], Array], operand: "Gaussian") -> "Gaussian":
        if self.structure != operand.structure:
            raise ValueError(
                f"Cannot combine Gaussians of different structure: {self.structure} and "
                f"{operand.structure}."
            )
        return jax.tree.map(fn, self, operand)

    def sum(self) -> "Gaussian":
        """Return the product over the leading client axis."""
        return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), self)

    def apply_precision(self, vector: ArrayTree) -> ArrayTree:
        """Return precision times `vector`, a pytree with the shapes of a position."""
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
        """Return the mean; the precision must be invertible."""
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
        """Draw a position; the precision must be positive definite."""
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
        """Length of the leading client axis; raises `ValueError` without such an axis."""
        leaves = jax.tree.leaves(self.precision_mean)
        lengths = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
        if len(lengths) != 1 or None in lengths:
            raise ValueError(
                f"Expected one Gaussian per client, with a leading client axis; precision_mean has "
                f"shapes {_shapes(self.precision_mean)}."
            )
        return leaves[0].shape[0]

    def check_clients(self, position: ArrayTree, num_clients: int) -> None:
        """Raise `ValueError` unless this is one Gaussian per client, shaped as `position`."""
        expected = jax.tree.map(lambda x: (num_clients, *jnp.shape(x)), position)
        size = trees.num_elements(jax.tree.map(jnp.asarray, position))
        precisions = {
            "scaled_identity": (num_clients,),
            "diagonal": expected,
            "dense": (num_clients, size, size),
        }
        shapes = _shapes(self.precision_mean), _shapes(self.precision)
        if shapes != (expected, precisions[self.structure]):
            raise ValueError(
                f"Expected one Gaussian per client, for {num_clients} clients with positions of "
                f"shapes {_shapes(position)}. The surrogates ({self.structure}) have "
                f"precision_mean of shapes {shapes[0]} and precision of shapes {shapes[1]}, whose "
                f"first axis must be the client."
            )


def _as_matrix(mean: ArrayTree, covariance: ArrayTree) -> tuple[Array, bool] | None:
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
            raise ValueError(f"Variances must be positive; the smallest is {smallest:.3g}.")


def _shapes(tree: ArrayTree) -> Any:
    return jax.tree.map(lambda x: jnp.shape(x), tree)


@compiled(static_argnames=("batched",))
def from_covariance(mean: ArrayTree, matrix: Array, *, batched: bool) -> Gaussian:
    """Return the Gaussian of a covariance ``[d, d]``, or `batched` Gaussians, unchecked."""

    def build(mean: ArrayTree, matrix: Array) -> Gaussian:
        precision = jnp.linalg.inv(matrix)
        return with_mean(mean, (precision + precision.T) / 2, "dense")

    return (jax.vmap(build) if batched else build)(mean, matrix)


def is_proper(q: Gaussian) -> Array:
    """Return true, ``[]`` bool, if `q` is finite and its precision positive definite."""
    finite = trees.all_finite(q)
    if q.structure == "dense":
        # Cholesky returns NaN for a matrix that is not positive definite.
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
    """Return the Gaussian with this mean and a precision as `flat_precision` returns it."""
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
    """Return the Gaussian of this structure that matches the moments of `q`.

    Moment matching minimizes the divergence ``KL(q || .)`` within the family: a diagonal covariance
    keeps the variances, a scaled identity keeps their mean.

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
    """Return the product of `q` and a Gaussian of mean zero and precision `number`."""
    if q.structure == "dense":
        eye = jnp.eye(q.precision.shape[0], dtype=q.precision.dtype)
        return replace(q, precision=q.precision + trees.cast(number, eye) * eye)
    added = jax.tree.map(lambda leaf: leaf + trees.cast(number, leaf), q.precision)
    return replace(q, precision=added)
