"""The potential of draws, and the error of highest-posterior-density regions."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree, Posterior, as_functions
from fedmcmc.data import FederatedData
from fedmcmc.gradients import Terms, fold_terms, refuse_latents
from fedmcmc.metrics._arguments import (
    as_finite,
    broadcast,
    over_leading,
    positive_integer,
    same_precision,
    unit_interval,
)
from fedmcmc.metrics._draws import flatten_draws
from fedmcmc.pytrees import trees


def potential(
    posterior: Posterior,
    data: FederatedData,
    draws: ArrayTree,
    *,
    sample_axes: int = 1,
    batch_size: int = 1,
) -> Array:
    """Return the potential of every draw, minus its log posterior up to a constant.

    ``U(theta) = -log p(theta) - sum_rows log p(row | theta)``, over all clients' rows, in chunks
    of rows. The constant is that of the posterior's own functions: compare potentials of the same
    posterior and data only.

    Parameters
    ----------
    posterior, data
        The model and all rows.
    draws
        Positions, leaves ``[*sample, *event]`` with `sample_axes` leading axes, unconstrained (as
        in `fedmcmc.Samples.draws`, with 2 of them).
    sample_axes
        How many leading axes count draws, at least 1.
    batch_size
        Draws computed at a time, static. More are faster where a draw is small, and take so much
        more memory.

    Returns
    -------
    Array
        ``[*sample]``.

    Raises
    ------
    ValueError
        If leaves disagree about their leading axes.

    Examples
    --------
    >>> import fedmcmc
    >>> import jax.numpy as jnp
    >>> posterior = fedmcmc.Posterior(
    ...     logprior_fn=lambda theta: -0.5 * theta**2,
    ...     loglikelihood_fn=lambda theta, rows: -0.5 * (rows - theta) ** 2,
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.array([1.0, 2.0]), jnp.array([3.0])])
    >>> potential(posterior, data, jnp.array([0.0, 1.0])).tolist()
    [7.0, 3.0]
    """
    batch_size = positive_integer("batch_size", batch_size)
    flat, lead = flatten_draws(draws, sample_axes)
    refuse_latents(posterior)
    densities = as_functions(Posterior(posterior.logprior_fn, posterior.loglikelihood_fn))
    return _potential(densities, data, flat, batch_size=batch_size).reshape(lead)


def hpd_threshold(potentials: Any, alpha: Any = 0.01) -> Array:
    """Return the potential that bounds the highest-posterior-density region of level 1 - alpha.

    ``C_alpha = {theta : U(theta) <= eta_alpha}`` with ``P(C_alpha) = 1 - alpha``: `eta_alpha` is
    the ``1 - alpha`` quantile of the potential over the draws (interpolated linearly).

    Parameters
    ----------
    potentials
        ``[..., num_draws]``, from `potential`.
    alpha
        One minus the region's probability, in ``(0, 1)``; a number or an array of any shape.

    Returns
    -------
    Array
        ``[..., *alpha.shape]``, in the units of the potential.

    Raises
    ------
    ValueError
        If the shape does not fit or, for concrete values, a potential is not finite or `alpha`
        is not in ``(0, 1)``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> float(hpd_threshold(jnp.arange(101.0), alpha=0.25))
    75.0
    """
    values = as_finite("potentials", potentials, "num_draws")
    return _quantile(values, unit_interval("alpha", alpha))


def hpd_error(potentials: Any, reference: Any, alpha: Any = 0.01) -> Array:
    """Return the relative error of the highest-posterior-density threshold.

    ``|eta_alpha - eta_alpha^ref| / |eta_alpha^ref|`` with `hpd_threshold` (Vono et al. 2022),
    which says how far a sampler's region of probability ``1 - alpha`` is from a
    reference sampler's. Both need the potential of the same posterior and data: the ratio depends
    on its additive constant. The default is the region of 99 %. The figures published under that
    name are at quantile level 0.4975 (``alpha=0.5025``), about the median of the potential.

    Parameters
    ----------
    potentials, reference
        ``[..., num_draws]`` and ``[..., num_reference]``, from `potential`.
    alpha
        One minus the region's probability, in ``(0, 1)``; a number or an array of any shape.

    Returns
    -------
    Array
        ``[..., *alpha.shape]``, a fraction, at least 0. Infinite where the reference's threshold
        alone is 0, and 0 where both are equal.

    Raises
    ------
    ValueError
        As `hpd_threshold`.

    References
    ----------
    Vono, Plassier, Durmus, Dieuleveut and Moulines (2022), QLSD: quantised Langevin stochastic
    dynamics for Bayesian federated learning.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> reference = jnp.arange(101.0)
    >>> round(float(hpd_error(1.1 * reference, reference)), 4)
    0.1
    """
    level = unit_interval("alpha", alpha)
    potentials, ref = broadcast(
        ("potentials", as_finite("potentials", potentials, "num_draws"), 1),
        ("reference", as_finite("reference", reference, "num_reference"), 1),
    )
    eta, eta_ref = _quantile(potentials, level), _quantile(ref, level)
    return _relative_gap(eta, eta_ref)


@jax.jit
def _quantile(values: Array, alpha: Array) -> Array:
    # The level in the dtype of the values: jnp.quantile wants one dtype.
    level = (1 - alpha.ravel()).astype(values.dtype)

    def one(row: Array) -> Array:
        return jnp.quantile(row, level).reshape(alpha.shape)

    return over_leading(one, values.ndim - 1)(values)


@jax.jit
def _relative_gap(eta: Array, reference: Array) -> Array:
    eta, reference = same_precision(eta, reference)
    gap = jnp.abs(eta - reference) / jnp.abs(reference)
    return jnp.where(eta == reference, jnp.zeros_like(gap), gap)


@partial(jax.jit, static_argnames="batch_size")
def _potential(
    posterior: Posterior, data: FederatedData, draws: ArrayTree, *, batch_size: int
) -> Array:
    everyone = data.pooled(groups=True).client(0)

    def of_draw(position: ArrayTree) -> Array:
        def chunk(terms_fn: Terms, mask: Array) -> Array:
            terms = terms_fn(position)
            return jnp.sum(jnp.where(mask, terms, jnp.zeros((), terms.dtype)))

        total = fold_terms(posterior.loglikelihood_fn, chunk, everyone)
        return -(total + trees.cast(posterior.logprior_fn(position), total))

    return jax.lax.map(of_draw, draws, batch_size=batch_size)
