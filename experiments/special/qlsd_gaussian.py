"""Vono et al. (2022), Figures 1, S1 and S2: a Gaussian mean, errors against bits.

The draws of a run are too many to keep: each algorithm leaves errors of its running averages.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import loaders, models
from experiments.claims import Number
from experiments.claims import mean as mean_with_error
from experiments.special.qlsd_bias import Law, centered_variance, stationary_variance
from experiments.tidy import Row, from_numbers
from fedmcmc.compression import bound_bits

__all__ = ["average_error", "rows"]

RELEASED_STEP = 0.01
"""Step size of the released notebook, in units of ours; its minibatches are single rows."""
PILOT_ROUNDS = 100
"""Rounds over which the bits of a message are counted."""


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

    Parameters
    ----------
    num_clients, dim
        Clients of `experiments.loaders.gaussian`.
    step_size_factor, budget_factors
        Step sizes in units of one over the number of rows; below 2 the chains are stable.
    batch_fraction, num_rounds, num_burnin, thinning, num_chains, seed
        As in kernels and `fedmcmc.sample`.
    bits
        Numbers ``p``: compressors have ``2**p`` levels.
    budget, budget_levels
        Bits that a client sends in Figure S2, and how many numbers of levels from 1 to 10,000.
    """
    data, _ = loaders.gaussian(num_clients, dim)
    posterior = models.gaussian(data, 0.0)
    client_rows = [data.client_rows(i)["y"] for i in range(num_clients)]
    mean = np.asarray(data.rows["y"]).mean(axis=0, dtype=np.float64)
    center, unit = jnp.asarray(mean, jnp.float32), 1 / data.num_rows

    def kernel(method: str, factor: float, levels: int | None) -> fedmcmc.FederatedKernel:
        settings: dict[str, Any] = dict(step_size=factor * unit, batch_size=batch_fraction)
        if levels is None:
            return fedmcmc.lsd_star(posterior, center, **settings)
        settings["compressor"] = fedmcmc.quantize(levels)
        if method == "QLSD":
            return fedmcmc.qlsd(posterior, **settings)
        return fedmcmc.qlsd_star(posterior, center, **settings)

    def run(key: Any, *settings: Any, start: Any = center, **counts: int) -> tuple[Any, float]:
        """Return distances of draws from the mean, and the bits of a message."""
        samples = fedmcmc.sample(
            key, kernel(*settings), data, start, num_chains=num_chains, progress=False, **counts
        )
        counted = np.asarray(samples.info["bits_up"], np.float64).mean() / num_clients
        return np.asarray(samples.draws, np.float64) - mean, float(counted)

    # Figure S1
    spread = np.std([x.mean(axis=0) for x in client_rows], axis=0, ddof=1).mean()
    within = np.sqrt(np.mean([x.var(axis=0, ddof=1) for x in client_rows]))
    table = from_numbers("data", {}, {"spread_of_means_over_spread_of_rows": spread / within})
    for i, x in enumerate(client_rows, start=1):
        table += from_numbers("data", {"client": i}, {"rows": len(x)})
    table += from_numbers("posterior", {}, {"variance": unit})
    table += from_numbers("all", {}, {"dim": dim})

    # Figure 1
    algorithms = [("QLSD", p) for p in dict.fromkeys((bits[0], bits[-1]))]
    algorithms += [("QLSD*", p) for p in bits]
    curves: dict[str, list[tuple[np.ndarray, list[Number]]]] = {}
    for number, (method, p) in enumerate([*algorithms, ("LSD*", 0)]):
        levels, place = (2**p, {"bits": p}) if p else (None, {})
        key = jax.random.fold_in(jax.random.key(seed), number)
        counts = dict(num_rounds=num_rounds, num_burnin=num_burnin, thinning=thinning)
        away, counted = run(key, method, step_size_factor, levels, **counts)
        law = Law(step_size_factor * unit, levels, seed=seed)
        variance = centered_variance(data.sizes, dim, law)
        numbers: dict[str, Any] = {}
        if method == "QLSD":
            variance = stationary_variance(data, batch_fraction, law)
            released = stationary_variance(data, 1, Law(RELEASED_STEP * unit, levels))
            numbers["variance_over_posterior_at_released_settings"] = released / unit
        points = np.unique(np.geomspace(1, away.shape[1], 40).astype(int))
        averages = np.cumsum(away, axis=1)[:, points - 1] / points[:, None]
        lengths = np.cumsum((away**2).sum(-1), axis=1)[:, points - 1] / points
        error = [mean_with_error(list(x)) for x in (averages**2).sum(-1).T]
        square = [mean_with_error(list(x)) for x in lengths.T]
        by_law = dim * average_error(variance, (1 - step_size_factor) ** thinning, points)
        bound = float(bound_bits(dim, levels, base="natural")) if levels else 32 * dim
        numbers |= {
            "variance_over_posterior": square[-1] / (dim * unit),
            "squared_error": error[-1],
            "squared_error_by_law": by_law[-1],
            "variance_by_law": variance,
            "bits_per_message": counted,
            "times_fewer_bits": 32 * dim / counted,
            "times_fewer_bits_by_bound_ln": 32 * dim / bound,
        }
        table += from_numbers(method, place, numbers)
        for i, x in enumerate(points * thinning):
            at_round = {
                "squared_error_by_round": error[i],
                "squared_error_by_round_by_law": by_law[i],
                "squared_distance_by_round": square[i],
                "bits_by_round": x * counted,
            }
            table += from_numbers(method, place, at_round, x=float(x))
        curves.setdefault(method, []).append((points * thinning * counted, error))
    ratios = [_least_ratio(a, b) for a in curves["QLSD"] for b in curves["QLSD*"]]
    least = min(ratios, key=float)
    table += from_numbers("QLSD", {}, {"least_error_over_qlsd_star_at_same_bits": least})

    # Figure S2; the length of a message does not depend on the step size
    start, key = center + unit**0.5, jax.random.key(seed + 1)
    all_levels = np.unique(np.round(np.geomspace(1, 1e4, budget_levels)).astype(int)).tolist()
    for i, levels in enumerate(all_levels):
        pilot_key = jax.random.fold_in(key, 1000 * i + 999)
        settings = dict(start=start, num_rounds=PILOT_ROUNDS)
        _, counted = run(pilot_key, "QLSD*", budget_factors[0], levels, **settings)
        settings["num_rounds"] = num = max(int(budget / counted), 1)
        errors, squares, place = [], [], {"levels": levels}
        for j, factor in enumerate(budget_factors):
            point_key = jax.random.fold_in(key, 1000 * i + j)
            away, _ = run(point_key, "QLSD*", factor, levels, **settings)
            errors.append(mean_with_error(list((away.mean(axis=1) ** 2).sum(-1))))
            ratio = centered_variance(data.sizes, dim, Law(factor * unit, levels)) / unit
            squares.append(_square_error(ratio, dim, 1 - factor, num))
            step = {"step_factor": float(factor)}
            table += from_numbers("QLSD*", place | step, {"budget_squared_error": errors[-1]})
        small, large = int(np.argmin(budget_factors)), int(np.argmax(budget_factors))
        numbers = {
            "error_of_small_over_large_step": errors[small] / errors[large],
            "square_error_of_small_over_large_step": squares[small] / squares[large],
            "budget_rounds": num,
            "budget_bits_per_message": counted,
        }
        table += from_numbers("QLSD*", place, numbers)
    return table


def _least_ratio(plain: Any, star: Any) -> Number:
    """Return the least ratio of errors at the same bits; a curve has bits and errors."""
    (log_bits, error), (x, star_error) = (
        (np.log(bits), np.array([[e.value, e.error / e.value] for e in curve]).T)
        for bits, curve in (plain, star)
    )
    both = (log_bits >= x[0]) & (log_bits <= x[-1])
    log_ratio = np.log(error[0, both]) - np.interp(log_bits[both], x, np.log(star_error[0]))
    relative = np.hypot(error[1, both], np.interp(log_bits[both], x, star_error[1]))
    index = int(log_ratio.argmin())
    ratio = float(np.exp(log_ratio[index]))
    return Number(ratio, ratio * float(relative[index]))


def average_error(variance: float, contraction: float, num: np.ndarray) -> np.ndarray:
    """Return the variance of averages of `num` states of a stationary chain.

    Its autocorrelation at lag k is ``contraction**k``.
    """
    lags = np.arange(1, int(num.max()))
    powers = contraction**lags
    sums, weighted = (np.append(0.0, np.cumsum(x)) for x in (powers, lags * powers))
    pairs = num * sums[num - 1] - weighted[num - 1]
    return np.asarray(variance * (num + 2 * pairs) / num.astype(float) ** 2)


def _square_error(ratio: float, dim: int, contraction: float, num: int) -> float:
    """Return the relative mean squared error of an average of squared lengths of `num` states.

    States are Gaussian with `dim` coordinates of `ratio` times the posterior's variance.
    """
    noise = average_error(2 * ratio**2 / dim, contraction**2, np.array([num]))
    return float((ratio - 1) ** 2 + noise[0])
