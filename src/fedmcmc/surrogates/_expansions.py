"""Second-order expansions at a common point or at clients' own maxima; the posterior's mode."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._types import ArrayTree, Posterior
from fedmcmc.data import FederatedData
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import BLOCK
from fedmcmc.pytrees import trees
from fedmcmc.surrogates import _checks as checks
from fedmcmc.surrogates._target import (
    DENSE_LIMIT,
    Maximum,
    Target,
    as_gaussian,
    client_cost,
    maximize,
    over_clients,
)


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
    checks.choices(check, structure)
    centre = jax.tree.map(trees.as_float, centre)
    with jax.default_matmul_precision("highest"):
        fitted, finite = _expand_at(checks.densities(posterior), data, centre, structure=structure)

    def describe(finite: bool) -> str | None:
        text = "the log likelihood's gradient or Hessian at the center is not finite"
        return None if finite else text

    remedies = "Pass another center, or drop such rows."
    checks.complain(check, "taylor", describe, (finite,), data.size, remedies)
    return fitted


UNSCALED = (
    "The usual reason is covariates far from zero for what they vary by (a year near 2000): center "
    "and scale them."
)


@partial(jax.jit, static_argnames=("structure",))
def _expand_at(
    posterior: Posterior, data: FederatedData, centre: ArrayTree, *, structure: str
) -> tuple[Gaussian, Array]:
    """Return the expansions at `centre` and whether each is finite."""
    flat, unravel = ravel_pytree(centre)
    target = Target(posterior, None, unravel)

    def one(index: Array) -> tuple[Gaussian, Array]:
        gradient, precision = target.expand(data.client(index), flat, structure == "dense")
        fitted = as_gaussian(gradient, precision, flat, unravel)
        return fitted, trees.all_finite(fitted)

    return over_clients(one, data.num_clients, client_cost(data, flat.shape[0]))


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
        Maximize ``likelihood * prior**prior_fraction``; the expansion, made there, is that of the
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
    checks.choices(check, structure)
    max_steps = checks.integer("max_steps", max_steps, 1)
    position = checks.start_position(rng_key, posterior, position)
    with jax.default_matmul_precision("highest"):
        fitted, measured = _expand_at_maxima(
            checks.densities(posterior),
            data,
            position,
            checks.fraction(prior_fraction),
            max_steps,
            tolerance,
            structure=structure,
            measure=check != "ignore",
        )
    if measured is not None:
        checks.complain(check, "laplace", checks.describe_maximum, measured, data.size)
    return fitted


@partial(jax.jit, static_argnames=("structure", "measure"))
def _expand_at_maxima(
    posterior: Posterior,
    data: FederatedData,
    position: ArrayTree,
    prior_fraction: Array | None,
    max_steps: Array,
    tolerance: Array,
    *,
    structure: str,
    measure: bool,
) -> tuple[Gaussian, checks.AtMaximum | None]:
    """Return the expansions at the clients' maxima, and what was measured there."""
    start, unravel = ravel_pytree(position)
    size = start.shape[0]
    likelihood = Target(posterior, None, unravel)
    tilted = Target(posterior, prior_fraction, unravel)
    # A diagonal hides most flat directions, so small problems are measured by the whole Hessian.
    dense = structure == "dense" or (measure and size <= DENSE_LIMIT)

    def one(index: Array) -> tuple[Gaussian, checks.AtMaximum | None]:
        client = data.client(index)
        maximum = maximize(
            lambda flat: tilted.value_and_gradient(client, flat), start, max_steps, tolerance
        )
        gradient, precision = likelihood.expand(client, maximum.flat, dense)
        thinned = precision if structure == "dense" or not dense else jnp.diagonal(precision)
        fitted = as_gaussian(gradient, thinned, maximum.flat, unravel)
        if not measure:
            return fitted, None
        if prior_fraction is not None:
            prior_gradient, prior_precision = tilted.expand_prior(maximum.flat, dense)
            gradient, precision = gradient + prior_gradient, precision + prior_precision
        measured = checks.at_maximum(
            lambda shift: tilted.change(client, maximum.flat, shift),
            gradient,
            precision,
            BLOCK,
        )
        return fitted, measured

    return over_clients(one, data.num_clients, client_cost(data, size))


class Mode(NamedTuple):
    """The maximum of a posterior, and what finding it cost.

    Attributes
    ----------
    position
        A pytree.
    num_exchanges
        How often the position went down to every client and its log likelihood and gradient came
        up, an int; `setup_bits` counts the bits.
    gradient_norm
        ``[]``, of the log posterior at `position`.
    """

    position: ArrayTree
    num_exchanges: int
    gradient_norm: Array


def mode(
    posterior: Posterior,
    data: FederatedData,
    position: ArrayTree,
    *,
    max_steps: int = 200,
    tolerance: float = 1e-7,
) -> Mode:
    """Find the maximum of the posterior of all rows, a common center for `taylor`.

    The server runs the L-BFGS of optax, which needs only sums over clients of log likelihoods and
    gradients. A step takes one or a few evaluations. Each evaluation is one exchange: ``d`` numbers
    down and ``d + 1`` up for every client.

    Parameters
    ----------
    posterior, data
        The model and every client's rows.
    position
        Where to start.
    max_steps, tolerance
        Stop after so many steps, or when one promises to gain less than `tolerance` nats.

    Raises
    ------
    ValueError
        Where the ascent ends at a position that is not finite, or is unfinished after `max_steps`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from fedmcmc import FederatedData, Posterior, surrogates
    >>> posterior = Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = FederatedData.from_clients([jnp.ones(4), jnp.zeros(3)])
    >>> round(float(surrogates.mode(posterior, data, jnp.array(3.0)).position), 4)
    0.5
    """
    max_steps = checks.integer("max_steps", max_steps, 1)
    position = jax.tree.map(trees.as_float, position)
    with jax.default_matmul_precision("highest"):
        position, maximum = _ascend(
            checks.densities(posterior), data, position, max_steps, tolerance
        )
    norm = jnp.linalg.norm(maximum.gradient)
    if not np.isfinite(maximum.gain) or not np.isfinite(norm):
        raise ValueError(
            "mode: the log posterior or its gradient turned infinite or not-a-number. Give another "
            "position=: zeros where a log link overflows elsewhere, as with covariates in the "
            "hundreds; or scale these."
        )
    if not maximum.gain <= tolerance:
        raise ValueError(
            f"mode: not finished after {max_steps} steps, of which the last promised "
            f"{float(maximum.gain):.2g} nats: raise max_steps, or tolerance if that little does "
            f"not matter (0.01 is about a tenth of a standard deviation from the maximum). "
            f"{UNSCALED}"
        )
    return Mode(position, int(maximum.num_evaluations), norm)


@jax.jit
def _ascend(
    posterior: Posterior,
    data: FederatedData,
    position: ArrayTree,
    max_steps: Array,
    tolerance: Array,
) -> tuple[ArrayTree, Maximum]:
    """Return the maximum of the posterior of all rows."""
    start, unravel = ravel_pytree(position)
    target = Target(posterior, jnp.ones((), start.dtype), unravel)
    # A sum over clients of sums over their rows is the sum over all rows.
    everyone = data.pooled(groups=True).client(0)
    maximum = maximize(
        lambda flat: target.value_and_gradient(everyone, flat), start, max_steps, tolerance
    )
    return unravel(maximum.flat), maximum


def setup_bits(surrogates: Gaussian, *, num_exchanges: int = 0) -> int:
    """Return the bits that setting up conducive gradients costs all clients together.

    Up: each client's natural parameters. Down: their sums, to each client. A dense precision is
    symmetric and counts ``d * (d + 1) / 2`` numbers. With `Mode.num_exchanges`, also what finding
    the common center of `taylor` cost: per exchange and client ``d`` numbers down, ``d + 1`` up.

    Examples
    --------
    Two clients, two dimensions, dense: five numbers up and five down, each 32 bits.

    >>> import jax.numpy as jnp
    >>> from fedmcmc import Gaussian, surrogates
    >>> q = Gaussian.from_moments(jnp.zeros((2, 2)), jnp.stack([jnp.eye(2)] * 2))
    >>> surrogates.setup_bits(q)
    640
    """
    num_clients = jax.tree.leaves(surrogates.precision_mean)[0].shape[0]
    down = trees.num_bits(surrogates.precision_mean)
    precision = trees.num_bits(surrogates.precision)
    if surrogates.structure == "dense":
        size = surrogates.precision.shape[-1]
        precision = precision // (size * size) * (size * (size + 1) // 2)
    value = down // trees.num_elements(surrogates.precision_mean) * num_clients
    return 2 * (down + precision) + num_exchanges * (2 * down + value)
