"""Closed-form laws of Langevin dynamics on summed, masked, sparsified gradients with memory.

In float64 NumPy; imports nothing of fedmcmc. Clients have log likelihoods
``-(theta - m_i)' A_i (theta - m_i) / 2``. The state is ``X = (theta, eta_1 .. eta_b, zeta)``: the
chain, the clients' memories and the snapshot, as far as an algorithm has them. Given who takes
part, a round maps X affinely and adds noise whose covariance is quadratic in X: of Langevin, of the
minibatches and of sparsification, ``C(v)_j = v_j B_j / q`` with ``Var C(v)_j = (1 / q - 1) v_j^2``.
So means and covariances follow a linear recursion, after any number of rounds and in the limit.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tests.oracles.laws import BatchNoise, Moments, at_point, iterate, mixture, push

__all__ = [
    "Langevin",
    "bernoulli",
    "cohorts",
    "everyone",
    "langevin",
    "realised",
    "schedule",
]

# Who takes part: ``[(probability, weights [b])]``; the weight of a client that is silent is zero.


def everyone(num_clients):
    """Return the rule by which all clients take part in all rounds."""
    return [(1.0, np.ones(num_clients))]


def bernoulli(probabilities):
    """Return the rule of independent clients with probabilities ``p_i`` and weights ``1 / p_i``."""
    p = np.asarray(probabilities, float)
    masks = [np.array(mask) for mask in itertools.product((0, 1), repeat=len(p))]
    return [(np.prod(np.where(mask, p, 1 - p)), mask / p) for mask in masks]


def cohorts(size, num_clients):
    """Return the rule of `size` distinct clients with weights ``b / size``."""
    subsets = list(itertools.combinations(range(num_clients), size))
    weights = np.zeros((len(subsets), num_clients))
    for row, subset in zip(weights, subsets, strict=True):
        row[list(subset)] = num_clients / size
    return [(1 / len(subsets), row) for row in weights]


def realised(probability, num_clients):
    """Return the rule of a nonempty set A of independent clients with weights ``b / |A|``."""
    rule = bernoulli(np.full(num_clients, probability))
    anyone = [(p, (w > 0).astype(float)) for p, w in rule if w.any()]
    total = sum(p for p, _ in anyone)
    return [(p / total, mask * num_clients / mask.sum()) for p, mask in anyone]


def schedule(number) -> Callable[[int], float]:
    """Return `number`, or a list of one a round, as a function of the round."""
    if np.ndim(number) == 0:
        return lambda round_: float(number)
    return lambda round_: float(number[round_])


class Langevin(NamedTuple):
    """A chain on the server, moved by what the clients say; built by `langevin`."""

    cohorts: list  # [(probability, weights [b])]
    base: Callable  # step_size -> (matrix, shift) of a round in which nobody takes part
    messages: np.ndarray  # [b, d, D], what is compressed is ``messages[i] @ X + offsets[i]``
    offsets: np.ndarray  # [b, d]
    places: np.ndarray  # [d, D], ``places @ X + place`` is where minibatch noise is evaluated
    place: np.ndarray  # [d]
    batches: tuple[BatchNoise, ...]  # one per client, or ()
    noises: np.ndarray  # [b, d, d], of gradients, independent of the state
    rates: np.ndarray | None  # [b], of the memories
    recalls: bool  # whether only the active clients' memories are added
    keep: np.ndarray  # [b]
    refresh_every: int | None
    step_size: Callable[[int], float]
    temperature: Callable[[int], float]

    def round(self, law, round_) -> Moments:
        """Return the law after round `round_` that starts at `law`."""
        return mixture(
            [p for p, _ in self.cohorts],
            [self._given(law, weights, round_) for _, weights in self.cohorts],
        )

    def _given(self, law, weights, round_) -> Moments:
        d, step_size = len(self.place), self.step_size(round_)
        law = self._refreshed(law, round_)
        matrix, shift = self.base(step_size)
        matrix, shift = matrix.copy(), shift.copy()
        noise = np.zeros_like(law.covariance)
        noise[:d, :d] = 2 * step_size * self.temperature(round_) * np.eye(d)
        for i in np.flatnonzero(weights):
            block = slice(d * (1 + i), d * (2 + i))
            lift = np.zeros((len(law.mean), d))
            lift[:d] = step_size * weights[i] * np.eye(d)
            if self.rates is not None:
                lift[block] = self.rates[i] * np.eye(d)
            if self.recalls:
                matrix[:d, block] += step_size * weights[i] * np.eye(d)
            matrix += lift @ self.messages[i]
            shift += lift @ self.offsets[i]
            noise += lift @ self._spread(law, i) @ lift.T
        return push(law, matrix, shift, noise)

    def _spread(self, law, i):
        """Return the mean covariance of what client `i` says, given the state before."""
        noise = self.noises[i]
        if self.batches:
            noise = noise + self.batches[i].expected(push(law, self.places, self.place))
        mean = self.messages[i] @ law.mean + self.offsets[i]
        square = self.messages[i] @ law.covariance @ self.messages[i].T + np.outer(mean, mean)
        return noise + (1 / self.keep[i] - 1) * np.diag(np.diag(square + noise))

    def _refreshed(self, law, round_) -> Moments:
        if self.refresh_every is None or round_ % self.refresh_every:
            return law
        d = len(self.place)
        copy = np.eye(len(law.mean))
        copy[-d:] = copy[:d]
        return push(law, copy)

    def rounds(self, position, num_rounds) -> list[Moments]:
        """Return the laws of the whole state after ``0 .. num_rounds`` rounds."""
        x = np.zeros(self.messages.shape[2])  # memories are zero before the first round
        x[: len(position)] = position
        return iterate(self.round, at_point(x), num_rounds)

    def stationary(self) -> Moments:
        """Return the limit: the fixed point of one round, by solving for it.

        Raises `ValueError` where a round is not always the same map, or has no finite limit.
        """
        if self.refresh_every not in (None, 1):
            raise ValueError("the law is periodic: use rounds")
        size = self.messages.shape[2]
        zero = at_point(np.zeros(size))

        def mean_of(x):
            return self.round(zero._replace(mean=x), 0).mean

        shift = mean_of(zero.mean)
        matrix = np.stack([mean_of(e) - shift for e in np.eye(size)], axis=1)
        mean = np.linalg.solve(np.eye(size) - matrix, shift)

        def covariance_of(x):
            return self.round(Moments(mean, x), 0).covariance.reshape(-1)

        constant = covariance_of(zero.covariance)
        basis = np.eye(size * size).reshape(-1, size, size)
        operator = np.stack([covariance_of(e) - constant for e in basis], axis=1)
        if np.abs(np.linalg.eigvals(operator)).max() >= 1:
            raise ValueError("no finite second moment: the spectral radius is not below one")
        solved = np.linalg.solve(np.eye(size * size) - operator, constant)
        return Moments(mean, solved.reshape(size, size))


def langevin(
    precisions,
    means,
    *,
    prior_precision,
    prior_mean,
    step_size,
    participation=None,
    shares=None,
    centre=None,
    centred=True,
    keep=1.0,
    rates=None,
    memory_of="all",
    refresh_every=None,
    temperature=1.0,
    noises=None,
    batches=(),
) -> Langevin:
    """Build the law of LSD and its kin.

    Parameters
    ----------
    precisions, means
        ``[b, d, d]`` and ``[b, d]``, the clients' log likelihoods.
    participation
        One of the rules above.
    shares
        ``[b]``, each client's part of the prior; without them the server adds it.
    centre, centred
        ``[d]``: messages are differences to the gradients there (LSD*), and the server adds the
        gradient of the log posterior there; or, not centred, each client adds its own.
    keep
        Probability of sending a number, which is then divided by it; ``[]`` or ``[b]``.
    rates, memory_of
        ``[b]``, of the memories, all of which the server adds, or those of the ``"active"``.
    refresh_every
        Rounds between snapshots (LSD++): minibatch noise is that of ``theta - zeta``.
    step_size, temperature
        A number, or a list of one a round.
    noises, batches
        Of the clients' gradients: ``[b, d, d]`` and one `BatchNoise` a client. Under `centre` and
        `refresh_every` the slopes are not used: the rows are the same at both places.
    """
    a = np.asarray(precisions, float)
    num, d = a.shape[:2]
    size = d * (1 + (0 if rates is None else num) + (refresh_every is not None))
    split = np.zeros(num) if shares is None else np.asarray(shares, float)
    curvatures = a + split[:, None, None] * prior_precision
    slopes = np.einsum("sij,sj->si", a, means) + split[:, None] * (prior_precision @ prior_mean)
    server = (1 - split.sum()) * prior_precision  # all of the prior, or nothing
    constant = server @ prior_mean
    if centre is not None and centred:
        at_centre = prior_precision @ (prior_mean - centre)
        at_centre = at_centre + np.einsum("sij,sj->i", a, means - np.asarray(centre))
        slopes, constant = curvatures @ centre, server @ centre + at_centre
    messages = np.zeros((num, d, size))
    messages[:, :, :d] = -curvatures
    recall = np.zeros((d, size))  # all memories, added whoever takes part
    if rates is not None:
        for i in range(num):
            block = slice(d * (1 + i), d * (2 + i))
            messages[i, :, block] = -np.eye(d)
            if memory_of == "all":
                recall[:, block] = np.eye(d)
    places, place = np.eye(d, size), np.zeros(d)
    if refresh_every is not None:
        places[:, -d:] -= np.eye(d)
    elif centre is not None:
        place = -np.asarray(centre, float)
    if refresh_every is not None or centre is not None:
        batches = [batch._replace(slopes=np.zeros_like(batch.slopes)) for batch in batches]

    def base(step_size_):
        matrix, shift = np.eye(size), np.zeros(size)
        matrix[:d] += step_size_ * (recall - server @ np.eye(d, size))
        shift[:d] = step_size_ * constant
        return matrix, shift

    return Langevin(
        cohorts=everyone(num) if participation is None else participation,
        base=base,
        messages=messages,
        offsets=slopes,
        places=places,
        place=place,
        batches=tuple(batches),
        noises=np.zeros_like(a) if noises is None else np.asarray(noises, float),
        rates=None if rates is None else np.broadcast_to(rates, (num,)),
        recalls=rates is not None and memory_of == "active",
        keep=np.broadcast_to(np.asarray(keep, float), (num,)),
        refresh_every=refresh_every,
        step_size=schedule(step_size),
        temperature=schedule(temperature),
    )
