"""Vono et al. (2022), Table 2 and section S4: stationary variances on Gaussian clients, exactly.

Potentials of `experiments.models.gaussian` with a flat prior are isotropic, so that the stationary
distribution of QLSD, QLSD* and QLSD++ has the posterior's mean, and its variance solves a linear
equation. Two means are simulated: those of the quantizer's variance, over directions of messages
that are taken as independent of their length, and over minibatches.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import fedmcmc
from experiments import loaders
from experiments.tidy import Row, from_numbers

__all__ = [
    "centered_variance",
    "memory_variance",
    "quantizer_variance",
    "rows",
    "stationary_variance",
]

NUM_DIRECTIONS = 4000


def stationary_variance(
    data: fedmcmc.FederatedData,
    *,
    step_size: float,
    batch_size: int | float,
    num_levels: int | None,
    participation: float = 1.0,
    seed: int = 0,
) -> float:
    """Return the stationary variance of QLSD, averaged over coordinates.

    With ``g`` the step size, ``L`` the number of rows, ``x`` the distance from the mean and ``H_i``
    client i's message,
    ``E |x'|^2 = (1 - g L)^2 E |x|^2 + 2 g d + g^2 sum_i (E |H_i - E H_i|^2 + E q(H_i))``.
    Messages are ``N_i (mean of the minibatch - theta)``, which depend on ``x`` so little that the
    quantizer's variance ``q`` is taken at ``x = 0``. If a client takes part with the probability
    `participation` and its message counts one over it, the message's second moment grows by that
    factor.

    Parameters
    ----------
    data
        Clients of `experiments.loaders.gaussian`.
    step_size, num_levels, participation, seed
        Settings of QLSD, without compression if `num_levels` is ``None``, and the simulation's
        seed.
    batch_size
        Rows of a minibatch, drawn with replacement, or their share of a client's rows.
    """
    rng, dim = np.random.default_rng(seed), data.rows["y"].shape[1]
    mean = np.asarray(data.rows["y"]).mean(axis=0, dtype=np.float64)
    sizes, absent = np.asarray(data.sizes, float), 1 / participation - 1
    noise = 0.0
    for i in range(data.num_clients):
        own = np.asarray(data.client_rows(i)["y"], np.float64)
        size = len(own)
        share = batch_size if isinstance(batch_size, int) else int(size * batch_size + 1e-9)
        num = max(min(share, size), 1)
        distance = size**2 * float(((own.mean(axis=0) - mean) ** 2).sum())
        noise += absent * distance + size**2 / num * own.var(axis=0).sum() / participation
        if num_levels is not None:
            index = rng.integers(0, size, (NUM_DIRECTIONS // 10, num))
            messages = size * (own[index].mean(axis=1) - mean)
            noise += quantizer_variance(messages, num_levels).mean() / participation
    growth = (1 - step_size * sizes.sum()) ** 2 + step_size**2 * absent * (sizes**2).sum()
    return float((2 * step_size * dim + step_size**2 * noise) / (1 - growth) / dim)


def centered_variance(
    sizes: Any,
    dim: int,
    *,
    step_size: float,
    num_levels: int | None,
    participation: float = 1.0,
    seed: int = 0,
) -> float:
    """Return the stationary variance of QLSD* for clients with `sizes` rows; else as above.

    Messages are ``N_i x``, without noise of minibatches, since all rows have the same Hessian.
    """
    ratio = _message_noise(dim, num_levels, participation, seed)
    own = np.asarray(sizes, float)
    growth = (1 - step_size * own.sum()) ** 2 + step_size**2 * ratio * (own**2).sum()
    return float(2 * step_size / (1 - growth))


def memory_variance(
    sizes: Any,
    dim: int,
    *,
    step_size: float,
    num_levels: int,
    participation: float = 1.0,
    seed: int = 0,
) -> float:
    """Return the stationary variance of QLSD++; arguments as in `centered_variance`.

    Client i's message is ``N_i x`` plus a constant. With ``e_i`` the message less its memory,
    ``v_i`` what compression and absence add to it, ``a`` the memory's rate and ``p`` the
    participation, ``x' = (1 - g L) x - g sum_i v_i + noise`` and
    ``e_i' = (1 - a p) e_i - a p v_i + N_i (x' - x)``: the constant is gone, and with it the
    differences between clients. The variance of ``v_i`` is proportional to ``|e_i|^2``, so that
    second moments solve one linear equation.
    """
    own = np.asarray(sizes, float)
    num = 1 + len(own)
    rate = participation / (1 + min(dim / num_levels**2, dim**0.5 / num_levels))
    moved = np.zeros((num, num))  # x and all e_i, from their last values
    moved[0, 0] = 1 - step_size * own.sum()
    moved[1:, 0] = -step_size * own.sum() * own
    moved[1:, 1:] = (1 - rate) * np.eye(num - 1)
    from_v = np.zeros((num, num - 1))
    from_v[0] = -step_size
    from_v[1:] = -step_size * own[:, None] - rate * np.eye(num - 1)
    noise = (2 * step_size) ** 0.5 * np.concatenate([[1.0], own])
    step, ratio = np.kron(moved, moved), _message_noise(dim, num_levels, participation, seed)
    for i, column in enumerate(from_v.T, start=1):
        step[:, i * num + i] += ratio * np.outer(column, column).ravel()
    moments = np.linalg.solve(np.eye(num**2) - step, np.outer(noise, noise).ravel())
    return float(moments[0])


def _message_noise(dim: int, num_levels: int | None, participation: float, seed: int) -> float:
    """Return the variance that compression and absence add to a message, over its square."""
    direction = np.random.default_rng(seed).standard_normal((NUM_DIRECTIONS, dim))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    ratio = 0.0 if num_levels is None else float(quantizer_variance(direction, num_levels).mean())
    return (1 + ratio) / participation - 1


def quantizer_variance(vectors: np.ndarray, num_levels: int) -> np.ndarray:
    """Return ``E |C(v) - v|^2`` of each vector ``[num, d]``, exactly."""
    norm = np.linalg.norm(vectors, axis=1)
    fraction = num_levels * np.abs(vectors) / norm[:, None] % 1
    return (norm / num_levels) ** 2 * (fraction * (1 - fraction)).sum(axis=1)


def rows(
    num_clients: int,
    dim: int,
    step_size_factor: float,
    batch_rows: int,
    levels: int,
    row_factors: Sequence[int],
    step_factors: Sequence[float],
    level_factors: Sequence[int],
    batch_factors: Sequence[int],
    participations: Sequence[float],
    spreads: Sequence[float],
    seed: int = 0,
) -> list[Row]:
    """Return squared 2-Wasserstein distances from the posterior where each setting varies alone.

    Parameters
    ----------
    num_clients, dim, spreads
        Clients of `experiments.loaders.gaussian`; standard deviations of their means.
    step_size_factor
        Step size over one over the number of rows.
    batch_rows, levels, participations
        Settings of the algorithms.
    row_factors, step_factors, level_factors, batch_factors
        Multiples of rows, step size, levels and minibatches; minibatches vary with the most levels,
        since the noise of few levels would hide theirs.
    seed
        Seed of the simulated means.
    """
    usual = {"rows": 1, "step": 1.0, "levels": 1, "batch": 1, "participation": 1.0, "spread": 5.0}

    def distances(**point: Any) -> tuple[dict[str, float], float]:
        at = usual | point
        data, _ = loaders.gaussian(num_clients, dim, spread=at["spread"], times=int(at["rows"]))
        variances = _variances(
            data,
            batch_rows * int(at["batch"]),
            step_size=at["step"] * step_size_factor / data.num_rows,
            num_levels=levels * int(at["levels"]),
            participation=at["participation"],
            seed=seed,
        )
        right = data.num_rows**-0.5
        return {k: dim * (v**0.5 - right) ** 2 for k, v in variances.items()}, dim * right**2

    fine = {"levels": level_factors[-1]}
    grid: dict[str, tuple[Sequence[float], dict[str, Any]]] = {
        "rows": (row_factors, {}),
        "step": (step_factors, {}),
        "levels": (level_factors, {}),
        "batch": (batch_factors, fine),
        "participation": (participations, {}),
        "spread": (spreads, {}),
    }
    found: list[Row] = []
    for varied, (values, others) in grid.items():
        curves: dict[str, list[float]] = {}
        for value in values:
            squared, scale = distances(**others, **{varied: value})
            for name, distance in squared.items():
                curves.setdefault(name, []).append(distance)
                place = {"varied": varied, "value": float(value)}
                relative = {"relative_squared_distance": distance / scale}
                found += from_numbers(name, place, {"squared_distance": distance} | relative)
        for name, curve in curves.items():
            found += from_numbers(name, {"varied": varied}, {"power": _power(values, curve)})
    sources = {"compression": {"levels": 1}, "participation": {"participation": participations[0]}}
    for source, coarse in sources.items():
        added = []
        for spread in spreads:
            one, other = (distances(**fine | x, spread=spread)[0]["QLSD"] for x in (coarse, {}))
            added.append(one - other)
            place = {"source": source, "spread": float(spread)}
            found += from_numbers("QLSD", place, {"added_squared_distance": added[-1]})
        power = {"power_of_added_distance": _power(spreads, added)}
        found += from_numbers("QLSD", {"source": source}, power)
    return found


def _variances(
    data: fedmcmc.FederatedData, batch_size: int, **settings: Any
) -> Mapping[str, float]:
    sizes, dim = np.asarray(data.sizes), data.rows["y"].shape[1]
    return {
        "QLSD": stationary_variance(data, batch_size=batch_size, **settings),
        "QLSD*": centered_variance(sizes, dim, **settings),
        "QLSD++": memory_variance(sizes, dim, **settings),
    }


def _power(values: Sequence[float], results: Sequence[float]) -> float:
    """Return the power of positive values that the results have, from end to end."""
    pairs = [(v, r) for v, r in zip(values, results, strict=True) if v > 0]
    (first, low), (last, high) = pairs[0], pairs[-1]
    return float(np.log(high / low) / np.log(last / first))
