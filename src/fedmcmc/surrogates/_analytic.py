"""Surrogates from sufficient statistics of each client's rows."""

from collections.abc import Callable

import jax
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial

from fedmcmc._types import ArrayTree
from fedmcmc.data import FederatedData, fold
from fedmcmc.gaussian import Gaussian
from fedmcmc.surrogates._arguments import check_choice
from fedmcmc.surrogates._propriety import (
    CHECKS,
    complain,
    describe_curvature,
    scaled_eigen,
    singular_below,
)
from fedmcmc.surrogates._target import client_cost, over_clients

__all__ = ["analytic"]


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
    check_choice("check", check, CHECKS)
    with jax.default_matmul_precision("highest"):
        fitted, smallest, singular = _fit(Partial(statistics_fn), Partial(gaussian_fn), data)
    if check != "ignore":
        remedies = (
            "taylor(posterior, data, centre) needs no proper likelihood, nor does check='ignore'."
        )
        complain(check, "analytic", describe_curvature(smallest, singular), data.size, remedies)
    return fitted


@jax.jit
def _fit(
    statistics_fn: Callable[..., ArrayTree],
    gaussian_fn: Callable[..., Gaussian],
    data: FederatedData,
) -> tuple[Gaussian, Array, Array]:
    """Return the Gaussians, their smallest scaled eigenvalues and whether these are singular."""

    def one(index: Array) -> tuple[Gaussian, Array, Array]:
        client = data.client(index)
        fitted = gaussian_fn(fold(statistics_fn, client), client.size.astype(client.share.dtype))
        if fitted.structure == "dense":
            values = scaled_eigen(fitted.precision).values
        else:
            values = scaled_eigen(ravel_pytree(fitted.precision)[0]).values
        # Not <=, so that a precision that is not a number counts as singular.
        return fitted, values.min(), ~(values.min() > singular_below(values))

    return over_clients(one, data.num_clients, client_cost(data, 1))
