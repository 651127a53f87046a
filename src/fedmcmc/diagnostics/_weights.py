"""Errors of a Gaussian approximation's mean and sds, by importance weights.

Gradients at an approximation's draws do not show the posterior outside of it: a Gaussian that is
narrower than a skewed posterior fits well at its draws. Therefore points are drawn from a mixture
around the Gaussian with wider tails, and weighted by the posterior's density.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import logsumexp

from fedmcmc.data import FederatedData
from fedmcmc.diagnostics._moments import NUM_GROUPS, MomentErrors, draws_per_batch, raveled
from fedmcmc.diagnostics._psis import khat_threshold, psis
from fedmcmc.gaussian import Mixture
from fedmcmc.gradients import Terms, fold_terms, row_size
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Posterior, as_functions, compiled

MAX_COORDINATES = 64
MAX_POINTS, MIN_POINTS = 2**14, 1_000
WORK = 2**29
"""Product of points and numbers of all rows beyond which fewer points are weighted."""
MAX_SHARE = 0.01
"""Share of the total weight up to which the largest weight is trusted even if k-hat is large: k-hat
has no meaning for bounded weights whose largest values are about equal."""


def check_by_weights(
    posterior: Posterior, data: FederatedData, draws: ArrayTree, *, rng_key: Array | None = None
) -> MomentErrors | None:
    """Compare the posterior with a Gaussian that has the draws' mean and covariance, by weights.

    Points are drawn from the Gaussian and from wider distributions around it. The moments of the
    posterior and of the Gaussian are computed from the same points, weighted by the posterior's
    density (smoothed by `psis`) and by the Gaussian's density.

    Parameters
    ----------
    posterior, data
        Model and all clients' rows.
    draws
        Independent draws of the approximation, leaves ``[num_chains, num_draws, *event]``, in the
        user's coordinates.
    rng_key
        Random key for the points; by default a fixed key.

    Returns
    -------
    Moments or None
        Errors with their `k_hat`; ``None`` with more than 64 dimensions, fewer than ten draws per
        dimension, too many rows to weight 1,000 points, or no finite log density.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(  # the logarithm of a gamma variable: sd 0.82, skewed
    ...     lambda theta: 2 * theta - jnp.exp(theta), lambda theta, x: 0.0 * x
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(1)])
    >>> normals = jax.random.normal(jax.random.key(0), (2, 8000))
    >>> moments = check_by_weights(posterior, data, 0.53 + 0.71 * normals)
    >>> moments.spread.round(1), moments.trusted
    (array([0.9]), True)
    """
    leaves = jax.tree.leaves(draws)
    total = leaves[0].shape[0] * leaves[0].shape[1]
    size = sum(int(np.prod(leaf.shape[2:])) for leaf in leaves)
    num = min(MAX_POINTS, WORK // max(data.num_rows * row_size(data.rows), 1))
    if not 0 < size <= MAX_COORDINATES or total < 10 * size or num < MIN_POINTS:
        return None
    flat = raveled(draws, total)
    with np.errstate(all="ignore"):
        mean, covariance = flat.mean(0), np.atleast_2d(np.cov(flat.T))
        sd = np.sqrt(np.diag(covariance))
        correlations = covariance / np.outer(sd, sd)
    if not np.isfinite(correlations).all() or np.linalg.cond(correlations) > 1e12:
        return None
    # Half of the points come from the Gaussian, the others from wider distributions.
    proposal = Mixture.of(
        [
            (0.5, np.inf, mean, covariance),
            (0.25, np.inf, mean, 2.5 * covariance),
            (0.25, 5.0, mean, 6 * covariance),
        ]
    )
    like = jax.tree.map(lambda leaf: jnp.asarray(leaf[0, 0]), draws)
    points_and_values = _points_and_values(
        as_functions(posterior),
        data.pooled(groups=True),
        jax.random.key(0) if rng_key is None else rng_key,
        proposal,
        trees.cast_like(trees.unravel(jnp.asarray(mean), like), like),
        num=num,
        batch_size=draws_per_batch(data),
    )
    points = np.asarray(points_and_values[0], np.float64)
    values = np.array(points_and_values[1], np.float64)
    values[~np.isfinite(values)] = -np.inf  # points where the log density overflows get no weight
    if np.isneginf(values).mean() > 0.5:
        return None
    density = proposal.in_strata(num).log_density(points)
    gaussian = Mixture.of([(1.0, np.inf, mean, covariance)]).log_density(points)
    return _compare((points - mean) / sd, values - density, gaussian - density, total)


@compiled(static_argnames=("num", "batch_size"))
def _points_and_values(
    posterior: Posterior,
    data: FederatedData,
    rng_key: Array,
    proposal: Mixture,
    center: ArrayTree,
    *,
    num: int,
    batch_size: int,
) -> tuple[Array, Array]:
    """Return points ``[num, d]``, and log densities ``[num]`` minus the value at `center`."""
    pooled = data.client(0)
    inverse = getattr(posterior.position_fn, "inverse", lambda position: position)
    middle = inverse(center)

    def difference(flat: Array) -> Array:
        place = inverse(trees.cast_like(trees.unravel(flat, center), center))

        def chunk(terms_fn: Terms, mask: Array) -> Array:
            # Subtract term by term, since sums over many rows lose digits.
            return jnp.sum(jnp.where(mask, terms_fn(place) - terms_fn(middle), 0))

        likelihood: Array = fold_terms(posterior.loglikelihood_fn, chunk, pooled)
        return likelihood + posterior.logprior_fn(place) - posterior.logprior_fn(middle)

    points = proposal.draw(rng_key, num)
    return points, jax.lax.map(difference, points, batch_size=batch_size)


def _compare(
    points: np.ndarray, log_ratios: np.ndarray, log_gaussian: np.ndarray, num_draws: int
) -> MomentErrors:
    """Return the errors of the Gaussian's moments.

    Densities at `points` ``[n, d]`` are relative to the proposal's: `log_ratios` are the
    posterior's, `log_gaussian` the Gaussian's, each ``[n]``.
    """
    log_weights, k_hat = psis(log_ratios)
    bias, stretch = _differences(points, log_weights, log_gaussian)
    parts = []
    group = np.arange(len(points)) % NUM_GROUPS  # each group has points of all strata
    for left_out in range(NUM_GROUPS):
        inside = group != left_out
        parts.append(
            _differences(points[inside], psis(log_ratios[inside])[0], log_gaussian[inside])
        )
    leaves = np.array(parts)  # [NUM_GROUPS, 2, d]
    away = leaves - leaves.mean(0)
    variance = (NUM_GROUPS - 1) / NUM_GROUPS * (away**2).sum(0)
    # The Gaussian's moments were estimated from this number of independent draws.
    errors = np.sqrt(variance + np.array([[1.0], [0.5]]) / num_draws)
    largest = np.exp(log_ratios.max() - logsumexp(log_ratios))
    trusted = bool(k_hat < khat_threshold(len(points)) or largest < MAX_SHARE)
    return MomentErrors(bias, errors[0], np.exp(stretch), errors[1], len(points), 0, k_hat, trusted)


def _differences(
    points: np.ndarray, log_weights: np.ndarray, log_gaussian: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return bias and log spread of the Gaussian, each ``[d]``."""
    moments = []
    for logs in (log_gaussian, log_weights):
        weights = np.exp(logs - logsumexp(logs))
        mean = weights @ points
        moments.append((mean, np.sqrt(weights @ (points - mean) ** 2)))
    (gaussian_mean, gaussian_sd), (mean, sd) = moments
    return (gaussian_mean - mean) / sd, np.log(gaussian_sd / sd)
