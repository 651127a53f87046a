"""What a kernel does to Gaussian clients, exactly: its stationary law, before any run.

With Gaussian surrogates in place of the clients' likelihoods a round is an affine map of the
position and of the normals that it draws. The map is read off the kernel's own round, by
differentiating it, so whatever the kernel is made of is part of the prediction.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial

from fedmcmc._types import (
    ArrayTree,
    Cohort,
    FederatedKernel,
    FederatedState,
    Posterior,
    as_functions,
)
from fedmcmc.data import FederatedData
from fedmcmc.diagnostics import BIAS, SPREAD
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import as_surrogates
from fedmcmc.pytrees import is_key, trees
from fedmcmc.rounds import TOGETHER, RoundDraws, prepare_round, run_round
from fedmcmc.transforms import is_secured

MAX_DIMENSION = 512
NEWTON_STEPS = 20
MOST_COHORTS = 2**15
"""Visits that are drawn to find all clients of a relay."""
MOST_ITERATIONS = 100_000
NOT_AFFINE = (
    "predict_bias needs a kernel whose round moves the position by an affine map of position and "
    "normals, and keeps nothing else: not one that compresses messages or refreshes snapshots."
)


class Prediction(NamedTuple):
    """The law of a kernel on Gaussian approximations of the clients, beside its target.

    Attributes
    ----------
    mean, covariance
        ``[d]`` and ``[d, d]`` over the raveled position, the stationary law of the position after a
        round; NaN where there is none.
    target_mean, target_covariance
        Of the posterior that the approximations make with the prior.
    spectral_radius
        Of the map of a round: what is left of a distance from the stationary mean after a round. At
        one or above, the kernel diverges.
    names
        What the coordinates of the raveled position are called.
    on_position
        ``[d, d]``, what a round does to the position in the mean.
    bits
        Sent up and down in a round, by and to all clients, uncompressed or as the kernel counts.
    """

    mean: np.ndarray
    covariance: np.ndarray
    target_mean: np.ndarray
    target_covariance: np.ndarray
    spectral_radius: float
    names: tuple[str, ...]
    on_position: np.ndarray
    bits: float

    @property
    def rounds_per_draw(self) -> np.ndarray:
        """Rounds per effective draw of each coordinate, ``[d]``: autocorrelation times, exact."""
        return np.diag(self._integrated) / np.diag(self.covariance)

    @property
    def slowest(self) -> float:
        """Rounds per effective draw of the slowest direction."""
        integrated, root = self._integrated, np.linalg.cholesky(self.covariance)
        inside = np.linalg.solve(root, np.linalg.solve(root, integrated).T)
        return float(np.linalg.eigvalsh((inside + inside.T) / 2)[-1])

    @property
    def _integrated(self) -> np.ndarray:
        """Return the sum of the autocovariances at all lags, ``[d, d]``."""
        one = np.eye(len(self.mean))
        sums = np.linalg.solve(one - self.on_position, (one + self.on_position) @ self.covariance)
        return (sums + sums.T) / 2

    @property
    def bias(self) -> np.ndarray:
        """Error of the mean in posterior standard deviations, ``[d]``."""
        return (self.mean - self.target_mean) / np.sqrt(np.diag(self.target_covariance))

    @property
    def spread(self) -> np.ndarray:
        """Standard deviations over those of the posterior, ``[d]``."""
        return np.sqrt(np.diag(self.covariance) / np.diag(self.target_covariance))

    @property
    def is_off(self) -> bool:
        """Whether the kernel diverges, or a mean is off by 0.1 sd, or an sd by a tenth."""
        if not self.spectral_radius < 1:
            return True
        stretch = np.abs(np.log(self.spread)).max()
        return bool(np.abs(self.bias).max() > BIAS or stretch > np.log(SPREAD))

    def __str__(self) -> str:
        """Return the largest errors in a sentence."""
        if not self.spectral_radius < 1:
            return (
                f"Predicted from Gaussian approximations and exact gradients: the kernel diverges "
                f"(spectral radius {self.spectral_radius:.4g} per round); take a smaller step size."
            )
        worst = np.abs(self.bias).argmax()
        return (
            f"Predicted from Gaussian approximations and exact gradients: means off by up to "
            f"{abs(self.bias[worst]):.3g} posterior sd ({self.names[worst]}), sds "
            f"{self.spread.min():.3g} to {self.spread.max():.3g} of the posterior's; a distance "
            f"from the stationary mean shrinks to {self.spectral_radius:.3g} of it per round."
        )


def predict_bias(
    kernel: FederatedKernel,
    data: FederatedData,
    surrogates: Gaussian,
    *,
    round_: int = 0,
) -> Prediction:
    """Predict the stationary law of `kernel` from Gaussian approximations of its clients.

    Exact where the clients' likelihoods and the prior are Gaussian and gradients are exact. The
    noise of minibatches is not part of it, that of `noisy` is. What remains at small step sizes is
    the bias of local steps at clients that differ in curvature.

    Parameters
    ----------
    kernel
        A kernel in whose rounds everyone takes part, or one client (`fedmcmc.fsgld`,
        `fedmcmc.dsgld`), and nothing but the position is kept between rounds; of compressed
        messages only what is not compressed can be predicted.
    data
        The clients' rows, for their number and shares.
    surrogates
        One `Gaussian` per client for its likelihood, as from `fedmcmc.surrogates.laplace`. The
        prior is expanded to second order at the mode of its product with them.
    round_
        The round whose step sizes are meant, where these are schedules.

    Raises
    ------
    ValueError
        If the kernel's round is not an affine map of position and normals alone, it has secure
        sums, or the dimension is above 512.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2,
    ...     lambda theta, rows: -0.5 * rows["p"] * (rows["x"] - theta) ** 2,
    ... )
    >>> data = fedmcmc.FederatedData.from_clients(
    ...     [{"x": jnp.ones(1), "p": jnp.ones(1)}, {"x": jnp.zeros(1), "p": 4 * jnp.ones(1)}]
    ... )
    >>> q = fedmcmc.Gaussian.from_moments(jnp.array([1.0, 0.0]), variance=jnp.array([1.0, 0.25]))
    >>> kernel = fedmcmc.fa_ld(posterior, step_size=0.02, num_local_steps=10)
    >>> predict_bias(kernel, data, q).bias.round(2)
    array([0.16])
    """
    if not isinstance(kernel, FederatedKernel) or not isinstance(data, FederatedData):
        raise TypeError(
            "predict_bias takes a FederatedKernel, a FederatedData and surrogates, got "
            f"{type(kernel).__name__}, {type(data).__name__} and {type(surrogates).__name__}."
        )
    if is_secured(kernel):
        raise ValueError(
            "predict_bias differentiates a round, which rounding to integers forbids: predict the "
            "kernel inside of secure_sum, whose law is the same up to the resolution."
        )
    surrogates = as_surrogates(surrogates)
    position = jax.tree.map(lambda leaf: leaf[0], surrogates.precision_mean)
    size = trees.num_elements(position)
    if size > MAX_DIMENSION:
        raise ValueError(
            f"A prediction needs dense matrices: at most {MAX_DIMENSION} dimensions, got {size}."
        )
    surrogates.check_clients(position, data.num_clients)
    kernel = as_functions(kernel)
    posteriors = [x for x in jax.tree.leaves(kernel, is_leaf=_is_posterior) if _is_posterior(x)]
    if not posteriors:
        raise ValueError("This kernel holds no posterior whose clients could be approximated.")
    eta, precision = _dense(surrogates)
    mode, prior = _mode(posteriors[0], eta.sum(0), precision.sum(0), position)
    model = Posterior(
        Partial(_log_quadratic, prior[0], prior[1]), Partial(_log_surrogate, eta, precision)
    )
    kernel = jax.tree.map(lambda x: model if _is_posterior(x) else x, kernel, is_leaf=_is_posterior)
    maps, bits = _affine_maps(kernel, _one_row_each(data), mode, round_)
    mean, covariance, radius = _stationary(maps)
    total = np.asarray(prior[1] + precision.sum(0), np.float64)
    target_mean = np.linalg.solve(total, np.asarray(prior[0] + eta.sum(0), np.float64))
    names = tuple(trees.element_names(position))
    whole = np.sum([each.share * each.on_position for each in maps], axis=0)
    inverse = np.linalg.inv(total)
    return Prediction(mean, covariance, target_mean, inverse, radius, names, whole, bits)


def largest_curvature(posterior: Posterior, surrogates: Gaussian) -> float:
    """Return the largest eigenvalue of the precision that surrogates and prior have together."""
    surrogates = as_surrogates(surrogates)
    position = jax.tree.map(lambda leaf: leaf[0], surrogates.precision_mean)
    eta, precision = _dense(surrogates)
    _, prior = _mode(as_functions(posterior), eta.sum(0), precision.sum(0), position)
    return float(np.linalg.eigvalsh(np.asarray(precision.sum(0) + prior[1], np.float64))[-1])


def _is_posterior(node: Any) -> bool:
    return isinstance(node, Posterior)


def _dense(surrogates: Gaussian) -> tuple[Array, Array]:
    """Return natural parameters ``[num_clients, d]`` and ``[num_clients, d, d]``."""

    def one(q: Gaussian) -> tuple[Array, Array]:
        eta, unravel = ravel_pytree(q.precision_mean)
        precision = jax.vmap(lambda e: ravel_pytree(q.apply_precision(unravel(e)))[0])
        return eta, precision(jnp.eye(eta.size, dtype=eta.dtype))

    return jax.vmap(one)(surrogates)


def _mode(
    posterior: Posterior, eta: Array, precision: Array, like: ArrayTree
) -> tuple[ArrayTree, tuple[Array, Array]]:
    """Return the mode with the prior, and the prior's natural parameters around it."""
    flat, unravel = ravel_pytree(like)
    x = jnp.zeros_like(flat)
    for _ in range(NEWTON_STEPS):
        prior = _expand(posterior, like, x)
        x = jnp.linalg.solve(precision + prior[1], eta + prior[0])
    prior = _expand(posterior, like, x)
    total = np.asarray(precision + prior[1], np.float64)
    if not np.isfinite(total).all() or np.linalg.eigvalsh(total).min() <= 0:
        raise ValueError(
            "The surrogates and the prior together make no proper Gaussian: the sum of their "
            "precisions is not positive definite."
        )
    return unravel(x), prior


@jax.jit
def _expand(posterior: Posterior, like: ArrayTree, x: Array) -> tuple[Array, Array]:
    """Return the natural parameters of the prior's expansion to second order at `x`."""

    def logprior(place: Array) -> Array:
        return posterior.logprior_fn(trees.cast_like(trees.unravel(place, like), like))

    curvature = -jax.hessian(logprior)(x)
    return jax.grad(logprior)(x) + curvature @ x, curvature


def _log_quadratic(eta: Array, precision: Array, position: ArrayTree) -> Array:
    x, _ = ravel_pytree(position)
    return x @ eta - x @ (precision @ x) / 2


def _log_surrogate(eta: Array, precision: Array, position: ArrayTree, rows: Array) -> Array:
    return jax.vmap(lambda c: _log_quadratic(eta[c], precision[c], position))(rows)


def _one_row_each(data: FederatedData) -> FederatedData:
    """Return clients of one row, their number, with the shares of `data`."""
    ids = np.arange(data.num_clients, dtype=np.int32)
    return replace(FederatedData.from_arrays(ids, ids), share=data.share)


class _Map(NamedTuple):
    """``position' = on_position position + shift + N(0, noise)``, in a share of the rounds."""

    share: float
    on_position: np.ndarray
    shift: np.ndarray
    noise: np.ndarray


def _cohorts(kernel: FederatedKernel, data: FederatedData) -> list[tuple[float, Cohort]]:
    """Return all cohorts that a round may have and how often it has them: one, or single clients.

    Raises
    ------
    ValueError
        If there are others.
    """
    participation = kernel.participation
    if participation.pooled:
        raise ValueError("predict_bias needs a federated kernel, not one on pooled rows.")
    if participation.drops or participation.cohort_size not in (None, 1):
        raise ValueError(
            "predict_bias needs a kernel in whose rounds every client takes part, or one."
        )
    num = data.num_clients
    draw: Any = jax.jit(lambda keys: jax.vmap(lambda k: participation.prepare(k, num))(keys))
    if participation.cohort_size is None:
        cohort = draw(jax.random.split(jax.random.key(0), 1))
        return [(1.0, jax.tree.map(lambda leaf: leaf[0], cohort))]
    cohorts = draw(jax.random.split(jax.random.key(0), MOST_COHORTS))
    ids, first = np.unique(np.asarray(cohorts.ids)[:, 0], return_index=True)
    found = [jax.tree.map(lambda leaf, i=i: leaf[i], cohorts) for i in first]
    shares = [1 / float(cohort.weight[0]) for cohort in found]
    if len(ids) < num or abs(sum(shares) - 1) > 1e-3:
        raise ValueError(
            f"predict_bias found {len(ids)} of {num} clients among {MOST_COHORTS} visits, in "
            f"shares that sum to {sum(shares):.3g}: visits are too rare to be predicted."
        )
    return list(zip(shares, found, strict=True))


def _affine_maps(
    kernel: FederatedKernel, data: FederatedData, position: ArrayTree, round_: int
) -> tuple[list[_Map], float]:
    """Return the map of a round, for each cohort that it may have, and the bits of a round."""
    key, number = jax.random.key(0), jnp.asarray(round_, jnp.int32)
    cohorts = _cohorts(kernel, data)
    state = kernel.init(key, position, data)
    state = state._replace(broadcast=state.broadcast._replace(round=number))
    _, draws = prepare_round(kernel, data, TOGETHER, key, state.broadcast, number)
    if any(map(is_key, jax.tree.leaves(draws.server))):
        # It draws from a key, and not as a normal that is added.
        raise ValueError(NOT_AFFINE)
    if any(map(is_key, jax.tree.leaves(draws))):
        raise ValueError("The draws of a round are too many to be predicted.")
    maps = [
        _Map(share, *_affine_map(kernel, data, state, cohort, draws)) for share, cohort in cohorts
    ]
    return maps, float(_bits(kernel, data, state, cohorts[0][1], draws))


def _affine_map(
    kernel: FederatedKernel,
    data: FederatedData,
    state: FederatedState,
    cohort: Cohort,
    draws: RoundDraws,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ``(A, b, V)`` of a round, ``position' = A position + b + N(0, V)``."""
    given = (kernel, data, state, cohort, draws)
    # Clients of one row, an integer, have no other numbers among their draws than normals.
    x = trees.ravel(state.broadcast.position)
    normals = list(filter(_is_normal, jax.tree.leaves(draws)))
    zero = trees.zeros_like(normals)
    try:
        (on_position, on_normals), _ = _jacobians(x, zero, *given)
    except ValueError as error:  # of what has no derivative, as a quantizer's integers
        raise ValueError(NOT_AFFINE) from error
    a = np.asarray(on_position, np.float64)
    b = np.asarray(_after(x, zero, *given)[0], np.float64) - a @ np.asarray(x)
    columns = [np.asarray(leaf, np.float64).reshape(x.size, -1) for leaf in on_normals]
    z = [np.asarray(leaf).ravel() for leaf in normals]
    # Elsewhere the round must be what the map says, and keep nothing.
    moved, states = _after(x + 1.0, normals, *given)
    expected = a @ (np.asarray(x) + 1.0) + b
    expected = expected + sum(c @ v for c, v in zip(columns, z, strict=True))
    pairs = zip(
        jax.tree.leaves(states), jax.tree.leaves((state.server, state.clients)), strict=True
    )
    keeps_nothing = all(np.array_equal(new, old) for new, old in pairs)
    error_size = np.abs(np.asarray(moved) - expected).max()
    if not keeps_nothing or error_size > 1e-3 * (1 + np.abs(expected).max()):
        raise ValueError(NOT_AFFINE)
    return a, b, np.asarray(sum(c @ c.T for c in columns)) + np.zeros_like(a)


def _stationary(maps: list[_Map]) -> tuple[np.ndarray, np.ndarray, float]:
    """Return mean and covariance in the long run, and what is left of a distance per round.

    Not finite where there is no such law. The distance is that of the mean, and at one or above
    also where the covariance grows.
    """
    shares = np.array([each.share for each in maps])
    shares = shares / shares.sum()
    on_position = np.stack([each.on_position for each in maps])
    whole, size = np.tensordot(shares, on_position, 1), on_position.shape[-1]
    nothing = np.full(size, np.nan), np.full((size, size), np.nan)
    radius = float(np.abs(np.linalg.eigvals(whole)).max())
    if not radius < 1:
        return *nothing, radius
    mean = np.linalg.solve(
        np.eye(size) - whole, sum(p * each.shift for p, each in zip(shares, maps, strict=True))
    )
    if len(maps) == 1:
        return mean, _lyapunov(whole, maps[0].noise), radius
    # Where a visit takes the mean of all differs from client to client.
    gaps = np.stack([each.on_position @ mean + each.shift - mean for each in maps])
    noise = sum(p * each.noise for p, each in zip(shares, maps, strict=True))
    noise = noise + np.einsum("s,si,sj->ij", shares, gaps, gaps)
    covariance, most = noise, 1e12 * np.abs(noise).max()
    for _ in range(MOST_ITERATIONS):
        after = noise + np.einsum(
            "s,sik,skl,sjl->ij", shares, on_position, covariance[None], on_position, optimize=True
        )
        change = np.abs(after - covariance).max()
        covariance = after
        if change < 1e-10 * np.abs(covariance).max():
            return mean, (covariance + covariance.T) / 2, radius
        if np.abs(covariance).max() > most:
            break
    return *nothing, float("inf")


def _is_normal(leaf: Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _run(
    x: Array,
    normals: list[Array],
    kernel: FederatedKernel,
    data: FederatedData,
    state: FederatedState,
    cohort: Cohort,
    draws: RoundDraws,
) -> tuple[Array, tuple[ArrayTree, ArrayTree]]:
    """Run a round from position `x` with these `normals`; return the position and the states."""
    rest = iter(normals)
    draws = jax.tree.map(lambda leaf: next(rest) if _is_normal(leaf) else leaf, draws)
    broadcast = state.broadcast
    position = trees.cast_like(trees.unravel(x, broadcast.position), broadcast.position)
    start = state._replace(broadcast=broadcast._replace(position=position))
    moved, _ = run_round(kernel, data, TOGETHER, start, cohort, draws)
    return trees.ravel(moved.broadcast.position), (moved.server, moved.clients)


@jax.jit
def _bits(
    kernel: FederatedKernel,
    data: FederatedData,
    state: FederatedState,
    cohort: Cohort,
    draws: RoundDraws,
) -> Array:
    _, info = run_round(kernel, data, TOGETHER, state, cohort, draws)
    return info.bits_up + info.bits_down


_after = jax.jit(_run)
_jacobians = jax.jit(jax.jacrev(_run, argnums=(0, 1), has_aux=True))


def _lyapunov(a: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return ``sum_k a^k v a^k'``, by doubling."""
    total, power = v, a
    while np.abs(power).max() > 1e-18:
        total = total + power @ total @ power.T
        power = power @ power
    return (total + total.T) / 2
