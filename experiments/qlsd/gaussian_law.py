"""The law of LSD and QLSD on the Gaussian federation, as far as it is closed.

All potentials are isotropic, so the law is ``mean + isotropic noise`` if the noise of compression
is; its variance a coordinate solves one linear equation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.qlsd.federations import GaussianFederation

__all__ = [
    "average_error",
    "centered_variance",
    "memory_variance",
    "square_error",
    "squares_for_the_budget",
    "stationary_variance",
]

NUM_DIRECTIONS = 4000


def stationary_variance(
    federation: GaussianFederation,
    *,
    step_size: float,
    batch_fraction: float,
    num_levels: int | None,
    centred: bool,
    seed: int,
    batch_rows: int | None = None,
    participation: float = 1.0,
) -> float:
    """Return the stationary variance a coordinate, averaged over coordinates.

    With ``g`` the step size, ``L`` the number of rows and ``x`` the distance from the mean,
    ``E |x'|^2 = (1 - g L)^2 E |x|^2 + 2 g d + g^2 sum_i (E |H_i - E H_i|^2 + E q(H_i))`` where
    ``q(v) = |v|^2 / s^2 * sum_j f_j (1 - f_j)`` is the quantiser's variance, ``f_j`` the fraction
    by which ``s |v_j| / |v|`` is above an integer, and ``H_i`` client i's message.

    Notes
    -----
    Centred messages are ``N_i x``, without noise of the minibatch as all rows have the same
    Hessian: ``q(N_i x) = N_i^2 |x|^2 E q(direction)``, and the equation is solved for ``E |x|^2``.
    The mean of ``q`` over directions is taken by simulation and the direction as independent of
    the length; without compression the law is exact. Messages that are not centred are
    ``N_i (mean of the minibatch - theta)``, which depend on ``x`` so little that ``q`` is taken at
    its mean over ``x = 0`` and minibatches. With `batch_rows`, minibatches have so many rows,
    whatever the client's fraction. Where a client takes part with the probability `participation`
    and its message counts one over it, the message's second moment grows by that factor.
    """
    rows, start = np.asarray(federation.data.rows, np.float64), np.asarray(federation.data.start)
    sizes = np.asarray(federation.data.sizes)
    dim = rows.shape[1]
    if centred:
        return centered_variance(
            sizes,
            dim,
            step_size=step_size,
            num_levels=num_levels,
            seed=seed,
            participation=participation,
        )
    rng = np.random.default_rng(seed)
    absent = 1 / participation - 1
    contraction = (1 - step_size * federation.precision) ** 2
    contraction += step_size**2 * absent * float((sizes.astype(float) ** 2).sum())
    constant = 2 * step_size * dim
    noise = 0.0
    for first, size in zip(start, sizes, strict=True):
        own = rows[first : first + size]
        num = max(int(np.floor(size * batch_fraction + 1e-9)), 1)
        if batch_rows is not None:
            num = min(batch_rows, int(size))
        whole = size**2 * float(((own.mean(axis=0) - federation.mean) ** 2).sum())
        noise += absent * whole + size**2 / num * own.var(axis=0).sum() / participation
        if num_levels is not None:
            index = rng.integers(0, size, (NUM_DIRECTIONS // 10, num))
            messages = size * (own[index].mean(axis=1) - federation.mean)
            noise += quantiser_variance(messages, num_levels).mean() / participation
    return (constant + step_size**2 * noise) / (1 - contraction) / dim


def centered_variance(
    sizes: np.ndarray | Sequence[int],
    dim: int,
    *,
    step_size: float,
    num_levels: int | None,
    seed: int,
    participation: float = 1.0,
) -> float:
    """Return `stationary_variance` of centered messages, for clients with `sizes` rows."""
    ratio = _message_noise(dim, num_levels, seed, participation)
    own = np.asarray(sizes, float)
    growth = (1 - step_size * own.sum()) ** 2 + step_size**2 * ratio * float((own**2).sum())
    return 2 * step_size / (1 - growth)


def memory_variance(
    sizes: np.ndarray | Sequence[int],
    dim: int,
    *,
    step_size: float,
    num_levels: int,
    seed: int,
    participation: float = 1.0,
) -> float:
    """Return the stationary variance a coordinate of QLSD++, whose clients have `sizes` rows.

    Notes
    -----
    All rows have the same Hessian, so that minibatches with a control variate make no noise and
    client i's message is ``N_i x`` plus a constant. With ``e_i`` the message less its memory, ``v_i
    = C(e_i) - e_i`` (zero in place of ``C`` where the client is absent, one over `participation` of
    it else), ``g`` the step size, ``a`` the memory's rate and ``p`` the participation,
    ``x' = (1 - g L) x - g sum_i v_i + noise`` and
    ``e_i' = (1 - a p) e_i - a p v_i + N_i (x' - x)``: the constant is gone, and with it how much
    clients differ. Given the state, ``v_i`` has mean zero and a variance in proportion to
    ``|e_i|^2``, so that second moments obey one linear equation. Directions are taken as in
    `stationary_variance`.
    """
    own = np.asarray(sizes, float)
    num, p = 1 + len(own), participation
    rate = p / (1 + min(dim / num_levels**2, dim**0.5 / num_levels))
    moved = np.zeros((num, num))  # x and all e_i, from their last values
    moved[0, 0] = 1 - step_size * own.sum()
    moved[1:, 0] = -step_size * own.sum() * own
    moved[1:, 1:] = (1 - rate) * np.eye(num - 1)
    from_v = np.zeros((num, num - 1))
    from_v[0] = -step_size
    from_v[1:] = -step_size * own[:, None] - rate * np.eye(num - 1)
    noise = (2 * step_size) ** 0.5 * np.concatenate([[1.0], own])
    ratio = _message_noise(dim, num_levels, seed, p)
    step = np.kron(moved, moved)
    for i in range(1, num):
        each = np.outer(from_v[:, i - 1], from_v[:, i - 1])
        step[:, i * num + i] += ratio * each.ravel()
    moments = np.linalg.solve(np.eye(num**2) - step, np.outer(noise, noise).ravel())
    return float(moments[0])


def _message_noise(dim: int, num_levels: int | None, seed: int, participation: float) -> float:
    """Return the variance that a message takes on in compression and absence, over its square."""
    direction = np.random.default_rng(seed).standard_normal((NUM_DIRECTIONS, dim))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    ratio = 0.0 if num_levels is None else float(quantiser_variance(direction, num_levels).mean())
    return (1 + ratio) / participation - 1


def quantiser_variance(vectors: np.ndarray, num_levels: int) -> np.ndarray:
    """Return ``E |C(v) - v|^2`` of each vector ``[num, d]``, exactly."""
    norm = np.linalg.norm(vectors, axis=1)
    scaled = num_levels * np.abs(vectors) / norm[:, None]
    fraction = scaled - np.floor(scaled)
    return (norm / num_levels) ** 2 * (fraction * (1 - fraction)).sum(axis=1)


def average_error(variance: float, contraction: float, num: np.ndarray) -> np.ndarray:
    """Return the variance of averages of `num` states of a stationary chain.

    Its autocorrelation at lag k is ``contraction**k``.
    """
    lags = np.arange(1, int(num.max()))
    powers = contraction**lags
    first, second = np.cumsum(powers), np.cumsum(lags * powers)
    pairs = np.array([n * first[n - 2] - second[n - 2] if n > 1 else 0.0 for n in num])
    return variance * (num + 2 * pairs) / num.astype(float) ** 2


def square_error(
    variance: float, target: float, dim: int, contraction: float, num: np.ndarray
) -> np.ndarray:
    """Return the mean squared error of averages of ``|x|^2`` over `num` states, in units.

    The states are those of `average_error`, Gaussian in `dim` coordinates; what is estimated is
    ``dim * target``, which is the unit, with `target` the posterior's variance. The error is that
    of a bias, ``variance / target - 1``, and of chance, whose autocorrelation is the square of that
    of the states.
    """
    bias = variance / target - 1
    return bias**2 + average_error(2 * variance**2 / dim, contraction**2, num) / target**2


def squares_for_the_budget(metrics: Mapping[str, Any]) -> np.ndarray:
    """Return `square_error` of QLSD* for the rounds that the budget pays for.

    ``[num_levels, num_step_sizes]``, as the measured errors of the mean in ``metrics["budget"]``.
    Compressed states are taken as Gaussian, which they are where compression is fine.
    """
    grid, target, dim = metrics["budget"], metrics["posterior_variance"], metrics["dim"]
    found = np.empty((len(grid["levels"]), len(grid["factors"])))
    for i, (levels, num) in enumerate(zip(grid["levels"], grid["rounds"], strict=True)):
        for j, factor in enumerate(grid["factors"]):
            variance = centered_variance(
                metrics["sizes"], dim, step_size=factor * target, num_levels=levels, seed=0
            )
            found[i, j] = square_error(variance, target, dim, 1 - factor, np.array([num]))[0]
    return found
