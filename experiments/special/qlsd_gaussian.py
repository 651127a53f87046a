"""Vono et al. (2022), Figures 1, S1, S2, Table 2 and section S4: means of Gaussian clients.

With a flat prior the potentials of `experiments.loaders.gaussian` are isotropic, so that the
stationary distributions of QLSD, QLSD* and QLSD++ have the posterior's mean, and their variances
solve linear equations. Two means are simulated: of the quantizer's variance, over directions
of messages that are taken as independent of their length, and over minibatches.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import claims, loaders, models
from experiments.special.fsgld_gaussian import average_variances
from experiments.special.fsgld_repetitions import by_x
from experiments.tidy import Row, from_numbers
from fedmcmc.compression import bound_bits

RELEASED_STEP = 0.01
"""Step size of the released notebook, in units of ours; its minibatches are single rows."""
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
    second moment by one over its probability. Minibatches are drawn with replacement.
    """
    rng, share, dim = np.random.default_rng(law.seed), law.participation, data.rows["y"].shape[1]
    mean = np.asarray(data.rows["y"]).mean(axis=0, dtype=np.float64)
    noise, growth = 0.0, (1 - law.step_size * data.num_rows) ** 2
    for i in range(data.num_clients):
        y = np.asarray(data.client_rows(i)["y"], np.float64)
        size, num = len(y), min(batch_size, len(y))
        growth += law.step_size**2 * (1 / share - 1) * size**2
        distance = size**2 * ((y.mean(axis=0) - mean) ** 2).sum()
        index = rng.integers(0, size, (NUM_DIRECTIONS // 10, num))
        quantized = quantizer_variance(size * (y[index].mean(axis=1) - mean), law.num_levels)
        added = size**2 / num * y.var(axis=0).sum() + quantized.mean()
        noise += (distance + added) / share - distance
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
    batch_fraction: float,
    bits: Sequence[int],
    num_rounds: int,
    num_burnin: int,
    thinning: int,
    num_chains: int,
    budget: float,
    budget_levels: int,
    budget_factors: Sequence[float],
    seed: int,
) -> list[Row]:
    """Return errors of QLSD (with the fewest and most bits), QLSD* and LSD*, and of a budget.

    The draws of a run are too many to keep: each algorithm leaves errors of its running averages.
    Step sizes are in units of one over the number of rows, below 2 for stable chains; compressors
    have ``2**p`` levels for `p` in `bits`. In Figure S2 a client sends `budget` bits, with
    `budget_levels` numbers of levels from 1 to 10,000 and step sizes from large to small.
    """
    data, _ = loaders.gaussian(num_clients, dim)
    posterior = models.gaussian(data, 0.0)
    mean = np.asarray(data.rows["y"]).mean(axis=0, dtype=np.float64)
    center, unit = jnp.asarray(mean, jnp.float32), 1 / data.num_rows
    kernels: dict[str, Any] = {
        "QLSD": partial(fedmcmc.qlsd, posterior),
        "QLSD*": partial(fedmcmc.qlsd_star, posterior, center),
        "LSD*": partial(fedmcmc.lsd_star, posterior, center),
    }

    def run(key: Any, method: str, factor: float, levels: int, start: Any, **lengths: int) -> Any:
        """Return distances of draws from the mean, and the bits of a message."""
        compressor = {"compressor": fedmcmc.quantize(levels)} if levels else {}
        kernel = kernels[method](step_size=factor * unit, batch_size=batch_fraction, **compressor)
        lengths |= dict(num_chains=num_chains)
        samples = fedmcmc.sample(key, kernel, data, start, progress=False, **lengths)
        counted = np.asarray(samples.info["bits_up"], np.float64).mean() / num_clients
        return np.asarray(samples.draws, np.float64) - mean, float(counted)

    # Figure S1
    client_rows = [data.client_rows(i)["y"] for i in range(num_clients)]
    spread = np.std([x.mean(axis=0) for x in client_rows], axis=0, ddof=1).mean()
    within = np.sqrt(np.mean([x.var(axis=0, ddof=1) for x in client_rows]))
    table = from_numbers("data", {}, {"spread_of_means_over_spread_of_rows": spread / within})
    for i, x in enumerate(client_rows, start=1):
        table += from_numbers("data", {"client": i}, {"rows": len(x)})
    table += from_numbers("posterior", {}, {"variance": unit})

    # Figure 1
    algorithms = [("QLSD", p) for p in dict.fromkeys((bits[0], bits[-1]))]
    algorithms += [("QLSD*", p) for p in bits]
    curves: dict[str, list[Any]] = {"QLSD": [], "QLSD*": [], "LSD*": []}
    lengths = dict(num_rounds=num_rounds, num_burnin=num_burnin, thinning=thinning)
    for number, (method, p) in enumerate([*algorithms, ("LSD*", 0)]):
        levels, place = (2**p, {"bits": p}) if p else (0, {})
        key = jax.random.fold_in(jax.random.key(seed), number)
        away, counted = run(key, method, step_size_factor, levels, center, **lengths)
        points = np.unique(np.geomspace(1, away.shape[1], 40).astype(int))
        averages = np.cumsum(away, axis=1)[:, points - 1] / points[:, None]
        squares = np.cumsum((away**2).sum(-1), axis=1)[:, points - 1] / points
        at_rounds = {
            "squared_error_by_round": _means((averages**2).sum(-1)),
            "squared_distance_by_round": _means(squares),
            "bits_by_round": points * thinning * counted,
        }
        error, square, sent = at_rounds.values()
        bound = float(bound_bits(dim, levels, base="natural")) if levels else 32 * dim
        numbers = {
            "variance_over_posterior": square[-1] / (dim * unit),
            "squared_error": error[-1],
            "times_fewer_bits": 32 * dim / counted,
            "times_fewer_bits_by_bound_ln": 32 * dim / bound,
        }
        if method == "QLSD":
            released = stationary_variance(data, 1, Law(RELEASED_STEP * unit, levels))
            numbers["variance_over_posterior_at_released_settings"] = released / unit
        table += from_numbers(method, place, numbers)
        table += by_x(method, place, points * thinning, at_rounds)
        curves[method].append((sent, error))
    ratios = [x for a in curves["QLSD"] for b in curves["QLSD*"] for x in _ratios(a, b)]
    smallest = {"least_error_over_qlsd_star_at_same_bits": min(ratios, key=float)}
    table += from_numbers("QLSD", {}, smallest)

    # Figure S2. A hundred rounds count the bits of a message, which no step size changes.
    start, key = center + unit**0.5, jax.random.key(seed + 1)
    all_levels = np.unique(np.round(np.geomspace(1, 1e4, budget_levels)).astype(int)).tolist()
    for i, levels in enumerate(all_levels):
        pilot_key = jax.random.fold_in(key, 1000 * i + 999)
        _, counted = run(pilot_key, "QLSD*", budget_factors[0], levels, start, num_rounds=100)
        num, errors, squares = max(int(budget / counted), 1), [], []
        for j, factor in enumerate(budget_factors):
            point_key = jax.random.fold_in(key, 1000 * i + j)
            away, _ = run(point_key, "QLSD*", factor, levels, start, num_rounds=num)
            errors.append(claims.mean(list((away.mean(axis=1) ** 2).sum(-1))))
            # Squared lengths of Gaussian states, relative to the posterior's
            ratio = centered_variance(data.sizes, dim, Law(factor * unit, levels)) / unit
            covariances = 2 * ratio**2 / dim * (1 - factor) ** (2 * np.arange(num))
            squares.append((ratio - 1) ** 2 + average_variances(covariances)[-1])
            place = {"levels": levels, "step_factor": float(factor)}
            table += from_numbers("QLSD*", place, {"budget_squared_error": errors[-1]})
        numbers = {
            "error_of_small_over_large_step": errors[-1] / errors[0],
            "square_error_of_small_over_large_step": squares[-1] / squares[0],
        }
        table += from_numbers("QLSD*", {"levels": levels}, numbers)
    return table


def _means(values: np.ndarray) -> list[claims.Number]:
    """Return means over chains ``[num_chains, n]``."""
    return [claims.mean(list(x)) for x in values.T]


def _ratios(plain: Any, star: Any) -> list[claims.Number]:
    """Return ratios of errors where both curves, of bits and errors, have the same bits."""
    bits, errors = star
    logs = np.array([[np.log(e.value), e.error / e.value] for e in errors]).T
    ratios = []
    for x, error in zip(*plain, strict=True):
        if bits[0] <= x <= bits[-1]:
            log, relative = (np.interp(np.log(x), np.log(bits), y) for y in logs)
            ratios.append(error / claims.Number(math.exp(log), math.exp(log) * relative))
    return ratios


def vary_settings(
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

    `spreads` are standard deviations of the clients' means. Step sizes are in units of one over the
    number of rows; `row_factors`, `step_factors`, `level_factors` and `batch_factors` are multiples
    of the other settings. Minibatches vary with the most levels, since the noise of few levels
    would hide theirs.
    """
    usual = {"rows": 1, "step": 1.0, "levels": 1, "batch": 1, "participation": 1.0, "spread": 5.0}

    def distances(**changed: Any) -> dict[str, float]:
        settings: dict[str, Any] = usual | changed
        data, _ = loaders.gaussian(num_clients, dim, settings["spread"], settings["rows"])
        step_size = settings["step"] * step_size_factor / data.num_rows
        law = Law(step_size, levels * settings["levels"], settings["participation"], seed)
        variances = {
            "QLSD": stationary_variance(data, batch_rows * settings["batch"], law),
            "QLSD*": centered_variance(data.sizes, dim, law),
            "QLSD++": memory_variance(data.sizes, dim, law),
        }
        return {k: dim * (v**0.5 - data.num_rows**-0.5) ** 2 for k, v in variances.items()}

    grid: dict[str, Sequence[Any]] = {
        "rows": row_factors,
        "step": step_factors,
        "levels": level_factors,
        "batch": batch_factors,
        "participation": participations,
        "spread": spreads,
    }
    fine: dict[str, Any] = {"levels": level_factors[-1]}
    table: list[Row] = []
    for varied, values in grid.items():
        shared = fine if varied == "batch" else {}
        curves = [distances(**shared | {varied: value}) for value in values]
        for name in curves[0]:
            squared = [curve[name] for curve in curves]
            for value, distance in zip(values, squared, strict=True):
                place = {"varied": varied, "value": float(value)}
                table += from_numbers(name, place, {"squared_distance": distance})
            table += from_numbers(name, {"varied": varied}, {"power": _power(values, squared)})
    sources = {"compression": {"levels": 1}, "participation": {"participation": participations[0]}}
    for source, coarse in sources.items():
        added = [
            distances(**fine | coarse, spread=x)["QLSD"] - distances(**fine, spread=x)["QLSD"]
            for x in spreads
        ]
        power = {"power_of_added_distance": _power(spreads, added)}
        table += from_numbers("QLSD", {"source": source}, power)
    return table


def _power(values: Sequence[float], results: Any) -> float:
    """Return the power of positive values that the results have, from end to end."""
    start = 0 if values[0] > 0 else 1
    return float(np.log(results[-1] / results[start]) / np.log(values[-1] / values[start]))
