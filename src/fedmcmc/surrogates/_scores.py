"""How scores of single rows vary within a client: what the noise of its minibatches is made of."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._types import ArrayTree, Client, Federation, Posterior, register_dataclass
from fedmcmc.data import fold
from fedmcmc.gradients import Target
from fedmcmc.kernels import PerClientQuestion, check_model
from fedmcmc.pytrees import trees
from fedmcmc.surrogates import _checks as checks
from fedmcmc.surrogates._asking import answers, federation_of, natural_like, symmetric, upper


def score_covariance(posterior: Posterior, data: Any, position: ArrayTree) -> Array:
    """Return each client's covariance of its rows' scores, ``[num_clients, d, d]``.

    A score is the gradient of a row's log likelihood at `position`, over the raveled position; the
    covariance is the mean over the client's rows. A gradient that is estimated from ``n`` of a
    client's ``N`` rows has ``N**2 / n`` times it as its covariance, times ``(N - n) / (N - 1)``
    without replacement. `fedmcmc.predict_bias` and `fedmcmc.tune` take it as ``scores=``. In a
    federation it costs one message per client, of ``d * (d + 1) / 2`` numbers.

    Parameters
    ----------
    posterior
        The model.
    data
        A `FederatedData`, or a consortium of clients elsewhere, who answer in one exchange.
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
    position = trees.as_floats(position, "position")
    question = ScoreCovariances(
        checks.densities(posterior), num_clients=federation_of(data).num_clients
    )
    size = trees.num_elements(position)
    # Scores of all rows of a chunk are in memory together.
    triangles = answers(question, data, position, rows_cost=size)
    if not jnp.isfinite(triangles).all():
        raise ValueError(
            "score_covariance: the gradient of some row's log likelihood is not finite at this "
            "position. Pass another one, or drop such rows."
        )
    return symmetric(triangles, size)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class ScoreCovariances(PerClientQuestion):
    """Each client's covariance of its rows' scores at a position; see `score_covariance`."""

    disclosure = replace(
        PerClientQuestion.disclosure,
        content="how much the gradients of single rows vary, as a matrix. One answer per site, "
        "no sum "
        "over the sites",
    )

    def own(self, content: ArrayTree, client: Client) -> Array:
        flat, unravel = ravel_pytree(content)
        target = Target(self.posterior, None, unravel)

        def scores(rows: ArrayTree, mask: Array) -> Array:
            """Return the scores of rows, ``[num_rows, d]``, zeros where there is no row."""

            def of_row(row: ArrayTree) -> Array:
                one = jax.tree.map(lambda leaf: leaf[None], row)
                return jax.grad(lambda x: target.terms(x, one)[0])(flat)

            return jnp.where(mask[:, None], jax.vmap(of_row)(rows), 0)

        num = client.size.astype(flat.dtype)
        mean = fold(lambda rows, mask: jnp.sum(scores(rows, mask), 0), client) / num

        def squares(rows: ArrayTree, mask: Array) -> Array:
            centered = jnp.where(mask[:, None], scores(rows, mask) - mean, 0)
            return jnp.matmul(centered.T, centered, precision=jax.lax.Precision.HIGHEST)

        return upper(fold(squares, client) / num)

    def own_like(self, content: ArrayTree) -> Any:
        flat = jax.eval_shape(trees.ravel, content)
        return natural_like(flat.shape[0], "dense", flat.dtype)[1]

    def check_content(self, content: ArrayTree, federation: Federation) -> None:
        check_model(self.posterior, content, federation)
