"""Potentials of draws, and errors of highest-posterior-density regions."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fedmcmc._checks import positive_integer
from fedmcmc.data import FederatedData
from fedmcmc.gradients import Terms, fold_terms, refuse_latents
from fedmcmc.metrics._arguments import (
    as_finite,
    as_fractions,
    broadcast_leading,
    map_leading,
    promote,
)
from fedmcmc.metrics._draws import flatten_draws
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Posterior, as_functions


def potential(
    posterior: Posterior,
    data: FederatedData,
    draws: ArrayTree,
    *,
    sample_axes: int = 1,
    batch_size: int = 1,
) -> Array:
    """Return the potential of each draw, minus its log posterior up to a constant.

    ``U(theta) = -log p(theta) - sum_rows log p(row | theta)``, over all clients' rows, in chunks
    of rows. Compare only potentials of the same posterior and data, which share the constant.

    Parameters
    ----------
    posterior, data
        Model, and all rows.
    draws, sample_axes, batch_size
        Unconstrained positions, and their axes and batches; see `predictive`.

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
    >>> import fedmcmc, jax.numpy as jnp
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.array([1.0, 2.0]), jnp.array([3.0])])
    >>> potential(posterior, data, jnp.array([0.0, 1.0])).tolist()
    [7.0, 3.0]
    """
    batch_size = positive_integer(batch_size, "batch_size")
    flat, sample = flatten_draws(draws, sample_axes)
    refuse_latents(posterior)
    densities = as_functions(Posterior(posterior.logprior_fn, posterior.loglikelihood_fn))
    return _potential(densities, data, flat, batch_size=batch_size).reshape(sample)


def hpd_threshold(potentials: ArrayLike, alpha: ArrayLike = 0.01) -> Array:
    """Return the potential that bounds the highest-posterior-density region of level 1 - alpha.

    The threshold ``eta_alpha`` of ``C_alpha = {theta : U(theta) <= eta_alpha}`` with ``P(C_alpha) =
    1 - alpha`` is the ``1 - alpha`` quantile of the potential over the draws.

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
    return _quantile(values, as_fractions("alpha", alpha))


def hpd_error(potentials: ArrayLike, reference: ArrayLike, alpha: ArrayLike = 0.01) -> Array:
    """Return the relative error of the highest-posterior-density threshold.

    ``|eta_alpha - eta_alpha^ref| / |eta_alpha^ref|`` with `hpd_threshold` (Vono et al. 2022, QLSD).
    Both potentials must be of the same posterior and data, because the ratio depends on the
    additive constant. The default is the region of 99 %. The published figures have
    ``alpha=0.5025``, about the median of the potential.

    Parameters
    ----------
    potentials, reference
        ``[..., num_draws]`` and ``[..., num_reference]``, from `potential`.
    alpha
        See `hpd_threshold`, which raises the same errors.

    Returns
    -------
    Array
        ``[..., *alpha.shape]``, a fraction, at least 0. It is 0 if both thresholds are equal, and
        infinite if only the reference's is 0.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> reference = jnp.arange(101.0)
    >>> round(float(hpd_error(1.1 * reference, reference)), 4)
    0.1
    """
    level = as_fractions("alpha", alpha)
    values, reference_values = broadcast_leading(
        ("potentials", as_finite("potentials", potentials, "num_draws"), 1),
        ("reference", as_finite("reference", reference, "num_reference"), 1),
    )
    return _relative_gap(_quantile(values, level), _quantile(reference_values, level))


@jax.jit
def _quantile(values: Array, alpha: Array) -> Array:
    # jnp.quantile requires one dtype.
    level = (1 - alpha.ravel()).astype(values.dtype)

    def compute(row: Array) -> Array:
        return jnp.quantile(row, level).reshape(alpha.shape)

    return map_leading(compute, values.ndim - 1)(values)


@jax.jit
def _relative_gap(eta: Array, reference: Array) -> Array:
    eta, reference = promote(eta, reference)
    gap = jnp.abs(eta - reference) / jnp.abs(reference)
    return jnp.where(eta == reference, jnp.zeros_like(gap), gap)


@partial(jax.jit, static_argnames="batch_size")
def _potential(
    posterior: Posterior, data: FederatedData, draws: ArrayTree, *, batch_size: int
) -> Array:
    client = data.pooled(groups=True).client(0)  # has the rows of all clients

    def compute(position: ArrayTree) -> Array:
        def sum_chunk(terms_fn: Terms, mask: Array) -> Array:
            terms = terms_fn(position)
            return jnp.sum(jnp.where(mask, terms, jnp.zeros((), terms.dtype)))

        total = fold_terms(posterior.loglikelihood_fn, sum_chunk, client)
        return -(total + trees.cast(posterior.logprior_fn(position), total))

    return jax.lax.map(compute, draws, batch_size=batch_size)
