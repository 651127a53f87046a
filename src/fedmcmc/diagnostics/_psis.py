"""Pareto-smoothed importance sampling."""

from importlib import import_module

import numpy as np
from jax.typing import ArrayLike
from scipy.special import logsumexp

EQUAL = 1e-9
"""Difference of log ratios below which they are equal and need no smoothing."""


def psis(log_ratios: ArrayLike) -> tuple[np.ndarray, float]:
    """Smooth the largest importance ratios by a generalized Pareto distribution.

    Parameters
    ----------
    log_ratios
        ``[num]``, log densities of target over proposal up to a constant; minus infinity is
        allowed.

    Returns
    -------
    log_weights
        ``[num]`` float64, normalized: their exponentials sum to one.
    k_hat
        Shape of the tail; minus infinity if all ratios are equal. For Gaussians it estimates
        one minus the smallest eigenvalue of proposal covariance times target precision, if this
        difference is positive, with an sd of about 0.1.

    Raises
    ------
    ValueError
        If a ratio is NaN or plus infinity, or all are minus infinity.

    References
    ----------
    Vehtari et al. (2024), Algorithm 1.

    Examples
    --------
    >>> log_weights, k_hat = psis(np.zeros(4))
    >>> np.exp(log_weights).tolist(), k_hat
    ([0.25, 0.25, 0.25, 0.25], -inf)
    """
    ratios = np.asarray(log_ratios, np.float64)
    if np.isnan(ratios).any() or np.isposinf(ratios).any() or np.isneginf(ratios).all():
        raise ValueError(
            "Importance ratios must be numbers or minus infinity, and at least one must be finite: "
            f"got {int(np.isnan(ratios).sum())} NaN, {int(np.isposinf(ratios).sum())} infinite and "
            f"{int(np.isneginf(ratios).sum())} minus infinite of {ratios.size}."
        )
    if np.ptp(ratios) < EQUAL:
        return np.full(ratios.shape, -np.log(ratios.size)), -np.inf
    array_stats = import_module("arviz_stats.base").array_stats  # the import takes half a second
    # ArviZ expects negative log ratios.
    with np.errstate(all="ignore"):  # tails of equal or huge ratios
        smoothed, k_hat = array_stats.psislw(-ratios)
    return smoothed - logsumexp(smoothed), float(k_hat)


def khat_threshold(num: int) -> float:
    """Return the k-hat below which `num` weighted draws can be trusted.

    ``min(1 - 1 / log10(num), 0.7)``, Vehtari et al. (2024), equation 13.
    """
    return min(1 - 1 / np.log10(num), 0.7)
