"""Second-order expansions of the clients' log likelihoods at their own maxima."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._types import ArrayTree, Posterior
from fedmcmc.data import FederatedData
from fedmcmc.gaussian import Gaussian
from fedmcmc.surrogates._arguments import (
    STRUCTURES,
    check_choice,
    densities,
    fraction,
    integer,
    start_position,
)
from fedmcmc.surrogates._newton import as_gaussian, expand, maximize, prior_expansion
from fedmcmc.surrogates._propriety import (
    CHECKS,
    REMEDIES,
    AtMaximum,
    at_maximum,
    complain,
    describe_maximum,
)
from fedmcmc.surrogates._target import (
    DENSE_LIMIT,
    Target,
    change,
    client_cost,
    over_clients,
    value_and_gradient,
)

__all__ = ["laplace"]

_DIRECTIONS = 64  # in which a maximum is looked at, at a time


def laplace(
    rng_key: Array,
    posterior: Posterior,
    data: FederatedData,
    *,
    position: ArrayTree = None,
    structure: str = "dense",
    prior_fraction: float = 0.0,
    max_steps: int = 200,
    tolerance: float = 1e-7,
    check: str = "error",
) -> Gaussian:
    """Expand each client's log likelihood to second order at its own maximum.

    The maximum is found by the L-BFGS of optax. The gradient that is left where it stops enters the
    surrogate's mean (one Newton step), so ``grad log q_s`` is exact there whatever the optimizer
    did, and everywhere for a quadratic log likelihood.

    Parameters
    ----------
    rng_key
        Used only by ``posterior.init_fn``.
    posterior, data
        The model and every client's rows.
    position
        Where every optimization starts; by default ``posterior.init_fn(rng_key)``.
    structure
        ``"dense"``, or ``"diagonal"`` for the diagonal of the Hessian.
    prior_fraction
        Maximise ``likelihood * prior**prior_fraction``; the expansion, made there, is that of the
        likelihood alone.
    max_steps, tolerance
        Stop after so many steps, or when one promises to gain less than `tolerance` nats.
    check
        ``"error"``, ``"warn"`` or ``"ignore"``: what to do where a client's likelihood is improper
        or its maximum not found: a precision that is singular or indefinite at the maximum, a log
        likelihood that hardly falls two standard deviations away from it in some direction (the
        optimizer ran off), or more than 0.1 standard deviations left to go. Looking costs about
        as much again as the Hessian. Above 256 dimensions a diagonal structure looks at coordinates
        only; networks want ``"ignore"``.

    Raises
    ------
    ValueError
        On arguments out of range, without a position, and where a client's likelihood is improper.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from fedmcmc import FederatedData, Posterior, surrogates
    >>> posterior = Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = FederatedData.from_clients([jnp.ones(4), jnp.zeros(8)])
    >>> q = surrogates.laplace(jax.random.key(0), posterior, data, position=jnp.array(0.0))
    >>> q.precision.ravel().tolist(), q.precision_mean.tolist()
    ([4.0, 8.0], [4.0, 0.0])
    """
    check_choice("check", check, CHECKS)
    check_choice("structure", structure, STRUCTURES)
    max_steps = integer("max_steps", max_steps, 1)
    position = start_position(rng_key, posterior, position)
    with jax.default_matmul_precision("highest"):
        fitted, measured = _fit(
            densities(posterior),
            data,
            position,
            fraction(prior_fraction),
            max_steps,
            tolerance,
            structure=structure,
            measure=check != "ignore",
        )
    if measured is not None:
        complain(check, "laplace", describe_maximum(measured), data.size, REMEDIES)
    return fitted


@partial(jax.jit, static_argnames=("structure", "measure"))
def _fit(
    posterior: Posterior,
    data: FederatedData,
    position: ArrayTree,
    prior_fraction: Array | None,
    max_steps: Array,
    tolerance: Array,
    *,
    structure: str,
    measure: bool,
) -> tuple[Gaussian, AtMaximum | None]:
    """Return the expansions at the clients' maxima, and what was measured there."""
    start, unravel = ravel_pytree(position)
    size = start.shape[0]
    likelihood = Target(posterior, None, unravel)
    tilted = Target(posterior, prior_fraction, unravel)
    # A diagonal hides most flat directions, so small problems are measured by the whole Hessian.
    dense = structure == "dense" or (measure and size <= DENSE_LIMIT)

    def one(index: Array) -> tuple[Gaussian, AtMaximum | None]:
        client = data.client(index)
        maximum = maximize(
            lambda flat: value_and_gradient(tilted, client, flat), start, max_steps, tolerance
        )
        gradient, precision = expand(likelihood, client, maximum.flat, dense)
        thinned = precision if structure == "dense" or not dense else jnp.diagonal(precision)
        fitted = as_gaussian(gradient, thinned, maximum.flat, unravel)
        if not measure:
            return fitted, None
        if prior_fraction is not None:
            prior_gradient, prior_precision = prior_expansion(tilted, maximum.flat, dense)
            gradient, precision = gradient + prior_gradient, precision + prior_precision
        measured = at_maximum(
            lambda shift: change(tilted, client, maximum.flat, shift),
            gradient,
            precision,
            _DIRECTIONS,
        )
        return fitted, measured

    return over_clients(one, data.num_clients, client_cost(data, size))
