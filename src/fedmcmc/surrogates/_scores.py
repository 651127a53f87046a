"""Covariance of the scores of rows within a client, from which minibatches get their noise."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc.data import fold
from fedmcmc.gradients import ClientDensity
from fedmcmc.kernels import PerClientQuestion, check_model
from fedmcmc.pytrees import trees
from fedmcmc.runs import as_consortium
from fedmcmc.surrogates import _checks as checks
from fedmcmc.surrogates._clients import answer_per_client, natural_parameters_like, symmetric, upper
from fedmcmc.types import ArrayTree, Client, Federation, Posterior, register_dataclass


def score_covariance(posterior: Posterior, data: object, position: ArrayTree) -> Array:
    """Return each client's covariance of its rows' scores, ``[num_clients, d, d]``.

    A score is the gradient of a row's log likelihood at `position`, over the raveled position; the
    covariance is a mean over the client's rows. A gradient that is estimated from ``n`` of a
    client's ``N`` rows has this covariance times ``N**2 / n``, and times ``(N - n) / (N - 1)``
    without replacement. `fedmcmc.predict_bias` and `fedmcmc.tune` use it as ``scores=``. In a
    federation it costs one message of ``d * (d + 1) / 2`` numbers per client.

    Parameters
    ----------
    posterior
        The model.
    data
        A `FederatedData`, or a consortium of clients, who answer in one exchange.
    position
        Position, preferably the mode (`mode`); for a posterior of `fedmcmc.whiten`, its
        ``position``.

    Raises
    ------
    ValueError
        If a score is not finite.

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
        checks.densities_of(posterior), num_clients=as_consortium(data).federation.num_clients
    )
    size = trees.num_elements(position)
    # The memory holds the scores of all rows of a chunk.
    triangles = answer_per_client(question, data, position, numbers_per_row=size)
    if not jnp.isfinite(triangles).all():
        raise ValueError(
            "score_covariance: the gradient of a row's log likelihood is not finite at this "
            "position. Pass another position, or drop such rows."
        )
    return symmetric(triangles, size)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class ScoreCovariances(PerClientQuestion):
    """Question for each client's covariance of its rows' scores; see `score_covariance`."""

    disclosure = replace(
        PerClientQuestion.disclosure,
        content="how much the gradients of single rows vary, as a matrix. One answer per site, "
        "no sum over the sites",
    )

    def own(self, content: ArrayTree, client: Client) -> Array:
        flat, unravel = ravel_pytree(content)
        target = ClientDensity(self.posterior, None, unravel)

        def scores(rows: ArrayTree, mask: Array) -> Array:
            """Return the scores of rows, ``[num_rows, d]``, zeros where the mask is false."""

            def score(row: ArrayTree) -> Array:
                single = jax.tree.map(lambda leaf: leaf[None], row)
                return jax.grad(lambda x: target.terms(x, single)[0])(flat)

            return jnp.where(mask[:, None], jax.vmap(score)(rows), 0)

        num = client.size.astype(flat.dtype)
        mean = fold(lambda rows, mask: jnp.sum(scores(rows, mask), 0), client) / num

        def squares(rows: ArrayTree, mask: Array) -> Array:
            centered = jnp.where(mask[:, None], scores(rows, mask) - mean, 0)
            return jnp.matmul(centered.T, centered, precision=jax.lax.Precision.HIGHEST)

        return upper(fold(squares, client) / num)

    def own_like(self, content: ArrayTree) -> Any:
        flat = jax.eval_shape(trees.ravel, content)
        return natural_parameters_like(flat.shape[0], "dense", flat.dtype)[1]

    def check_content(self, content: ArrayTree, federation: Federation) -> None:
        check_model(self.posterior, content, federation)
