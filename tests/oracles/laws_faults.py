"""The exact law of Langevin dynamics on messages that get lost, or arrive a round late.

In float64 NumPy; imports nothing of fedmcmc. Client ``i`` has the log likelihood
``-(theta - m_i)' A_i (theta - m_i) / 2`` and the gradient ``h_i(theta) = A_i (m_i - theta)``. The
state is ``X = (theta, P, eta_1 .. eta_b)``: the chain, the weighted sum of the messages that arrive
next, and the clients' memories, if there are any. In a round client i is silent, in time, or late:

    theta' = theta + g [prior + sum_i eta_i + sum_{in time} w_i (h_i(theta) - eta_i) + P] + noise
    P'     = sum_{late} w_i (h_i(theta) - eta_i)
    eta_i' = eta_i + a (h_i(theta) - eta_i)    of those who are not silent

which is affine in X given who is what, so the law follows by enumerating the 3^b cases.
"""

import itertools

import numpy as np

from tests.oracles.laws import at_point, iterate, mixture, push

__all__ = ["cases", "rounds"]


def cases(arrive, late, weights, masks=None):
    """Return ``[(probability, in time [b], late [b])]``, the latter two weights, zero for nobody.

    `arrive` is the probability that a message of a client that takes part arrives at all, `late`
    that it then does so a round late, all ``[b]``. `masks` is who takes part without faults, as
    ``[(probability, weights [b])]``; the weights there multiply `weights`.
    """
    num = len(arrive)
    masks = [(1.0, np.ones(num))] if masks is None else masks
    chances = {"silent": 1 - arrive, "time": arrive * (1 - late), "late": arrive * late}
    outcomes = []
    for chance, base in masks:
        members = np.flatnonzero(base)
        for kinds in itertools.product(chances, repeat=len(members)):
            probability, in_time, delayed = chance, np.zeros(num), np.zeros(num)
            for i, kind in zip(members, kinds, strict=True):
                probability = probability * chances[kind][i]
                in_time[i] = base[i] * weights[i] * (kind == "time")
                delayed[i] = base[i] * weights[i] * (kind == "late")
            if probability > 0:
                outcomes.append((probability, in_time, delayed))
    return outcomes


def rounds(
    precisions,
    means,
    *,
    prior_precision,
    prior_mean,
    cases,
    step_size,
    position,
    num_rounds,
    rate=None,
    temperature=1.0,
    stale=True,
):
    """Return the laws of X after ``0 .. num_rounds`` rounds; `rate` is that of the memories.

    Without `stale`, what is late is the client's gradient where the chain is when it arrives, as no
    message can know: for showing that a test would notice.
    """
    num, d = precisions.shape[:2]
    size = d * (2 if rate is None else 2 + num)
    theta, pending = np.eye(d, size), np.eye(d, size, d)
    memories = [np.eye(d, size, d * (2 + i)) if rate else np.zeros((d, size)) for i in range(num)]
    slopes = np.einsum("sij,sj->si", precisions, means)
    noise = np.zeros((size, size))
    noise[:d, :d] = 2 * step_size * temperature * np.eye(d)
    x = np.zeros(size)
    x[:d] = position

    def move(law, in_time, delayed):
        matrix, shift = np.eye(size), np.zeros(size)
        matrix[d : 2 * d] = 0
        drift = -prior_precision @ theta + pending + sum(memories)
        constant = prior_precision @ prior_mean
        for i in range(num):
            message, offset = -precisions[i] @ theta - memories[i], slopes[i]
            drift, constant = drift + in_time[i] * message, constant + in_time[i] * offset
            matrix[d : 2 * d] += delayed[i] * message
            shift[d : 2 * d] += delayed[i] * offset
            if rate is not None and in_time[i] + delayed[i] > 0:
                block = slice(d * (2 + i), d * (3 + i))
                matrix[block] += rate * message
                shift[block] += rate * offset
        matrix[:d] += step_size * drift
        shift[:d] += step_size * constant
        if not stale:
            # Pending gradients of the next position: ``P' <- P' - K (theta' - theta)``.
            late_curvature = np.einsum("s,sij->ij", delayed, precisions)
            correction = np.eye(size)
            correction[d : 2 * d, :d] = -late_curvature
            matrix = correction @ matrix
            matrix[d : 2 * d, :d] += late_curvature
            shift = correction @ shift
            moved = correction @ noise @ correction.T
        else:
            moved = noise
        return push(law, matrix, shift, moved)

    def step(law, _):
        return mixture([p for p, _, _ in cases], [move(law, *case) for _, *case in cases])

    return iterate(step, at_point(x), num_rounds)
