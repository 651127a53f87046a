"""Mixtures of Gaussians and Student's t as proposals of importance sampling."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from scipy.linalg import solve_triangular
from scipy.special import gammaln, logsumexp

from fedmcmc.gaussian._gaussian import Gaussian, flat_precision
from fedmcmc.pytrees import trees
from fedmcmc.types import Described, register_dataclass


class StandardDraws(NamedTuple):
    """Standardized draws of a mixture, before its means and scales are applied.

    Attributes
    ----------
    part
        Index of the part that each draw comes from, ``[num]`` int32.
    z
        Draws of the standard Gaussian or t of that part, ``[num, d]``.
    """

    part: Array
    z: Array


WHOLE = (
    "It must approximate the whole posterior: surrogates.sum() times the prior's Gaussian, or "
    "samples.state.server.approximation.gaussian of one chain of fed_ep."
)
"""Remedy in errors on an approximation that does not cover the whole posterior."""


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Mixture(Described):
    """Mixture of multivariate Gaussian and t distributions over raveled positions.

    Attributes
    ----------
    means
        Means, ``[num_parts, d]``.
    factors
        Roots ``F`` of the scale matrices ``F F'``, lower triangular ``[num_parts, d, d]``, or
        diagonal ``[num_parts, d]``.
    weights
        Weights of the parts, static; they sum to one.
    degrees
        Degrees of freedom of the parts, static; infinite for a Gaussian, whose scale matrix is its
        covariance.

    Examples
    --------
    >>> import jax
    >>> q = defensive(jnp.zeros(1), jnp.eye(1))
    >>> q.draw(jax.random.key(0), 10).shape, q.counts(10)
    ((10, 1), (8, 2))
    >>> q.log_density(np.zeros((1, 1))).round(4)  # 0.8 of a normal, 0.2 of a t
    array([-0.9456])
    """

    means: Array
    factors: Array
    weights: tuple[float, ...] = field(metadata={"static": True})
    degrees: tuple[float, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, parts: Sequence[tuple[float, float, Any, Any]]) -> "Mixture":
        """Return the mixture of parts ``(weight, degrees, mean [d], scale)``.

        A scale is a matrix ``[d, d]`` or its diagonal ``[d]``. Weights are normalized.

        Raises
        ------
        ValueError
            If a scale matrix is not positive definite, or a weight is not positive.
        """
        weights = np.array([weight for weight, _, _, _ in parts], float)
        if not (weights > 0).all():
            raise ValueError(f"Weights of a mixture must be positive, got {weights.tolist()}.")
        factors = [_factorize(np.asarray(scale, np.float64)) for _, _, _, scale in parts]
        dtype = jnp.result_type(float)
        return cls(
            jax.device_put(np.array([np.asarray(mean) for _, _, mean, _ in parts], dtype)),
            jax.device_put(np.stack(factors).astype(dtype)),
            tuple((weights / weights.sum()).tolist()),
            tuple(float(degrees) for _, degrees, _, _ in parts),
        )

    def counts(self, num: int) -> tuple[int, ...]:
        """Return the number of draws per part among `num`: its weight times `num`, rounded."""
        ends = np.round(np.cumsum(self.weights) * num).astype(int)
        return tuple(np.diff(ends, prepend=0).tolist())

    def in_strata(self, num: int) -> "Mixture":
        """Return the mixture with the weights that `num` stratified draws realize."""
        return replace(self, weights=tuple(count / num for count in self.counts(num)))

    def draw(self, rng_key: Array, num: int) -> Array:
        """Draw points ``[num, d]`` in strata: `counts` fixes the number of draws per part."""
        size = self.means.shape[1]
        normal_key, gamma_key = jax.random.split(rng_key)
        z = jax.random.normal(normal_key, (num, size), self.means.dtype)
        parts, start = [], 0
        for j, count in enumerate(self.counts(num)):
            part_z, factor = z[start : start + count], self.factors[j]
            if np.isfinite(self.degrees[j]):
                half = self.degrees[j] / 2
                key = jax.random.fold_in(gamma_key, j)
                chi2 = jax.random.gamma(key, half, (count, 1), z.dtype) / jnp.asarray(half, z.dtype)
                part_z = part_z * jax.lax.rsqrt(chi2)
            moved = part_z * factor if factor.ndim == 1 else _apply(factor, part_z)
            parts.append(self.means[j] + moved)
            start += count
        return jnp.concatenate(parts)

    @partial(jax.jit, static_argnames="num", inline=True)
    def standard_draws(self, rng_key: Array, num: int) -> StandardDraws:
        """Draw independently, without strata, what `placed` turns into draws of the mixture."""
        part_key, normal_key, gamma_key = jax.random.split(rng_key, 3)
        dtype = self.means.dtype
        u = jax.random.uniform(part_key, (num,), dtype)
        part = jnp.searchsorted(jnp.asarray(np.cumsum(self.weights)[:-1], dtype), u, side="right")
        z = jax.random.normal(normal_key, (num, self.means.shape[1]), dtype)
        if not np.isinf(self.degrees).all():
            degrees = np.array(self.degrees)
            half = jnp.asarray(np.where(np.isinf(degrees), 2, degrees) / 2, dtype)[part]
            stretch = jax.lax.rsqrt(jax.random.gamma(gamma_key, half, dtype=dtype) / half)
            z = jnp.where(jnp.asarray(np.isinf(degrees))[part][:, None], z, z * stretch[:, None])
        return StandardDraws(part.astype(jnp.int32), z)

    @partial(jax.jit, inline=True)
    def placed(self, draws: StandardDraws) -> Array:
        """Apply means and scales to `draws`, and return draws of the mixture, ``[num, d]``."""
        parts = [
            mean[None] + (draws.z * factor[None] if factor.ndim == 1 else _apply(factor, draws.z))
            for mean, factor in zip(self.means, self.factors, strict=True)
        ]
        return jnp.take_along_axis(jnp.stack(parts), draws.part[None, :, None], axis=0)[0]

    def log_density_of(self, point: Array) -> Array:
        """Return the log density at a point ``[d]``, ``[]``; can be traced by JAX."""
        terms = []
        for j, (weight, degrees) in enumerate(zip(self.weights, self.degrees, strict=True)):
            if weight == 0:
                continue
            factor, gap = self.factors[j], point - self.means[j]
            if factor.ndim == 1:
                z, scales = gap / factor, factor
            else:
                z = jax.scipy.linalg.solve_triangular(factor, gap, lower=True)
                scales = jnp.diagonal(factor)
            square = jnp.sum(jnp.square(z))
            norm, half = _norm_and_power(len(point), degrees)
            decay = square / 2 if np.isinf(degrees) else half * jnp.log1p(square / degrees)
            terms.append(float(np.log(weight)) + norm - jnp.sum(jnp.log(scales)) - decay)
        return jax.nn.logsumexp(jnp.stack(terms))

    def log_density(self, points: ArrayLike) -> np.ndarray:
        """Return the log density at points ``[num, d]``, in float64 on the host."""
        points = np.asarray(points, np.float64)
        terms = [
            np.log(weight) + _evaluate_part(points, mean, factor, degrees)
            for weight, mean, factor, degrees in zip(
                self.weights,
                np.asarray(self.means, np.float64),
                np.asarray(self.factors, np.float64),
                self.degrees,
                strict=True,
            )
            if weight > 0
        ]
        total: np.ndarray = logsumexp(np.stack(terms), axis=0)
        return total


def defensive(
    mean: ArrayLike, covariance: ArrayLike, *, tail: float = 0.2, degrees: float = 5.0
) -> Mixture:
    """Return ``(1 - tail) N(mean, C) + tail t(mean, 1.2 C)``, a Gaussian with heavier tails.

    `covariance` is ``[d, d]``, or its diagonal ``[d]``. Importance weights are bounded if the
    target has lighter tails than the t distribution; at most a share `tail` of the draws is lost
    (Hesterberg 1995).
    """
    covariance = np.asarray(covariance, np.float64)
    parts = [(1 - tail, np.inf, mean, covariance), (tail, degrees, mean, 1.2 * covariance)]
    return Mixture.of([part for part in parts if part[0] > 0])


def moments_of(approximation: Gaussian) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean ``[d]`` and the covariance ``[d, d]`` or its diagonal ``[d]``, in float64.

    Raises
    ------
    ValueError
        If the Gaussian is improper or has a client axis.
    """
    q = approximation
    size = trees.num_elements(q.precision_mean)
    fits = q.structure == "scaled_identity" and jnp.ndim(q.precision) == 0
    fits |= q.structure == "diagonal" and trees.same_shapes(q.precision, q.precision_mean)
    fits |= q.structure == "dense" and jnp.shape(q.precision) == (size, size)
    if not fits:
        raise ValueError(
            f"approximation must be a single Gaussian over {size} parameters; its precision has "
            f"shapes {jax.tree.map(jnp.shape, q.precision)}. {WHOLE}"
        )
    precision = np.asarray(flat_precision(q), np.float64)
    eta = np.asarray(trees.ravel(q.precision_mean), np.float64)
    if q.structure == "dense":
        precision = (precision + precision.T) / 2
        lowest = np.linalg.eigvalsh(precision)[0]
    else:
        precision = np.broadcast_to(precision, eta.shape)
        lowest = precision.min()
    if not lowest > 0 or not np.isfinite(precision).all():
        raise ValueError(
            f"approximation is not proper: the smallest eigenvalue of its precision is "
            f"{lowest:.3g}. {WHOLE}"
        )
    if q.structure == "dense":
        return np.linalg.solve(precision, eta), np.linalg.inv(precision)
    return eta / precision, 1 / precision


def _apply(factor: Array, z: Array) -> Array:
    return jnp.matmul(z, factor.T, precision=jax.lax.Precision.HIGHEST)


def _factorize(scale: np.ndarray) -> np.ndarray:
    lowest = scale.min() if scale.ndim == 1 else np.linalg.eigvalsh(scale)[0]
    if not lowest > 0:
        raise ValueError(
            f"The covariance of a proposal must be positive definite; its smallest eigenvalue is "
            f"{lowest:.3g}."
        )
    return np.sqrt(scale) if scale.ndim == 1 else np.linalg.cholesky(scale)


def _evaluate_part(
    points: np.ndarray, mean: np.ndarray, factor: np.ndarray, degrees: float
) -> np.ndarray:
    size = len(mean)
    gaps = (points - mean).T
    if factor.ndim == 1:
        z, log_det = gaps / factor[:, None], np.log(factor).sum()
    else:
        z = solve_triangular(factor, gaps, lower=True)
        log_det = np.log(np.diagonal(factor)).sum()
    square = (z**2).sum(0)
    norm, half = _norm_and_power(size, degrees)
    if np.isinf(degrees):
        return norm - log_det - square / 2
    return norm - log_det - half * np.log1p(square / degrees)


def _norm_and_power(size: int, degrees: float) -> tuple[float, float]:
    """Return the log normalizing constant, and the power of the t density's kernel."""
    if np.isinf(degrees):
        return float(-size / 2 * np.log(2 * np.pi)), np.inf
    norm = gammaln((degrees + size) / 2) - gammaln(degrees / 2) - size / 2 * np.log(degrees * np.pi)
    return float(norm), float(degrees + size) / 2
