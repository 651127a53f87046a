"""Surrogates with the moments of local Langevin samples."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._types import ArrayTree, GradientEstimator, Posterior
from fedmcmc.data import FederatedData
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import for_batch_size
from fedmcmc.pytrees import trees
from fedmcmc.surrogates._arguments import (
    STRUCTURES,
    check_choice,
    densities,
    fraction,
    integer,
    start_position,
    step_sizes,
    typed_key,
)
from fedmcmc.surrogates._chain import Chain, Moments, run_chain
from fedmcmc.surrogates._newton import as_gaussian, prior_expansion
from fedmcmc.surrogates._propriety import (
    CHECKS,
    REMEDIES,
    complain,
    describe_chain,
    scaled_eigen,
    singular_below,
    warn_shrinkage,
)
from fedmcmc.surrogates._target import DENSE_LIMIT, Target, over_clients

__all__ = ["sampled"]


def sampled(
    rng_key: Array,
    posterior: Posterior,
    data: FederatedData,
    step_size: Any,
    num_samples: int = 3000,
    *,
    structure: str = "diagonal",
    position: ArrayTree = None,
    batch_size: int | None = None,
    num_burnin: int = 1000,
    thinning: int = 1,
    prior_fraction: float = 0.0,
    shrinkage: float | None = None,
    check: str = "error",
) -> Gaussian:
    """Fit moments of local Langevin (SGLD) samples of each client's likelihood.

    The surrogate of El Mekkaoui et al. (2021), section 3.1. The samples have the law of the chain
    at its step size: for a Gaussian likelihood of precision ``A`` and full gradients a covariance
    of ``inv(A @ (I - step_size * A / 2))``, and minibatch noise adds to that.

    Parameters
    ----------
    rng_key
        Client ``i`` draws from keys folded with ``i``, whoever else is there.
    posterior, data
        The model and every client's rows.
    step_size
        ``[]`` or ``[num_clients]``; the paper's ``h`` is ``2 * step_size``.
    num_samples
        Samples per client.
    structure
        ``"diagonal"`` or ``"dense"``.
    position
        Where every chain starts; by default ``posterior.init_fn(rng_key)``.
    batch_size
        Rows of a minibatch (with replacement); ``None`` for full gradients.
    num_burnin, thinning
        Steps before the first sample, and from sample to sample.
    prior_fraction
        Sample ``likelihood * prior**prior_fraction``, then divide the prior's part out again by its
        second-order expansion at the mean (exact for a Gaussian prior).
    shrinkage
        Replace a sample covariance ``S`` by ``(1 - shrinkage) * S + shrinkage * diag(S)`` before it
        is inverted (dense only). By default this is done only where ``S`` is singular, as it is
        where `num_samples` does not exceed the dimension ``d``, then with
        ``d / (d + num_samples)``, and a warning tells so.
    check
        ``"error"``, ``"warn"`` or ``"ignore"``: what to do with samples that are not finite or not
        stationary, as those of an improper likelihood, along which the chain walks off. The chain
        must have lasted 20 relaxation times in its slowest direction (dimensions above 256: in its
        slowest coordinate, unless dense), about as many as 10 independent samples; raise
        `step_size` or `num_samples` where a proper likelihood fails, and for a good fit aim at
        hundreds. A random walk lasts that long in about one percent of chains. ``"ignore"`` also
        leaves the warning about shrinkage out.

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
    >>> q = surrogates.sampled(
    ...     jax.random.key(0), posterior, data, step_size=0.02, position=jnp.array(0.0)
    ... )
    >>> q.precision.shape
    (2,)
    """
    check_choice("check", check, CHECKS)
    check_choice("structure", structure, STRUCTURES)
    num_samples = integer("num_samples", num_samples, 2)
    num_burnin = integer("num_burnin", num_burnin, 0)
    thinning = integer("thinning", thinning, 1)
    steps = step_sizes(step_size, data.num_clients)
    if shrinkage is not None and not 0 <= shrinkage <= 1:
        raise ValueError(f"shrinkage must lie in [0, 1], got {shrinkage!r}.")
    position = start_position(rng_key, posterior, position)
    # A walk along no axis shows in the whole covariance only.
    small = trees.num_elements(position) <= DENSE_LIMIT
    dense = structure == "dense" or (check != "ignore" and small)
    fitted, report = _fit(
        densities(posterior),
        for_batch_size(batch_size),
        data,
        position,
        typed_key(rng_key),
        steps,
        fraction(prior_fraction),
        shrinkage,
        chain=Chain(num_samples, num_burnin, thinning, batch_size, dense),
        structure=structure,
    )
    if check != "ignore":
        complaints = describe_chain(report.finite, report.moved, report.relaxations)
        complain(check, "sampled", complaints, data.size, REMEDIES)
        if shrinkage is None:
            warn_shrinkage(report.shrinkage)
    return fitted


class ChainReport(NamedTuple):
    """Of one client's chain, leaves ``[]``.

    `finite` and `moved` are bool, `relaxations` the simulated time over the largest variance,
    `shrinkage` what the sample covariance was regularized with.
    """

    finite: Array
    moved: Array
    relaxations: Array
    shrinkage: Array


@partial(jax.jit, static_argnames=("chain", "structure"))
def _fit(
    posterior: Posterior,
    estimator: GradientEstimator,
    data: FederatedData,
    position: ArrayTree,
    rng_key: Array,
    step_size: Array,
    prior_fraction: Array | None,
    shrinkage: Array | None,
    *,
    chain: Chain,
    structure: str,
) -> tuple[Gaussian, ChainReport]:
    """Return the Gaussians of the clients' samples, and what was seen of the chains."""
    flat, unravel = ravel_pytree(position)
    tilted = Target(posterior, prior_fraction, unravel)

    def one(index: Array) -> tuple[Gaussian, ChainReport]:
        moments = run_chain(
            tilted, estimator, chain, rng_key, position, data, index, step_size[index]
        )
        precision, used = _precision(moments, structure == "dense", shrinkage)
        mean, gradient = moments.mean, jnp.zeros_like(moments.mean)
        if prior_fraction is not None:
            prior_gradient, prior_precision = prior_expansion(tilted, mean, structure == "dense")
            gradient, precision = gradient - prior_gradient, precision - prior_precision
        fitted = as_gaussian(gradient, precision, mean, unravel)
        time = step_size[index] * (chain.num_samples * chain.thinning)
        return fitted, _report(moments, time, used)

    return over_clients(one, data.num_clients, chain.cost(data, flat.shape[0]))


def _precision(moments: Moments, dense: bool, shrinkage: Array | None) -> tuple[Array, Array]:
    """Invert the sample covariance, regularized where it is singular; return also the amount."""
    covariance = moments.second / (moments.num - 1)
    if not dense:
        variance = covariance if covariance.ndim == 1 else jnp.diagonal(covariance)
        return 1 / variance, jnp.zeros_like(moments.num)
    scale, values, vectors = scaled_eigen(covariance)
    assert vectors is not None
    if shrinkage is None:
        size = values.shape[0]
        singular = values.min() <= singular_below(values)
        amount = jnp.where(singular, size / (size + moments.num), 0)
    else:
        amount = trees.cast(shrinkage, values)
    # In units of its diagonal, the diagonal of a covariance is the identity.
    values = (1 - amount) * values + amount
    inverse = jnp.matmul(vectors / values[None, :], vectors.T, precision=jax.lax.Precision.HIGHEST)
    return inverse / jnp.outer(scale, scale), amount


def _report(moments: Moments, time: Array, shrinkage: Array) -> ChainReport:
    covariance = moments.second / (moments.num - 1)
    full = covariance.ndim == 2
    variance = jnp.diagonal(covariance) if full else covariance
    largest = jnp.linalg.eigvalsh(covariance)[-1] if full else variance.max()
    return ChainReport(
        jnp.all(jnp.isfinite(moments.mean)) & jnp.all(jnp.isfinite(covariance)),
        jnp.all(variance > 0),
        time / largest,
        shrinkage,
    )
