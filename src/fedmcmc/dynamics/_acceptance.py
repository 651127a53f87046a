"""Stationary acceptance probabilities of proposals on Gaussian targets, in closed form.

If a proposal is reversible with respect to some density, its acceptance probability in the
stationary state is twice the probability that the Metropolis-Hastings ratio is above one. On a
Gaussian target the log ratio is a difference of quadratic forms, so the probability of its sign is
a value of the beta distribution or a one-dimensional integral (derived in
``docs/explanation/exact_distributions.md``).
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from scipy.special import betainc, ndtr

FREQUENCIES = np.exp(np.arange(-30, 60, 0.05))
"""Frequencies at which a characteristic function is summed, for ten correct digits."""
STABILITY_LIMIT = 2.0
"""Upper limit of step size times root of curvature for stable trajectories."""


def hmc_acceptance(
    step_size: float,
    curvatures: int | np.ndarray,
    num_integration_steps: int | Sequence[int] = 1,
) -> float:
    """Return the mean acceptance probability of leapfrog trajectories on a Gaussian target.

    Parameters
    ----------
    step_size
        Step size in coordinates in which momenta are standard normal.
    curvatures
        Number of dimensions ``d`` if all curvatures are one (whitened coordinates); or ``[d]``, the
        eigenvalues of ``C' H C`` with the target's precision ``H`` and the metric ``C C'``.
    num_integration_steps
        Number of steps per trajectory, or several equally likely numbers of steps.

    Returns
    -------
    float
        Probability; zero if trajectories are unstable, ``step_size**2 * max(curvatures) >= 4``.

    Raises
    ------
    ValueError
        If a curvature is not positive.

    Examples
    --------
    >>> round(hmc_acceptance(0.8, 10, 5), 4)
    0.8241
    >>> round(hmc_acceptance(0.8, np.array([1.0, 1.0, 0.2, 5.0]), 5), 4)
    0.5253

    References
    ----------
    Imhof (1961), Computing the distribution of quadratic forms in normal variables, eq. 3.2.
    """
    lengths = np.atleast_1d(np.asarray(num_integration_steps, int))
    if np.ndim(curvatures) == 0:
        if not 0 <= step_size < STABILITY_LIMIT:
            return 0.0
        kappa = _error_rates(step_size, lengths)
        return float(np.mean(_beta(kappa / np.sqrt(1 + kappa**2), int(curvatures))))
    if not (np.asarray(curvatures) > 0).all():
        raise ValueError(f"curvatures must be positive, got {curvatures!r}.")
    steps = step_size * np.sqrt(np.asarray(curvatures, float))
    if not (steps < STABILITY_LIMIT).all():
        return 0.0
    probabilities = []
    for length in lengths:
        exponent = 2 * np.arcsinh(_error_rates(steps, length))
        weights = np.concatenate([np.expm1(exponent), np.expm1(-exponent)])
        probabilities.append(_probability_below_zero(weights))
    return 2 * float(np.mean(probabilities))


def mala_acceptance(step_size: float, curvatures: int | np.ndarray) -> float:
    """Return the mean acceptance probability of Langevin proposals on a Gaussian target.

    Parameters
    ----------
    step_size
        Step size that multiplies the gradient, as in `fedmcmc.lsd` and `fedmcmc.mala`. A leapfrog
        step of size ``sqrt(2 * step_size)`` is the same proposal.
    curvatures
        Curvatures, see `hmc_acceptance`.

    Examples
    --------
    >>> round(mala_acceptance(1.0, 10), 4)
    0.2897
    """
    return hmc_acceptance(np.sqrt(2 * step_size), curvatures)


def gaussian_mh_acceptance(
    num_dimensions: int, *, variance: float = 1.0, distance: float = 0.0, correlation: float = 0.0
) -> float:
    """Return the mean acceptance probability of proposals from a Gaussian approximation.

    All arguments refer to coordinates in which the target is standard normal.

    Parameters
    ----------
    num_dimensions
        Number of dimensions of the target.
    variance
        Variance of the approximation, the same in all directions.
    distance
        Distance between the means of approximation and target, in sds.
    correlation
        Correlation of proposals with the current position; zero for independent proposals.

    Raises
    ------
    ValueError
        If variance and mean both differ from the target's: then there is no closed form.

    Examples
    --------
    >>> round(gaussian_mh_acceptance(20, variance=0.8), 4)
    0.6225
    >>> round(gaussian_mh_acceptance(20, variance=1.5, correlation=0.8), 4)
    0.5899
    >>> round(gaussian_mh_acceptance(20, distance=0.7), 4)
    0.6206
    """
    if variance != 1 and distance != 0:
        raise ValueError("Pass variance= or distance=, not both: then there is no closed form.")
    innovation = 1 - correlation**2
    if distance != 0:
        return float(2 * ndtr(-distance * np.sqrt((1 - correlation) / 2)))
    t = innovation * abs(variance - 1)
    return float(_beta(t / np.sqrt(t**2 + 4 * innovation * variance), num_dimensions))


@lru_cache
def hmc_step_size(
    num_dimensions: int, target_accept: float = 0.8, max_integration_steps: int = 1
) -> float:
    """Return the step size with a target acceptance probability in whitened coordinates.

    Parameters
    ----------
    num_dimensions
        Number of dimensions of the target.
    target_accept
        Acceptance probability in (0, 1).
    max_integration_steps
        Largest number of steps per trajectory; all numbers from one on are equally likely.

    Returns
    -------
    float
        Smallest step size with this acceptance. For long trajectories there may be several,
        because acceptance is not monotone in the step size.

    Raises
    ------
    ValueError
        If `target_accept` is outside (0, 1).

    Examples
    --------
    >>> round(hmc_step_size(10, 0.57), 3), round(hmc_step_size(100, 0.8, 3), 3)
    (1.141, 0.503)
    """
    if not 0 < target_accept < 1:
        raise ValueError(f"target_accept must be in (0, 1), got {target_accept!r}.")
    lengths = range(1, max_integration_steps + 1)

    def excess(step_size: float) -> float:
        return hmc_acceptance(step_size, num_dimensions, lengths) - target_accept

    grid = np.linspace(0, STABILITY_LIMIT, 1_001)
    below = next(i for i, step_size in enumerate(grid) if excess(step_size) < 0)
    low, high = float(grid[below - 1]), float(grid[below])
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return low


def _error_rates(step_size: np.ndarray | float, length: np.ndarray | int) -> np.ndarray:
    """Return the deviation of a trajectory from a rotation, for each direction.

    A trajectory is a rotation in coordinates ``(x, c p)``, but not in ``(x, p)``.
    """
    c = 1 / np.sqrt(1 - np.square(step_size) / 4)
    phi = np.arccos(1 - np.square(step_size) / 2)
    rates: np.ndarray = np.abs((c - 1 / c) * np.sin(length * phi)) / 2
    return rates


def _beta(s: np.ndarray | float, num_dimensions: int) -> np.ndarray:
    """Return twice the probability that ``(1 - s) chi2_d > (1 + s) chi2'_d``."""
    half = num_dimensions / 2
    probability: np.ndarray = 2 * betainc(half, half, (1 - np.asarray(s)) / 2)
    return probability


def _probability_below_zero(weights: np.ndarray) -> float:
    """Return the probability that a weighted sum of squares of normals is below zero."""
    largest = np.abs(weights).max()
    if largest == 0:
        return 0.5
    angle, decay = np.zeros_like(FREQUENCIES), np.zeros_like(FREQUENCIES)
    for weight in weights / largest:
        angle += np.arctan(weight * FREQUENCIES) / 2
        decay += np.log1p(np.square(weight * FREQUENCIES)) / 4
    width = np.log(FREQUENCIES[1] / FREQUENCIES[0])
    return float(0.5 - np.sum(np.sin(angle) * np.exp(-decay)) * width / np.pi)
