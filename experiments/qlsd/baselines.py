"""What the baselines of Vono et al. (2022) need to know, whose settings were not released."""

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments.qlsd import logistic

__all__ = ["dg_settings", "diagonal_surrogates"]


def dg_settings(
    data: fedmcmc.FederatedData, prior_precision: float, smoothness_factor: float, factor: float
) -> dict[str, jax.Array]:
    """Return tolerances and step sizes of DG-SGLD, ``[num_clients]`` each.

    With ``M_i`` the bound on the curvature of client i (`logistic.smoothness`), its share of the
    prior included, the tolerance is ``factor / M_i`` and the step size
    ``tolerance / (2 (tolerance M_i + 1))``, as in Plassier et al. (2021), whose factors are 1 to
    50.
    """
    features, start = np.asarray(data.rows["features"]), np.asarray(data.start)
    sizes, shares = np.asarray(data.sizes), np.asarray(data.share, np.float64)
    smoothness = [
        logistic.smoothness(
            features[first : first + size], prior_precision * share, smoothness_factor
        )
        for first, size, share in zip(start, sizes, shares, strict=True)
    ]
    tolerance = factor / np.array(smoothness)
    return {
        "tolerance": jnp.asarray(tolerance, jnp.float32),
        "step_size": jnp.asarray(tolerance / (2 * (factor + 1)), jnp.float32),
    }


def diagonal_surrogates(
    data: fedmcmc.FederatedData, centre: tuple[jax.Array, ...]
) -> fedmcmc.Gaussian:
    """Return `fedmcmc.surrogates.taylor` with diagonal structure, in closed form.

    For `experiments.models.multinomial` with ``by_class=True``: the Hessian's diagonal for
    class k is ``sum_n x_n^2 p_nk (1 - p_nk)``.
    """
    features, label = (np.asarray(data.rows[name]) for name in ("features", "label"))
    place = np.stack([np.asarray(column) for column in centre], axis=1)
    chance = np.exp(np.asarray(logistic.log_probabilities(jnp.asarray(place), features)))
    residual = np.eye(place.shape[1], dtype=np.float32)[label] - chance
    gradient, precision = [], []
    for first, size in zip(np.asarray(data.start), np.asarray(data.sizes), strict=True):
        own = slice(first, first + size)
        gradient.append(features[own].T @ residual[own])
        precision.append((features[own] ** 2).T @ (chance[own] * (1 - chance[own])))
    shift = np.array(gradient) + np.array(precision) * place

    def columns(stacked: np.ndarray) -> tuple[jax.Array, ...]:
        return tuple(jnp.asarray(stacked[..., k]) for k in range(place.shape[1]))

    return fedmcmc.Gaussian(columns(shift), columns(np.array(precision)), "diagonal")
