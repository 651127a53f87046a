"""Constants of two papers' bounds, for a model and its clients: how much a round's noise is.

FSGLD: El Mekkaoui et al. (2021), Theorems 1 and 2. QLSD: Vono et al. (2022), the noise of gradients
at the mode, which their Table 2 is about; its entries were derived anew from assumptions H2 to H4.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import positive_integer
from fedmcmc._types import ArrayTree, ClientTerms, Posterior
from fedmcmc.compression import Compressor
from fedmcmc.data import FederatedData
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import refuse_latents
from fedmcmc.pytrees import trees

ROWS_AT_A_TIME = 1024


class RelayConstants(NamedTuple):
    """Constants of the bounds of DSGLD and FSGLD; see `relay_constants`.

    Attributes
    ----------
    gamma_squared
        ``[num_clients]``, the largest squared gradient of a row's log likelihood.
    eps_squared
        ``[num_clients]``, the largest average over a client's rows of the squared distance between
        a row's gradient and the surrogate's, over the rows.
    dsgld, fsgld
        ``sum_s N_s^2 gamma_s^2 / f_s`` and ``sum_s N_s^2 eps_s^2 / f_s``: over ``m T``, the first
        terms of the bounds.
    """

    gamma_squared: Array
    eps_squared: Array
    dsgld: float
    fsgld: float


def relay_constants(
    posterior: Posterior,
    data: FederatedData,
    surrogates: Gaussian,
    positions: ArrayTree,
    *,
    probabilities: Any = None,
) -> RelayConstants:
    """Return the constants of the bounds of DSGLD and FSGLD, as largest values over positions.

    The theorems take suprema over all positions, which are infinite for most models; here they are
    those over `positions`: draws of the posterior, say, or a grid. Surrogates with a smaller
    ``eps_squared`` make FSGLD's gradients less noisy. Where each surrogate has the slope of its
    client's log likelihood, ``fsgld / m`` is the variance of FSGLD's gradient at the position (at
    most, over several); elsewhere the differences of slopes add what no minibatch reduces.

    Parameters
    ----------
    posterior, data
        The model and every client's rows.
    surrogates
        One Gaussian per client, as for `fedmcmc.fsgld`.
    positions
        Leaves ``[num_positions, *event]``.
    probabilities
        ``[num_clients]``, with which clients are visited; equal ones by default.

    Raises
    ------
    ValueError
        If probabilities are not one positive number per client, summing to one, or the model has
        terms of other things than rows.

    References
    ----------
    El Mekkaoui et al. (2021), Theorems 1 and 2, Lemma 2.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: 0.0, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.array([1.0, 3.0]), jnp.array([-2.0])])
    >>> exact = fedmcmc.surrogates.taylor(posterior, data, 0.0)
    >>> found = fedmcmc.tuning.relay_constants(posterior, data, exact, jnp.array([0.0, 1.0]))
    >>> found.gamma_squared.tolist(), found.eps_squared.tolist()
    ([9.0, 9.0], [1.0, 0.0])
    >>> found.dsgld, found.fsgld
    (90.0, 8.0)
    """
    owner, index = _rows_of(posterior, data)
    sizes = np.asarray(data.sizes)
    shares = _probabilities(probabilities, data.num_clients)

    def at(position: ArrayTree) -> tuple[Array, Array]:
        slopes = jax.vmap(lambda own: trees.ravel(own.grad_log(position)))(surrogates)
        per_row = slopes / jnp.asarray(sizes)[:, None]

        def of_row(which: tuple[Array, Array]) -> tuple[Array, Array]:
            gradient = _row_gradient(posterior, data, position, which[1])
            return jnp.sum(gradient**2), jnp.sum((gradient - per_row[which[0]]) ** 2)

        squares, distances = jax.lax.map(of_row, (owner, index), batch_size=ROWS_AT_A_TIME)
        num = data.num_clients
        return (
            jax.ops.segment_max(squares, owner, num),
            jax.ops.segment_sum(distances, owner, num) / jnp.asarray(sizes),
        )

    gamma, eps = (leaf.max(axis=0) for leaf in jax.jit(lambda x: jax.lax.map(at, x))(positions))
    dsgld, fsgld = (float((sizes**2.0 / shares * np.asarray(x)).sum()) for x in (gamma, eps))
    return RelayConstants(gamma, eps, dsgld, fsgld)


class NoiseAtMode(NamedTuple):
    """The variance of the gradient that a round of QLSD adds up; see `noise_at_mode`.

    Attributes
    ----------
    heterogeneity
        ``sum_i |grad U_i|^2`` of the clients' log likelihoods, zero where all agree on the mode.
    minibatch
        ``sum_i E |H_i - grad U_i|^2`` of minibatches.
    qlsd
        The bound on the variance of QLSD's gradient, which compression and absent clients widen.
    star
        That of `qlsd_star` and `lsd_star` at their center: zero.
    """

    heterogeneity: float
    minibatch: float
    qlsd: float
    star: float


def noise_at_mode(
    posterior: Posterior,
    data: FederatedData,
    position: ArrayTree,
    *,
    compressor: Compressor | None = None,
    batch_size: int | None = None,
    probability: float = 1.0,
) -> NoiseAtMode:
    """Return how noisy the gradient of a round is at a position, best the mode.

    What does not vanish there biases a chain however many rows there are. The bound is
    ``sum_i ((omega_i + 1) / p) (|grad U_i|^2 + E |H_i - grad U_i|^2) - |grad U_i|^2``, with
    equality for `sparsify` and without compression. Variance reduction with memory (`qlsd_pp`)
    comes to zero, too, as chain and snapshot come to the mode.

    Parameters
    ----------
    posterior, data
        The model and every client's rows; a gradient of each row is held.
    position
        Where, `fedmcmc.surrogates.mode` for the mode.
    compressor
        Whose ``omega`` counts; none by default.
    batch_size
        Rows per minibatch, drawn with replacement; all rows by default.
    probability
        ``p``, with which each client takes part.

    Raises
    ------
    ValueError
        On numbers out of range, and for models with terms of other things than rows.

    References
    ----------
    Vono et al. (2022), assumptions H2 to H4 and Table 2.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: 0.0, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.array([1.0, 3.0]), jnp.array([-4.0])])
    >>> fedmcmc.tuning.noise_at_mode(posterior, data, 0.0, batch_size=1, probability=0.5)
    NoiseAtMode(heterogeneity=32.0, minibatch=4.0, qlsd=40.0, star=0.0)
    """
    owner, index = _rows_of(posterior, data)
    if batch_size is not None:
        batch_size = positive_integer(batch_size, "batch_size")
    if not 0 < probability <= 1:
        raise ValueError(f"probability must lie in (0, 1], got {probability}.")
    sizes = np.asarray(data.sizes, float)

    @jax.jit
    def moments(at: ArrayTree) -> tuple[Array, Array]:
        gradients = jax.lax.map(
            lambda row: _row_gradient(posterior, data, at, row), index, batch_size=ROWS_AT_A_TIME
        )
        totals = jax.ops.segment_sum(gradients, owner, data.num_clients)
        means = totals / jnp.asarray(sizes)[:, None]
        # About the means, so that nothing cancels.
        apart = jnp.sum((gradients - means[owner]) ** 2, axis=1)
        scatter = jax.ops.segment_sum(apart, owner, data.num_clients) / jnp.asarray(sizes)
        return jnp.sum(means**2, axis=1), scatter

    means, scatter = (np.asarray(leaf, float) for leaf in moments(position))
    slopes = sizes**2 * means
    noise = np.zeros_like(slopes) if batch_size is None else sizes**2 / batch_size * scatter
    omega = 0.0 if compressor is None else np.asarray(compressor.omega(position), float)
    total = (omega + 1) / probability * (slopes + noise) - slopes
    return NoiseAtMode(float(slopes.sum()), float(noise.sum()), float(total.sum()), 0.0)


def _rows_of(posterior: Posterior, data: FederatedData) -> tuple[Array, Array]:
    """Return for each row its client and its place in `data.rows`, ``[num_rows]``."""
    if not isinstance(data, FederatedData):
        raise TypeError(
            f"data must be FederatedData, whose rows lie in one place, got {type(data).__name__}."
        )
    refuse_latents(posterior)
    if isinstance(posterior.loglikelihood_fn, ClientTerms):
        raise ValueError(
            "These constants are of rows: the log likelihood must have a term per row."
        )
    sizes, start = np.asarray(data.sizes), np.asarray(data.start)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return jnp.asarray(owner), jnp.asarray(start[owner] + within)


def _row_gradient(
    posterior: Posterior, data: FederatedData, position: ArrayTree, index: Array
) -> Array:
    """Return the gradient of a row's log likelihood, ``[d]``."""
    row = jax.tree.map(lambda leaf: leaf[index][None], data.rows)
    return trees.ravel(jax.grad(lambda at: posterior.loglikelihood_fn(at, row)[0])(position))


def _probabilities(probabilities: Any, num_clients: int) -> np.ndarray:
    if probabilities is None:
        return np.full(num_clients, 1 / num_clients)
    shares = np.asarray(probabilities, float)
    if shares.shape != (num_clients,) or not (shares > 0).all() or abs(shares.sum() - 1) > 1e-4:
        raise ValueError(
            f"probabilities must be one positive number per client, {num_clients} in all, that sum "
            f"to one, got {probabilities}."
        )
    return shares
