"""Errors of the draws' mean and sds, from the posterior's gradients at some of the draws.

Draws of any density ``p`` with gradients ``g = grad log p`` satisfy Stein's identities, ``E g = 0``
and ``E (x - E x) g' = -I``. A Newton step of a regression of ``g`` on ``x`` turns a violation into
errors of mean and sds, exactly so for a Gaussian posterior.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.data import CHUNK_ROWS, FederatedData
from fedmcmc.gradients import Terms, fold_terms, row_size
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Posterior, as_functions, compiled

MAX_COORDINATES = 256
NUM_GROUPS = 16
"""Groups of draws that the jackknife leaves out, for standard errors."""
WORK = 2**31
"""Product of draws and numbers of all rows beyond which fewer draws are checked."""
NUM_FAR = 16
"""Number of farthest draws whose log densities are also computed."""
OUT = 10.0
"""Squared distance from the median beyond which a draw is far, over the distance that one draw in
ten exceeds: 4.8 sds of a Gaussian in one dimension, 8.6 in ten."""
TYPICAL = 0.9
"""Quantile of the depth of typical draws."""
MAX_BATCH_VALUES = 2**24
"""Numbers in a batch of draws and rows."""


class MomentErrors(NamedTuple):
    """Errors of draws' moments.

    Attributes
    ----------
    bias, bias_error
        ``[d]`` float64, error of the mean in posterior sds, and its standard error.
    spread, spread_error
        ``[d]``, sds over the posterior's sds, and the standard error of the logarithm.
    num_draws
        Number of draws with gradients, or of weighted points.
    not_finite
        Number of these draws whose log density or gradient is not finite. The other figures use
        the remaining draws; they are NaN if too few remain or their covariance is degenerate.
    k_hat
        Tail shape of the weights; ``None`` if gradients were used.
    trusted
        False if weights cannot be trusted: k-hat is too large and a point has more than a hundredth
        of the total weight.
    depth
        Distance of the farthest draw's log density below the median, over the distance of the 10 %
        quantile. Log densities of a posterior's draws have tails that fall about exponentially, so
        that the depth of 10,000 draws is about 8. Zero if it was not computed.
    widened
        Largest ratio of a coordinate's sd with and without the far draws.
    """

    bias: np.ndarray
    bias_error: np.ndarray
    spread: np.ndarray
    spread_error: np.ndarray
    num_draws: int
    not_finite: int
    k_hat: float | None = None
    trusted: bool = True
    depth: float = 0.0
    widened: float = 1.0

    def off(self, bias: float, spread: float) -> np.ndarray:
        """Return true where an error exceeds a bound by three standard errors, ``[d]``."""
        with np.errstate(divide="ignore", invalid="ignore"):
            stretch = np.abs(np.log(self.spread))
            away = np.abs(self.bias) > bias + 3 * self.bias_error
            return away | (stretch > np.log(spread) + 3 * self.spread_error)


def check_moments(
    posterior: Posterior, data: FederatedData, draws: ArrayTree
) -> MomentErrors | None:
    """Compare the mean and sds of draws with the posterior's, using gradients at some draws.

    Parameters
    ----------
    posterior, data
        Model and all clients' rows.
    draws
        Pytree with leaves ``[num_chains, num_draws, *event]``, in the user's coordinates.

    Returns
    -------
    Moments or None
        ``None`` with more than 256 dimensions, or too few draws for the dimension.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> normals = jax.random.normal(jax.random.key(0), (2, 4000))
    >>> exact = check_moments(posterior, data, 1 / 3 + normals / 3)  # the posterior's mean and sd
    >>> wide = check_moments(posterior, data, 1 / 2 + normals / 2)
    >>> bool(abs(exact.bias) < 0.1), exact.spread.round(1), wide.bias.round(1), wide.spread.round(1)
    (True, array([1.]), array([0.5]), array([1.5]))
    """
    leaves = jax.tree.leaves(draws)
    num_chains, num = leaves[0].shape[:2]
    total, size = num_chains * num, sum(int(np.prod(leaf.shape[2:])) for leaf in leaves)
    if not 0 < size <= MAX_COORDINATES:
        return None
    affordable = WORK // max(data.num_rows * row_size(data.rows), 1)
    num_checked = min(max(20 * size, 256), total, max(affordable, 5 * size, 100))
    if num_checked < 5 * size or num_checked < NUM_GROUPS * 4:
        return None
    flat = raveled(draws, total)
    far, widened = _farthest(flat.reshape(num_chains, num, size))
    indices = np.linspace(0, total - 1, num_checked).astype(int)
    checked = np.concatenate([indices, far])
    positions = jax.tree.map(
        lambda leaf: np.asarray(leaf).reshape(total, *leaf.shape[2:])[checked], draws
    )
    values, slopes = _values_and_gradients(
        as_functions(posterior),
        data.pooled(groups=True),
        positions,
        batch_size=draws_per_batch(data),
    )
    depth = depth_of(np.asarray(values, np.float64), num_checked)
    values, slopes = values[:num_checked], slopes[:num_checked]
    finite = np.isfinite(values) & np.isfinite(slopes).all(1)
    not_finite = int((~finite).sum())
    figures = None
    if finite.sum() >= max(5 * size, NUM_GROUPS * 4):
        with np.errstate(all="ignore"):
            figures = _compare(flat, indices[finite], np.asarray(slopes, np.float64)[finite])
    if figures is None:
        figures = 4 * (np.full(size, np.nan),)
    return MomentErrors(*figures, num_checked, not_finite, depth=depth, widened=widened)


def _farthest(draws: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the flat indices ``[NUM_FAR]`` of the farthest draws, and `Moments.widened`.

    The metric is the covariance of the draws near the median. Draws before a chain first reaches
    the typical distance are ignored. If too few draws remain, the final draw fills the indices.
    """
    num_chains, num, size = draws.shape
    low, middle, high = np.quantile(draws, [0.25, 0.5, 0.75], axis=(0, 1))
    scaled = (draws - middle) / np.where(high > low, high - low, np.inf)
    scaled = scaled.reshape(-1, size)
    flat, near = scaled, scaled[np.abs(scaled).max(1) <= 4]
    if len(near) > 5 * size:
        values, vectors = np.linalg.eigh(near.T @ near / len(near))
        positive = values > 1e-9 * values[-1]
        flat = flat @ vectors[:, positive] / np.sqrt(values[positive])
    squares = np.square(flat).sum(1)
    middle, low = np.quantile(squares, [0.5, TYPICAL])
    arrived = np.maximum.accumulate((squares <= middle).reshape(num_chains, num), axis=1).ravel()
    out = arrived & ~(squares <= middle + OUT * (low - middle))
    widened = 1.0
    if out.any():
        with np.errstate(invalid="ignore", divide="ignore"):
            ratios = scaled[arrived].std(0) / scaled[arrived & ~out].std(0)
        widened = float(np.nan_to_num(ratios, nan=1.0, posinf=np.inf).max())
    distances = np.where(arrived & np.isfinite(squares), squares, -1)
    indices = np.argsort(-distances, kind="stable")[:NUM_FAR]
    indices = np.where(distances[indices] >= 0, indices, len(distances) - 1)
    return np.pad(indices, (0, NUM_FAR - len(indices)), mode="edge"), widened


def depth_of(values: np.ndarray, num_typical: int) -> float:
    """Return `MomentErrors.depth` from log densities of typical draws, followed by far draws."""
    falls = -values
    if not np.isfinite(falls[:num_typical]).all():
        return 0.0  # `MomentErrors.not_finite` reports it
    middle, low = np.quantile(falls[:num_typical], [0.5, TYPICAL])
    far = falls[num_typical:]
    deepest = np.where(np.isfinite(far), far, np.inf).max() - middle
    return float(deepest / (low - middle)) if low > middle else 0.0


def draws_per_batch(data: FederatedData) -> int:
    """Return the number of draws at which all rows are evaluated in one batch."""
    chunk = min(data.num_rows, CHUNK_ROWS) * row_size(data.rows)
    return min(max(MAX_BATCH_VALUES // chunk, 1), 32)


def raveled(draws: ArrayTree, total: int) -> np.ndarray:
    """Return all chains' draws, ``[total, d]`` float64."""
    columns = [np.asarray(leaf, np.float64).reshape(total, -1) for leaf in jax.tree.leaves(draws)]
    return np.concatenate(columns, 1)


@compiled(static_argnames=("batch_size",))
def _values_and_gradients(
    posterior: Posterior, data: FederatedData, positions: ArrayTree, *, batch_size: int
) -> tuple[Array, Array]:
    """Return log densities ``[n]`` and gradients ``[n, d]`` at positions, leaves ``[n, ...]``."""
    pooled = data.client(0)
    inverse = getattr(posterior.position_fn, "inverse", lambda position: position)

    def value_and_gradient(position: ArrayTree) -> tuple[Array, Array]:
        def chunk(terms_fn: Terms, mask: Array) -> tuple[Array, ArrayTree]:
            def total(place: ArrayTree) -> Array:
                return jnp.sum(jnp.where(mask, terms_fn(inverse(place)), 0))

            return jax.value_and_grad(total)(position)

        likelihood, slope = fold_terms(posterior.loglikelihood_fn, chunk, pooled)
        prior, prior_slope = jax.value_and_grad(
            lambda place: posterior.logprior_fn(inverse(place))
        )(position)
        return prior + likelihood, trees.ravel(trees.add(slope, prior_slope))

    result: tuple[Array, Array] = jax.lax.map(value_and_gradient, positions, batch_size=batch_size)
    return result


def _compare(
    draws: np.ndarray, indices: np.ndarray, slopes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Return bias, spread and their errors from all draws, with gradients at ``draws[indices]``."""
    center, scale = draws.mean(0), draws.std(0)
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        return None
    scaled, slopes = (draws - center) / scale, slopes * scale
    group = np.arange(len(draws)) * NUM_GROUPS // len(draws)
    estimates = _errors(scaled, scaled[indices], slopes)
    if estimates is None:
        return None
    # The jackknife leaves out groups of neighbors, since draws of a chain depend on each other.
    parts = []
    for left_out in range(NUM_GROUPS):
        inside = group != left_out
        part = _errors(scaled[inside], scaled[indices][inside[indices]], slopes[inside[indices]])
        if part is None:
            return None
        parts.append(part)
    leaves = np.array(parts)  # [NUM_GROUPS, 2, d]
    away = leaves - leaves.mean(0)
    error = np.sqrt((NUM_GROUPS - 1) / NUM_GROUPS * (away**2).sum(0))
    return estimates[0], error[0], np.exp(estimates[1]), error[1]


def _errors(
    draws: np.ndarray, points: np.ndarray, slopes: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return bias and log spread, each ``[d]``, or ``None`` if the covariance is degenerate."""
    middle, steep = points.mean(0), slopes.mean(0)
    around = points - middle
    covariance = around.T @ around / len(points)
    if np.linalg.cond(covariance) > 1e12:
        return None
    precision = -np.linalg.solve(covariance, around.T @ (slopes - steep) / len(points))
    precision = (precision + precision.T) / 2
    eigenvalues, vectors = np.linalg.eigh(precision)
    if eigenvalues[0] <= 1e-9 * eigenvalues[-1]:
        # No Gaussian fits these gradients, so use Stein's identities per coordinate.
        products = -np.mean(around * slopes, axis=0)
        return steep, np.log(np.maximum(products, 1e-12)) / 2
    inverse = (vectors / eigenvalues) @ vectors.T
    sd = np.sqrt(np.diag(inverse))
    bias = (draws.mean(0) - middle - inverse @ steep) / sd
    return bias, np.log(draws.std(0) / sd)
