"""How scores of single rows vary within a client: what the noise of its minibatches is made of."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._types import ArrayTree, Posterior
from fedmcmc.data import FederatedData, fold
from fedmcmc.gradients import row_terms
from fedmcmc.pytrees import trees
from fedmcmc.surrogates import _checks as checks
from fedmcmc.surrogates._target import client_cost, over_clients


def score_covariance(posterior: Posterior, data: FederatedData, position: ArrayTree) -> Array:
    """Return each client's covariance of its rows' scores, ``[num_clients, d, d]``.

    A score is the gradient of a row's log likelihood at `position`, over the raveled position; the
    covariance is the mean over the client's rows. A gradient that is estimated from ``n`` of a
    client's ``N`` rows has ``N**2 / n`` times it as its covariance, times ``(N - n) / (N - 1)``
    without replacement. `fedmcmc.predict_bias` and `fedmcmc.tune` take it as ``scores=``. In a
    federation it costs one message per client, of ``d * (d + 1) / 2`` numbers.

    Parameters
    ----------
    posterior, data
        The model and every client's rows.
    position
        Best the mode, as from `mode`; with a posterior of `fedmcmc.whiten`, its ``position``.

    Raises
    ------
    ValueError
        Where a score is not finite.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from fedmcmc import FederatedData, Posterior, surrogates
    >>> posterior = Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = FederatedData.from_clients([jnp.array([1.0, 3.0]), jnp.zeros(8)])
    >>> surrogates.score_covariance(posterior, data, jnp.array(0.0)).ravel().tolist()
    [1.0, 0.0]
    """
    position = jax.tree.map(trees.as_float, position)
    with jax.default_matmul_precision("highest"):
        covariances = _covariances(checks.densities(posterior), data, position)
    if not jnp.isfinite(covariances).all():
        raise ValueError(
            "score_covariance: the gradient of some row's log likelihood is not finite at this "
            "position. Pass another one, or drop such rows."
        )
    return covariances


@jax.jit
def _covariances(posterior: Posterior, data: FederatedData, position: ArrayTree) -> Array:
    flat, unravel = ravel_pytree(position)

    def terms_at(x: Array, rows: ArrayTree) -> Array:
        return row_terms(posterior.loglikelihood_fn, unravel(x), rows)

    def scores(rows: ArrayTree, mask: Array) -> Array:
        """Return the scores of rows, ``[num_rows, d]``, zeros where there is no row."""

        def of_row(row: ArrayTree) -> Array:
            one = jax.tree.map(lambda leaf: leaf[None], row)
            return jax.grad(lambda x: terms_at(x, one)[0])(flat)

        return jnp.where(mask[:, None], jax.vmap(of_row)(rows), 0)

    def one(index: Array) -> Array:
        client = data.client(index)
        num = client.size.astype(flat.dtype)
        mean = fold(lambda rows, mask: jnp.sum(scores(rows, mask), 0), client) / num

        def squares(rows: ArrayTree, mask: Array) -> Array:
            centered = jnp.where(mask[:, None], scores(rows, mask) - mean, 0)
            return centered.T @ centered

        return fold(squares, client) / num

    size = flat.shape[0]
    return over_clients(one, data.num_clients, client_cost(data, size) + data.max_size * size)
