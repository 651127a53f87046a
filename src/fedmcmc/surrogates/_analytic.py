"""Surrogates from sufficient statistics of each client's rows."""

from collections.abc import Callable

import jax
from jax import Array
from jax.tree_util import Partial

from fedmcmc._types import ArrayTree, compiled
from fedmcmc.data import FederatedData, fold
from fedmcmc.gaussian import Gaussian
from fedmcmc.pytrees import trees
from fedmcmc.surrogates import _checks as checks
from fedmcmc.surrogates._asking import rows_of, with_labels
from fedmcmc.surrogates._maxima import client_cost, over_clients

INSTEAD = "surrogates.taylor gives the same for every quadratic log likelihood, and asks them"


def analytic(
    statistics_fn: Callable[[ArrayTree, Array], ArrayTree],
    gaussian_fn: Callable[[ArrayTree, Array], Gaussian],
    data: FederatedData,
    *,
    check: str = "error",
) -> Gaussian:
    """Build each client's surrogate from sufficient statistics of its rows.

    For a log likelihood that is quadratic in the position `taylor` gives the same at any center
    without any algebra.

    Parameters
    ----------
    statistics_fn
        ``(rows, mask) -> statistics``: a pytree of sums over the rows where the mask holds. Rows
        have leaves ``[chunk, ...]``, the mask is ``[chunk]`` bool; the other rows are copies of the
        client's own. Statistics of several chunks are added.
    gaussian_fn
        ``(statistics, size) -> Gaussian`` of one client, from natural parameters or
        `Gaussian.from_moments`; `size` is its number of rows, ``[]``, a float.
    data
        Every client's rows.
    check
        ``"error"``, ``"warn"`` or ``"ignore"``: what to do where a precision is not positive
        definite.

    Raises
    ------
    ValueError
        Where a client's likelihood is improper, unless `check` says otherwise.

    Examples
    --------
    Rows ``x ~ N(theta, I)`` (El Mekkaoui et al. 2021, section 5.1):

    >>> import jax.numpy as jnp
    >>> from fedmcmc import FederatedData, Gaussian, surrogates
    >>> data = FederatedData.from_clients([jnp.ones((3, 2)), jnp.zeros((1, 2))])
    >>> q = surrogates.analytic(
    ...     lambda rows, mask: jnp.sum(jnp.where(mask[:, None], rows, 0), axis=0),
    ...     lambda total, size: Gaussian(total, jnp.full(2, size), "diagonal"),
    ...     data,
    ... )
    >>> q.precision_mean.tolist(), q.precision.tolist()
    ([[3.0, 3.0], [0.0, 0.0]], [[3.0, 3.0], [1.0, 1.0]])
    """
    data = rows_of(data, "surrogates.analytic", INSTEAD)
    checks.choices(check)
    with jax.default_matmul_precision("highest"):
        fitted, *measured = _fit(Partial(statistics_fn), Partial(gaussian_fn), data)

    def describe(smallest: float, singular: bool) -> str | None:
        text = "the smallest eigenvalue of the precision, in units of its diagonal, is"
        return f"{text} {smallest:.2g}" if singular else None

    remedies = (
        "taylor(posterior, data, centre) needs no proper likelihood, nor does check='ignore'."
    )
    checks.complain(check, "analytic", describe, (*measured,), data, remedies)
    return with_labels(fitted, data)


@compiled
def _fit(
    statistics_fn: Callable[..., ArrayTree],
    gaussian_fn: Callable[..., Gaussian],
    data: FederatedData,
) -> tuple[Gaussian, Array, Array]:
    """Return the Gaussians, their smallest scaled eigenvalues and whether these are singular."""

    def one(index: Array) -> tuple[Gaussian, Array, Array]:
        client = data.client(index)
        fitted = gaussian_fn(fold(statistics_fn, client), client.size.astype(client.share.dtype))
        dense = fitted.structure == "dense"
        precision = fitted.precision if dense else trees.ravel(fitted.precision)
        values = checks.scaled_eigen(precision).values
        # Not <=, so that a precision that is not a number counts as singular.
        return fitted, values.min(), ~(values.min() > checks.singular_below(values))

    return over_clients(one, data.num_clients, client_cost(data, 1))
