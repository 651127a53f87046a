"""The exact law of two rounds of quantised Langevin dynamics; float64 NumPy, nothing of fedmcmc.

The variance of the quantiser of Alistarh et al. (2017) is no quadratic function of its argument, so
no recursion of moments closes. But without Langevin's noise the first round ends in one of finitely
many states, and from a given state the moments of the next one are known. With ``s`` levels,
``a_j = s |v_j| / |v|`` and ``r_j`` its fractional part, ``C(v)_j = |v| sign(v_j) k_j / s`` where
``k_j`` is ``a_j - r_j`` or, with probability ``r_j``, one more: it has mean ``v_j`` and variance
``(|v| / s)^2 r_j (1 - r_j)``.
"""

import itertools
from typing import NamedTuple

import numpy as np

from tests.oracles.laws import Moments

__all__ = ["quantised", "two_rounds", "variance"]


def _parts(v, num_levels):
    norm = np.linalg.norm(v, axis=-1, keepdims=True)
    scaled = num_levels * np.abs(v) / np.where(norm > 0, norm, 1)
    return norm / num_levels * np.sign(v), np.floor(scaled), scaled - np.floor(scaled)


def variance(v, num_levels):
    """Return the variances of ``C(v)``, for vectors along the last axis."""
    unit, _, above = _parts(v, num_levels)
    return unit**2 * above * (1 - above)


def quantised(v, num_levels):
    """Return all ``(probability, C(v))`` of one vector."""
    unit, below, above = _parts(v, num_levels)
    results = []
    for up in itertools.product((0, 1), repeat=len(v)):
        probability = np.prod(np.where(up, above, 1 - above))
        if probability > 0:
            results.append((probability, unit * (below + np.array(up))))
    return results


class _States(NamedTuple):
    probability: np.ndarray  # [n]
    theta: np.ndarray  # [n, d]
    memory: np.ndarray  # [n, b, d]


def two_rounds(
    precisions,
    means,
    *,
    prior_precision,
    prior_mean,
    num_levels,
    step_sizes,
    temperature,
    participation,
    position,
    rates=None,
    memory_of="all",
):
    """Return the laws of theta after one round without noise and after one more with noise.

    Parameters
    ----------
    step_sizes
        ``[2]``.
    temperature
        Of the second round.
    participation
        A rule of `laws_qlsd`: ``[(probability, weights [b])]``.
    rates
        ``[b]``, of the memories; ``None`` without.
    num_levels, precisions, means, prior_precision, prior_mean, memory_of
        As in `laws_qlsd.langevin`; the server adds the prior.
    """
    a = np.asarray(precisions, float)
    num, d = a.shape[:2]
    alpha = np.zeros(num) if rates is None else np.asarray(rates, float)

    def differences(states):
        gaps = means - states.theta[:, None]
        return np.einsum("sij,nsj->nsi", a, gaps) - states.memory

    def drift(states, weights):
        """Return what the server adds however the messages are rounded."""
        prior = (prior_mean - states.theta) @ prior_precision
        spoken = np.ones(num) if memory_of == "all" else weights
        return prior + np.einsum("s,nsi->ni", spoken, states.memory)

    start = _States(np.ones(1), np.asarray(position, float)[None], np.zeros((1, num, d)))
    v = differences(start)[0]
    ends = []
    for chance, weights in participation:
        active = np.flatnonzero(weights)
        for codes in itertools.product(*(quantised(v[i], num_levels) for i in active)):
            total, memory, probability = drift(start, weights)[0], np.zeros((num, d)), chance
            for i, (p, code) in zip(active, codes, strict=True):
                probability *= p
                total = total + weights[i] * code
                memory[i] = alpha[i] * code
            ends.append((probability, position + step_sizes[0] * total, memory))
    states = _States(*map(np.array, zip(*ends, strict=True)))
    first = _moments([(states.probability, states.theta, np.zeros(d))])

    v = differences(states)
    spread = variance(v, num_levels)
    pieces = []
    for chance, weights in participation:
        total = drift(states, weights) + np.einsum("s,nsi->ni", weights, v)
        noise = step_sizes[1] ** 2 * np.einsum("s,nsi->ni", weights**2, spread)
        noise = noise + 2 * step_sizes[1] * temperature
        pieces.append((chance * states.probability, states.theta + step_sizes[1] * total, noise))
    return first, _moments(pieces)


def _moments(pieces) -> Moments:
    """Return the moments of a mixture of means ``[n, d]`` with variances ``[n, d]``."""
    mean = sum(p @ x for p, x, _ in pieces)
    covariance = sum(
        (x - mean).T @ (p[:, None] * (x - mean)) + np.diag(p @ np.broadcast_to(v, x.shape))
        for p, x, v in pieces
    )
    return Moments(mean, covariance)
