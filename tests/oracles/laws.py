"""Exact distributions ("laws") of samplers on Gaussian targets, in float64 NumPy alone.

Clients have log likelihoods ``-(theta - m_s)' A_s (theta - m_s) / 2``. A round of a kernel is then
a random affine map, and mean and covariance follow linear recursions, at the step size of the run
and after any number of rounds. ``step_size`` is ``h / 2`` of Ahn et al. (2014) and El Mekkaoui et
al. (2021). ``T`` below is the number of local steps. Oracles import nothing of fedmcmc.
"""

from typing import NamedTuple

import numpy as np

__all__ = [
    "BatchNoise",
    "Moments",
    "Relay",
    "at_point",
    "batch_noise",
    "effective_rounds",
    "fixed_point",
    "geometric",
    "iterate",
    "kron_solve",
    "location_noise",
    "mixture",
    "pool",
    "posterior",
    "push",
    "relay",
    "single",
]


class Moments(NamedTuple):
    """A mean ``[d]`` and a covariance ``[d, d]``."""

    mean: np.ndarray
    covariance: np.ndarray


def at_point(position) -> Moments:
    """Return the moments of a constant."""
    position = np.asarray(position, float)
    return Moments(position, np.zeros((len(position),) * 2))


def push(law, matrix, shift=0.0, noise=0.0) -> Moments:
    """Return the moments of ``matrix x + shift`` plus independent noise of that covariance."""
    return Moments(matrix @ law.mean + shift, matrix @ law.covariance @ matrix.T + noise)


def mixture(weights, parts) -> Moments:
    """Return the moments of a mixture."""
    mean = sum(w * part.mean for w, part in zip(weights, parts, strict=True))
    covariance = sum(
        w * (part.covariance + np.outer(part.mean - mean, part.mean - mean))
        for w, part in zip(weights, parts, strict=True)
    )
    return Moments(mean, covariance)


def iterate(step, start: Moments, num_rounds) -> list[Moments]:
    """Return the laws after ``0 .. num_rounds`` rounds; `step` maps a law and a round to a law."""
    laws = [start]
    for round_ in range(num_rounds):
        laws.append(step(laws[-1], round_))
    return laws


def kron_solve(factors, weights, constant):
    """Solve ``X = sum_k weights[k] F_k X F_k' + constant``.

    Raises `ValueError` where the recursion has no finite second moment.
    """
    d = constant.shape[0]
    operator = sum(w * np.kron(f, f) for w, f in zip(weights, factors, strict=True))
    if np.abs(np.linalg.eigvals(operator)).max() >= 1:
        raise ValueError("no finite second moment: the spectral radius is not below one")
    return np.linalg.solve(np.eye(d * d) - operator, constant.reshape(-1)).reshape(d, d)


def fixed_point(maps) -> Moments:
    """Return the stationary law of a random map; `maps` are ``(chance, matrix, shift, noise)``."""
    chances, matrices, shifts, _ = (list(x) for x in zip(*maps, strict=True))
    on_mean = sum(p * a for p, a in zip(chances, matrices, strict=True))
    shift = sum(p * b for p, b in zip(chances, shifts, strict=True))
    mean = np.linalg.solve(np.eye(len(shift)) - on_mean, shift)
    ends = [push(at_point(mean), a, b, v) for _, a, b, v in maps]
    return Moments(mean, kron_solve(matrices, chances, mixture(chances, ends).covariance))


def geometric(matrix, num):
    """Return ``sum_{t < num} matrix^t``."""
    total = np.zeros_like(matrix)
    for _ in range(num):
        total = np.eye(len(matrix)) + matrix @ total
    return total


def effective_rounds(matrix, covariance, direction, num=5_000):
    """Return ``1 + 2 sum_k rho_k`` of ``direction @ x`` by powers; ``x' = matrix x + noise``."""
    along, total = covariance @ direction, 0.0
    for _ in range(num):
        along = matrix @ along
        total += direction @ along
    return 1 + 2 * total / (direction @ covariance @ direction)


def posterior(precisions, means, prior_precision, prior_mean) -> Moments:
    """Return the exact posterior of Gaussian clients ``[S, d, d]``, ``[S, d]``."""
    total = prior_precision + precisions.sum(0)
    shift = prior_precision @ prior_mean + np.einsum("sij,sj->i", precisions, means)
    return Moments(np.linalg.solve(total, shift), np.linalg.inv(total))


def pool(precisions, means):
    """Return the one client, ``[1, d, d]`` and ``[1, d]``, that owns all rows."""
    total = precisions.sum(0)
    shift = np.einsum("sij,sj->i", precisions, means)
    return total[None], np.linalg.solve(total, shift)[None]


def _batch_factor(n, m, replace):
    """Return ``n^2 / m`` times the correction for a finite population."""
    kappa = 1.0 if replace else (n - m) / (n - 1) if m < n else 0.0
    return n**2 / m * kappa


def location_noise(rows, precision, batch_size, *, replace):
    """Return the covariance of a minibatch gradient of a client whose rows share a precision.

    Rows are ``[n, d]`` with log likelihoods ``-(theta - x)' P (theta - x) / 2``; the estimate is
    ``n / m`` times the sum over the batch. The noise does not depend on theta:
    ``(n^2 / m) kappa P S P``, with ``S`` the rows' covariance (divided by ``n``) and ``kappa`` one
    with replacement, ``(n - m) / (n - 1)`` without. A client of fewer than ``m`` rows uses all of
    them without replacement.
    """
    rows = np.asarray(rows, float)
    n, centered = len(rows), rows - rows.mean(0)
    factor = _batch_factor(n, batch_size, replace)
    return factor * precision @ (centered.T @ centered / n) @ precision


class BatchNoise(NamedTuple):
    """The noise of a minibatch gradient where rows differ in curvature: it depends on theta.

    Its covariance is ``factor`` times the mean over rows of the outer square of
    ``slopes - curvatures @ theta``, both centered over rows.
    """

    slopes: np.ndarray  # [n, d]
    curvatures: np.ndarray  # [n, d, d]
    factor: float

    def expected(self, law: Moments) -> np.ndarray:
        """Return the mean covariance where theta has the law `law`."""
        center = self.slopes - self.curvatures @ law.mean
        spread = np.einsum("nij,jk,nlk->il", self.curvatures, law.covariance, self.curvatures)
        return self.factor * (center.T @ center + spread) / len(center)


def batch_noise(rows, curvatures, batch_size, *, replace) -> BatchNoise:
    """Build from rows ``[n, d]`` with curvatures ``[n, d, d]``, as in `location_noise`."""
    slopes = np.einsum("nij,nj->ni", curvatures, rows)
    factor = _batch_factor(len(rows), batch_size, replace)
    return BatchNoise(slopes - slopes.mean(0), curvatures - curvatures.mean(0), factor)


class Relay(NamedTuple):
    """A chain that visits client ``s`` with probability ``f_s`` and takes ``T_s`` steps there.

    A step at client ``s`` is ``theta' = E_s theta + b_s + noise`` of covariance ``W_s``.
    """

    probabilities: np.ndarray  # [S]
    maps: np.ndarray  # [S, d, d], E_s
    shifts: np.ndarray  # [S, d], b_s
    noises: np.ndarray  # [S, d, d], W_s
    num_local_steps: int | np.ndarray  # or [S]
    batches: tuple[BatchNoise, ...] = ()  # [S], already scaled to one step

    @property
    def lengths(self):
        """The numbers of steps, ``[S]``."""
        return np.broadcast_to(self.num_local_steps, len(self.probabilities))

    def visit(self, s, law: Moments, num) -> Moments:
        """Return the law after at most `num` steps of a visit to client `s`."""
        for _ in range(min(num, self.lengths[s])):
            noise = self.noises[s] + (self.batches[s].expected(law) if self.batches else 0)
            law = push(law, self.maps[s], self.shifts[s], noise)
        return law

    def after(self, start: Moments, num) -> Moments:
        """Return the law `num` local steps into a round that starts at the law `start`.

        A client that takes fewer stays where it is.
        """
        parts = [self.visit(s, start, num) for s in range(len(self.lengths))]
        return mixture(self.probabilities, parts)

    def rounds(self, position, num_rounds) -> list[Moments]:
        """Return the laws after ``0 .. num_rounds`` rounds from a point."""
        num = self.lengths.max()
        return iterate(lambda law, _: self.after(law, num), at_point(position), num_rounds)

    def local(self, start: Moments) -> list[Moments]:
        """Return the laws of the round's iterates ``1 .. T``."""
        return [self.after(start, t) for t in range(1, self.lengths.max() + 1)]

    def local_average(self, start: Moments) -> Moments:
        """Return the law of an iterate chosen uniformly among the round's ``1 .. T``."""
        num = self.lengths.max()
        return mixture(np.full(num, 1 / num), self.local(start))

    def stationary(self) -> Moments:
        """Return the stationary law at round boundaries."""
        if self.batches:
            raise ValueError("only for noise that does not depend on theta")
        origin, maps = at_point(np.zeros(self.shifts.shape[1])), []
        for s, num in enumerate(self.lengths):
            shift, noise = self.visit(s, origin, num)
            matrix = np.linalg.matrix_power(self.maps[s], num)
            maps.append((self.probabilities[s], matrix, shift, noise))
        return fixed_point(maps)


def relay(
    precisions,
    means,
    *,
    prior_precision,
    prior_mean,
    probabilities,
    step_size,
    num_local_steps,
    surrogate_precisions=None,
    surrogate_means=None,
    alpha=1.0,
    temperature=1.0,
    noises=None,
    batches=(),
) -> Relay:
    """Build the law of FSGLD; of DSGLD where there are no surrogates.

    Parameters
    ----------
    precisions, means
        ``[S, d, d]`` and ``[S, d]``, the clients' log likelihoods.
    prior_precision, prior_mean
        ``[d, d]`` and ``[d]``; the prior counts once at every visit.
    probabilities
        ``[S]``.
    surrogate_precisions, surrogate_means
        ``[S, d, d]`` and ``[S, d]``.
    noises
        ``[S, d, d]``, covariance of the client's gradient estimate before it is divided by its
        probability, one independent draw per step.
    batches
        One `BatchNoise` a client, for noise that depends on theta.
    """
    a, f = np.asarray(precisions, float), np.asarray(probabilities, float)
    num, d = a.shape[0], a.shape[1]
    q = np.zeros_like(a) if surrogate_precisions is None else np.asarray(surrogate_precisions)
    u = np.zeros((num, d)) if surrogate_means is None else np.asarray(surrogate_means)
    c = np.zeros_like(a) if noises is None else np.asarray(noises)
    natural, q_natural = np.einsum("sij,sj->si", a, means), np.einsum("sij,sj->si", q, u)
    # A share of all steps, which is that of visits where all are as long.
    share = f * num_local_steps / (f @ np.broadcast_to(num_local_steps, num))
    weight = 1 / share[:, None]
    curvature = prior_precision + weight[..., None] * a
    curvature = curvature + alpha * (q.sum(0) - weight[..., None] * q)
    slope = prior_precision @ prior_mean + weight * natural
    slope = slope + alpha * (q_natural.sum(0) - weight * q_natural)
    noise = 2 * step_size * temperature * np.eye(d) + (step_size * weight[..., None]) ** 2 * c
    scaled = tuple(
        batch._replace(factor=batch.factor * (step_size / p) ** 2)
        for batch, p in zip(batches, share, strict=bool(batches))
    )
    maps = np.eye(d) - step_size * curvature
    return Relay(f, maps, step_size * slope, noise, num_local_steps, scaled)


def single(precision, mean, *, step_size, noise=None, temperature=1.0) -> Relay:
    """Build the law of Langevin dynamics with an additive-noise gradient on one Gaussian."""
    d = len(mean)
    return relay(
        np.asarray(precision)[None],
        np.asarray(mean)[None],
        prior_precision=np.zeros((d, d)),
        prior_mean=np.zeros(d),
        probabilities=[1.0],
        step_size=step_size,
        num_local_steps=1,
        noises=None if noise is None else np.asarray(noise)[None],
        temperature=temperature,
    )
