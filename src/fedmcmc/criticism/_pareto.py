"""Pareto-smoothed importance weights in JAX: for clients, who smooth theirs by themselves.

`fedmcmc.exact.psis` is the same for a server, in float64.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import logsumexp

ROUNDING = 100
"""Log ratios that differ by less than so many units in their last place are equal."""
EQUAL = 1e-9
PRIOR_SHAPE, PRIOR_DRAWS = 0.5, 10


def tail_length(num: int, efficiency: float = 1.0) -> int:
    """Return how many of `num` draws are the tail: ``3 sqrt(num / efficiency)``, or a fifth.

    Vehtari et al. (2024), Appendix H; `efficiency` is effective draws per draw.
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
        Static, of `tail_length`, at least 5 and less than `num`.

    Returns
    -------
    log_weights
        ``[num]``, in the order of the ratios; their exponentials sum to one.
    khat
        ``[]``, the shape of the tail: minus infinity where its ratios are equal, infinity where no
        distribution fits.

    References
    ----------
    Vehtari, Simpson, Gelman, Yao and Gabry (2024), Algorithm 1; Zhang and Stephens (2009).
    """
    largest, places = jax.lax.top_k(log_ratios, num_tail + 1)
    tail, khat = smoothed_tail(largest)
    smoothed = (log_ratios - largest[0]).at[places[:-1]].set(tail)
    return smoothed - logsumexp(smoothed), khat


@partial(jax.jit, inline=True)
def smoothed_tail(largest: Array) -> tuple[Array, Array]:
    """Return the tail of log ratios, smoothed, and its k-hat; see `psis`.

    `largest` ``[num_tail + 1]`` descends: the tail, and what lies next below it. What is returned,
    ``[num_tail]``, descends too, from the largest ratio at zero.
    """
    ratios = (largest - largest[0])[::-1]
    tail, cut, num_tail = ratios[1:], ratios[0], ratios.shape[0] - 1
    # exp(tail) - exp(cut), without the digits that this loses
    excess = jnp.where(jnp.isneginf(tail), 0, jnp.exp(tail) * -jnp.expm1(cut - tail))
    shape, scale = _fit(excess)
    epsilon = jnp.finfo(ratios.dtype).eps
    # So far apart that this type cannot hold them together; shapes are far above one there.
    spans = excess[_quartile(num_tail)] > epsilon * excess[-1]
    khat = (num_tail * shape + PRIOR_DRAWS * PRIOR_SHAPE) / (num_tail + PRIOR_DRAWS)
    places = (jnp.arange(num_tail, dtype=ratios.dtype) + 0.5) / num_tail
    # An exponential distribution at zero, where the quotient is not a number.
    k = jnp.where(jnp.abs(khat) > epsilon, khat, epsilon)
    quantiles = scale * jnp.expm1(-k * jnp.log1p(-places)) / k
    fitted = jnp.minimum(jnp.logaddexp(cut, jnp.log(quantiles)), 0)
    fitted = jnp.where(jnp.isneginf(tail), tail, fitted)
    fits = jnp.isfinite(khat) & (scale > 0) & spans
    equal = -tail[0] < jnp.maximum(EQUAL, ROUNDING * epsilon * (1 + jnp.abs(largest[0])))
    khat = jnp.where(equal, -jnp.inf, jnp.where(fits, khat, jnp.inf))
    return jnp.where(fits & ~equal, fitted, tail)[::-1], khat


def _fit(excess: Array) -> tuple[Array, Array]:
    """Return shape and scale of a generalized Pareto distribution, Zhang and Stephens (2009).

    `excess` ``[num]`` ascends. The shape is without the prior of `psis`.
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
    """Return the place of the lower quartile of `num` numbers that ascend."""
    return int(num / 4 + 0.5) - 1
