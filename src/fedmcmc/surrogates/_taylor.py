"""Second-order expansions of the clients' log likelihoods at one common point."""

from functools import partial

import jax
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._types import ArrayTree, Posterior
from fedmcmc.data import FederatedData
from fedmcmc.gaussian import Gaussian
from fedmcmc.pytrees import trees
from fedmcmc.surrogates._arguments import STRUCTURES, check_choice, densities
from fedmcmc.surrogates._newton import as_gaussian, expand
from fedmcmc.surrogates._propriety import CHECKS, complain
from fedmcmc.surrogates._target import Target, client_cost, over_clients

__all__ = ["taylor"]


def taylor(
    posterior: Posterior,
    data: FederatedData,
    centre: ArrayTree,
    *,
    structure: str = "dense",
    check: str = "error",
) -> Gaussian:
    """Expand each client's log likelihood to second order at one common point.

    ``precision = -Hessian`` and ``precision_mean = gradient + precision @ centre``, both at
    `centre`, so ``grad log q_s`` is exact there and everywhere for a quadratic log likelihood. It
    is defined for every client, however small or separable; its surrogate may then be improper,
    which conducive gradients do not mind. A good center is the posterior's maximum, see `mode`.

    Parameters
    ----------
    posterior, data
        The model and every client's rows.
    centre
        A position.
    structure
        ``"dense"``, or ``"diagonal"`` for the diagonal of the Hessian.
    check
        ``"error"``, ``"warn"`` or ``"ignore"``: what to do where an expansion is not finite.

    Raises
    ------
    ValueError
        Where a gradient or Hessian is not finite; never because a likelihood is improper.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from fedmcmc import FederatedData, Posterior, surrogates
    >>> posterior = Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = FederatedData.from_clients([jnp.ones(4), jnp.zeros(8)])
    >>> q = surrogates.taylor(posterior, data, jnp.array(0.5))
    >>> q.precision.ravel().tolist(), q.precision_mean.tolist()
    ([4.0, 8.0], [4.0, 0.0])
    """
    check_choice("check", check, CHECKS)
    check_choice("structure", structure, STRUCTURES)
    centre = jax.tree.map(trees.as_float, centre)
    with jax.default_matmul_precision("highest"):
        fitted, finite = _fit(densities(posterior), data, centre, structure=structure)
    if check != "ignore":
        text = "the log likelihood's gradient or Hessian at the center is not finite"
        complaints = [None if good else text for good in np.asarray(finite)]
        complain(check, "taylor", complaints, data.size, "Pass another center, or drop such rows.")
    return fitted


@partial(jax.jit, static_argnames=("structure",))
def _fit(
    posterior: Posterior, data: FederatedData, centre: ArrayTree, *, structure: str
) -> tuple[Gaussian, Array]:
    """Return the expansions at `centre` and whether each is finite."""
    flat, unravel = ravel_pytree(centre)
    target = Target(posterior, None, unravel)

    def one(index: Array) -> tuple[Gaussian, Array]:
        gradient, precision = expand(target, data.client(index), flat, structure == "dense")
        fitted = as_gaussian(gradient, precision, flat, unravel)
        return fitted, trees.all_finite(fitted)

    return over_clients(one, data.num_clients, client_cost(data, flat.shape[0]))
