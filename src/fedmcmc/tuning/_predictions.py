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

from fedmcmc._types import ArrayTree, FederatedKernel, Posterior, as_functions
from fedmcmc.data import FederatedData
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import as_surrogates
from fedmcmc.pytrees import trees
from fedmcmc.tuning._affine import affine_map, lyapunov

MAX_DIMENSION = 512
NEWTON_STEPS = 20


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
    """

    mean: np.ndarray
    covariance: np.ndarray
    target_mean: np.ndarray
    target_covariance: np.ndarray
    spectral_radius: float
    names: tuple[str, ...]

    @property
    def bias(self) -> np.ndarray:
        """Error of the mean in posterior standard deviations, ``[d]``."""
        return (self.mean - self.target_mean) / np.sqrt(np.diag(self.target_covariance))

    @property
    def spread(self) -> np.ndarray:
        """Standard deviations over those of the posterior, ``[d]``."""
        return np.sqrt(np.diag(self.covariance) / np.diag(self.target_covariance))

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
        A kernel in whose rounds everyone takes part and nothing but the position is kept between
        rounds; of compressed messages only what is not compressed can be predicted.
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
        If the kernel's round is not an affine map of position and normals alone, or the dimension
        is above 512.

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
    on_position, shift, noise = affine_map(kernel, _one_row_each(data), mode, round_)
    radius = float(np.abs(np.linalg.eigvals(on_position)).max())
    total = np.asarray(prior[1] + precision.sum(0), np.float64)
    target_mean = np.linalg.solve(total, np.asarray(prior[0] + eta.sum(0), np.float64))
    mean = np.full(size, np.nan)
    covariance = np.full((size, size), np.nan)
    if radius < 1:
        mean = np.linalg.solve(np.eye(size) - on_position, shift)
        covariance = lyapunov(on_position, noise)
    names = tuple(trees.element_names(position))
    return Prediction(mean, covariance, target_mean, np.linalg.inv(total), radius, names)


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
