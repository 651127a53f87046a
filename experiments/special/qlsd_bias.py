"""Vono et al. (2022), Table 2 and section S4: stationary variances on Gaussian clients, exactly.

With a flat prior the potentials of `experiments.loaders.gaussian` are isotropic, so that the
stationary distributions of QLSD, QLSD* and QLSD++ have the posterior's mean, and their variances
solve linear equations. Two means are simulated: of the quantizer's variance, over directions
of messages that are taken as independent of their length, and over minibatches.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import fedmcmc
from experiments import loaders
from experiments.tidy import Row, from_numbers

__all__ = ["Law", "centered_variance", "memory_variance", "rows", "stationary_variance"]

NUM_DIRECTIONS = 4000


class Law(NamedTuple):
    """Settings of an algorithm; clients take part with the probability `participation`."""

    step_size: float
    num_levels: int
    participation: float = 1.0
    seed: int = 0  # of the simulated means


def stationary_variance(data: fedmcmc.FederatedData, batch_size: int, law: Law) -> float:
    """Return the stationary variance of QLSD, averaged over coordinates.

    With ``g`` the step size, ``L`` the number of rows, ``x`` the distance from the mean and ``H_i``
    client i's message,
    ``E |x'|^2 = (1 - g L)^2 E |x|^2 + 2 g d + g^2 sum_i (E |H_i - E H_i|^2 + E q(H_i))``.
    Messages are ``N_i (mean of the minibatch - theta)``, which depend on ``x`` so little that the
    quantizer's variance ``q`` is taken at ``x = 0``. Partial participation multiplies a message's
    second moment by one over its probability. Minibatches have `batch_size` rows, drawn with
    replacement.
    """
    rng, share, dim = np.random.default_rng(law.seed), law.participation, data.rows["y"].shape[1]
    mean = np.asarray(data.rows["y"]).mean(axis=0, dtype=np.float64)
    noise, growth = 0.0, (1 - law.step_size * data.num_rows) ** 2
    for i in range(data.num_clients):
        y = np.asarray(data.client_rows(i)["y"], np.float64)
        size, num = len(y), min(batch_size, len(y))
        distance = size**2 * float(((y.mean(axis=0) - mean) ** 2).sum())
        noise += (1 / share - 1) * distance + size**2 / num * y.var(axis=0).sum() / share
        growth += law.step_size**2 * (1 / share - 1) * size**2
        index = rng.integers(0, size, (NUM_DIRECTIONS // 10, num))
        messages = size * (y[index].mean(axis=1) - mean)
        noise += quantizer_variance(messages, law.num_levels).mean() / share
    return float((2 * law.step_size + law.step_size**2 * noise / dim) / (1 - growth))


def centered_variance(sizes: Any, dim: int, law: Law) -> float:
    """Return the stationary variance of QLSD* for clients with `sizes` rows.

    Messages are ``N_i x``, without noise of minibatches, since all rows have the same Hessian.
    """
    sizes = np.asarray(sizes, float)
    growth = (1 - law.step_size * sizes.sum()) ** 2
    growth += law.step_size**2 * _message_noise(dim, law) * (sizes**2).sum()
    return float(2 * law.step_size / (1 - growth))


def memory_variance(sizes: Any, dim: int, law: Law) -> float:
    """Return the stationary variance of QLSD++ for clients with `sizes` rows.

    Client i's message is ``N_i x`` plus a constant. With ``e_i`` the message less its memory,
    ``v_i`` what compression and absence add to it, ``a`` the memory's rate and ``p`` the
    participation, ``x' = (1 - g L) x - g sum_i v_i + noise`` and
    ``e_i' = (1 - a p) e_i - a p v_i + N_i (x' - x)``: the constant is gone, and with it the
    differences between clients. The variance of ``v_i`` is proportional to ``|e_i|^2``, so that
    second moments solve one linear equation.
    """
    sizes, levels = np.asarray(sizes, float), law.num_levels
    num, eye, pull = 1 + len(sizes), np.eye(len(sizes)), -law.step_size * sizes
    rate = law.participation / (1 + min(dim / levels**2, dim**0.5 / levels))
    of_x = np.append(1 + pull.sum(), pull.sum() * sizes)[:, None]
    moved = np.hstack([of_x, np.vstack([0 * sizes, (1 - rate) * eye])])
    from_v = np.vstack([np.full(len(sizes), -law.step_size), pull[:, None] - rate * eye])
    noise = (2 * law.step_size) ** 0.5 * np.append(1.0, sizes)
    step, ratio = np.kron(moved, moved), _message_noise(dim, law)
    for i, column in enumerate(from_v.T, start=1):
        step[:, i * num + i] += ratio * np.outer(column, column).ravel()
    moments = np.linalg.solve(np.eye(num**2) - step, np.outer(noise, noise).ravel())
    return float(moments[0])


def _message_noise(dim: int, law: Law) -> float:
    """Return the variance that compression and absence add to a message, over its square."""
    direction = np.random.default_rng(law.seed).standard_normal((NUM_DIRECTIONS, dim))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    ratio = quantizer_variance(direction, law.num_levels).mean()
    return float((1 + ratio) / law.participation - 1)


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
    seed: int,
) -> list[Row]:
    """Return how squared 2-Wasserstein distances from the posterior depend on each setting alone.

    Clients are those of `experiments.loaders.gaussian`, with standard deviations `spreads` of their
    means. Step sizes are in units of one over the number of rows. `row_factors`, `step_factors`,
    `level_factors` and `batch_factors` are multiples of the other settings. Minibatches vary with
    the most levels, since the noise of few levels would hide theirs.
    """
    usual = {"rows": 1, "step": 1.0, "levels": 1, "batch": 1, "participation": 1.0, "spread": 5.0}

    def distances(**changed: Any) -> dict[str, float]:
        settings = usual | changed
        data, _ = loaders.gaussian(
            num_clients, dim, spread=settings["spread"], times=int(settings["rows"])
        )
        step_size = settings["step"] * step_size_factor / data.num_rows
        law = Law(step_size, levels * int(settings["levels"]), settings["participation"], seed)
        variances = {
            "QLSD": stationary_variance(data, batch_rows * int(settings["batch"]), law),
            "QLSD*": centered_variance(data.sizes, dim, law),
            "QLSD++": memory_variance(data.sizes, dim, law),
        }
        return {k: dim * (v**0.5 - data.num_rows**-0.5) ** 2 for k, v in variances.items()}

    grid = {
        "rows": row_factors,
        "step": step_factors,
        "levels": level_factors,
        "batch": batch_factors,
        "participation": participations,
        "spread": spreads,
    }
    fine = {"levels": level_factors[-1]}
    table: list[Row] = []
    for varied, values in grid.items():
        others = fine if varied == "batch" else {}
        curves = [distances(**others, **{varied: value}) for value in values]
        for name in curves[0]:
            squared = [curve[name] for curve in curves]
            for value, distance in zip(values, squared, strict=True):
                place = {"varied": varied, "value": float(value)}
                table += from_numbers(name, place, {"squared_distance": distance})
            table += from_numbers(name, {"varied": varied}, {"power": _power(values, squared)})
    sources = {"compression": {"levels": 1}, "participation": {"participation": participations[0]}}
    for source, coarse in sources.items():
        curves = [[distances(**fine | x, spread=y)["QLSD"] for y in spreads] for x in (coarse, {})]
        added = np.subtract(*curves)
        power = {"power_of_added_distance": _power(spreads, added)}
        table += from_numbers("QLSD", {"source": source}, power)
    return table


def _power(values: Sequence[float], results: Any) -> float:
    """Return the power of positive values that the results have, from end to end."""
    first = 0 if values[0] > 0 else 1
    return float(np.log(results[-1] / results[first]) / np.log(values[-1] / values[first]))
