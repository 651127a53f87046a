"""Surrogates from sufficient statistics of each client's rows."""

from collections.abc import Callable

import jax
from jax import Array
from jax.tree_util import Partial

from fedmcmc.data import FederatedData, fold
from fedmcmc.gaussian import Gaussian
from fedmcmc.pytrees import trees
from fedmcmc.surrogates import _checks as checks
from fedmcmc.surrogates._clients import map_clients, numbers_per_client, require_rows, with_labels
from fedmcmc.types import ArrayTree, compiled


def analytic(
    statistics_fn: Callable[[ArrayTree, Array], ArrayTree],
    gaussian_fn: Callable[[ArrayTree, Array], Gaussian],
    data: FederatedData,
    *,
    check: str = "error",
) -> Gaussian:
    """Build each client's surrogate from sufficient statistics of its rows.

    If the log likelihood is quadratic in the position, `taylor` returns the same surrogates for any
    center.

    Parameters
    ----------
    statistics_fn
        Function ``(rows, mask) -> statistics`` that returns a pytree of sums over the rows where
        the mask is true. Rows have leaves ``[chunk, ...]``, the mask is ``[chunk]`` bool; the other
        rows are copies of rows of this client. Statistics of several chunks are added.
    gaussian_fn
        Function ``(statistics, size) -> Gaussian`` for one client, which uses natural parameters or
        `Gaussian.from_moments`; `size` is the client's number of rows, a float ``[]``.
    data
        Every client's rows.
    check
        ``"error"``, ``"warn"`` or ``"ignore"``: action if a precision is not positive definite.

    Raises
    ------
    ValueError
        If a client's likelihood is improper and `check` is ``"error"``.

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
    data = require_rows(
        data,
        "surrogates.analytic",
        "surrogates.taylor, which returns the same surrogates for quadratic log likelihoods",
    )
    checks.check_choices(check)
    with jax.default_matmul_precision("highest"):
        fitted, *measured = _fit(Partial(statistics_fn), Partial(gaussian_fn), data)

    def describe(smallest: float, singular: bool) -> str | None:
        text = "the smallest eigenvalue of the precision, in units of its diagonal, is"
        return f"{text} {smallest:.2g}" if singular else None

    remedies = (
        "Use taylor(posterior, data, centre), which needs no proper likelihood, or check='ignore'."
    )
    checks.report_bad_clients(check, "analytic", describe, (*measured,), data, remedies)
    return with_labels(fitted, data)


@compiled
def _fit(
    statistics_fn: Callable[..., ArrayTree],
    gaussian_fn: Callable[..., Gaussian],
    data: FederatedData,
) -> tuple[Gaussian, Array, Array]:
    """Return the Gaussians, their smallest scaled eigenvalues and flags of singular precisions."""

    def fit_client(index: Array) -> tuple[Gaussian, Array, Array]:
        client = data.client(index)
        fitted = gaussian_fn(fold(statistics_fn, client), client.size.astype(client.share.dtype))
        dense = fitted.structure == "dense"
        precision = fitted.precision if dense else trees.ravel(fitted.precision)
        values = checks.scaled_eigen(precision).values
        # Not <=, so that a precision that is not a number counts as singular.
        return fitted, values.min(), ~(values.min() > checks.singular_below(values))

    return map_clients(fit_client, data.num_clients, numbers_per_client(data, 1))
