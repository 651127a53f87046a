"""Stationary distributions of random affine maps, in float64 NumPy.

A round maps ``position`` to ``F position + b + N(0, V)``. If only some clients take part,
``F = F_0 + sum_i u_i M_i`` and ``b = b_0 + sum_i u_i b_i`` with random counts ``u``. The stationary
moments then depend on the mean and covariance of ``u`` only.
"""

from typing import NamedTuple

import numpy as np

from fedmcmc.types import ParticipationMoments

MAX_ITERATIONS = 2_000
"""Limit on iterations for the covariance; enough unless cohorts make it fifty times as large."""


class RandomMap(NamedTuple):
    """Round as a random affine map."""

    on_position: np.ndarray  # [d, d], mean of F
    shift: np.ndarray  # [d], mean of b
    noise: np.ndarray  # [d, d], mean of V
    counts: ParticipationMoments | None = None  # moments of u; None if F and b are constant
    client_maps: np.ndarray = np.zeros((0, 0, 0))  # [num_clients, d, d], M
    client_shifts: np.ndarray = np.zeros((0, 0))  # [num_clients, d]

    def stationary(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Return the stationary mean and covariance, and the spectral radius of the mean map.

        Without a stationary distribution, the moments are NaN. If only the covariance diverges, the
        radius is infinite.
        """
        mean_map, size = self.on_position, len(self.shift)
        undefined = np.full(size, np.nan), np.full((size, size), np.nan)
        radius = float(np.abs(np.linalg.eigvals(mean_map)).max())
        if not radius < 1:
            return *undefined, radius
        mean = np.linalg.solve(np.eye(size) - mean_map, self.shift)
        if self.counts is None:
            return mean, _sum_series(mean_map, self.noise), radius
        # Each cohort moves the stationary mean to another place.
        pulls = self.client_maps @ mean + self.client_shifts
        noise = self.noise + self._over_cohorts(pulls[:, :, None], np.eye(1))
        covariance = _sum_series(mean_map, noise)
        limit = 1e12 * np.abs(covariance).max()
        for _ in range(MAX_ITERATIONS):
            after = _sum_series(mean_map, noise + self._over_cohorts(self.client_maps, covariance))
            change = np.abs(after - covariance).max()
            covariance = after
            if change < 1e-12 * np.abs(covariance).max():
                return mean, covariance, radius
            if not np.abs(covariance).max() < limit:
                break
        return *undefined, float("inf")

    def _over_cohorts(self, factors: np.ndarray, inner: np.ndarray) -> np.ndarray:
        """Return ``sum_ij cov(u_i, u_j) factors_i inner factors_j'``."""
        assert self.counts is not None
        own, common, sign = self.counts.own, self.counts.common, self.counts.sign
        total = np.tensordot(own, factors @ inner @ factors.transpose(0, 2, 1), 1)
        together = np.tensordot(common, factors, 1)
        return np.asarray(total + sign * together @ inner @ together.T)


def _sum_series(a: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return ``sum_k a^k v a^k'``, by doubling."""
    total, power = v, a
    while np.abs(power).max() > 1e-18:
        total = total + power @ total @ power.T
        power = power @ power
    return (total + total.T) / 2


def rounds_per_draw(
    on_position: np.ndarray, covariance: np.ndarray
) -> tuple[np.ndarray, float, np.ndarray]:
    """Return autocorrelation times of coordinates and of the slowest direction, and the latter.

    Times of coordinates and the direction are ``[d]``. The autocovariance at lag k is
    ``on_position^k covariance``. If a direction has no variance, all results are NaN.
    """
    size = len(covariance)
    if not np.linalg.eigvalsh(covariance)[0] > 0:
        return np.full(size, np.nan), float("nan"), np.full(size, np.nan)
    sums = _sum_autocovariances(on_position, covariance)
    root = np.linalg.cholesky(covariance)
    scaled = np.linalg.solve(root, np.linalg.solve(root, sums).T)
    values, vectors = np.linalg.eigh((scaled + scaled.T) / 2)
    direction = np.linalg.solve(root.T, vectors[:, -1])
    return np.diag(sums) / np.diag(covariance), float(values[-1]), direction


def rounds_along(direction: np.ndarray, on_position: np.ndarray, covariance: np.ndarray) -> float:
    """Return the autocorrelation time of ``direction @ position``; NaN without variance."""
    variance = direction @ covariance @ direction
    if not variance > 0:
        return float("nan")
    sums = _sum_autocovariances(on_position, covariance)
    return float(direction @ sums @ direction / variance)


def _sum_autocovariances(on_position: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """Return the sum of autocovariances over all positive and negative lags, ``[d, d]``."""
    eye = np.eye(len(covariance))
    sums = np.linalg.solve(eye - on_position, (eye + on_position) @ covariance)
    return np.asarray(sums + sums.T) / 2
