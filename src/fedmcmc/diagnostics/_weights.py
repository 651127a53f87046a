"""Whether an approximation has the posterior's mean and sds, by weights.

Gradients at an approximation's own draws say nothing of what lies outside of it: a Gaussian that is
narrower than a skewed posterior fits well where its draws are. Here points are drawn from a mixture
of its mean and covariance whose tails reach further, and weighted by the posterior's density.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import logsumexp

from fedmcmc._types import ArrayTree, Posterior, as_functions, compiled
from fedmcmc.data import FederatedData
from fedmcmc.diagnostics._moments import NUM_GROUPS, Moments, raveled, taken_together
from fedmcmc.diagnostics._psis import psis, threshold
from fedmcmc.gaussian import Mixture
from fedmcmc.gradients import Terms, fold_terms, row_size
from fedmcmc.pytrees import trees

MOST_COORDINATES = 64
MOST_POINTS, FEWEST_POINTS = 2**14, 1_000
WORK = 2**29
"""Products of points and numbers of all rows beyond which fewer points are weighted."""
LARGE = 0.01
"""Share of all weight that no single point may have, where the shape of the tail looks heavy: of
weights that are bounded and about equal at their largest, k-hat can be anything."""


def check_by_weights(
    posterior: Posterior, data: FederatedData, draws: ArrayTree, *, rng_key: Array | None = None
) -> Moments | None:
    """Compare a Gaussian of the draws' mean and covariance with the posterior, by weights.

    Points are drawn from that Gaussian and from wider ones around it, and both moments are
    taken of the same points: weighted by the posterior's density, smoothed (`psis`), and by the
    Gaussian's. What the points lack is thus lacking on both sides.

    Parameters
    ----------
    posterior, data
        The model and every client's rows.
    draws
        Independent draws of the approximation, leaves ``[num_chains, num_draws, *event]``, in the
        user's coordinates.
    rng_key
        Of the points; by default the same each time.

    Returns
    -------
    Moments or None
        With `khat`. ``None`` with more than 64 dimensions, fewer than ten draws per dimension, too
        many rows to weigh 1,000 points, or no finite log density.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(  # the logarithm of a gamma variable: sd 0.82, skewed
    ...     lambda theta: 2 * theta - jnp.exp(theta), lambda theta, x: 0.0 * x
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(1)])
    >>> normals = jax.random.normal(jax.random.key(0), (2, 8000))
    >>> found = check_by_weights(posterior, data, 0.53 + 0.71 * normals)
    >>> found.spread.round(1), found.trusted
    (array([0.9]), True)
    """
    leaves = jax.tree.leaves(draws)
    total = leaves[0].shape[0] * leaves[0].shape[1]
    size = sum(int(np.prod(leaf.shape[2:])) for leaf in leaves)
    num = min(MOST_POINTS, WORK // max(data.num_rows * row_size(data.rows), 1))
    if not 0 < size <= MOST_COORDINATES or total < 10 * size or num < FEWEST_POINTS:
        return None
    every = raveled(draws, total)
    with np.errstate(all="ignore"):
        mean, covariance = every.mean(0), np.atleast_2d(np.cov(every.T))
        sd = np.sqrt(np.diag(covariance))
        correlations = covariance / np.outer(sd, sd)
    if not np.isfinite(correlations).all() or np.linalg.cond(correlations) > 1e12:
        return None
    # Most points where the Gaussian is, and some where a longer tail would be.
    proposal = Mixture.of(
        [
            (0.5, np.inf, mean, covariance),
            (0.25, np.inf, mean, 2.5 * covariance),
            (0.25, 5.0, mean, 6 * covariance),
        ]
    )
    like = jax.tree.map(lambda leaf: jnp.asarray(leaf[0, 0]), draws)
    drawn = _points_and_values(
        as_functions(posterior),
        data.pooled(groups=True),
        jax.random.key(0) if rng_key is None else rng_key,
        proposal,
        trees.cast_like(trees.unravel(jnp.asarray(mean), like), like),
        num=num,
        together=taken_together(data),
    )
    points, values = np.asarray(drawn[0], np.float64), np.array(drawn[1], np.float64)
    values[~np.isfinite(values)] = -np.inf  # what overflows far outside gets no weight
    if np.isneginf(values).mean() > 0.5:
        return None
    density = proposal.in_strata(num).log_density(points)
    gaussian = Mixture.of([(1.0, np.inf, mean, covariance)]).log_density(points)
    return _compare((points - mean) / sd, values - density, gaussian - density, total)


@compiled(static_argnames=("num", "together"))
def _points_and_values(
    posterior: Posterior,
    data: FederatedData,
    rng_key: Array,
    proposal: Mixture,
    center: ArrayTree,
    *,
    num: int,
    together: int,
) -> tuple[Array, Array]:
    """Return points ``[num, d]``, and log densities ``[num]`` relative to that at `center`."""
    everyone = data.client(0)
    inverse = getattr(posterior.position_fn, "inverse", lambda position: position)
    middle = inverse(center)

    def one(flat: Array) -> Array:
        place = inverse(trees.cast_like(trees.unravel(flat, center), center))

        def of_terms(terms_fn: Terms, mask: Array) -> Array:
            # Differences term by term, as sums over many rows lose digits.
            return jnp.sum(jnp.where(mask, terms_fn(place) - terms_fn(middle), 0))

        likelihood: Array = fold_terms(posterior.loglikelihood_fn, of_terms, everyone)
        return likelihood + posterior.logprior_fn(place) - posterior.logprior_fn(middle)

    points = proposal.draw(rng_key, num)
    return points, jax.lax.map(one, points, batch_size=together)


def _compare(
    points: np.ndarray, log_ratios: np.ndarray, log_own: np.ndarray, num_draws: int
) -> Moments:
    """Return how moments by the approximation's weights differ from those by the posterior's.

    `points` are ``[n, d]``, `log_ratios` those of the posterior's density over the points', and
    `log_own` of the approximation's, ``[n]``.
    """
    log_weights, khat = psis(log_ratios)
    bias, stretch = _differences(points, log_weights, log_own)
    parts = []
    group = np.arange(len(points)) % NUM_GROUPS  # as points lie in strata
    for left_out in range(NUM_GROUPS):
        kept = group != left_out
        parts.append(_differences(points[kept], psis(log_ratios[kept])[0], log_own[kept]))
    leaves = np.array(parts)  # [NUM_GROUPS, 2, d]
    away = leaves - leaves.mean(0)
    variance = (NUM_GROUPS - 1) / NUM_GROUPS * (away**2).sum(0)
    # The Gaussian has the moments of so many independent draws.
    errors = np.sqrt(variance + np.array([[1.0], [0.5]]) / num_draws)
    largest = np.exp(log_ratios.max() - logsumexp(log_ratios))
    trusted = bool(khat < threshold(len(points)) or largest < LARGE)
    return Moments(bias, errors[0], np.exp(stretch), errors[1], len(points), 0, khat, trusted)


def _differences(
    points: np.ndarray, log_weights: np.ndarray, log_own: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return bias and the logarithm of the spread of the approximation, each ``[d]``."""
    moments = []
    for logs in (log_own, log_weights):
        weights = np.exp(logs - logsumexp(logs))
        mean = weights @ points
        moments.append((mean, np.sqrt(weights @ (points - mean) ** 2)))
    (own_mean, own_sd), (mean, sd) = moments
    return (own_mean - mean) / sd, np.log(own_sd / sd)
