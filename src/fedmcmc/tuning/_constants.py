"""Constants in the error bounds of FSGLD and QLSD, for a model and its clients.

FSGLD: El Mekkaoui et al. (2021), Theorems 1 and 2. QLSD: Vono et al. (2022), noise of the gradients
at the mode as in their Table 2, derived here from their assumptions H2 to H4.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from fedmcmc._checks import positive_integer
from fedmcmc.compression import Compressor
from fedmcmc.data import FederatedData
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import refuse_latents
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, ClientTerms, Posterior, as_functions, compiled

ROWS_PER_BATCH = 1024


class RelayConstants(NamedTuple):
    """Constants in the error bounds of DSGLD and FSGLD; see `relay_constants`.

    Attributes
    ----------
    gamma_squared
        ``[num_clients]``, largest squared gradient of a row's log likelihood.
    eps_squared
        ``[num_clients]``, largest mean over a client's rows of the squared distance between the
        row's gradient and the surrogate's gradient divided by the number of rows.
    dsgld, fsgld
        ``sum_s N_s^2 gamma_s^2 / f_s`` and ``sum_s N_s^2 eps_s^2 / f_s``. Divided by ``m T``, they
        are the first terms of the bounds.
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
    probabilities: ArrayLike | Sequence[float] | None = None,
) -> RelayConstants:
    """Return constants in the error bounds of DSGLD and FSGLD: largest values over positions.

    The theorems take suprema over all positions, which are infinite for most models; here they are
    maxima over `positions`, for example draws from the posterior. At a position where each
    surrogate has the slope of its client's log likelihood, ``fsgld / m`` is the variance of FSGLD's
    gradient. Elsewhere, differences of the slopes add variance.

    Parameters
    ----------
    posterior, data
        Model, and rows of all clients.
    surrogates
        One Gaussian per client, as in `fedmcmc.fsgld`.
    positions
        Leaves ``[num_positions, *event]``.
    probabilities
        ``[num_clients]``, probability of visiting each client; equal by default.

    Raises
    ------
    ValueError
        If probabilities are not one positive number per client that sum to one, or if the model has
        terms other than one per row.

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
    >>> constants = fedmcmc.tuning.relay_constants(posterior, data, exact, jnp.array([0.0, 1.0]))
    >>> constants.gamma_squared.tolist(), constants.eps_squared.tolist()
    ([9.0, 9.0], [1.0, 0.0])
    >>> constants.dsgld, constants.fsgld
    (90.0, 8.0)
    """
    client_of_row, index = _rows_of(posterior, data)
    sizes = np.asarray(data.sizes)
    shares = _check_probabilities(probabilities, data.num_clients)

    model = as_functions(posterior)
    constants = _gradient_lengths(model, data, surrogates, positions, client_of_row, index)
    gamma, eps = (leaf.max(axis=0) for leaf in constants)
    dsgld, fsgld = (float((sizes**2.0 / shares * np.asarray(x)).sum()) for x in (gamma, eps))
    return RelayConstants(gamma, eps, dsgld, fsgld)


@compiled
def _gradient_lengths(
    posterior: Posterior,
    data: FederatedData,
    surrogates: Gaussian,
    positions: ArrayTree,
    client_of_row: Array,
    index: Array,
) -> tuple[Array, Array]:
    """Return squared lengths of rows' gradients, ``[num_positions, num_clients]``.

    The first result is the maximum over a client's rows, the second one the mean for the
    differences from the surrogate's gradient.
    """

    def at_position(position: ArrayTree) -> tuple[Array, Array]:
        slopes = jax.vmap(lambda surrogate: trees.ravel(surrogate.grad_log(position)))(surrogates)
        per_row = slopes / data.size[:, None]

        def squared_lengths(row: tuple[Array, Array]) -> tuple[Array, Array]:
            gradient = _row_gradient(posterior, data, position, row[1])
            return jnp.sum(gradient**2), jnp.sum((gradient - per_row[row[0]]) ** 2)

        squares, distances = jax.lax.map(
            squared_lengths, (client_of_row, index), batch_size=ROWS_PER_BATCH
        )
        num = data.num_clients
        return (
            jax.ops.segment_max(squares, client_of_row, num),
            jax.ops.segment_sum(distances, client_of_row, num) / data.size,
        )

    lengths: tuple[Array, Array] = jax.lax.map(at_position, positions)
    return lengths


class NoiseAtMode(NamedTuple):
    """Variance of the sum of gradients in a round of QLSD; see `noise_at_mode`.

    Attributes
    ----------
    heterogeneity
        ``sum_i |grad U_i|^2`` over the clients' log likelihoods; zero if they share their mode.
    minibatch
        ``sum_i E |H_i - grad U_i|^2``, from minibatches.
    qlsd
        Bound on the variance of QLSD's gradient, with compression and absent clients.
    star
        Zero, the variance for `qlsd_star` and `lsd_star` at their center.
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
    """Return the variance of a round's gradient at a position, usually the mode.

    Noise that remains at the mode biases a chain, however many rows there are. The bound
    ``sum_i ((omega_i + 1) / p) (|grad U_i|^2 + E |H_i - grad U_i|^2) - |grad U_i|^2`` is exact for
    `sparsify` and without compression. The noise of `qlsd_pp` vanishes at the mode.

    Parameters
    ----------
    posterior, data
        Model, and rows of all clients. The gradient of every row is kept in memory.
    position
        Position, such as the result of `fedmcmc.surrogates.mode`.
    compressor
        Compressor of messages, which enters through its ``omega``; none by default.
    batch_size
        Number of rows per minibatch, drawn with replacement; all rows by default.
    probability
        Probability ``p`` that a client takes part.

    Raises
    ------
    ValueError
        If a number is out of range, or if the model has terms other than one per row.

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
    client_of_row, index = _rows_of(posterior, data)
    batch_size = None if batch_size is None else positive_integer(batch_size, "batch_size")
    if not 0 < probability <= 1:
        raise ValueError(f"probability must lie in (0, 1], got {probability}.")
    sizes = np.asarray(data.sizes, float)

    moments = _row_moments(as_functions(posterior), data, position, client_of_row, index)
    means, scatter = (np.asarray(leaf, float) for leaf in moments)
    slopes = sizes**2 * means
    noise = np.zeros_like(slopes) if batch_size is None else sizes**2 / batch_size * scatter
    omega = 0.0 if compressor is None else np.asarray(compressor.omega(position), float)
    total = (omega + 1) / probability * (slopes + noise) - slopes
    return NoiseAtMode(float(slopes.sum()), float(noise.sum()), float(total.sum()), 0.0)


@compiled
def _row_moments(
    posterior: Posterior,
    data: FederatedData,
    position: ArrayTree,
    client_of_row: Array,
    index: Array,
) -> tuple[Array, Array]:
    """Return the squared mean and the variance of rows' gradients, each ``[num_clients]``."""
    gradients = jax.lax.map(
        lambda row: _row_gradient(posterior, data, position, row), index, batch_size=ROWS_PER_BATCH
    )
    totals = jax.ops.segment_sum(gradients, client_of_row, data.num_clients)
    means = totals / data.size[:, None]
    # Centered first: a difference of two large squares would lose its digits.
    squares = jnp.sum((gradients - means[client_of_row]) ** 2, axis=1)
    scatter = jax.ops.segment_sum(squares, client_of_row, data.num_clients)
    return jnp.sum(means**2, axis=1), scatter / data.size


def _rows_of(posterior: Posterior, data: FederatedData) -> tuple[Array, Array]:
    """Return the client of each row and the row's index in `data.rows`, ``[num_rows]``."""
    if not isinstance(data, FederatedData):
        raise TypeError(
            f"data must be a FederatedData, with all rows in one place, got {type(data).__name__}."
        )
    refuse_latents(posterior)
    if isinstance(posterior.loglikelihood_fn, ClientTerms):
        raise ValueError(
            "These constants are maxima and means over rows, so the log likelihood must have one "
            "term per row."
        )
    sizes, start = np.asarray(data.sizes), np.asarray(data.start)
    client_of_row = np.repeat(np.arange(len(sizes)), sizes)
    offset = np.arange(len(client_of_row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return jnp.asarray(client_of_row), jnp.asarray(start[client_of_row] + offset)


def _row_gradient(
    posterior: Posterior, data: FederatedData, position: ArrayTree, index: Array
) -> Array:
    """Return the gradient of a row's log likelihood, ``[d]``."""
    row = jax.tree.map(lambda leaf: leaf[index][None], data.rows)
    return trees.ravel(jax.grad(lambda x: posterior.loglikelihood_fn(x, row)[0])(position))


def _check_probabilities(
    probabilities: ArrayLike | Sequence[float] | None, num_clients: int
) -> np.ndarray:
    if probabilities is None:
        return np.full(num_clients, 1 / num_clients)
    shares = np.asarray(probabilities, float)
    if shares.shape != (num_clients,) or not (shares > 0).all() or abs(shares.sum() - 1) > 1e-4:
        raise ValueError(
            f"probabilities must be one positive number per client, {num_clients} in all, that sum "
            f"to one, got {probabilities}."
        )
    return shares
