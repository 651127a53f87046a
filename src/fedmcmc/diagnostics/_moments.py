"""Whether draws have the posterior's mean and sds, by its gradients at some of them.

For draws of a density ``p`` with gradients ``g = grad log p``, ``E g = 0`` and ``E (x - E x) g' =
-I``, whatever the density (Stein's identities, by parts). A Newton step of a regression of ``g`` on
``x`` turns a violation into errors of mean and sds: for a Gaussian posterior exactly.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, Posterior, as_functions, compiled
from fedmcmc.data import CHUNK_ROWS, FederatedData
from fedmcmc.gradients import Terms, fold_terms, row_size
from fedmcmc.pytrees import trees

MOST_COORDINATES = 256
NUM_GROUPS = 16
"""Groups of draws that are left out in turn, for standard errors."""
WORK = 2**31
"""Products of draws and numbers of all rows beyond which fewer draws are looked at."""
MOST_FAR = 16
"""Draws farthest out, whose log densities are looked at besides."""
OUT = 10.0
"""Of squared distances, in units of how far one draw in ten is from the median: of a Gaussian with
one dimension 4.8 sds, with ten 8.6."""
TYPICAL = 0.9
"""Share of draws that are not far down."""
_MEMORY = 2**24  # numbers that draws looked at together may take


class Moments(NamedTuple):
    """How draws differ from the posterior.

    Attributes
    ----------
    bias, bias_error
        ``[d]`` float64, error of the mean in posterior standard deviations, and its standard error.
    spread, spread_error
        ``[d]``, standard deviations over the posterior's, and the standard error of the logarithm.
    num_draws
        At how many draws gradients were taken, or how many points were weighted.
    not_finite
        At how many of these the log density or its gradient is not finite. If any, the other
        figures are of the rest; NaN where these are too few, or their covariance degenerate.
    khat
        Of weights, the shape of their tail; ``None`` where the figures are by gradients.
    trusted
        Whether figures by weights can be trusted: k-hat is below 0.7, or no point has more than a
        hundredth of all weight.
    depth
        How far the log density of the draw farthest out lies below the median draw's, over how far
        that of one draw in ten does. Log densities of a posterior's draws have tails that fall
        about exponentially, so that of ten thousand it is about 8; zero where it was not looked at.
    widened
        The largest ratio of a coordinate's sd to that without the draws that are far out.
    """

    bias: np.ndarray
    bias_error: np.ndarray
    spread: np.ndarray
    spread_error: np.ndarray
    num_draws: int
    not_finite: int
    khat: float | None = None
    trusted: bool = True
    depth: float = 0.0
    widened: float = 1.0

    def off(self, bias: float, spread: float) -> np.ndarray:
        """Return which coordinates are off by more than this and three standard errors, ``[d]``."""
        with np.errstate(divide="ignore", invalid="ignore"):
            stretch = np.abs(np.log(self.spread))
            away = np.abs(self.bias) > bias + 3 * self.bias_error
            return away | (stretch > np.log(spread) + 3 * self.spread_error)


def check_moments(posterior: Posterior, data: FederatedData, draws: ArrayTree) -> Moments | None:
    """Compare the mean and sds of draws with the posterior's, by gradients at some of them.

    In a real federation this is one exchange of as many points as draws are looked at.

    Parameters
    ----------
    posterior, data
        The model and every client's rows.
    draws
        Leaves ``[num_chains, num_draws, *event]``, in the user's coordinates.

    Returns
    -------
    Moments or None
        ``None`` where there are too few draws for the dimension, or more than 256 dimensions.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> normals = jax.random.normal(jax.random.key(0), (2, 4000))
    >>> found = check_moments(posterior, data, 1 / 3 + normals / 3)  # its mean and sd
    >>> wide = check_moments(posterior, data, 1 / 2 + normals / 2)
    >>> bool(abs(found.bias) < 0.1), found.spread.round(1), wide.bias.round(1), wide.spread.round(1)
    (True, array([1.]), array([0.5]), array([1.5]))
    """
    leaves = jax.tree.leaves(draws)
    num_chains, num = leaves[0].shape[:2]
    total, size = num_chains * num, sum(int(np.prod(leaf.shape[2:])) for leaf in leaves)
    if not 0 < size <= MOST_COORDINATES:
        return None
    affordable = WORK // max(data.num_rows * row_size(data.rows), 1)
    most = min(max(20 * size, 256), total)
    num_looked = min(most, max(affordable, 5 * size, 100))
    if num_looked < 5 * size or num_looked < NUM_GROUPS * 4:
        return None
    every = raveled(draws, total)
    far, widened = farthest(every.reshape(num_chains, num, size))
    at = np.linspace(0, total - 1, num_looked).astype(int)
    looked = np.concatenate([at, far])
    chosen = jax.tree.map(
        lambda leaf: np.asarray(leaf).reshape(total, *leaf.shape[2:])[looked], draws
    )
    values, slopes = _values_and_gradients(
        as_functions(posterior), data.pooled(groups=True), chosen, together=taken_together(data)
    )
    depth = depth_of(np.asarray(values, np.float64), num_looked)
    values, slopes = values[:num_looked], slopes[:num_looked]
    finite = np.isfinite(values) & np.isfinite(slopes).all(1)
    not_finite = int((~finite).sum())
    figures = None
    if finite.sum() >= max(5 * size, NUM_GROUPS * 4):
        with np.errstate(all="ignore"):
            figures = _compare(every, at[finite], np.asarray(slopes, np.float64)[finite])
    if figures is None:
        nothing = np.full(size, np.nan)
        return Moments(*4 * (nothing,), num_looked, not_finite, depth=depth, widened=widened)
    return Moments(*figures, num_looked, not_finite, depth=depth, widened=widened)


def farthest(draws: np.ndarray) -> tuple[np.ndarray, float]:
    """Return which draws ``[num_chains, num_draws, d]`` are farthest out, ``[MOST_FAR]``.

    Numbers count through all chains. Far is measured by the covariance of the draws without those
    that are far from the median; a chain that has yet to arrive is not out. Where none is left, the
    last draw stands in. The second value is `Moments.widened`.
    """
    num_chains, num, size = draws.shape
    low, middle, high = np.quantile(draws, [0.25, 0.5, 0.75], axis=(0, 1))
    scaled = (draws - middle) / np.where(high > low, high - low, np.inf)
    scaled = scaled.reshape(-1, size)
    flat, near = scaled, scaled[np.abs(scaled).max(1) <= 4]
    if len(near) > 5 * size:
        values, vectors = np.linalg.eigh(near.T @ near / len(near))
        kept = values > 1e-9 * values[-1]
        flat = flat @ vectors[:, kept] / np.sqrt(values[kept])
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
    found = np.argsort(-distances, kind="stable")[:MOST_FAR]
    found = np.where(distances[found] >= 0, found, len(distances) - 1)
    return np.pad(found, (0, MOST_FAR - len(found)), mode="edge"), widened


def depth_of(values: np.ndarray, num_typical: int) -> float:
    """Return `Moments.depth` from log densities, of typical draws and then of those far out."""
    falls = -values
    if not np.isfinite(falls[:num_typical]).all():
        return 0.0  # which is said by itself
    middle, low = np.quantile(falls[:num_typical], [0.5, TYPICAL])
    far = falls[num_typical:]
    deepest = np.where(np.isfinite(far), far, np.inf).max() - middle
    return float(deepest / (low - middle)) if low > middle else 0.0


def taken_together(data: FederatedData) -> int:
    """Return at how many draws all rows are looked at together."""
    return min(max(_MEMORY // (min(data.num_rows, CHUNK_ROWS) * row_size(data.rows)), 1), 32)


def raveled(draws: ArrayTree, total: int) -> np.ndarray:
    """Return draws of all chains, `total` many, ``[total, d]`` float64."""
    columns = [np.asarray(leaf, np.float64).reshape(total, -1) for leaf in jax.tree.leaves(draws)]
    return np.concatenate(columns, 1)


@compiled(static_argnames=("together",))
def _values_and_gradients(
    posterior: Posterior, data: FederatedData, positions: ArrayTree, *, together: int
) -> tuple[Array, Array]:
    """Return log densities ``[n]`` and gradients ``[n, d]`` at positions, leaves ``[n, ...]``."""
    everyone = data.client(0)
    inverse = getattr(posterior.position_fn, "inverse", lambda position: position)

    def one(position: ArrayTree) -> tuple[Array, Array]:
        def of_terms(terms_fn: Terms, mask: Array) -> tuple[Array, ArrayTree]:
            def total(place: ArrayTree) -> Array:
                return jnp.sum(jnp.where(mask, terms_fn(inverse(place)), 0))

            return jax.value_and_grad(total)(position)

        likelihood, slope = fold_terms(posterior.loglikelihood_fn, of_terms, everyone)
        prior, prior_slope = jax.value_and_grad(
            lambda place: posterior.logprior_fn(inverse(place))
        )(position)
        return prior + likelihood, trees.ravel(trees.add(slope, prior_slope))

    result: tuple[Array, Array] = jax.lax.map(one, positions, batch_size=together)
    return result


def _compare(
    draws: np.ndarray, at: np.ndarray, slopes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Return bias, its error, spread and its error, of all draws ``[n, d]``.

    Gradients `slopes` are those at the draws `at`.
    """
    center, scale = draws.mean(0), draws.std(0)
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        return None
    scaled, slopes = (draws - center) / scale, slopes * scale
    group = np.arange(len(draws)) * NUM_GROUPS // len(draws)
    whole = _errors(scaled, scaled[at], slopes)
    if whole is None:
        return None
    # Left out in turn: groups of neighbors, as draws of a chain are no independent ones.
    parts = []
    for left_out in range(NUM_GROUPS):
        kept = group != left_out
        one = _errors(scaled[kept], scaled[at][kept[at]], slopes[kept[at]])
        if one is None:
            return None
        parts.append(one)
    leaves = np.array(parts)  # [NUM_GROUPS, 2, d]
    away = leaves - leaves.mean(0)
    error = np.sqrt((NUM_GROUPS - 1) / NUM_GROUPS * (away**2).sum(0))
    return whole[0], error[0], np.exp(whole[1]), error[1]


def _errors(
    draws: np.ndarray, points: np.ndarray, slopes: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return bias and the logarithm of the spread, each ``[d]``; ``None`` where none is found."""
    middle, steep = points.mean(0), slopes.mean(0)
    around = points - middle
    covariance = around.T @ around / len(points)
    if np.linalg.cond(covariance) > 1e12:
        return None
    precision = -np.linalg.solve(covariance, around.T @ (slopes - steep) / len(points))
    precision = (precision + precision.T) / 2
    eigenvalues, vectors = np.linalg.eigh(precision)
    if eigenvalues[0] <= 1e-9 * eigenvalues[-1]:
        # No Gaussian fits these gradients: what the identities say, coordinate by coordinate.
        products = -np.mean(around * slopes, axis=0)
        return steep, np.log(np.maximum(products, 1e-12)) / 2
    inverse = (vectors / eigenvalues) @ vectors.T
    sd = np.sqrt(np.diag(inverse))
    bias = (draws.mean(0) - middle - inverse @ steep) / sd
    return bias, np.log(draws.std(0) / sd)
