"""Closed-form laws of consensus kernels on Gaussian targets, in float64 NumPy.

Client ``i`` has a log density ``-(z - m_i)' A_i (z - m_i) / 2`` (its share of the prior included)
and holds ``z_i``; the server holds ``theta``. One round is an affine map of ``(theta, z_1, ...,
z_b)`` with Gaussian noise: plain matrices over all of them, local step by local step. Imports
nothing of fedmcmc.
"""

from typing import NamedTuple

import numpy as np

from tests.oracles.laws import Moments, at_point, iterate, push

__all__ = ["Consensus", "consensus", "gibbs", "server_precision", "start_at"]


class Consensus(NamedTuple):
    """One round: ``state' = map @ state + shift + N(0, noise)``, theta first."""

    map: np.ndarray  # [(b + 1) d, (b + 1) d]
    shift: np.ndarray  # [(b + 1) d]
    noise: np.ndarray  # [(b + 1) d, (b + 1) d]

    def after(self, law: Moments) -> Moments:
        """Return the law after one more round."""
        return push(law, *self)

    def rounds(self, position, num_rounds) -> list[Moments]:
        """Return the laws after ``0 .. num_rounds`` rounds; all start at `position`."""
        start = start_at(position, len(self.shift) // len(position))
        return iterate(lambda law, _: self.after(law), start, num_rounds)

    def stationary(self) -> Moments:
        """Return the stationary law, by doubling the number of rounds until nothing is left."""
        if np.abs(np.linalg.eigvals(self.map)).max() >= 1:
            raise ValueError("no stationary law: the spectral radius is not below one")
        mean = np.linalg.solve(np.eye(len(self.shift)) - self.map, self.shift)
        power, covariance = self.map, self.noise
        while np.abs(power).max() > 1e-300:
            covariance, power = covariance + power @ covariance @ power.T, power @ power
        return Moments(mean, covariance)


def start_at(position, num_copies) -> Moments:
    """Return the deterministic start of theta and every ``z_i`` at `position`."""
    return at_point(np.tile(position, num_copies))


def consensus(
    precisions,
    means,
    *,
    step_sizes,
    num_local_steps,
    tolerances,
    temperature=1.0,
    noises=None,
    correlation=0.0,
) -> Consensus:
    """Build the law of one round.

    Parameters
    ----------
    precisions, means
        ``[b, d, d]`` and ``[b, d]``, the clients' log densities, prior included.
    step_sizes, tolerances
        ``[]`` or ``[b]``.
    noises
        ``[b, d, d]``, covariance of the clients' gradient estimates, one independent draw per step.
    correlation
        ``[]``, of the Langevin noise of any two clients in a step.
    """
    a = np.asarray(precisions, float)
    b, d = a.shape[:2]
    size = (b + 1) * d
    steps, rhos = np.broadcast_to(step_sizes, (b,)), np.broadcast_to(tolerances, (b,))
    c = np.zeros_like(a) if noises is None else np.asarray(noises, float)
    # One step of all clients at once.
    step, kick, injected = np.eye(size), np.zeros(size), np.zeros((size, size))
    for i in range(b):
        block = slice((i + 1) * d, (i + 2) * d)
        step[block, block] -= steps[i] * (a[i] + np.eye(d) / rhos[i])
        step[block, :d] += steps[i] * np.eye(d) / rhos[i]
        kick[block] = steps[i] * a[i] @ means[i]
        injected[block, block] = 2 * steps[i] * temperature * np.eye(d) + steps[i] ** 2 * c[i]
        for j in range(i):
            column = slice((j + 1) * d, (j + 2) * d)
            common = 2 * np.sqrt(steps[i] * steps[j]) * temperature * correlation * np.eye(d)
            injected[block, column] = injected[column, block] = common
    total, shift, noise = np.eye(size), np.zeros(size), np.zeros((size, size))
    for _ in range(num_local_steps):
        total, shift = step @ total, step @ shift + kick
        noise = step @ noise @ step.T + injected
    return _with_server(total, shift, noise, rhos, temperature)


def _with_server(total, shift, noise, rhos, temperature) -> Consensus:
    """Append the server's draw given all ``z_i`` to what the clients did."""
    b = len(rhos)
    d = len(shift) // (b + 1)
    server = np.eye(len(shift))
    weights = (1 / rhos) / np.sum(1 / rhos)
    server[:d] = np.concatenate([np.zeros((d, d))] + [w * np.eye(d) for w in weights], axis=1)
    drawn = np.zeros_like(noise)
    drawn[:d, :d] = temperature / np.sum(1 / rhos) * np.eye(d)
    return Consensus(server @ total, server @ shift, server @ noise @ server.T + drawn)


def gibbs(precisions, means, *, tolerances) -> Consensus:
    """Return a round of the exact two-block Gibbs sampler: every ``z_i | theta``, then theta."""
    a = np.asarray(precisions, float)
    b, d = a.shape[:2]
    rhos = np.broadcast_to(tolerances, (b,))
    total, shift, noise = np.eye((b + 1) * d), np.zeros((b + 1) * d), np.zeros(((b + 1) * d,) * 2)
    for i in range(b):
        block = slice((i + 1) * d, (i + 2) * d)
        covariance = np.linalg.inv(a[i] + np.eye(d) / rhos[i])
        total[block] = 0
        total[block, :d] = covariance / rhos[i]
        shift[block] = covariance @ a[i] @ means[i]
        noise[block, block] = covariance
    return _with_server(total, shift, noise, rhos, 1.0)


def server_precision(precisions, tolerances):
    """Return theta's precision in the limit of small steps, ``sum (A_i^-1 + rho_i I)^-1``."""
    a = np.asarray(precisions, float)
    rhos = np.broadcast_to(tolerances, (len(a),))
    eye = np.eye(a.shape[1])
    return sum(np.linalg.inv(np.linalg.inv(p) + r * eye) for p, r in zip(a, rhos, strict=True))
