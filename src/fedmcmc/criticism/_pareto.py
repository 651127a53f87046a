"""Pareto-smoothed importance weights in JAX, for clients that smooth weights per row.

`fedmcmc.diagnostics.psis` is the server's version in float64.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import logsumexp

ROUNDING = 100
"""Difference of log ratios, in units in the last place, below which they are equal."""
EQUAL = 1e-9
PRIOR_SHAPE, PRIOR_DRAWS = 0.5, 10


def tail_length(num: int, efficiency: float = 1.0) -> int:
    """Return the number of draws in the tail, ``3 sqrt(num / efficiency)`` or a fifth of `num`.

    Vehtari et al. (2024), Appendix H; `efficiency` is the number of effective draws per draw.
    """
    return int(3 * np.sqrt(num / efficiency)) if num * efficiency > 225 else num // 5


@partial(jax.jit, static_argnames="num_tail", inline=True)
def psis(log_ratios: Array, num_tail: int) -> tuple[Array, Array]:
    """Smooth the `num_tail` largest importance ratios by a generalized Pareto distribution.

    Parameters
    ----------
    log_ratios
        ``[num]``, log of target over proposal up to a constant; minus infinity is allowed.
    num_tail
        Static number from `tail_length`, at least 5 and less than `num`.

    Returns
    -------
    log_weights
        ``[num]``, normalized, in the order of the ratios.
    k_hat
        ``[]``, shape of the tail: minus infinity if its ratios are equal, infinity if no
        distribution fits.

    References
    ----------
    Vehtari et al. (2024), Algorithm 1; Zhang and Stephens (2009).
    """
    largest, indices = jax.lax.top_k(log_ratios, num_tail + 1)
    tail, k_hat = smooth_tail(largest)
    smoothed = (log_ratios - largest[0]).at[indices[:-1]].set(tail)
    return smoothed - logsumexp(smoothed), k_hat


@partial(jax.jit, inline=True)
def smooth_tail(largest: Array) -> tuple[Array, Array]:
    """Return the smoothed tail of log ratios ``[num_tail]``, descending from zero, and its k-hat.

    `largest` ``[num_tail + 1]`` descends: the tail and the next smaller ratio. See `psis`.
    """
    ratios = (largest - largest[0])[::-1]
    tail, cut, num_tail = ratios[1:], ratios[0], ratios.shape[0] - 1
    # exp(tail) - exp(cut) without cancellation
    excess = jnp.where(jnp.isneginf(tail), 0, jnp.exp(tail) * -jnp.expm1(cut - tail))
    shape, scale = _fit(excess)
    epsilon = jnp.finfo(ratios.dtype).eps
    # False if the floating-point type cannot resolve the tail, whose shape is then far above one.
    resolved = excess[_quartile(num_tail)] > epsilon * excess[-1]
    k_hat = (num_tail * shape + PRIOR_DRAWS * PRIOR_SHAPE) / (num_tail + PRIOR_DRAWS)
    probabilities = (jnp.arange(num_tail, dtype=ratios.dtype) + 0.5) / num_tail
    # At shape zero, the exponential distribution, the quotient would be NaN.
    k = jnp.where(jnp.abs(k_hat) > epsilon, k_hat, epsilon)
    quantiles = scale * jnp.expm1(-k * jnp.log1p(-probabilities)) / k
    fitted = jnp.minimum(jnp.logaddexp(cut, jnp.log(quantiles)), 0)
    fitted = jnp.where(jnp.isneginf(tail), tail, fitted)
    fits = jnp.isfinite(k_hat) & (scale > 0) & resolved
    equal = -tail[0] < jnp.maximum(EQUAL, ROUNDING * epsilon * (1 + jnp.abs(largest[0])))
    k_hat = jnp.where(equal, -jnp.inf, jnp.where(fits, k_hat, jnp.inf))
    return jnp.where(fits & ~equal, fitted, tail)[::-1], k_hat


def _fit(excess: Array) -> tuple[Array, Array]:
    """Return shape and scale of a generalized Pareto distribution, Zhang and Stephens (2009).

    `excess` ``[num]`` ascends. The shape does not include the prior of `psis`.
    """
    num, dtype = excess.shape[0], excess.dtype
    num_candidates = 30 + int(np.sqrt(num))
    ranks = jnp.arange(1, num_candidates + 1, dtype=dtype) - 0.5
    largest = excess[-1]
    candidates = (1 - jnp.sqrt(num_candidates / ranks)) / (3 * excess[_quartile(num)]) + 1 / largest
    shapes = jnp.mean(jnp.log1p(-candidates[:, None] * excess), axis=1)
    lengths = num * (jnp.log(-candidates / shapes) - shapes - 1)
    weights = jnp.exp(lengths - logsumexp(lengths))
    weights = jnp.where(weights >= 10 * jnp.finfo(dtype).eps, weights, 0)
    best = jnp.sum(weights * candidates) / jnp.sum(weights)
    shape = jnp.mean(jnp.log1p(-best * excess))
    return shape, -shape / best


def _quartile(num: int) -> int:
    """Return the index of the lower quartile of `num` ascending numbers."""
    return int(num / 4 + 0.5) - 1
