"""The law of FA-HMC on Gaussian clients in any number of dimensions, round by round.

It is what `experiments.fa_hmc.dimension_law` is for one coordinate: each client's trajectories are
those of its own principal axes. Momenta are shared by all clients (``rho = 1``).
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

__all__ = ["Quadratics", "Round", "bin_shares", "local_rounds", "moments", "stationary", "target"]


class Quadratics(NamedTuple):
    """Clients' weighted losses ``(theta - mean)' H (theta - mean) / 2``, by principal axes.

    Attributes
    ----------
    curvatures, axes
        Eigenvalues of ``H``, ``[b, d]``, and eigenvectors in columns, ``[b, d, d]``.
    means
        ``[b, d]``.
    weights
        ``[b]``, summing to one.
    """

    curvatures: np.ndarray
    axes: np.ndarray
    means: np.ndarray
    weights: np.ndarray

    @classmethod
    def of_likelihoods(
        cls,
        precisions: np.ndarray,
        linear: np.ndarray,
        weights: np.ndarray,
        prior_precision: float,
    ) -> "Quadratics":
        """Return clients with log likelihoods ``linear' theta - theta' precision theta / 2``.

        The prior is normal around zero.
        """
        each = precisions / weights[:, None, None]
        curvatures, axes = np.linalg.eigh(each)
        curvatures = curvatures + prior_precision
        along = np.einsum("bij,bi->bj", axes, linear / weights[:, None]) / curvatures
        return cls(curvatures, axes, np.einsum("bij,bj->bi", axes, along), weights)

    def matrix(self, values: np.ndarray) -> np.ndarray:
        """Return the weighted sum of matrices with these eigenvalues ``[b, d]``."""
        wide = (self.axes * (self.weights[:, None] * values)[:, None, :]).transpose(1, 0, 2)
        dim = values.shape[1]
        return wide.reshape(dim, -1) @ self.axes.transpose(1, 0, 2).reshape(dim, -1).T

    def vector(self, values: np.ndarray) -> np.ndarray:
        """Return the weighted sum of those matrices times the clients' means, ``[d]``."""
        along = values * np.einsum("bij,bi->bj", self.axes, self.means)
        return np.einsum("b,bij,bj->i", self.weights, self.axes, along)


class Round(NamedTuple):
    """A round as a map: ``theta' = on_position theta + shift + N(0, noise)``.

    Of the covariance `noise`, `of_gradients` is the part that the noise of gradients adds.
    """

    on_position: np.ndarray
    shift: np.ndarray
    noise: np.ndarray
    of_gradients: np.ndarray

    def with_exact_gradients(self) -> "Round":
        """Return the round without the noise of gradients."""
        nothing = np.zeros_like(self.of_gradients)
        return self._replace(noise=self.noise - self.of_gradients, of_gradients=nothing)


def target(clients: Quadratics) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and covariance of the posterior."""
    precision = clients.matrix(clients.curvatures)
    covariance = np.linalg.inv(precision)
    return covariance @ clients.vector(clients.curvatures), covariance


def local_rounds(
    clients: Quadratics,
    wanted: Sequence[int],
    *,
    step_size: float,
    num_steps: int,
    noise: float,
) -> Iterator[tuple[int, Round]]:
    """Yield rounds of these numbers of trajectories, ascending, of `num_steps` leapfrog steps each.

    The formulas are those of `dimension_law.map_of_round` on each axis; `noise` is the standard
    deviation of each coordinate of a gradient, where two half kicks share one.

    Raises
    ------
    ValueError
        If the step size is too large for a client.
    """
    cosine = 1 - step_size**2 * clients.curvatures / 2
    if np.abs(cosine).max() >= 1:
        most = 2 / math.sqrt(clients.curvatures.max())
        raise ValueError(f"step_size must be below {most:.4g}, got {step_size:.4g}.")
    angle = np.arccos(cosine)

    def pushed(num: int) -> np.ndarray:
        return step_size * np.sin(num * angle) / np.sin(angle)

    keep, push = np.cos(num_steps * angle), pushed(num_steps)
    called = (step_size * push / 2) ** 2
    called = called + sum((step_size * pushed(n)) ** 2 for n in range(1, num_steps))
    dim = clients.curvatures.shape[1]
    momenta, gradients, kept = np.zeros((dim, dim)), np.zeros((dim, dim)), np.ones_like(keep)
    for num in range(1, 1 + max(wanted)):
        shared = clients.matrix(kept * push)
        momenta = momenta + shared @ shared.T
        own = noise**2 * clients.weights[:, None] * kept**2 * called
        gradients = gradients + clients.matrix(own)
        kept = kept * keep
        if num in wanted:
            on_position, shift = clients.matrix(kept), clients.vector(1 - kept)
            yield num, Round(on_position, shift, momenta + gradients, gradients)


def moments(one: Round, start: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield mean and standard deviation of every coordinate after one, two, ... rounds."""
    mean, covariance = start, np.zeros_like(one.noise)
    while True:
        mean = one.on_position @ mean + one.shift
        covariance = one.on_position @ covariance @ one.on_position.T + one.noise
        yield mean, np.sqrt(np.diag(covariance))


def stationary(one: Round) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of every coordinate in the long run."""
    mean = np.linalg.solve(np.eye(len(one.shift)) - one.on_position, one.shift)
    covariance, power = one.noise, one.on_position
    while np.abs(power).max() > 1e-12:
        covariance = covariance + power @ covariance @ power.T
        power = power @ power
    return mean, np.sqrt(np.diag(covariance))


def bin_shares(mean: np.ndarray, sd: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return which share of each normal lies between edges ``[d, bins + 1]``, and outside."""
    below = ndtr((edges - mean[:, None]) / sd[:, None])
    inside = np.diff(below, axis=1)
    return np.concatenate([inside, 1 - inside.sum(1, keepdims=True)], axis=1)
