"""Laws of random affine maps, in float64 NumPy: long-run moments and autocorrelation times.

A round is ``position' = F position + b + N(0, V)``. Where not all clients take part, ``F = F_0 +
sum_i u_i M_i`` and ``b`` likewise, and all that the long run needs of the cohorts are mean and
covariance of the counts ``u``.
"""

from typing import NamedTuple

import numpy as np

from fedmcmc._types import ParticipationMoments

MAX_STEPS = 2_000
"""Of the iteration for the covariance, each of which is a geometric series: more are needed only
where cohorts make it fifty times as large."""


class RandomMap(NamedTuple):
    """A round as a random affine map.

    Attributes
    ----------
    on_position, shift
        ``[d, d]`` and ``[d]``, their means.
    noise
        ``[d, d]``, the mean covariance that normals add.
    counts
        How often clients take part, ``None`` where the map is always the same.
    of_client, shift_of_client
        ``[num_clients, d, d]`` and ``[num_clients, d]``, what a client that takes part adds.
    """

    on_position: np.ndarray
    shift: np.ndarray
    noise: np.ndarray
    counts: ParticipationMoments | None = None
    of_client: np.ndarray = np.zeros((0, 0, 0))
    shift_of_client: np.ndarray = np.zeros((0, 0))

    def stationary(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Return mean and covariance in the long run, and what is left of a distance per round.

        Moments are NaN where there is no such law. The distance is that of the mean, and infinite
        where the covariance grows.
        """
        whole, size = self.on_position, len(self.shift)
        nothing = np.full(size, np.nan), np.full((size, size), np.nan)
        radius = float(np.abs(np.linalg.eigvals(whole)).max())
        if not radius < 1:
            return *nothing, radius
        mean = np.linalg.solve(np.eye(size) - whole, self.shift)
        if self.counts is None:
            return mean, _series(whole, self.noise), radius
        # Where a round takes the mean of all depends on who takes part.
        pulls = self.of_client @ mean + self.shift_of_client
        noise = self.noise + self._over_cohorts(pulls[:, :, None], np.eye(1))
        covariance = _series(whole, noise)
        most = 1e12 * np.abs(covariance).max()
        for _ in range(MAX_STEPS):
            after = _series(whole, noise + self._over_cohorts(self.of_client, covariance))
            change = np.abs(after - covariance).max()
            covariance = after
            if change < 1e-12 * np.abs(covariance).max():
                return mean, covariance, radius
            if not np.abs(covariance).max() < most:
                break
        return *nothing, float("inf")

    def _over_cohorts(self, each: np.ndarray, inside: np.ndarray) -> np.ndarray:
        """Return ``sum_ij cov(u_i, u_j) each_i inside each_j'``."""
        assert self.counts is not None
        own, common, sign = self.counts.own, self.counts.common, self.counts.sign
        total = np.tensordot(own, each @ inside @ each.transpose(0, 2, 1), 1)
        together = np.tensordot(common, each, 1)
        return np.asarray(total + sign * together @ inside @ together.T)


def _series(a: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return ``sum_k a^k v a^k'``, by doubling."""
    total, power = v, a
    while np.abs(power).max() > 1e-18:
        total = total + power @ total @ power.T
        power = power @ power
    return (total + total.T) / 2


def rounds_per_draw(
    on_position: np.ndarray, covariance: np.ndarray
) -> tuple[np.ndarray, float, np.ndarray]:
    """Return autocorrelation times: of each coordinate ``[d]``, of the slowest direction, and that.

    Autocovariances are ``on_position^k covariance`` at lag k. The direction is ``[d]``. All are NaN
    where a direction has no variance.
    """
    size = len(covariance)
    if not np.linalg.eigvalsh(covariance)[0] > 0:
        return np.full(size, np.nan), float("nan"), np.full(size, np.nan)
    sums = _summed(on_position, covariance)
    root = np.linalg.cholesky(covariance)
    inside = np.linalg.solve(root, np.linalg.solve(root, sums).T)
    values, vectors = np.linalg.eigh((inside + inside.T) / 2)
    direction = np.linalg.solve(root.T, vectors[:, -1])
    return np.diag(sums) / np.diag(covariance), float(values[-1]), direction


def rounds_along(direction: np.ndarray, on_position: np.ndarray, covariance: np.ndarray) -> float:
    """Return the autocorrelation time of ``direction @ position``; NaN without variance."""
    variance = direction @ covariance @ direction
    if not variance > 0:
        return float("nan")
    return float(direction @ _summed(on_position, covariance) @ direction / variance)


def _summed(on_position: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """Return the sum of autocovariances over all lags, negative ones too, ``[d, d]``."""
    one = np.eye(len(covariance))
    sums = np.linalg.solve(one - on_position, (one + on_position) @ covariance)
    return np.asarray(sums + sums.T) / 2
